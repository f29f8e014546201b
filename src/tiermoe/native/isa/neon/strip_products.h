/* Products with strips of rows: of a part of four rows with one token after the other (parts.h). */
#ifndef TIERMOE_ISA_NEON_STRIP_PRODUCTS_H
#define TIERMOE_ISA_NEON_STRIP_PRODUCTS_H

#include "../strips.h"
#include "parts.h"

#define OWN_STRIPS_TIMES

enum {
    STRIP_FOURS = STRIP_ROWS / PART_ROWS,
    FEW_TOKENS = 4, /* at most: to change the order of codes costs more than it saves */
};

/* Of four rows the numbers of a group after each other. */
INLINE void by_groups(const float *const rows[PART_ROWS], size_t groups, float to[STRIP_GROUPS][PART_ROWS]) {
    for (size_t g = 0; g < groups; g += 4) {
        const float32x4x4_t four = {{vld1q_f32(rows[0] + g), vld1q_f32(rows[1] + g), vld1q_f32(rows[2] + g), vld1q_f32(rows[3] + g)}};
        vst4q_f32(to[g], four);
    }
}

/* Sixteen columns of four rows, `apart` registers from each other: then four columns of each row. */
INLINE void rows_to_lanes(const int8x16_t *rows, size_t apart, int8x16_t lanes[4]) {
    const uint32x4_t v0 = vreinterpretq_u32_s8(rows[0]), v1 = vreinterpretq_u32_s8(rows[apart]);
    const uint32x4_t v2 = vreinterpretq_u32_s8(rows[2 * apart]), v3 = vreinterpretq_u32_s8(rows[3 * apart]);
    const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(v0, v1)), b = vreinterpretq_u64_u32(vtrn2q_u32(v0, v1));
    const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(v2, v3)), d = vreinterpretq_u64_u32(vtrn2q_u32(v2, v3));
    lanes[0] = vreinterpretq_s8_u64(vtrn1q_u64(a, c)), lanes[1] = vreinterpretq_s8_u64(vtrn1q_u64(b, d));
    lanes[2] = vreinterpretq_s8_u64(vtrn2q_u64(a, c)), lanes[3] = vreinterpretq_s8_u64(vtrn2q_u64(b, d));
}

/* totals (tokens, STRIP_ROWS) += a strip of rows, from column `begin` on, times tokens. */
INLINE void strips_times(Coding coding, size_t group, const int8_t *const rows[STRIP_ROWS], const StripScales of[STRIP_ROWS],
                         const float *prepared, size_t columns, size_t begin, size_t width, size_t tokens, float *totals) {
    const size_t halves = group == 16 ? 2 : 1, each = X_PART / halves, pieces = each / 16, registers = PART_REGISTERS / halves;
    float scales[STRIP_FOURS][STRIP_GROUPS][PART_ROWS], offsets[STRIP_FOURS][STRIP_GROUPS][PART_ROWS];
    for (size_t f = 0; f < STRIP_FOURS; f++) {
        const StripScales *s = of + PART_ROWS * f;
        const float *const its[] = {s[0].scales, s[1].scales, s[2].scales, s[3].scales};
        const float *const more[] = {s[0].offsets, s[1].offsets, s[2].offsets, s[3].offsets};
        if (coding != INT8) by_groups(its, STRIP / each, scales[f]);
        if (has_offsets(coding)) by_groups(more, STRIP / each, offsets[f]);
    }
    for (size_t g = 0; g * each < width; g++) {
        const size_t part = begin / X_PART + g / halves, half = g % halves;
        int8x16_t codes[STRIP_FOURS * PART_REGISTERS], lanes[STRIP_FOURS * PART_REGISTERS];
        FourScales its[STRIP_FOURS];
        for (size_t i = 0; i < STRIP_ROWS * pieces; i++) codes[i] = vld1q_s8(rows[i / pieces] + g * each + i % pieces * 16);
        for (size_t f = 0; f < STRIP_FOURS; f++) {
            its[f].scales = coding == INT8 ? vdupq_n_f32(1) : vld1q_f32(scales[f][g]);
            its[f].offsets = has_offsets(coding) ? vld1q_f32(offsets[f][g]) : vdupq_n_f32(0);
        }
        if (tokens <= FEW_TOKENS) {
            rows_times(coding, 0, STRIP_FOURS, codes, its, part, half, halves, prepared, columns, tokens, totals, STRIP_ROWS);
            continue;
        }
        for (size_t i = 0; i < STRIP_FOURS * pieces; i++)
            rows_to_lanes(codes + i / pieces * registers + i % pieces, pieces, lanes + 4 * i);
        rows_times(coding, 1, STRIP_FOURS, lanes, its, part, half, halves, prepared, columns, tokens, totals, STRIP_ROWS);
    }
}

#include "../strip_products.h"

#endif
