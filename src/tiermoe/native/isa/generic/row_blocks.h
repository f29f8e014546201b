/* Products with matrices that are kept in blocks of rows: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2. */
#ifndef TIERMOE_ISA_GENERIC_ROW_BLOCKS_H
#define TIERMOE_ISA_GENERIC_ROW_BLOCKS_H

#include <string.h>

#include "../../matrix.h"
#include "../../trellis.h"
#include "../simd.h"

enum {
    TOGETHER = 4,       /* tokens for which a weight is unpacked once */
    LONGEST_GROUP = 256, /* of TCQ2 */
};

/* Byte r of column i of four, of nibbles that the codes are the lowest bits of. */
static inline unsigned nibbles_at(Coding coding, const uint8_t *four, size_t i, size_t r) {
    enum { COLUMN = BLOCK / 2 };
    if (code_bits(coding) == 2) return four[i / 2 * COLUMN + r] >> i % 2 * 2;
    if (code_bits(coding) == 4 || i < 3) return four[i * COLUMN + r];
    return (four[r] >> 3 & 0x11) | (four[COLUMN + r] >> 2 & 0x22) | (four[2 * COLUMN + r] >> 1 & 0x44);
}

/* The codes of column c of a block, less the middle one; of NL4, NL3 and NL2 their levels. */
static inline void nibbles_unpack(Coding coding, const uint8_t *codes, size_t c, float values[BLOCK]) {
    const uint8_t *four = codes + code_bytes(coding, c / 4 * 4);
    const unsigned mask = (1 << code_bits(coding)) - 1;
    for (size_t r = 0; r < BLOCK / 2; r++) {
        const unsigned both = nibbles_at(coding, four, c % 4, r);
        const unsigned low = both & mask, high = both >> 4 & mask;
        values[r] = is_uneven(coding) ? uneven_levels(coding)[low] : (int)low - middle_code(coding);
        values[BLOCK / 2 + r] = is_uneven(coding) ? uneven_levels(coding)[high] : (int)high - middle_code(coding);
    }
}

static inline void int6_unpack(const uint8_t *codes, size_t c, float values[BLOCK]) {
    const uint8_t *four = codes + c / 4 * BLOCK * 3, *low = four + c % 4 * BLOCK / 2;
    const uint8_t *high = four + BLOCK * 2 + c % 4 / 2 * BLOCK / 2;
    for (size_t r = 0; r < BLOCK / 2; r++) {
        const int both = high[r] >> c % 2 * 4;
        values[r] = (float)((low[r] & 15) + (both >> 2 & 3) * 16 - 32);
        values[BLOCK / 2 + r] = (float)((low[r] >> 4) + (both & 3) * 16 - 32);
    }
}

/* sums (count, 64) = what is unpacked of a group's columns times those of x (count, columns). */
INLINE void block_group(Coding coding, const uint8_t *codes, size_t group, const bf16 *x, size_t columns, size_t count,
                        float sums[TOGETHER][BLOCK]) {
    memset(sums, 0, TOGETHER * sizeof *sums);
    for (size_t c = 0; c < group; c++) {
        float values[BLOCK];
        if (coding == INT6)
            int6_unpack(codes, c, values);
        else
            nibbles_unpack(coding, codes, c, values);
        for (size_t m = 0; m < count; m++) {
            const float factor = from_bf16(x[m * columns + c]);
            for (size_t r = 0; r < BLOCK; r++) sums[m][r] += values[r] * factor;
        }
    }
}

/* totals (64) += a group's sums, scaled, and its zeros times the sum of x. */
static inline void paired_group(const bf16 *pairs, const float sums[BLOCK], float x_sum, float totals[BLOCK]) {
    for (size_t r = 0; r < BLOCK; r++) totals[r] += from_bf16(pairs[2 * r]) * sums[r] + from_bf16(pairs[2 * r + 1]) * x_sum;
}

static inline void scaled_group(const bf16 *scales, const float sums[BLOCK], float totals[BLOCK]) {
    for (size_t r = 0; r < BLOCK; r++) totals[r] += from_bf16(scales[r]) * sums[r];
}

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens,
                        bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, groups = columns / group;
    const size_t before = is_uneven(coding) ? UNEVEN_SCALES : 0, apart = before + code_bytes(coding, group); /* bytes of a group */
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * apart * groups + before;
    const bf16 *scales = matrix->scales;
    if (!is_uneven(coding)) scales += block * BLOCK * (has_pairs(coding) ? 2 : groups);
    for (size_t first = 0; first < tokens; first += TOGETHER) {
        const size_t count = tokens - first < TOGETHER ? tokens - first : TOGETHER;
        float totals[TOGETHER][BLOCK] = {{0}}, part[TOGETHER][BLOCK];
        for (size_t g = 0; g < groups; g++) {
            const uint8_t *at = codes + g * apart;
            uint8_t room[coding == TCQ2 ? LONGEST_GROUP * BLOCK * 3 / 4 : 1];
            block_group(taken_as(coding), codes_as_taken(coding, at, group, room), group, x + first * columns + g * group, columns, count, part);
            for (size_t m = 0; m < count; m++)
                if (is_uneven(coding))
                    scaled_group((const bf16 *)(at - UNEVEN_SCALES), part[m], totals[m]);
                else if (has_pairs(coding))
                    paired_group(scales + 2 * g * matrix->rows, part[m], sums[(first + m) * groups + g], totals[m]);
                else
                    scaled_group(scales + g * BLOCK, part[m], totals[m]);
        }
        for (size_t m = 0; m < count; m++)
            for (size_t r = 0; r < BLOCK; r++) out[(first + m) * stride + r] = to_bf16(totals[m][r]);
    }
}

#endif
