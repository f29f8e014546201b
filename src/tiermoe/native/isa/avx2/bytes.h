/* Products of weights as bytes with a token's codes (../integers.h), four columns of a row to a lane of 32 bits. AVX2 adds two
 * products to a word, and words while 16 bits hold them, before it adds them up as integers of 32 bits; a weight with a sign is
 * taken without it, and the code with it. AVX-VNNI (DPBUSD: its instruction) adds all four to an integer of 32 bits; what has a
 * sign is 128 larger. */
#ifndef TIERMOE_ISA_AVX2_BYTES_H
#define TIERMOE_ISA_AVX2_BYTES_H

#include "../../matrix.h"
#include "../integers.h"
#include "../simd.h"

enum { FOURS = X_PART / 4 }; /* columns of a part by four */

static inline int is_signed(Coding coding) {
    return is_uneven(coding) || coding == INT8 || coding == Q8_0 || coding == IQ4_NL || coding == IQ4_XS;
}

#if defined(DPBUSD)
enum { ABOVE_SIGNED = 128 };

/* How many sums of four products may be added before as_integers. */
static inline size_t sums_together(Coding coding) { return (void)coding, FOURS; }

INLINE __m256i plus_products(Coding coding, __m256i sums, __m256i weights, __m256i codes) {
    return (void)coding, DPBUSD(sums, weights, codes);
}
static inline __m256i plus_sums(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
static inline __m256i as_integers(__m256i sums) { return sums; }
#else
enum { ABOVE_SIGNED = 0 };

/* The largest byte; without its sign where it has one. */
static inline size_t most_byte(Coding coding) {
    switch (coding) {
        case INT6: case TCQ2: case Q6_K: return 63;
        case Q5_0: case Q5_1: case Q5_K: return 31;
        case IQ2_XXS: case IQ2_XS: case IQ2_S: return 2 * 43;
        case IQ3_XXS: return 2 * 62;
        case IQ3_S: return 2 * 15;
        case IQ1_S: case IQ1_M: return 2 * 9;
        case MXFP4: case E2M1: return 2 * 12;
        default: return is_signed(coding) ? 128 : 15;
    }
}

/* How many sums of two products may be added as words, before as_integers: 8, 4, 2 or 1. */
static inline size_t sums_together(Coding coding) {
    size_t sums = FOURS;
    while (sums * 2 * most_byte(coding) * MOST_CODE > INT16_MAX) sums /= 2;
    return sums;
}

INLINE __m256i plus_products(Coding coding, __m256i sums, __m256i weights, __m256i codes) {
    if (!is_signed(coding)) return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, codes));
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(codes, weights)));
}
static inline __m256i plus_sums(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
static inline __m256i as_integers(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif

/* What a code's byte is above the number that it stands for. */
static inline int above_code(Coding coding) {
    switch (coding) {
        case INT4: case INT6: case INT2: case TCQ2: return middle_code(coding);
        case Q4_0: case S4: return 8;
        case Q5_0: return 16;
        case Q3_K: return 4;
        case Q6_K: return 32;
        case TQ1_0: case TQ2_0: return 1;
        case IQ1_S: case IQ1_M: return 9;
        case IQ2_XXS: case IQ2_XS: case IQ2_S: return 43;
        case IQ3_XXS: return 62;
        case IQ3_S: return 15;
        case MXFP4: case E2M1: return 12;
        default: return is_signed(coding) ? ABOVE_SIGNED : 0;
    }
}

/* Bytes with a sign, as plus_products takes them. */
static inline __m256i signed_bytes(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8((char)ABOVE_SIGNED)); }

/* Numbers of a table, above_code above themselves. A byte's highest bit has to be 0; the three below it do not matter. */
static inline __m256i looked_up(Coding coding, const int8_t table[16], __m256i nibbles) {
    const __m128i numbers = _mm_add_epi8(_mm_load_si128((const void *)table), _mm_set1_epi8((char)above_code(coding)));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), nibbles);
}

static inline __m256i four_codes(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, sizeof four);
    return _mm256_set1_epi32(four);
}

#endif
