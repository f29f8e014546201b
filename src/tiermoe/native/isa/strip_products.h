/* Products with rows of INT8, of the blocks of GGUF files and of published codes, strip by strip: some rows are unpacked to bytes,
 * which meet one token after the other in whole numbers (integers.h). */
#ifndef TIERMOE_ISA_STRIP_PRODUCTS_H
#define TIERMOE_ISA_STRIP_PRODUCTS_H

#include "../matrix.h"
#include "integers.h"
#include "strips.h"

enum { STRIP_TOKENS = 64 }; /* that share what is unpacked */

/* A strip of rows. */
typedef struct {
    int8_t room[STRIP_ROWS][STRIP] __attribute__((aligned(32)));
    const int8_t *codes[STRIP_ROWS];
    StripScales of[STRIP_ROWS];
} RowStrips;

/* The strip from column `begin` on of rows `row` .. of a matrix; of the last one again where there are fewer. */
INLINE void strips_unpack(Coding coding, const Matrix *matrix, size_t row, size_t begin, size_t width, RowStrips *to) {
    const size_t row_bytes = row_bytes_of(coding, matrix->columns), bytes = row_bytes_of(coding, width);
    for (size_t i = 0; i < STRIP_ROWS; i++) {
        const size_t its = least(row + i, matrix->rows - 1);
        const uint8_t *at = (const uint8_t *)matrix->weights + its * row_bytes + row_bytes_of(coding, begin);
        for (size_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(at + STRIP_ROWS * row_bytes + ahead, 0, 2);
        to->codes[i] = coding == INT8 ? (const int8_t *)at : to->room[i];
        if (coding == INT8) continue;
        strip_codes(coding, at, width, to->room[i]);
        if (coding >= FIRST_PUBLISHED)
            published_scales(matrix, its, begin, width, &to->of[i]);
        else
            strip_scales(coding, at, width, &to->of[i]);
    }
}

#if !defined(OWN_STRIPS_TIMES)
/* sums[i] = the sum of products of codes, of so many columns of rows. */
static inline void codes_times(size_t columns, const int8_t *const rows[STRIP_ROWS], const int8_t *codes, int32_t sums[STRIP_ROWS]) {
    for (size_t i = 0; i < STRIP_ROWS; i++) {
        sums[i] = 0;
        for (size_t c = 0; c < columns; c++) sums[i] += rows[i][c] * codes[c];
    }
}

/* totals (tokens, STRIP_ROWS) += a strip of rows, from column `begin` on, times tokens. */
INLINE void strips_times(Coding coding, size_t group, const int8_t *const rows[STRIP_ROWS], const StripScales of[STRIP_ROWS],
                         const float *prepared, size_t columns, size_t begin, size_t width, size_t tokens, float *totals) {
    const size_t halves = group == 16 ? 2 : 1, each = X_PART / halves;
    for (size_t m = 0; m < tokens; m++, totals += STRIP_ROWS) {
        const XIntegers x = integers_at(prepared + m * integer_floats(columns), columns);
        for (size_t g = 0; g * each < width; g++) {
            const size_t part = begin / X_PART + g / halves;
            const int32_t x_sum = sum_of_codes(&x, part, g % halves, halves);
            const float unit = x.scales[part];
            const int8_t *its[STRIP_ROWS];
            int32_t sums[STRIP_ROWS];
            for (size_t i = 0; i < STRIP_ROWS; i++) its[i] = rows[i] + g * each;
            codes_times(each, its, x.codes + begin + g * each, sums);
            for (size_t i = 0; i < STRIP_ROWS; i++) {
                totals[i] = __builtin_fmaf((float)sums[i], coding == INT8 ? unit : of[i].scales[g] * unit, totals[i]);
                if (has_offsets(coding)) totals[i] = __builtin_fmaf(of[i].offsets[g], (float)x_sum * unit, totals[i]);
            }
        }
    }
}
#endif

INLINE void strips_block(Coding coding, size_t group, const Matrix *matrix, size_t block, const float *prepared, size_t tokens,
                         bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns, rows = least(BLOCK, matrix->rows - begin);
    for (size_t some; tokens; tokens -= some, prepared += some * integer_floats(columns), out += some * stride) {
        some = least(tokens, STRIP_TOKENS);
        for (size_t r = 0; r < rows; r += STRIP_ROWS) {
            float totals[STRIP_TOKENS][STRIP_ROWS] = {{0}};
            for (size_t c = 0; c < columns; c += STRIP) {
                const size_t width = least(STRIP, columns - c);
                RowStrips strips;
                strips_unpack(coding, matrix, begin + r, c, width, &strips);
                strips_times(coding, group, strips.codes, strips.of, prepared, columns, c, width, some, totals[0]);
            }
            for (size_t m = 0; m < some; m++)
                for (size_t i = 0; i < least(STRIP_ROWS, rows - r); i++) {
                    const float scale = coding == INT8 ? from_bf16(((const bf16 *)matrix->scales)[begin + r + i]) : 1;
                    out[m * stride + r + i] = to_bf16(totals[m][i] * scale);
                }
        }
    }
}

#endif
