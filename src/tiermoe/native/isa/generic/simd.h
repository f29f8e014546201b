/* Sixteen numbers at a time, in plain C; products fused, which the C library does where the processor cannot. */
#ifndef TIERMOE_ISA_GENERIC_SIMD_H
#define TIERMOE_ISA_GENERIC_SIMD_H

#include <string.h>

#include "../../quants.h"

#define OWN_SOME /* load_some and store_some */

enum {
    LANES = 16,
    DOT = 32, /* columns of a dot product at a time */
};
#define QUERIES 2 /* that share what is loaded of keys and values */
#define KEYS(queries) ((queries) == 1 ? 4 : 2) /* keys scored at a time */
#define WIDEST(queries) 32 /* columns of values whose sums are kept at a time */

typedef struct {
    float lane[LANES];
} Vector;

#define EACH_LANE for (int i = 0; i < LANES; i++)

static inline Vector load_some(const bf16 *from, size_t count) {
    Vector v = {{0}};
    for (size_t i = 0; i < count && i < LANES; i++) v.lane[i] = from_bf16(from[i]);
    return v;
}
static inline void store_some(bf16 *to, size_t count, Vector v) {
    for (size_t i = 0; i < count && i < LANES; i++) to[i] = to_bf16(v.lane[i]);
}
static inline Vector load_bf16(const bf16 *from) { return load_some(from, LANES); }
static inline void store_bf16(bf16 *to, Vector v) { store_some(to, LANES, v); }

/* `count` pairs: their first and their second numbers. */
static inline void load_pairs(const bf16 *from, size_t count, Vector *first, Vector *second) {
    *first = *second = (Vector){{0}};
    for (size_t i = 0; i < count && i < LANES; i++)
        first->lane[i] = from_bf16(from[2 * i]), second->lane[i] = from_bf16(from[2 * i + 1]);
}

/* Rounded to bfloat16: what a tensor of that dtype would hold between two operations. */
static inline Vector as_bf16(Vector v) {
    EACH_LANE v.lane[i] = from_bf16(to_bf16(v.lane[i]));
    return v;
}

static inline Vector all(float value) {
    Vector v;
    EACH_LANE v.lane[i] = value;
    return v;
}
static inline Vector zeros(void) { return all(0); }
static inline Vector load(const float *from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}
static inline void store(float *to, Vector v) { memcpy(to, &v, sizeof v); }

#define OPERATION(name, expression)                   \
    static inline Vector name(Vector a, Vector b) {    \
        EACH_LANE {                                    \
            const float x = a.lane[i], y = b.lane[i]; \
            a.lane[i] = expression;                    \
        }                                              \
        return a;                                      \
    }
OPERATION(plus, x + y)
OPERATION(minus, x - y)
OPERATION(times, x *y)
OPERATION(over, x / y)
OPERATION(smaller, x < y ? x : y) /* y where one is undefined */
OPERATION(larger_of, x > y ? x : y) /* likewise */
#undef OPERATION

/* Fused, as in every other set. */
static inline Vector times_plus(Vector a, Vector b, Vector c) {
    EACH_LANE c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
static inline Vector minus_times(Vector c, Vector a, Vector b) {
    EACH_LANE c.lane[i] = __builtin_fmaf(-a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

/* The nearest ones, of |a| < 2^22. */
static inline Vector to_integers(Vector a) { return minus(plus(a, all(12582912.0f)), all(12582912.0f)); }

static inline float two_to(int n) {
    const uint32_t bits = (uint32_t)(n + 127) << 23;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* a * 2^n for integers |n| <= 200: in two steps, since 2^n may be no normal number. */
static inline Vector times_two_to(Vector a, Vector n) {
    EACH_LANE {
        const int whole = n.lane[i] == n.lane[i] ? (int)n.lane[i] : 0, half = whole / 2;
        a.lane[i] = a.lane[i] * two_to(half) * two_to(whole - half);
    }
    return a;
}

static inline float sum_of(Vector a) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a.lane[i] += a.lane[i + half];
    return a.lane[0];
}
static inline float largest_of(Vector a) {
    float largest = a.lane[0];
    EACH_LANE largest = a.lane[i] > largest ? a.lane[i] : largest;
    return largest;
}
static inline float first_of(Vector a) { return a.lane[0]; }

/* Whole numbers as signed bytes; of what is no number any. */
static inline void store_codes(int8_t *to, Vector numbers) {
    EACH_LANE to[i] = (int8_t)(numbers.lane[i] == numbers.lane[i] ? numbers.lane[i] : 0);
}

/* The float16 at an address. */
static inline float from_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)rest * two_to(-24);
    const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* What the nibbles of 16 bytes stand for. */
static inline void look_up(const int8_t codes[16], const uint8_t *from, int8_t *low, int8_t *high) {
    for (int i = 0; i < 16; i++) low[i] = codes[from[i] & 15], high[i] = codes[from[i] >> 4];
}

static inline void look_up_32(const bf16 numbers[16], const uint8_t *from, bf16 *out) {
    for (int i = 0; i < 16; i++) out[i] = numbers[from[i] & 15], out[i + 16] = numbers[from[i] >> 4];
}

/* out[i] = scale * the sum of dots[i]: of four after each other (0 + 2) + (1 + 3), and of these four likewise. */
static inline void four_dots(const Vector dots[4], float scale, float *out) {
    for (int i = 0; i < 4; i++) {
        const float *x = dots[i].lane;
        float fours[4];
        for (int q = 0; q < 4; q++) fours[q] = (x[4 * q] + x[4 * q + 2]) + (x[4 * q + 1] + x[4 * q + 3]);
        out[i] = scale * ((fours[0] + fours[2]) + (fours[1] + fours[3]));
    }
}

#endif
