/* Sixteen numbers at a time. */
#ifndef TIERMOE_VECTOR_H
#define TIERMOE_VECTOR_H

#include <immintrin.h>
#include <string.h>

#include "matrix.h"
#include "target.h"

TARGET static inline __m512 load_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}

TARGET static inline void store_bf16(bf16 *to, __m512 values) {
    _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

static inline float from_bf16(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

TARGET static inline bf16 round_bf16(float value) {
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0);
}

/* Rounded to bfloat16: what a tensor of that dtype would hold between two operations. */
TARGET static inline __m512 as_bf16(__m512 values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16));
}

/* rows (columns), rounded, plus others; columns a multiple of 16. */
TARGET static inline void add_rows(bf16 *rows, const bf16 *others, size_t columns) {
    for (size_t i = 0; i < columns; i += 16) store_bf16(rows + i, _mm512_add_ps(load_bf16(rows + i), load_bf16(others + i)));
}

/* Lanes whose sum is a times b; columns a multiple of 32. */
TARGET static inline __m512 products(const bf16 *a, const bf16 *b, size_t columns) {
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < columns; i += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
    return sum;
}

/* The sums of the lanes of four registers. */
TARGET static inline __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xEE);
    const __m512 sums = _mm512_add_ps(low, high); /* a b c d in each quarter */
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* e^x within 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2, a Taylor polynomial of degree 7. */
TARGET static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104), _mm512_min_ps(_mm512_set1_ps(104), x)); /* beyond: 0 and infinity */
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    static const float REST[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(REST[i]));
    return _mm512_scalef_ps(sum, n);
}

#endif
