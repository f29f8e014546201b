/* Products with matrices that are kept in blocks of rows: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2. */
#ifndef TIERMOE_ISA_GENERIC_ROW_BLOCKS_H
#define TIERMOE_ISA_GENERIC_ROW_BLOCKS_H

#include <string.h>

#include "../../matrix.h"
#include "../../trellis.h"
#include "../integers.h"
#include "../simd.h"

enum {
    TOGETHER = 4,       /* tokens for which a weight is unpacked once */
};

/* The bytes of column i of four, whose nibbles have the codes in their lowest bits. */
static inline void nibbles_of_column(Coding coding, const uint8_t *four, size_t i, uint8_t both[BLOCK / 2]) {
    enum { COLUMN = BLOCK / 2 };
    const int shift = (int)(i % 2 * 2);
    for (size_t r = 0; r < COLUMN; r++) {
        if (code_bits(coding) == 2)
            both[r] = (uint8_t)(four[i / 2 * COLUMN + r] >> shift);
        else if (coding != NL3 || i < 3)
            both[r] = four[i * COLUMN + r];
        else
            both[r] = (uint8_t)((four[r] >> 3 & 0x11) | (four[COLUMN + r] >> 2 & 0x22) | (four[2 * COLUMN + r] >> 1 & 0x44));
    }
}

/* What column i of four stands for: codes less the middle one; of NL4, NL3 and NL2 their levels. */
static inline void nibbles_unpack(Coding coding, const uint8_t *four, size_t i, int8_t values[BLOCK]) {
    const unsigned mask = (1 << code_bits(coding)) - 1;
    uint8_t both[BLOCK / 2];
    nibbles_of_column(coding, four, i, both);
    if (is_uneven(coding)) {
        for (size_t r = 0; r < BLOCK / 2; r += 16) look_up(uneven_levels(coding), both + r, values + r, values + BLOCK / 2 + r);
        return;
    }
    for (size_t r = 0; r < BLOCK / 2; r++) {
        values[r] = (int8_t)((int)(both[r] & mask) - middle_code(coding));
        values[BLOCK / 2 + r] = (int8_t)((int)(both[r] >> 4 & mask) - middle_code(coding));
    }
}

static inline void int6_unpack(const uint8_t *four, size_t i, int8_t values[BLOCK]) {
    const uint8_t *low = four + i * BLOCK / 2, *high = four + BLOCK * 2 + i / 2 * BLOCK / 2;
    for (size_t r = 0; r < BLOCK / 2; r++) {
        const int both = high[r] >> i % 2 * 4;
        values[r] = (int8_t)((low[r] & 15) + (both >> 2 & 3) * 16 - 32);
        values[BLOCK / 2 + r] = (int8_t)((low[r] >> 4) + (both & 3) * 16 - 32);
    }
}

/* sums (count, 64) += the numbers that four columns of a block stand for times those of x, two columns at a time: the sum of
 * two products has 16 bits. */
INLINE void plus_four(Coding coding, const uint8_t *four, const XIntegers *x, size_t at, size_t count, int32_t sums[TOGETHER][BLOCK]) {
    int8_t values[4][BLOCK];
    for (size_t i = 0; i < 4; i++)
        if (coding == INT6)
            int6_unpack(four, i, values[i]);
        else
            nibbles_unpack(coding, four, i, values[i]);
    for (size_t m = 0; m < count; m++)
        for (size_t i = 0; i < 4; i += 2) {
            const int16_t first = x[m].codes[at + i], second = x[m].codes[at + i + 1];
            for (size_t r = 0; r < BLOCK; r++)
                sums[m][r] += (int16_t)((int16_t)(values[i][r] * first) + (int16_t)(values[i + 1][r] * second));
        }
}

/* totals (64) += a part's sums, scaled, and its zeros times the sum of x. */
INLINE void plus_part(Coding coding, const bf16 *scales, const int32_t sums[BLOCK], const XIntegers *x, size_t part,
                      float totals[BLOCK]) {
    const size_t apart = has_pairs(coding) ? 2 : 1;
    const float unit = x->scales[part];
    for (size_t r = 0; r < BLOCK; r++) {
        totals[r] = __builtin_fmaf((float)sums[r], from_bf16(scales[apart * r]) * unit, totals[r]);
        if (has_pairs(coding)) totals[r] = __builtin_fmaf(from_bf16(scales[2 * r + 1]), (float)x->sums[part] * unit, totals[r]);
    }
}

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const float *prepared,
                        size_t tokens, bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, groups = columns / group;
    const size_t before = is_uneven(coding) ? UNEVEN_SCALES : 0, apart = before + code_bytes(coding, group); /* bytes of a group */
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * apart * groups + before;
    const bf16 *scales = matrix->scales;
    if (!is_uneven(coding)) scales += block * BLOCK * (has_pairs(coding) ? 2 : groups);
    for (size_t first = 0; first < tokens; first += TOGETHER) {
        const size_t count = tokens - first < TOGETHER ? tokens - first : TOGETHER;
        float totals[TOGETHER][BLOCK] = {{0}};
        XIntegers x[TOGETHER];
        for (size_t m = 0; m < count; m++) x[m] = integers_at(prepared + (first + m) * integer_floats(columns), columns);
        for (size_t c = 0; c < columns; c += X_PART) {
            const uint8_t *at = codes + c / group * apart, *part = at + code_bytes(coding, c % group);
            const bf16 *its = is_uneven(coding) ? (const bf16 *)(at - UNEVEN_SCALES)
                                                : scales + c / group * (has_pairs(coding) ? 2 * matrix->rows : BLOCK);
            int32_t sums[TOGETHER][BLOCK] = {{0}};
            for (size_t i = 0; i < X_PART; i += 4, part += code_bytes(coding, 4)) {
                uint8_t room[coding == TCQ2 ? BLOCK * 3 : 1];
                plus_four(taken_as(coding), codes_as_taken(coding, part, 4, room), x, c + i, count, sums);
            }
            for (size_t m = 0; m < count; m++) plus_part(coding, its, sums[m], &x[m], c / X_PART, totals[m]);
        }
        for (size_t m = 0; m < count; m++)
            for (size_t r = 0; r < BLOCK; r++) out[(first + m) * stride + r] = to_bf16(totals[m][r]);
    }
}

#endif
