/* Products of four rows with a part of tokens, or with one of its halves (../integers.h): a lane of sums has a row. */
#ifndef TIERMOE_ISA_NEON_PARTS_H
#define TIERMOE_ISA_NEON_PARTS_H

#include "../../matrix.h"
#include "../integers.h"
#include "../simd.h"

enum {
    PART_ROWS = 4,
    PART_REGISTERS = X_PART * PART_ROWS / 16, /* of codes */
};

/* Each lane + the sum of its four products of bytes. */
static inline int32x4_t plus_dots(int32x4_t sums, int8x16_t a, int8x16_t b) {
#if defined(SIMD_NEON_DOT)
    return vdotq_s32(sums, a, b);
#else /* the sum of two products has 16 bits */
    return vpadalq_s16(sums, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
#endif
}

/* Likewise, with the four bytes of one lane of b. */
#if defined(SIMD_NEON_DOT)
#define PLUS_DOTS_LANE(sums, a, b, lane) vdotq_laneq_s32(sums, a, b, lane)
#else
#define PLUS_DOTS_LANE(sums, a, b, lane) plus_dots(sums, a, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(b), lane)))
#endif

/* The sums of `registers` registers times the codes of x. Either a lane has four columns of its row, or each row lies in registers of
 * its own. */
INLINE int32x4_t sums_by_lanes(const int8x16_t *codes, size_t registers, const int8_t *x) {
    int32x4_t sums = vdupq_n_s32(0);
    for (size_t i = 0; i < registers; i += 4) {
        const int8x16_t its = vld1q_s8(x + 4 * i);
        sums = PLUS_DOTS_LANE(sums, codes[i], its, 0), sums = PLUS_DOTS_LANE(sums, codes[i + 1], its, 1);
        sums = PLUS_DOTS_LANE(sums, codes[i + 2], its, 2), sums = PLUS_DOTS_LANE(sums, codes[i + 3], its, 3);
    }
    return sums;
}
INLINE int32x4_t sums_by_rows(const int8x16_t *codes, size_t registers, const int8_t *x) {
    const size_t each = registers / PART_ROWS;
    int32x4_t sums[PART_ROWS];
    for (size_t i = 0; i < PART_ROWS; i++) {
        sums[i] = vdupq_n_s32(0);
        for (size_t k = 0; k < each; k++) sums[i] = plus_dots(sums[i], codes[i * each + k], vld1q_s8(x + 16 * k));
    }
    return vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
}

/* What four rows' codes are multiplied by, and what is added to them then. */
typedef struct {
    float32x4_t scales, offsets;
} FourScales;

/* totals + the sums, scaled. */
INLINE float32x4_t plus_sums(Coding coding, float32x4_t totals, int32x4_t sums, FourScales of, float unit, int32_t x_sum) {
    totals = vfmaq_f32(totals, vcvtq_f32_s32(sums), vmulq_n_f32(of.scales, unit));
    return has_offsets(coding) ? vfmaq_n_f32(totals, of.offsets, (float)x_sum * unit) : totals;
}

/* totals[m * apart ..] += half `half` of `halves` of a part of `fours` times four rows, times token m. codes: the four rows' after
 * each other. */
INLINE void rows_times(Coding coding, int by_lanes, size_t fours, const int8x16_t *codes, const FourScales *of, size_t part, size_t half,
                       size_t halves, const float *prepared, size_t columns, size_t tokens, float *totals, size_t apart) {
    const size_t registers = PART_REGISTERS / halves, column = part * X_PART + half * X_PART / 2;
    for (size_t m = 0; m < tokens; m++, prepared += integer_floats(columns), totals += apart) {
        const XIntegers x = integers_at(prepared, columns);
        const int32_t x_sum = sum_of_codes(&x, part, half, halves);
        for (size_t f = 0; f < fours; f++) {
            const int8x16_t *its = codes + f * registers;
            const int32x4_t sums = by_lanes ? sums_by_lanes(its, registers, x.codes + column) : sums_by_rows(its, registers, x.codes + column);
            float *to = totals + PART_ROWS * f;
            vst1q_f32(to, plus_sums(coding, vld1q_f32(to), sums, of[f], x.scales[part], x_sum));
        }
    }
}

#endif
