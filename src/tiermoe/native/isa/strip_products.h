/* Products with rows of INT8, of the blocks of GGUF files and of published codes, strip by strip: four rows are unpacked to bytes,
 * which meet one token after the other in whole numbers (integers.h). */
#ifndef TIERMOE_ISA_STRIP_PRODUCTS_H
#define TIERMOE_ISA_STRIP_PRODUCTS_H

#include "../matrix.h"
#include "integers.h"
#include "strips.h"

enum {
    STRIP_ROWS = 4,    /* that are unpacked at a time */
    STRIP_TOKENS = 64, /* that share them */
};

/* sums[i] = the sum of products of codes, of so many columns of four rows. */
static inline void four_codes_times(size_t columns, const int8_t *const row[STRIP_ROWS], const int8_t *codes, int32_t sums[STRIP_ROWS]) {
    for (size_t i = 0; i < STRIP_ROWS; i++) {
        sums[i] = 0;
        for (size_t c = 0; c < columns; c++) sums[i] += row[i][c] * codes[c];
    }
}

/* A strip of four rows. */
typedef struct {
    int8_t room[STRIP_ROWS][STRIP] __attribute__((aligned(32)));
    const int8_t *codes[STRIP_ROWS];
    StripScales of[STRIP_ROWS];
} FourStrips;

/* The strip from column `begin` on of rows `row` .. of a matrix; of the last one again where there are fewer. */
INLINE void strips_unpack(Coding coding, const Matrix *matrix, size_t row, size_t begin, size_t width, FourStrips *to) {
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

/* totals (4) += such a strip times one token. */
INLINE void strips_times(Coding coding, size_t group, const FourStrips *strips, const XIntegers *x, size_t begin, size_t width, float *totals) {
    const size_t halves = group == 16 ? 2 : 1, each = X_PART / halves;
    for (size_t g = 0; g * each < width; g++) {
        const size_t part = begin / X_PART + g / halves;
        const float unit = x->scales[part];
        const int8_t *codes[STRIP_ROWS];
        int32_t sums[STRIP_ROWS];
        for (size_t i = 0; i < STRIP_ROWS; i++) codes[i] = strips->codes[i] + g * each;
        four_codes_times(each, codes, x->codes + begin + g * each, sums);
        for (size_t i = 0; i < STRIP_ROWS; i++) {
            totals[i] = __builtin_fmaf((float)sums[i], coding == INT8 ? unit : strips->of[i].scales[g] * unit, totals[i]);
            if (!has_offsets(coding)) continue;
            const int32_t x_sum = sum_of_codes(x, part, g % halves, halves);
            totals[i] = __builtin_fmaf(strips->of[i].offsets[g], (float)x_sum * unit, totals[i]);
        }
    }
}

INLINE void strips_block(Coding coding, size_t group, const Matrix *matrix, size_t block, const float *prepared, size_t tokens,
                         bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns, rows = least(BLOCK, matrix->rows - begin);
    for (size_t some; tokens; tokens -= some, prepared += some * integer_floats(columns), out += some * stride) {
        some = least(tokens, STRIP_TOKENS);
        for (size_t r = 0; r < rows; r += STRIP_ROWS) {
            float totals[STRIP_TOKENS][STRIP_ROWS] = {{0}};
            for (size_t c = 0; c < columns; c += STRIP) {
                const size_t width = least(STRIP, columns - c);
                FourStrips strips;
                strips_unpack(coding, matrix, begin + r, c, width, &strips);
                for (size_t m = 0; m < some; m++) {
                    const XIntegers x = integers_at(prepared + m * integer_floats(columns), columns);
                    strips_times(coding, group, &strips, &x, c, width, totals[m]);
                }
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
