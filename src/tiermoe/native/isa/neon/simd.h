/* Sixteen numbers at a time, in four registers of NEON, and eight in two (shared/eight_*.h, row_blocks.h); products fused. */
#ifndef TIERMOE_ISA_NEON_SIMD_H
#define TIERMOE_ISA_NEON_SIMD_H

#include <arm_neon.h>
#include <string.h>

#include "../../quants.h"

enum {
    LANES = 16,
    DOT = 32, /* columns of a dot product at a time */
};
#define QUERIES 2 /* that share what is loaded of keys and values */
#define KEYS(queries) ((queries) == 1 ? 4 : 2) /* keys scored at a time */
#define WIDEST(queries) ((queries) < 2 ? 64 : 32) /* columns of values whose sums are in registers at a time */

typedef float32x4x4_t Vector;

#define EACH_PART for (int i = 0; i < 4; i++)

static inline float32x4_t four_of(uint16x4_t values) { return vreinterpretq_f32_u32(vshll_n_u16(values, 16)); }

/* Each rounded to bfloat16. */
static inline uint16x4_t rounded_bits(float32x4_t values) {
    const uint32x4_t bits = vreinterpretq_u32_f32(values);
    const uint32x4_t even = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(even, vdupq_n_u32(0x7FFF)));
    const uint32x4_t undefined = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(values, values), rounded, undefined), 16);
}

static inline Vector load_bf16(const bf16 *from) {
    Vector v;
    EACH_PART v.val[i] = four_of(vld1_u16(from + 4 * i));
    return v;
}
static inline void store_bf16(bf16 *to, Vector v) { EACH_PART vst1_u16(to + 4 * i, rounded_bits(v.val[i])); }

/* `count` pairs: their first and their second numbers. */
static inline void load_pairs(const bf16 *from, size_t count, Vector *first, Vector *second) {
    bf16 some[2 * LANES] = {0};
    if (count < LANES) from = memcpy(some, from, 2 * count * sizeof *some);
    EACH_PART {
        const uint16x4x2_t pairs = vld2_u16(from + 8 * i);
        first->val[i] = four_of(pairs.val[0]), second->val[i] = four_of(pairs.val[1]);
    }
}

/* Rounded to bfloat16: what a tensor of that dtype would hold between two operations. */
static inline Vector as_bf16(Vector v) {
    EACH_PART v.val[i] = four_of(rounded_bits(v.val[i]));
    return v;
}

static inline Vector all(float value) {
    const float32x4_t four = vdupq_n_f32(value);
    return (Vector){{four, four, four, four}};
}
static inline Vector zeros(void) { return all(0); }
static inline Vector load(const float *from) { return vld1q_f32_x4(from); }
static inline void store(float *to, Vector v) { vst1q_f32_x4(to, v); }

#define OPERATION(name, expression)                     \
    static inline Vector name(Vector a, Vector b) {      \
        EACH_PART {                                      \
            const float32x4_t x = a.val[i], y = b.val[i]; \
            a.val[i] = expression;                       \
        }                                                \
        return a;                                        \
    }
OPERATION(plus, vaddq_f32(x, y))
OPERATION(minus, vsubq_f32(x, y))
OPERATION(times, vmulq_f32(x, y))
OPERATION(over, vdivq_f32(x, y))
OPERATION(smaller, vbslq_f32(vcltq_f32(x, y), x, y)) /* y where one is undefined */
OPERATION(larger_of, vbslq_f32(vcgtq_f32(x, y), x, y)) /* likewise */
#undef OPERATION

/* a b + c */
static inline Vector times_plus(Vector a, Vector b, Vector c) {
    EACH_PART c.val[i] = vfmaq_f32(c.val[i], a.val[i], b.val[i]);
    return c;
}

/* c - a b */
static inline Vector minus_times(Vector c, Vector a, Vector b) {
    EACH_PART c.val[i] = vfmsq_f32(c.val[i], a.val[i], b.val[i]);
    return c;
}

static inline Vector to_integers(Vector a) {
    EACH_PART a.val[i] = vrndnq_f32(a.val[i]);
    return a;
}

/* a * 2^n for integers |n| <= 200: in two steps, since 2^n may be no normal number. */
static inline float32x4_t two_to(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
static inline Vector times_two_to(Vector a, Vector n) {
    EACH_PART {
        const int32x4_t whole = vcvtq_s32_f32(n.val[i]), half = vshrq_n_s32(whole, 1);
        a.val[i] = vmulq_f32(vmulq_f32(a.val[i], two_to(half)), two_to(vsubq_s32(whole, half)));
    }
    return a;
}

static inline float sum_of_four(float32x4_t a) {
    const float32x2_t pairs = vadd_f32(vget_low_f32(a), vget_high_f32(a)); /* 0 + 2, 1 + 3 */
    return vget_lane_f32(pairs, 0) + vget_lane_f32(pairs, 1);
}
static inline float sum_of(Vector a) {
    return sum_of_four(vaddq_f32(vaddq_f32(a.val[0], a.val[2]), vaddq_f32(a.val[1], a.val[3])));
}
static inline float largest_of(Vector a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.val[0], a.val[1]), vmaxq_f32(a.val[2], a.val[3])));
}
static inline float first_of(Vector a) { return vgetq_lane_f32(a.val[0], 0); }

/* Whole numbers as signed bytes; of what is no number any. */
static inline void store_codes(int8_t *to, Vector numbers) {
    int16x4_t words[4];
    EACH_PART words[i] = vmovn_s32(vcvtq_s32_f32(numbers.val[i]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(vcombine_s16(words[0], words[1])), vmovn_s16(vcombine_s16(words[2], words[3]))));
}

/* out[i] = scale * the sum of dots[i]. */
static inline void four_dots(const Vector dots[4], float scale, float *out) {
    for (int i = 0; i < 4; i++) {
        float fours[4];
        for (int q = 0; q < 4; q++) fours[q] = sum_of_four(dots[i].val[q]);
        out[i] = scale * ((fours[0] + fours[2]) + (fours[1] + fours[3]));
    }
}

/* Four words of 32 bits, for the products. */
typedef uint32x4_t Words;

static inline Words words_from(const uint8_t *from) { return vreinterpretq_u32_u8(vld1q_u8(from)); }
static inline Words words_and(Words words, uint32_t mask) { return vandq_u32(words, vdupq_n_u32(mask)); }
static inline Words words_or(Words a, Words b) { return vorrq_u32(a, b); }
#define WORDS_RIGHT(words, n) vshrq_n_u32(words, n)

/* The float16 at an address. */
static inline float from_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}

/* What the nibbles of 16 bytes stand for. */
static inline void look_up(const int8_t codes[16], const uint8_t *from, int8_t *low, int8_t *high) {
    const int8x16_t table = vld1q_s8(codes);
    const uint8x16_t bytes = vld1q_u8(from);
    vst1q_s8(low, vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15))));
    vst1q_s8(high, vqtbl1q_s8(table, vshrq_n_u8(bytes, 4)));
}
static inline void look_up_32(const bf16 numbers[16], const uint8_t *from, bf16 *out) {
    const uint8x16x2_t table = vld2q_u8((const uint8_t *)numbers); /* their low bytes, their high bytes */
    const uint8x16_t bytes = vld1q_u8(from), halves[] = {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
    for (int half = 0; half < 2; half++) {
        const uint8x16x2_t both = {{vqtbl1q_u8(table.val[0], halves[half]), vqtbl1q_u8(table.val[1], halves[half])}};
        vst2q_u8((uint8_t *)(out + 16 * half), both);
    }
}

#endif
