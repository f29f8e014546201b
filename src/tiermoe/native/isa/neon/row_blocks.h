/* Products with matrices that are kept in blocks of rows: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2. Four columns of a block
 * become the bytes of sixteen registers: a lane has a row's four. */
#ifndef TIERMOE_ISA_NEON_ROW_BLOCKS_H
#define TIERMOE_ISA_NEON_ROW_BLOCKS_H

#include "../../trellis.h"
#include "../nibbles.h"
#include "parts.h"

enum {
    REGISTERS = BLOCK / PART_ROWS,
    PANEL_FOURS = 2,   /* times four rows whose codes are in registers at a time */
    PANEL_TOKENS = 64, /* that share what is unpacked of a part */
};

/* Four columns of sixteen bytes each: a lane has a byte of each. */
INLINE void by_lanes(const uint8x16_t column[4], uint8x16_t lanes[4]) {
    const uint8x16x2_t even = vzipq_u8(column[0], column[2]), odd = vzipq_u8(column[1], column[3]);
    for (size_t k = 0; k < 2; k++) {
        const uint8x16x2_t both = vzipq_u8(even.val[k], odd.val[k]);
        lanes[2 * k] = both.val[0], lanes[2 * k + 1] = both.val[1];
    }
}

/* Four columns of TCQ2. Of a product of 16 bits the highest five say which level: the factors are whole multiples of 32. */
INLINE void trellis_four(const uint8_t *four, int8x16_t rows[REGISTERS]) {
    static const uint8_t ORDER[] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    const uint8x16_t order = vld1q_u8(ORDER);
    const uint8x16x2_t table = vld1q_u8_x2(TRELLIS_CODES);
    uint8x16_t before = vqtbl1q_u8(vld1q_u8(four + 48), order);
    for (size_t q = 0; q < 4; q++) { /* bytes 4 q .. of the columns */
        const uint8x16_t own = vqtbl1q_u8(vld1q_u8(four + 16 * q), order), last = vextq_u8(before, own, 12);
        const uint16x8_t even = vreinterpretq_u16_u8(vtrn1q_u8(last, own)), odd = vreinterpretq_u16_u8(vtrn2q_u8(last, own));
        for (size_t i = 0; i < RUN_CODES; i++) {
            const uint16x8_t kept = vdupq_n_u16(TRELLIS_KEPT[i]), factor = vdupq_n_u16(TRELLIS_FACTORS[i] >> 5);
            const uint8x16_t first = vreinterpretq_u8_u16(vmulq_u16(vandq_u16(even, kept), factor));
            const uint8x16_t second = vreinterpretq_u8_u16(vmulq_u16(vandq_u16(odd, kept), factor));
            rows[4 * i + q] = vreinterpretq_s8_u8(vqtbl2q_u8(table, vshrq_n_u8(vtrn2q_u8(first, second), 3)));
        }
        before = own;
    }
}

/* Four columns of a block: register r has rows 4 r .. 4 r + 3, as far above what they stand for as above_zero says. */
INLINE void unpack_four(Coding coding, const uint8_t *four, int8x16_t rows[REGISTERS]) {
    if (coding == TCQ2) {
        trellis_four(four, rows);
        return;
    }
    const uint8x16_t mask = vdupq_n_u8(coding == INT2 ? 3 : 15), two = vdupq_n_u8(0x30);
    for (size_t h = 0; h < 2; h++) { /* rows 16 h .. and 32 + 16 h .. */
        uint8x16_t column[4], both[4], high[4];
        for (size_t i = 0; i < 4; i++) column[i] = vreinterpretq_u8_u32(column_nibbles(coding, four + 16 * h, i));
        by_lanes(column, both);
        if (coding == INT6) {
            for (size_t i = 0; i < 4; i += 2) {
                column[i] = vld1q_u8(four + 2 * BLOCK + i / 2 * BLOCK / 2 + 16 * h);
                column[i + 1] = vshrq_n_u8(column[i], 4);
            }
            by_lanes(column, high);
        }
        for (size_t k = 0; k < 4; k++) {
            uint8x16_t low = vandq_u8(both[k], mask), up = vshrq_n_u8(both[k], 4);
            if (coding == INT2) up = vandq_u8(up, mask);
            if (coding == INT6) low = vbslq_u8(two, vshlq_n_u8(high[k], 2), low), up = vbslq_u8(two, vshlq_n_u8(high[k], 4), up);
            rows[4 * h + k] = vreinterpretq_s8_u8(low), rows[REGISTERS / 2 + 4 * h + k] = vreinterpretq_s8_u8(up);
            if (!is_uneven(coding)) continue;
            const int8x16_t levels = vld1q_s8(uneven_levels(coding));
            rows[4 * h + k] = vqtbl1q_s8(levels, low), rows[REGISTERS / 2 + 4 * h + k] = vqtbl1q_s8(levels, up);
        }
    }
}

/* What a code's byte is above the number that it stands for. */
static inline int above_zero(Coding coding) { return is_uneven(coding) ? 0 : middle_code(coding); }

/* Scales of four rows of a group, and zeros of INT4 and INT2: pairs of both, the scale in the low half of a word. */
INLINE FourScales scales_of_rows(Coding coding, const bf16 *scales, size_t row) {
    if (!has_pairs(coding)) return (FourScales){four_of(vld1_u16(scales + row)), vdupq_n_f32(0)};
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(scales + 2 * row));
    const uint32x4_t zeros = vandq_u32(both, vdupq_n_u32(0xFFFF0000));
    return (FourScales){vreinterpretq_f32_u32(vshlq_n_u32(both, 16)), vreinterpretq_f32_u32(zeros)};
}

/* totals (64) += a part times one token: what is unpacked stays in registers. */
INLINE void part_times_one(Coding coding, const uint8_t *codes, const bf16 *scales, const XIntegers *x, size_t part, float *totals) {
    int32x4_t sums[REGISTERS];
    for (size_t r = 0; r < REGISTERS; r++) sums[r] = vdupq_n_s32(-above_zero(coding) * x->sums[part]);
    for (size_t c = 0; c < X_PART; c += 4) {
        int8x16_t rows[REGISTERS];
        int32_t its;
        memcpy(&its, x->codes + part * X_PART + c, sizeof its);
        unpack_four(coding, codes + code_bytes(coding, c), rows);
        for (size_t r = 0; r < REGISTERS; r++) sums[r] = plus_dots(sums[r], rows[r], vreinterpretq_s8_s32(vdupq_n_s32(its)));
    }
    for (size_t r = 0; r < REGISTERS; r++, totals += PART_ROWS) {
        const FourScales of = scales_of_rows(coding, scales, PART_ROWS * r);
        vst1q_f32(totals, plus_sums(coding, vld1q_f32(totals), sums[r], of, x->scales[part], x->sums[part]));
    }
}

/* totals (tokens, 64) += a part times tokens, for all of which it is unpacked once. */
INLINE void part_times(Coding coding, const uint8_t *codes, const bf16 *scales, size_t part, const float *prepared, size_t columns,
                       size_t tokens, float *totals) {
    int8x16_t panel[REGISTERS][PART_REGISTERS];
    for (size_t i = 0; i < PART_REGISTERS; i++) {
        int8x16_t rows[REGISTERS];
        unpack_four(coding, codes + code_bytes(coding, 4 * i), rows);
        for (size_t r = 0; r < REGISTERS; r++) panel[r][i] = vsubq_s8(rows[r], vdupq_n_s8((int8_t)above_zero(coding)));
    }
    for (size_t r = 0; r < REGISTERS; r += PANEL_FOURS) {
        FourScales of[PANEL_FOURS];
        for (size_t f = 0; f < PANEL_FOURS; f++) of[f] = scales_of_rows(coding, scales, PART_ROWS * (r + f));
        rows_times(coding, 1, PANEL_FOURS, panel[r], of, part, 0, 1, prepared, columns, tokens, totals + PART_ROWS * r, BLOCK);
    }
}

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const float *prepared, size_t tokens, bf16 *out,
                        size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, groups = columns / group;
    const size_t before = is_uneven(coding) ? UNEVEN_SCALES : 0, apart = before + code_bytes(coding, group); /* bytes of a group */
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * apart * groups + before;
    const bf16 *scales = matrix->scales;
    if (!is_uneven(coding)) scales += block * BLOCK * (has_pairs(coding) ? 2 : groups);
    for (size_t some; tokens; tokens -= some, prepared += some * integer_floats(columns), out += some * stride) {
        some = least(tokens, PANEL_TOKENS);
        float totals[PANEL_TOKENS * BLOCK];
        memset(totals, 0, some * BLOCK * sizeof *totals);
        const XIntegers x = integers_at(prepared, columns);
        for (size_t c = 0; c < columns; c += X_PART) {
            const uint8_t *at = codes + c / group * apart, *part = at + code_bytes(coding, c % group);
            const bf16 *its = is_uneven(coding) ? (const bf16 *)(at - UNEVEN_SCALES)
                                                : scales + c / group * (has_pairs(coding) ? 2 * matrix->rows : BLOCK);
            if (some == 1)
                part_times_one(coding, part, its, &x, c / X_PART, totals);
            else
                part_times(coding, part, its, c / X_PART, prepared, columns, some, totals);
        }
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < BLOCK; r += LANES) store_bf16(out + m * stride + r, load(totals + m * BLOCK + r));
    }
}

#endif
