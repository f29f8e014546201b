/* Products with published codes of 8 bits that are floats: a dot product as of BF16 (rows.h) for each run of columns that share a
 * scale, whose pairs of columns are scaled and added before they are added to each other. */
#ifndef TIERMOE_ISA_E4M3_H
#define TIERMOE_ISA_E4M3_H

#include "../matrix.h"
#include "simd.h"
#include "strips.h"

enum { E4M3_TOKENS = 6 }; /* whose sums are in registers at a time */

#if !defined(OWN_E4M3)
/* 2 * DOT columns, or DOT. */
static inline void load_e4m3(const uint8_t *from, size_t columns, Columns to[2]) {
    for (size_t i = 0; i < columns / DOT; i++) {
        bf16 values[DOT];
        for (size_t c = 0; c < DOT; c++) values[c] = to_bf16(e4m3_at(from + i * DOT + c));
        to[i] = load_columns(values);
    }
}
#endif

/* out[m * stride] = a row times token m, for a number of tokens known when compiling. */
INLINE void e4m3_row(size_t tokens, const Matrix *matrix, size_t row, const bf16 *x, bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, shared = matrix->scale_columns;
    const uint8_t *codes = (const uint8_t *)matrix->weights + row * columns;
    const float factor = published_factor(matrix, row);
    size_t at = published_row(matrix, row);
    Dot totals[E4M3_TOKENS];
    for (size_t m = 0; m < tokens; m++) totals[m] = no_dot();
    for (size_t begin = 0, end; begin < columns; begin = end, at++) {
        const Vector scale = all(published_scale(matrix, at, factor));
        Dot sums[E4M3_TOKENS];
        end = columns - begin < shared ? columns : begin + shared;
        for (size_t m = 0; m < tokens; m++) sums[m] = no_dot();
        for (size_t c = begin, some; c < end; c += some) {
            Columns values[2];
            some = end - c < 2 * DOT ? DOT : 2 * DOT;
            load_e4m3(codes + c, some, values);
            for (size_t i = 0; i < some / DOT; i++)
                for (size_t m = 0; m < tokens; m++) sums[m] = dot(sums[m], values[i], load_columns(x + m * columns + c + i * DOT));
        }
        for (size_t m = 0; m < tokens; m++) totals[m] = times_plus(scale, sums[m], totals[m]);
    }
    for (size_t m = 0; m < tokens; m++) out[m * stride] = to_bf16(sum_of_dot(totals[m]));
}

#define E4M3_ROWS(n) \
    case n: for (size_t r = 0; r < rows; r++) e4m3_row(n, matrix, begin + r, x, out + r, stride); break;

PRODUCT(e4m3) {
    const size_t begin = block * BLOCK, rows = least(matrix->rows - begin, BLOCK);
    (void)prepared;
    for (size_t tiles = (tokens + E4M3_TOKENS - 1) / E4M3_TOKENS, some; tiles; tiles--, tokens -= some) {
        some = (tokens + tiles - 1) / tiles;
        switch (some) { E4M3_ROWS(1) E4M3_ROWS(2) E4M3_ROWS(3) E4M3_ROWS(4) E4M3_ROWS(5) E4M3_ROWS(6) }
        x += some * matrix->columns, out += some * stride;
    }
}

#endif
