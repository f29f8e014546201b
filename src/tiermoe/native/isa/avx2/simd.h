/* Sixteen numbers at a time, in two registers of AVX2, and eight in one (shared/eight_*.h); products fused (FMA). */
#ifndef TIERMOE_ISA_AVX2_SIMD_H
#define TIERMOE_ISA_AVX2_SIMD_H

#include <immintrin.h>
#include <string.h>

#include "../../quants.h"

#include "../x86.h"

enum {
    LANES = 16,
    DOT = 32, /* columns of a dot product at a time */
};
#define QUERIES 2 /* that share what is loaded of keys and values */
#define KEYS(queries) ((queries) == 1 ? 4 : 2) /* keys scored at a time */
#define WIDEST(queries) ((queries) < 2 ? 64 : 32) /* columns of values whose sums are in registers at a time */

typedef struct {
    __m256 low, high;
} Vector;

static inline __m256 eight_of(__m128i values) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}

/* The bits of each rounded to bfloat16, in the low half of its lane. */
static inline __m256i rounded_bits(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values), high = _mm256_srli_epi32(bits, 16);
    const __m256i even = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, even), 16);
    const __m256i undefined = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), undefined);
}

static inline Vector load_bf16(const bf16 *from) {
    return (Vector){eight_of(_mm_loadu_si128((const void *)from)), eight_of(_mm_loadu_si128((const void *)(from + 8)))};
}
static inline void store_bf16(bf16 *to, Vector v) {
    const __m256i both = _mm256_packus_epi32(rounded_bits(v.low), rounded_bits(v.high));
    _mm256_storeu_si256((void *)to, _mm256_permute4x64_epi64(both, 0xD8));
}

/* `count` pairs: their first and their second numbers. */
static inline void load_pairs(const bf16 *from, size_t count, Vector *first, Vector *second) {
    bf16 some[2 * LANES] = {0};
    if (count < LANES) from = memcpy(some, from, 2 * count * sizeof *some);
    const __m256i low = _mm256_loadu_si256((const void *)from), high = _mm256_loadu_si256((const void *)(from + LANES));
    const __m256i mask = _mm256_set1_epi32((int)0xFFFF0000);
    *first = (Vector){_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    *second = (Vector){_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}

/* Rounded to bfloat16: what a tensor of that dtype would hold between two operations. */
static inline Vector as_bf16(Vector v) {
    return (Vector){_mm256_castsi256_ps(_mm256_slli_epi32(rounded_bits(v.low), 16)),
                    _mm256_castsi256_ps(_mm256_slli_epi32(rounded_bits(v.high), 16))};
}

static inline Vector all(float value) { return (Vector){_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline Vector zeros(void) { return all(0); }
static inline Vector load(const float *from) { return (Vector){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void store(float *to, Vector v) { _mm256_storeu_ps(to, v.low), _mm256_storeu_ps(to + 8, v.high); }

#define OPERATION(name, instruction) \
    static inline Vector name(Vector a, Vector b) { return (Vector){instruction(a.low, b.low), instruction(a.high, b.high)}; }
OPERATION(plus, _mm256_add_ps)
OPERATION(minus, _mm256_sub_ps)
OPERATION(times, _mm256_mul_ps)
OPERATION(over, _mm256_div_ps)
OPERATION(smaller, _mm256_min_ps) /* b where one is undefined */
OPERATION(larger_of, _mm256_max_ps) /* likewise */
#undef OPERATION

/* a b + c */
static inline Vector times_plus(Vector a, Vector b, Vector c) {
    return (Vector){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

/* c - a b */
static inline Vector minus_times(Vector c, Vector a, Vector b) {
    return (Vector){_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

static inline Vector to_integers(Vector a) {
    return (Vector){_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

/* a * 2^n for integers |n| <= 200: in two steps, since 2^n may be no normal number. */
static inline __m256 eight_times_two_to(__m256 a, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    const __m256i rest = _mm256_sub_epi32(whole, half);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
static inline Vector times_two_to(Vector a, Vector n) {
    return (Vector){eight_times_two_to(a.low, n.low), eight_times_two_to(a.high, n.high)};
}

static inline float sum_of_eight(__m256 a) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
static inline float sum_of(Vector a) { return sum_of_eight(_mm256_add_ps(a.low, a.high)); }
static inline float largest_of(Vector a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
static inline float first_of(Vector a) { return _mm256_cvtss_f32(a.low); }

/* Whole numbers as signed bytes; of what is no number any. */
static inline void store_codes(int8_t *to, Vector numbers) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(numbers.low), _mm256_cvtps_epi32(numbers.high));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xD8);
    _mm_storeu_si128((void *)to, _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1)));
}

/* Low and high bytes are looked up apart. */
static inline void look_up_32(const bf16 numbers[16], const uint8_t *from, bf16 *out) {
    const __m128i first = _mm_loadu_si128((const void *)numbers), second = _mm_loadu_si128((const void *)(numbers + 8));
    const __m128i byte = _mm_set1_epi16(0xFF), nibble = _mm_set1_epi8(15), bytes = _mm_loadu_si128((const void *)from);
    const __m128i low = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
    const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    const __m128i halves[] = {_mm_and_si128(bytes, nibble), _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble)};
    for (int half = 0; half < 2; half++) {
        const __m128i a = _mm_shuffle_epi8(low, halves[half]), b = _mm_shuffle_epi8(high, halves[half]);
        _mm_storeu_si128((void *)(out + 16 * half), _mm_unpacklo_epi8(a, b));
        _mm_storeu_si128((void *)(out + 16 * half + 8), _mm_unpackhi_epi8(a, b));
    }
}

/* Of four registers' halves of four lanes (0 + 2) + (1 + 3). */
static inline __m256 sums_of_fours(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
}

/* out[i] = scale * the sum of dots[i]. */
static inline void four_dots(const Vector dots[4], float scale, float *out) {
    const __m256 low = sums_of_fours(dots[0].low, dots[1].low, dots[2].low, dots[3].low);
    const __m256 high = sums_of_fours(dots[0].high, dots[1].high, dots[2].high, dots[3].high), both = _mm256_add_ps(low, high);
    const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
}

/* Eight numbers, and eight words of 32 bits, for the products. */
typedef __m256 Eight;
typedef __m256i Words;

static inline Eight eight_zeros(void) { return _mm256_setzero_ps(); }
static inline Eight eight_all(float value) { return _mm256_set1_ps(value); }
static inline Eight eight_from(const float *from) { return _mm256_loadu_ps(from); }
static inline void eight_to(float *to, Eight a) { _mm256_storeu_ps(to, a); }
static inline Eight eight_times(Eight a, Eight b) { return _mm256_mul_ps(a, b); }
static inline Eight eight_times_plus(Eight a, Eight b, Eight c) { return _mm256_fmadd_ps(a, b, c); }
static inline Eight eight_bits(Words words) { return _mm256_castsi256_ps(words); }

static inline Words words_from(const void *from) { return _mm256_loadu_si256(from); }
static inline Words words_and(Words words, uint32_t mask) { return _mm256_and_si256(words, _mm256_set1_epi32((int)mask)); }
static inline Words words_or(Words a, Words b) { return _mm256_or_si256(a, b); }
#define WORDS_LEFT(words, n) _mm256_slli_epi32(words, n)
#define WORDS_RIGHT(words, n) _mm256_srli_epi32(words, n)

/* The rows of four registers, (k, 4 of rows 4 k ..; 4 of rows 16 + 4 k ..), to lanes (row % 4, row / 4). */
static inline void transpose(Words v[4]) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, c), v[1] = _mm256_unpackhi_epi64(a, c);
    v[2] = _mm256_unpacklo_epi64(b, d), v[3] = _mm256_unpackhi_epi64(b, d);
}

#endif
