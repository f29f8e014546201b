/* Sixteen numbers at a time, in one register. */
#ifndef TIERMOE_ISA_AVX512_SIMD_H
#define TIERMOE_ISA_AVX512_SIMD_H

#include <immintrin.h>
#include <string.h>

#include "../../quants.h"

#include "../x86.h"

#define OWN_SOME /* load_some and store_some */
#define OWN_DOT  /* Dot, Columns, and what is done with them */

enum {
    LANES = 16,
    DOT = 32,    /* columns of a dot product at a time */
};
#define QUERIES 4 /* that share what is loaded of keys and values */
#define KEYS(queries) 4 /* keys scored at a time */
#define WIDEST(queries) ((queries) < 3 ? 128 : 64) /* columns of values whose sums are in registers at a time */

typedef __m512 Vector;
typedef __m512 Dot;      /* lanes whose sum is a dot product */
typedef __m512i Columns; /* of one factor */

static inline __mmask16 first_lanes(size_t count) { return count < LANES ? (__mmask16)((1u << count) - 1) : 0xFFFF; }

static inline Vector widened(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
static inline __m256i narrowed(Vector values) { return (__m256i)_mm512_cvtneps_pbh(values); }

static inline Vector load_bf16(const bf16 *from) { return widened(_mm256_loadu_si256((const void *)from)); }
static inline void store_bf16(bf16 *to, Vector values) { _mm256_storeu_si256((void *)to, narrowed(values)); }

/* The first `count` of them, at most 16. */
static inline Vector load_some(const bf16 *from, size_t count) {
    return widened(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
static inline void store_some(bf16 *to, size_t count, Vector values) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), narrowed(values));
}

/* `count` pairs: their first and their second numbers. */
static inline void load_pairs(const bf16 *from, size_t count, Vector *first, Vector *second) {
    const __m512i pairs = _mm512_maskz_loadu_epi32(first_lanes(count), from);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)));
}

/* Rounded to bfloat16: what a tensor of that dtype would hold between two operations. */
static inline Vector as_bf16(Vector values) { return widened(narrowed(values)); }

static inline bf16 round_bf16(float value) {
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0);
}

static inline Vector zeros(void) { return _mm512_setzero_ps(); }
static inline Vector all(float value) { return _mm512_set1_ps(value); }
static inline Vector load(const float *from) { return _mm512_loadu_ps(from); }
static inline void store(float *to, Vector values) { _mm512_storeu_ps(to, values); }
static inline Vector plus(Vector a, Vector b) { return _mm512_add_ps(a, b); }
static inline Vector minus(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
static inline Vector times(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
static inline Vector over(Vector a, Vector b) { return _mm512_div_ps(a, b); }
static inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); } /* b where one is undefined */
static inline Vector larger_of(Vector a, Vector b) { return _mm512_max_ps(a, b); } /* likewise */
static inline Vector times_plus(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }   /* a b + c */
static inline Vector minus_times(Vector c, Vector a, Vector b) { return _mm512_fnmadd_ps(a, b, c); } /* c - a b */
static inline Vector to_integers(Vector a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
static inline Vector times_two_to(Vector a, Vector n) { return _mm512_scalef_ps(a, n); }
static inline float sum_of(Vector a) { return _mm512_reduce_add_ps(a); }
static inline float largest_of(Vector a) { return _mm512_reduce_max_ps(a); }
static inline float first_of(Vector a) { return _mm512_cvtss_f32(a); }

/* 0 from lane `count` on. */
static inline Vector keep(Vector a, size_t count) { return _mm512_maskz_mov_ps(first_lanes(count), a); }

/* Whole numbers as signed bytes; of what is no number any. */
static inline void store_codes(int8_t *to, Vector numbers) {
    _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(numbers)));
}

static inline Dot no_dot(void) { return _mm512_setzero_ps(); }
static inline Columns load_columns(const bf16 *from) { return _mm512_loadu_si512(from); }
static inline Dot dot(Dot sum, Columns a, Columns b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
static inline float sum_of_dot(Dot a) { return _mm512_reduce_add_ps(a); }

static inline void look_up_32(const bf16 numbers[16], const uint8_t *from, bf16 *out) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)numbers)); /* twice: five bits choose */
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from));
    const __m512i chosen = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(chosen, table));
}

/* The sums of the lanes of four registers. */
static inline __m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xEE);
    const __m512 sums = _mm512_add_ps(low, high); /* a b c d in each quarter */
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* out[i] = scale * the sum of dots[i]. */
static inline void four_dots(const Dot dots[4], float scale, float *out) {
    _mm_storeu_ps(out, _mm_mul_ps(four_sums(dots[0], dots[1], dots[2], dots[3]), _mm_set1_ps(scale)));
}

#endif
