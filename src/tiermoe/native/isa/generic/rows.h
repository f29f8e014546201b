/* Products with matrices that are kept row by row: INT8 and BF16. */
#ifndef TIERMOE_ISA_GENERIC_ROWS_H
#define TIERMOE_ISA_GENERIC_ROWS_H

#include "../../matrix.h"
#include "../simd.h"
#include "row_blocks.h"

static inline Vector load_codes(const int8_t *from) {
    Vector v;
    EACH_LANE v.lane[i] = from[i];
    return v;
}

/* One row times each token: coded (INT8) with its scale. */
static void row_times(int coded, const void *weights, float scale, const bf16 *x, size_t columns, size_t tokens, bf16 *out,
                      size_t stride) {
    for (size_t first = 0; first < tokens; first += TOGETHER) {
        const size_t count = tokens - first < TOGETHER ? tokens - first : TOGETHER;
        Vector sums[TOGETHER] = {{{0}}};
        for (size_t c = 0; c < columns; c += LANES) {
            const Vector values = coded ? load_codes((const int8_t *)weights + c) : load_bf16((const bf16 *)weights + c);
            for (size_t m = 0; m < count; m++)
                sums[m] = times_plus(values, load_bf16(x + (first + m) * columns + c), sums[m]);
        }
        for (size_t m = 0; m < count; m++) out[(first + m) * stride] = to_bf16(scale * sum_of(sums[m]));
    }
}

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t columns = matrix->columns;
    (void)sums;
    for (size_t r = block * BLOCK; r < (block + 1) * BLOCK && r < matrix->rows; r++, out++)
        if (matrix->coding == BF16)
            row_times(0, (const bf16 *)matrix->weights + r * columns, 1, x, columns, tokens, out, stride);
        else
            row_times(1, (const int8_t *)matrix->weights + r * columns, from_bf16(((const bf16 *)matrix->scales)[r]), x, columns,
                      tokens, out, stride);
}

#endif
