/* Products with matrices of every coding. */
#include "vector.h"

enum { TOGETHER = 4 }; /* tokens for which a weight is unpacked once */

/* sums (count, 64) = a group's columns of codes - 8, times those of x (count, columns). */
static void int4_group(const uint8_t *codes, size_t group, const bf16 *x, size_t columns, size_t count,
                       float sums[TOGETHER][BLOCK]) {
    memset(sums, 0, TOGETHER * sizeof *sums);
    for (size_t c = 0; c < group; c++, codes += BLOCK / 2) {
        float values[BLOCK];
        for (size_t r = 0; r < BLOCK / 2; r++) {
            values[r] = (float)((codes[r] & 15) - 8);
            values[BLOCK / 2 + r] = (float)((codes[r] >> 4) - 8);
        }
        for (size_t m = 0; m < count; m++) {
            const float factor = from_bf16(x[m * columns + c]);
            for (size_t r = 0; r < BLOCK; r++) sums[m][r] += values[r] * factor;
        }
    }
}

static void int4_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, groups = columns / group;
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * BLOCK / 2 * columns;
    const bf16 *scales = (const bf16 *)matrix->scales + 2 * block * BLOCK;
    for (size_t first = 0; first < tokens; first += TOGETHER) {
        const size_t count = tokens - first < TOGETHER ? tokens - first : TOGETHER;
        float totals[TOGETHER][BLOCK] = {{0}}, part[TOGETHER][BLOCK];
        for (size_t g = 0; g < groups; g++) {
            const bf16 *pairs = scales + 2 * g * matrix->rows;
            int4_group(codes + g * group * BLOCK / 2, group, x + first * columns + g * group, columns, count, part);
            for (size_t m = 0; m < count; m++)
                for (size_t r = 0; r < BLOCK; r++)
                    totals[m][r] += from_bf16(pairs[2 * r]) * part[m][r] +
                                    from_bf16(pairs[2 * r + 1]) * sums[(first + m) * groups + g];
        }
        for (size_t m = 0; m < count; m++)
            for (size_t r = 0; r < BLOCK; r++) out[(first + m) * stride + r] = to_bf16(totals[m][r]);
    }
}

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
