/* Activations as integers of 16 bits: those of a run of columns times a power of two. What is at least about 1/128 of the
 * run's largest stays as it is, the others are rounded by at most about 2^-15 of it. */
#ifndef TIERMOE_ISA_AVX2_INTEGERS_H
#define TIERMOE_ISA_AVX2_INTEGERS_H

#include <string.h>

#include "../simd.h"

/* The float of 2^exponent; undefined from 128 on. */
static inline float power_of_two(int exponent) { return from_bf16(exponent < 128 ? (bf16)((exponent + 127) << 7) : 0x7FC0); }

/* What makes numbers integers below 255 * 128, and one over it. */
typedef struct {
    float place, unit; /* 1 and undefined where a number is no finite one */
} Place;

static inline Place place_of(const bf16 *x, size_t width) {
    const unsigned bits = largest_bits(x, width);
    const int most = (int)((bits + 1) >> 7) - 127, exponent = most < -112 ? -112 : most;
    const int finite = bits < 0x7F80;
    return (Place){power_of_two(finite ? 14 - exponent : 0), power_of_two(finite ? exponent - 14 : 128)};
}

/* Sixteen numbers times a factor, to the nearest integers: four of `a`, four of `b`, and again. */
static inline __m256i to_words(Eight a, Eight b, Eight factor) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(a, factor)), high = _mm256_cvtps_epi32(_mm256_mul_ps(b, factor));
    return _mm256_packs_epi32(low, high);
}

/* Those of `a` first. */
static inline __m256i in_order(__m256i words) { return _mm256_permute4x64_epi64(words, 0xD8); }

/* sums + the products of words, two of them in each lane. */
static inline __m256i plus_products(__m256i sums, __m256i a, __m256i b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }

/* Keeps the compiler from adding products to each other first: then some sums would have no register. */
INLINE __m256i in_register(__m256i sums) {
    __asm__("" : "+x"(sums));
    return sums;
}

#endif
