/* Products with rows of BF16, each a dot product as attention's scores are (attention.h), over all its columns. */
#ifndef TIERMOE_ISA_ROWS_H
#define TIERMOE_ISA_ROWS_H

#include "../matrix.h"
#include "simd.h"

enum {
    ROW_TILE = 4,    /* rows whose sums are in registers at a time */
    ROW_TOKENS = 16, /* that share what is widened of four rows */
    ROW_ROOM = 1 << 15, /* floats of tokens that are widened at a time: they lie on the stack */
};

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

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, size_t tokens, bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns, rows = least(BLOCK, matrix->rows - begin);
    const size_t most = columns > ROW_ROOM / ROW_TILE ? 1 : least(ROW_TOKENS, ROW_ROOM / columns);
    float totals[ROW_TOKENS * BLOCK];
    for (size_t parts = (tokens + most - 1) / most; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        plain_rows((const bf16 *)matrix->weights + begin * columns, rows, x, columns, some, totals);
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < rows; r += LANES) store_some(out + m * stride + r, rows - r, load(totals + m * BLOCK + r));
        x += some * columns, out += some * stride, tokens -= some;
    }
}

#endif
