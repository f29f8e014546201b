/* Products with matrices that are kept row by row, over Eight: INT8 and BF16.
 *
 * A row's products are summed in 8 lanes over ROW_SPAN columns, then the lanes, then the spans. */
#ifndef TIERMOE_ISA_ROWS_H
#define TIERMOE_ISA_ROWS_H

#include "../matrix.h"
#include "simd.h"

enum {
    ROW_SPAN = 256, /* columns */
    LINE = 64,      /* bytes of a cache line; a row has a multiple of them */
    ROW_TILE = 4,   /* rows whose sums are in registers at a time */
    FEW_TOKENS = 3, /* likewise */
    ROW_TOKENS = 18, /* that share what is unpacked of a span */
};

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Eight weights or codes from column c of a row on. */
INLINE Eight eight_weights(int coded, const uint8_t *row, size_t c) {
    return coded ? eight_of_int8(row + c) : eight_of_bf16((const bf16 *)row + c);
}

/* totals[m * BLOCK + r] += `width` columns of row r times those of token m, `stride` apart, for 4 rows and a number of
 * tokens known when compiling. decoded: the rows are floats; else those `ahead` bytes on are asked for meanwhile. */
INLINE void four_rows(int decoded, int coded, size_t ahead, size_t tokens, const uint8_t *const row[ROW_TILE], const float *x,
                      size_t stride, size_t width, float *totals) {
    Eight sums[FEW_TOKENS][ROW_TILE];
    const size_t bytes = coded ? 1 : sizeof(bf16), line = LINE / bytes;
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < ROW_TILE; r++) sums[m][r] = eight_zeros();
    for (size_t begin = 0; begin < width; begin += line) {
        for (size_t r = 0; !decoded && r < ROW_TILE; r++)
            __builtin_prefetch(row[r] + begin * bytes + ahead, 0, 2);
        for (size_t c = begin; c < begin + line; c += 8) {
            Eight values[FEW_TOKENS];
            for (size_t m = 0; m < tokens; m++) values[m] = eight_from(x + m * stride + c);
            for (size_t r = 0; r < ROW_TILE; r++) {
                const Eight weights = decoded ? eight_from((const float *)row[r] + c) : eight_weights(coded, row[r], c);
                for (size_t m = 0; m < tokens; m++) sums[m][r] = eight_times_plus(weights, values[m], sums[m][r]);
            }
        }
    }
    for (size_t m = 0; m < tokens; m++) add_four_sums(totals + m * BLOCK, sums[m]);
}

#define ROWS_OF(n)                                                                \
    case n:                                                                       \
        four_rows(decoded, coded, ahead, n, row, x, stride, width, totals);              \
        break;

INLINE void four_rows_of(int decoded, int coded, size_t ahead, size_t tokens, const uint8_t *const row[ROW_TILE],
                         const float *x, size_t stride, size_t width, float *totals) {
    switch (tokens) { ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) }
}

static inline void widen_x(const bf16 *x, size_t columns, float *values) {
    for (size_t c = 0; c < columns; c += 8)
        eight_to(values + c, eight_of_bf16(x + c));
}

/* Few tokens: four rows at a time from their first column to their last. totals (tokens, 64) */
INLINE void few_times(int coded, const uint8_t *weights, size_t rows, const bf16 *x, size_t columns, size_t tokens,
                      float *totals) {
    const size_t row_bytes = columns * (coded ? 1 : sizeof(bf16)), bytes = row_bytes / columns;
    float values[tokens * columns];
    widen_x(x, tokens * columns, values);
    for (size_t r = 0; r < rows; r += ROW_TILE)
        for (size_t begin = 0; begin < columns; begin += ROW_SPAN) {
            const uint8_t *row[ROW_TILE]; /* the last one again where there are fewer */
            for (size_t i = 0; i < ROW_TILE; i++) row[i] = weights + least(r + i, rows - 1) * row_bytes + begin * bytes;
            four_rows_of(0, coded, ROW_TILE * row_bytes, tokens, row, values + begin, columns, least(ROW_SPAN, columns - begin),
                         totals + r);
        }
}

/* At most ROW_TOKENS tokens: a span of four rows is unpacked for all of them. */
INLINE void many_times(int coded, const uint8_t *weights, size_t rows, const bf16 *x, size_t columns, size_t tokens,
                       float *totals) {
    const size_t row_bytes = columns * (coded ? 1 : sizeof(bf16));
    float values[ROW_TOKENS * ROW_SPAN], panel[ROW_TILE][ROW_SPAN] __attribute__((aligned(32)));
    const uint8_t *const row[] = {(uint8_t *)panel[0], (uint8_t *)panel[1], (uint8_t *)panel[2], (uint8_t *)panel[3]};
    for (size_t begin = 0; begin < columns; begin += ROW_SPAN) {
        const size_t width = least(ROW_SPAN, columns - begin);
        for (size_t m = 0; m < tokens; m++) widen_x(x + m * columns + begin, width, values + m * ROW_SPAN);
        for (size_t r = 0; r < rows; r += ROW_TILE) {
            for (size_t i = 0; i < ROW_TILE; i++)
                for (size_t c = 0; c < width; c += 8)
                    eight_to(panel[i] + c, eight_weights(coded, weights + least(r + i, rows - 1) * row_bytes, begin + c));
            for (size_t m = 0; m < tokens; m += FEW_TOKENS)
                four_rows_of(1, coded, 0, least(FEW_TOKENS, tokens - m), row, values + m * ROW_SPAN, ROW_SPAN, width,
                             totals + m * BLOCK + r);
        }
    }
}

/* `rows` rows times the tokens. scales: NULL where the weights are no codes. */
INLINE void rows_times(int coded, const void *weights, const bf16 *scales, size_t rows, const bf16 *x, size_t columns,
                       size_t tokens, bf16 *out, size_t stride) {
    float totals[ROW_TOKENS * BLOCK];
    for (size_t parts = (tokens + ROW_TOKENS - 1) / ROW_TOKENS; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        memset(totals, 0, some * BLOCK * sizeof *totals);
        if (some <= FEW_TOKENS)
            few_times(coded, weights, rows, x, columns, some, totals);
        else
            many_times(coded, weights, rows, x, columns, some, totals);
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < rows; r += LANES) {
                const Vector values = load(totals + m * BLOCK + r);
                store_some(out + m * stride + r, rows - r, coded ? times(values, load_some(scales + r, rows - r)) : values);
            }
        x += some * columns, out += some * stride, tokens -= some;
    }
}

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns, rows = least(BLOCK, matrix->rows - begin);
    (void)sums;
    if (matrix->coding == BF16)
        rows_times(0, (const bf16 *)matrix->weights + begin * columns, NULL, rows, x, columns, tokens, out, stride);
    else
        rows_times(1, (const int8_t *)matrix->weights + begin * columns, (const bf16 *)matrix->scales + begin, rows, x, columns,
                   tokens, out, stride);
}

#endif
