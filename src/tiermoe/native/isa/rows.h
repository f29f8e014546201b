/* Products with matrices that are kept row by row: INT8 and BF16. A row of BF16 is a dot product as attention's scores are
 * (attention.h), over all its columns; one of INT8 is integers (integers.h), whose total its scale multiplies in the end. */
#ifndef TIERMOE_ISA_ROWS_H
#define TIERMOE_ISA_ROWS_H

#include "../matrix.h"
#include "integers.h"
#include "simd.h"

enum {
    ROW_TILE = 4,    /* rows whose sums are in registers at a time */
    LINE = 64,       /* bytes of a cache line; a row has a multiple of them */
    ROW_TOKENS = 16, /* that share what is widened of four rows */
    ROW_ROOM = 1 << 15, /* floats of tokens that are widened at a time: they lie on the stack */
};

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Numbers as floats: of each DOT columns those at even places before the others. */
static inline void widen(const bf16 *x, size_t columns, float *values) {
    for (size_t c = 0; c < columns; c += DOT) {
        const Columns of = load_columns(x + c);
        store(values + c, of.even), store(values + c + LANES, of.odd);
    }
}

INLINE Columns widened_columns(const float *values) { return (Columns){load(values), load(values + LANES)}; }

/* sums (4) = four rows times a token's floats. wide: rows are floats, too, else bfloat16, and the next four are asked for. */
INLINE void four_rows(int wide, const void *const row[ROW_TILE], const float *x, size_t columns, float *sums) {
    Dot totals[ROW_TILE];
    for (size_t r = 0; r < ROW_TILE; r++) totals[r] = no_dot();
    for (size_t c = 0; c < columns; c += DOT) {
        const Columns its = widened_columns(x + c);
        for (size_t r = 0; r < ROW_TILE; r++) {
            const bf16 *at = (const bf16 *)row[r] + c;
            if (!wide) __builtin_prefetch(at + ROW_TILE * columns, 0, 2);
            totals[r] = dot(totals[r], wide ? widened_columns((const float *)row[r] + c) : load_columns(at), its);
        }
    }
    four_dots(totals, 1, sums);
}

/* At most ROW_TOKENS tokens. sums (tokens, 64) */
static void plain_rows(const bf16 *weights, size_t rows, const bf16 *x, size_t columns, size_t tokens, float *sums) {
    float values[tokens * columns], panel[tokens > 1 ? ROW_TILE * columns : 1];
    widen(x, tokens * columns, values);
    for (size_t r = 0; r < rows; r += ROW_TILE) {
        const void *row[ROW_TILE];
        for (size_t i = 0; i < ROW_TILE; i++) { /* the last one again where there are fewer */
            row[i] = weights + least(r + i, rows - 1) * columns;
            if (tokens > 1) widen(row[i], columns, panel + i * columns), row[i] = panel + i * columns;
        }
        if (tokens == 1) four_rows(0, row, values, columns, sums + r);
        for (size_t m = 0; tokens > 1 && m < tokens; m++) four_rows(1, row, values + m * columns, columns, sums + m * BLOCK + r);
    }
}

#if !defined(OWN_CODES_TIMES)
/* The sum of a part's products of codes. */
static inline int32_t codes_times(const int8_t *a, const int8_t *b) {
    int32_t sum = 0;
    for (size_t c = 0; c < X_PART; c++) sum += a[c] * b[c];
    return sum;
}

/* sums[i] = the same of four rows. */
static inline void four_codes_times(const int8_t *const row[ROW_TILE], size_t at, const int8_t *codes, int32_t sums[ROW_TILE]) {
    for (size_t i = 0; i < ROW_TILE; i++) sums[i] = codes_times(row[i] + at, codes);
}
#endif

/* As plain_rows, of codes, but for the rows' scales. */
static void coded_rows(const int8_t *codes, size_t rows, const float *prepared, size_t columns, size_t tokens, float *totals) {
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t r = 0; r < rows; r += ROW_TILE) {
        const int8_t *row[ROW_TILE];
        for (size_t i = 0; i < ROW_TILE; i++) row[i] = codes + least(r + i, rows - 1) * columns;
        for (size_t c = 0; c < columns; c += X_PART) {
            for (size_t i = 0; i < ROW_TILE; i++) __builtin_prefetch(row[i] + ROW_TILE * columns + c, 0, 2);
            for (size_t m = 0; m < tokens; m++) {
                const XIntegers x = integers_at(prepared + m * integer_floats(columns), columns);
                int32_t sums[ROW_TILE];
                four_codes_times(row, c, x.codes + c, sums);
                for (size_t i = 0; i < ROW_TILE; i++) {
                    float *total = totals + m * BLOCK + r + i;
                    *total = __builtin_fmaf((float)sums[i], x.scales[c / X_PART], *total);
                }
            }
        }
    }
}

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns, rows = least(BLOCK, matrix->rows - begin);
    const int coded = matrix->coding == INT8;
    const size_t most = columns > ROW_ROOM / ROW_TILE ? 1 : least(ROW_TOKENS, ROW_ROOM / columns);
    float totals[ROW_TOKENS * BLOCK];
    for (size_t parts = (tokens + most - 1) / most; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        if (coded)
            coded_rows((const int8_t *)matrix->weights + begin * columns, rows, prepared, columns, some, totals);
        else
            plain_rows((const bf16 *)matrix->weights + begin * columns, rows, x, columns, some, totals);
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < rows; r += LANES) {
                const Vector values = load(totals + m * BLOCK + r);
                const bf16 *scales = (const bf16 *)matrix->scales + begin + r;
                store_some(out + m * stride + r, rows - r, coded ? times(values, load_some(scales, rows - r)) : values);
            }
        x += some * columns, out += some * stride, tokens -= some;
        if (coded) prepared += some * integer_floats(columns);
    }
}

#endif
