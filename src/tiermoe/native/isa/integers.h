/* Activations as whole numbers: of each X_PART columns of a token codes of 8 bits, and what they are multiplied by. A weight is a
 * whole number, too, times the scale of its group. So the sum over a part is an integer, exact in any order, and
 *
 *   a total     takes part after part in the order of the columns: total + (float)sum * (scale of weights * scale of the part),
 *               the last product and sum fused; where a group has a zero, then total + zero * ((float)sum of codes * scale of
 *               the part), fused
 *
 * which gives the same bits for one token as for many, on every instruction set. A code is at most 127 from 0 and a weight 128:
 * a part's sum is below 2^20, and no float of one is rounded. */
#ifndef TIERMOE_ISA_INTEGERS_H
#define TIERMOE_ISA_INTEGERS_H

#include <math.h>

#include "../matrix.h"
#include "simd.h"

enum {
    X_PART = 32,           /* columns */
    MOST_CODE = 127,
    NO_NUMBER = 0x7F80,  /* bits of a bfloat16 without its sign: infinite, or undefined beyond */
    LEAST_PLACE = 0x0D80 /* likewise: 2^-100. A part of smaller numbers is 0: one over them would be no number */
};

/* Floats of what is known of a token: codes (columns), and of each part a scale, the sum of its codes and that of the first half
 * of them. */
static inline size_t integer_floats(size_t columns) { return columns / 4 + columns / X_PART * 3; }

/* A token's, from where they begin. */
typedef struct {
    const int8_t *codes;
    const float *scales;
    const int32_t *sums, *firsts;
} XIntegers;

static inline XIntegers integers_at(const float *prepared, size_t columns) {
    const float *scales = prepared + columns / 4;
    const int32_t *sums = (const int32_t *)(const void *)(scales + columns / X_PART);
    return (XIntegers){(const int8_t *)prepared, scales, sums, sums + columns / X_PART};
}

/* The sum of the codes of a part, or of one of its two halves. */
static inline int32_t sum_of_codes(const XIntegers *x, size_t part, size_t half, size_t halves) {
    if (halves == 1) return x->sums[part];
    return half ? x->sums[part] - x->firsts[part] : x->firsts[part];
}

#if !defined(OWN_LARGEST_BITS)
/* The bits of the largest of some numbers, a multiple of 16, without their signs. */
static inline unsigned largest_bits(const bf16 *x, size_t width) {
    unsigned largest = 0;
    for (size_t c = 0; c < width; c++) {
        const unsigned bits = x[c] & 0x7FFF;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}
#endif

/* What a part's numbers are multiplied by to become codes, and the codes by to be what they stand for. A part with a number that
 * is none has an undefined scale, and so has every total that it is in. */
typedef struct {
    float factor, scale;
} XUnit;

static inline XUnit unit_of(const bf16 *x) {
    const unsigned bits = largest_bits(x, X_PART);
    const float largest = from_bf16((bf16)bits);
    if (bits >= NO_NUMBER) return (XUnit){0, NAN};
    return bits < LEAST_PLACE ? (XUnit){0, 0} : (XUnit){MOST_CODE / largest, largest / MOST_CODE};
}

static inline void to_integers_of(const bf16 *x, size_t columns, float *prepared) {
    int8_t *codes = (int8_t *)prepared;
    float *scales = prepared + columns / 4;
    int32_t *sums = (int32_t *)(void *)(scales + columns / X_PART), *firsts = sums + columns / X_PART;
    for (size_t p = 0; p < columns / X_PART; p++, x += X_PART, codes += X_PART) {
        const XUnit unit = unit_of(x);
        Vector numbers = zeros();
        for (size_t c = 0; c < X_PART; c += LANES) {
            const Vector some = to_integers(times(load_bf16(x + c), all(unit.factor)));
            store_codes(codes + c, some);
            numbers = plus(numbers, some);
            if (c == 0) firsts[p] = unit.factor > 0 ? (int32_t)sum_of(numbers) : 0;
        }
        scales[p] = unit.scale, sums[p] = unit.factor > 0 ? (int32_t)sum_of(numbers) : 0;
    }
}

/* Whether a coding's products are of whole numbers. */
static inline int of_integers(Coding coding) { return coding != BF16 && coding != E4M3; }

#endif
