/* Strips of the types of 256 columns to a block (strips.h) on x86-64 processors with AVX2 or more: their scales, and of those
 * whose codes are places in a grid what places and signs come to. */
#ifndef TIERMOE_ISA_X86_STRIPS_H
#define TIERMOE_ISA_X86_STRIPS_H

#include "strips.h"

/* The sixteen scales of Q3_K, bytes. */
static inline __m128i q3_k_integers(const block_q3_k *block) {
    int high;
    memcpy(&high, block->scales + 8, sizeof high);
    const __m128i eight = _mm_loadl_epi64((const void *)block->scales), all_high = _mm_set1_epi32(high);
    const __m128i low = _mm_and_si128(_mm_unpacklo_epi64(eight, _mm_srli_epi16(eight, 4)), _mm_set1_epi8(15));
    const __m128i twos = _mm_and_si128(_mm_srlv_epi32(all_high, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
    return _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(twos, 4)), _mm_set1_epi8(32));
}

/* The eight scales of IQ4_XS, bytes. */
static inline __m128i iq4_xs_integers(const block_iq4_xs *block) {
    const __m256i twos = _mm256_srlv_epi32(_mm256_set1_epi32((int)two_bytes(block->scales_high)), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32((int)four_bytes(block->scales_low)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i above = _mm256_slli_epi32(_mm256_and_si256(twos, _mm256_set1_epi32(3)), 4);
    const __m256i both = _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi32(15)), above);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    return _mm_sub_epi8(_mm_packus_epi16(words, words), _mm_set1_epi8(32));
}

/* Types whose codes are places in a grid: a strip's places and signs are taken apart together. Of each type:
 *   strip_signs   of 256 columns, as strips.h has them
 *   places        sixteen of them, the i-th time; of IQ2_XXS and IQ3_XXS they are bytes of the block
 *   scale_bytes   twice the scales of a block's groups, rounded down to even ones: bits 1 .. 4 of each byte */

/* What the bits of a strip come to. */
typedef struct {
    uint16_t places[64];       /* of eight columns each, in IQ3 of four; unless they are bytes of the block */
    uint8_t signs[STRIP / 8]; /* as of grid_signs */
} GridStrip;

/* Sixteen words: of each 64 bits four times, or of each 128 bits eight times, the same one of `from`, from the first on. */
static inline __m256i words_again(__m128i from, int eight_times) {
    const __m256i four = _mm256_setr_epi64x(0x0100010001000100, 0x0302030203020302, 0x0504050405040504, 0x0706070607060706);
    const __m256i eight = _mm256_setr_epi64x(0x0100010001000100, 0x0100010001000100, 0x0302030203020302, 0x0302030203020302);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(from), eight_times ? eight : four);
}

/* Sixteen places: their low bytes, and from each word times `up` the bits that `down` brings to those above them. */
static inline __m256i sixteen_places(const uint8_t *low, __m256i words, __m256i up, int down, int mask) {
    const __m256i high = _mm256_srli_epi16(_mm256_mullo_epi16(words, up), down);
    return _mm256_or_si256(_mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)low)), _mm256_and_si256(high, _mm256_set1_epi16((short)mask)));
}

/* Each of 16 bytes' low half and then its high one, in the low bits of a byte. */
static inline __m256i half_bytes_of(__m128i bytes) {
    const __m128i high = _mm_srli_epi16(bytes, 4);
    return _mm256_set_m128i(_mm_unpackhi_epi8(bytes, high), _mm_unpacklo_epi8(bytes, high));
}

/* even_signs of 32 bytes. */
static inline __m256i even_bytes(__m256i sevens) {
    __m256i odd = _mm256_xor_si256(sevens, _mm256_srli_epi16(sevens, 4));
    odd = _mm256_xor_si256(odd, _mm256_srli_epi16(odd, 2));
    odd = _mm256_xor_si256(odd, _mm256_srli_epi16(odd, 1));
    return _mm256_or_si256(sevens, _mm256_and_si256(_mm256_slli_epi16(odd, 7), _mm256_set1_epi8((char)0x80)));
}

/* four_sevens of eight words. */
static inline __m256i all_sevens(__m256i words) {
    const __m256i first = _mm256_and_si256(words, _mm256_set1_epi32(0x7F));
    const __m256i second = _mm256_and_si256(_mm256_slli_epi32(words, 1), _mm256_set1_epi32(0x7F00));
    const __m256i third = _mm256_and_si256(_mm256_slli_epi32(words, 2), _mm256_set1_epi32(0x7F0000));
    const __m256i fourth = _mm256_and_si256(_mm256_slli_epi32(words, 3), _mm256_set1_epi32(0x7F000000));
    return _mm256_or_si256(_mm256_or_si256(first, second), _mm256_or_si256(third, fourth));
}

/* IQ1_S */

static inline __m256i iq1_s_strip_signs(const block_iq1_s *block) {
    return _mm256_srai_epi32(_mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)block->high)), 15);
}

static inline __m256i iq1_s_places(const block_iq1_s *block, size_t i) {
    const __m128i high = _mm_loadl_epi64((const void *)(block->high + 8 * i));
    const __m256i threes = _mm256_set1_epi64x(0x0010008004002000); /* to bit 13 */
    return sixteen_places(block->codes + 16 * i, words_again(high, 0), threes, 5, 0x700);
}

static inline __m128i iq1_s_scale_bytes(const block_iq1_s *block) {
    const __m128i words = _mm_srli_epi16(_mm_loadu_si128((const void *)block->high), 11);
    return _mm_packus_epi16(_mm_and_si128(words, _mm_set1_epi16(14)), _mm_setzero_si128());
}

/* IQ1_M */

static inline __m256i iq1_m_strip_signs(const block_iq1_m *block) {
    const __m256i halves = half_bytes_of(_mm_loadu_si128((const void *)block->high)), bit = _mm256_set1_epi8(8);
    return _mm256_cmpeq_epi8(_mm256_and_si256(halves, bit), bit);
}

static inline __m256i iq1_m_places(const block_iq1_m *block, size_t i) {
    const __m128i high = _mm_loadl_epi64((const void *)(block->high + 8 * i));
    const __m256i fours = _mm256_set1_epi64x(0x0002002002002000); /* to bit 13 */
    return sixteen_places(block->codes + 16 * i, words_again(high, 0), fours, 5, 0x700);
}

static inline __m128i iq1_m_scale_bytes(const block_iq1_m *block) {
    const __m256i words = words_again(_mm_loadl_epi64((const void *)block->scales), 0);
    const __m256i top = _mm256_mullo_epi16(words, _mm256_set1_epi64x(0x0010008004002000));
    const __m256i both = _mm256_and_si256(_mm256_srli_epi16(top, 12), _mm256_set1_epi16(14));
    return _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
}

/* IQ2_XXS and IQ3_XXS: eight words of four times 7 signs below a scale of 4 bits. */

static inline __m256i iq2_xxs_words(const block_iq2_xxs *block) {
    const __m256 first = _mm256_loadu_ps((const void *)block->codes), last = _mm256_loadu_ps((const void *)(block->codes + 32));
    return _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first, last, 0xDD)), 0xD8);
}

static inline __m256i iq3_xxs_words(const block_iq3_xxs *block) { return _mm256_loadu_si256((const void *)block->signs); }

static inline __m256i words_signs(__m256i words) { return even_bytes(all_sevens(words)); }

static inline __m128i words_scale_bytes(__m256i words) {
    const __m256i scales = _mm256_slli_epi32(_mm256_srli_epi32(words, 28), 1);
    const __m128i eight = _mm_packus_epi32(_mm256_castsi256_si128(scales), _mm256_extracti128_si256(scales, 1));
    return _mm_packus_epi16(eight, eight);
}

/* IQ2_XS, IQ2_S and IQ3_S: scales of 4 bits, two to a byte. */

static inline __m128i nibbles_scale_bytes(__m128i eight) {
    const __m128i halves = _mm_unpacklo_epi8(eight, _mm_srli_epi16(eight, 4));
    return _mm_and_si128(_mm_slli_epi16(halves, 1), _mm_set1_epi8(30));
}

static inline __m256i iq2_xs_strip_signs(const block_iq2_xs *block) {
    const __m256i first = _mm256_srli_epi16(_mm256_loadu_si256((const void *)block->codes), 9);
    const __m256i last = _mm256_srli_epi16(_mm256_loadu_si256((const void *)(block->codes + 32)), 9);
    return even_bytes(_mm256_permute4x64_epi64(_mm256_packus_epi16(first, last), 0xD8));
}

static inline __m256i iq2_xs_places(const block_iq2_xs *block, size_t i) {
    return _mm256_and_si256(_mm256_loadu_si256((const void *)(block->codes + 32 * i)), _mm256_set1_epi16(511));
}

static inline __m256i iq2_s_strip_signs(const block_iq2_s *block) { return _mm256_loadu_si256((const void *)block->signs); }

static inline __m256i iq2_s_places(const block_iq2_s *block, size_t i) {
    const __m128i high = _mm_cvtepu8_epi16(_mm_cvtsi32_si128((int)four_bytes(block->high + 4 * i)));
    const __m256i twos = _mm256_set1_epi64x(0x0100040010004000); /* to bit 14 */
    return sixteen_places(block->codes + 16 * i, words_again(high, 0), twos, 6, 0x300);
}

static inline __m256i iq3_s_strip_signs(const block_iq3_s *block) { return _mm256_loadu_si256((const void *)block->signs); }

static inline __m256i iq3_s_places(const block_iq3_s *block, size_t i) {
    const __m128i high = _mm_cvtepu8_epi16(_mm_cvtsi32_si128((int)two_bytes(block->high + 2 * i)));
    const __m256i ones = _mm256_broadcastsi128_si256(_mm_setr_epi16((short)0x8000, 0x4000, 0x2000, 0x1000, 0x800, 0x400, 0x200, 0x100));
    return sixteen_places(block->codes + 16 * i, words_again(high, 1), ones, 7, 0x100);
}

/* All of them. */

INLINE __m256i strip_signs(Coding coding, const uint8_t *at) {
    switch (coding) {
        case IQ1_S: return iq1_s_strip_signs(AT(iq1_s, at));
        case IQ1_M: return iq1_m_strip_signs(AT(iq1_m, at));
        case IQ2_XXS: return words_signs(iq2_xxs_words(AT(iq2_xxs, at)));
        case IQ2_XS: return iq2_xs_strip_signs(AT(iq2_xs, at));
        case IQ2_S: return iq2_s_strip_signs(AT(iq2_s, at));
        case IQ3_XXS: return words_signs(iq3_xxs_words(AT(iq3_xxs, at)));
        default: return iq3_s_strip_signs(AT(iq3_s, at));
    }
}

INLINE __m256i places_of(Coding coding, const uint8_t *at, size_t i) {
    switch (coding) {
        case IQ1_S: return iq1_s_places(AT(iq1_s, at), i);
        case IQ1_M: return iq1_m_places(AT(iq1_m, at), i);
        case IQ2_XS: return iq2_xs_places(AT(iq2_xs, at), i);
        case IQ2_S: return iq2_s_places(AT(iq2_s, at), i);
        default: return iq3_s_places(AT(iq3_s, at), i);
    }
}

/* The scales of a block's groups, as grid_integers finds them. */
INLINE __m128i grid_scale_bytes(Coding coding, const uint8_t *at) {
    __m128i twice;
    switch (coding) {
        case IQ1_S: twice = iq1_s_scale_bytes(AT(iq1_s, at)); break;
        case IQ1_M: twice = iq1_m_scale_bytes(AT(iq1_m, at)); break;
        case IQ2_XXS: twice = words_scale_bytes(iq2_xxs_words(AT(iq2_xxs, at))); break;
        case IQ2_XS: twice = nibbles_scale_bytes(_mm_loadl_epi64((const void *)AT(iq2_xs, at)->scales)); break;
        case IQ2_S: twice = nibbles_scale_bytes(_mm_loadl_epi64((const void *)AT(iq2_s, at)->scales)); break;
        case IQ3_XXS: twice = words_scale_bytes(iq3_xxs_words(AT(iq3_xxs, at))); break;
        default: twice = nibbles_scale_bytes(_mm_cvtsi32_si128((int)four_bytes(AT(iq3_s, at)->scales)));
    }
    return _mm_or_si128(twice, _mm_set1_epi8(1));
}

INLINE void grid_strip(Coding coding, const uint8_t *at, GridStrip *to) {
    for (size_t i = 0; i < (coding == IQ2_XXS || coding == IQ3_XXS ? 0 : coding == IQ3_S ? 4 : 2); i++)
        _mm256_storeu_si256((void *)(to->places + 16 * i), places_of(coding, at, i));
    _mm256_storeu_si256((void *)to->signs, strip_signs(coding, at));
    __asm__("" : "+m"(*to)); /* else the compiler takes places out of vectors, which is slower than out of memory */
}

/* A place; else the compiler works out several in a vector, which it takes apart again. */
INLINE size_t place_alone(size_t place) {
    __asm__("" : "+r"(place));
    return place;
}

/* Columns 8 n .. of a strip of IQ1 or IQ2, without their signs. */
INLINE int64_t strip_eight(Coding coding, const uint8_t *at, const uint16_t *places, size_t n) {
    switch (coding) {
        case IQ1_S: case IQ1_M: return (int64_t)IQ1_GRID[place_alone(places[n])];
        case IQ2_XXS: return (int64_t)IQ2_XXS_GRID[place_alone(AT(iq2_xxs, at)->codes[n / 4 * 8 + n % 4])];
        case IQ2_XS: return (int64_t)IQ2_XS_GRID[place_alone(places[n])];
        default: return (int64_t)IQ2_S_GRID[place_alone(places[n])];
    }
}

/* Columns 4 n .. of a strip of IQ3, likewise. */
INLINE int strip_four(Coding coding, const uint8_t *at, const uint16_t *places, size_t n) {
    if (coding == IQ3_XXS) return (int)IQ3_XXS_GRID[place_alone(AT(iq3_xxs, at)->codes[n])];
    return (int)IQ3_S_GRID[place_alone(places[n])];
}

/* Part p of a strip, without its signs. */
INLINE __m256i grid_sizes(Coding coding, const uint8_t *at, const GridStrip *strip, size_t p) {
#define EIGHT(i) strip_eight(coding, at, strip->places, 4 * p + (i))
#define FOUR(i) strip_four(coding, at, strip->places, 8 * p + (i))
    if (coding >= IQ3_XXS) return _mm256_setr_epi32(FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7));
    return _mm256_setr_epi64x(EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3));
#undef EIGHT
#undef FOUR
}

/* Types of 256 columns to a block: the scales of a strip's groups, eight or sixteen, are signed bytes times a factor. Of Q4_K and
 * Q5_K the bytes are those that a block begins with: two factors, scales and minima. */

INLINE __m128i scale_bytes(Coding coding, const uint8_t *at) {
    switch (coding) {
        case Q4_K: case Q5_K: return _mm_loadu_si128((const void *)at);
        case Q2_K: return _mm_loadu_si128((const void *)AT(q2_k, at)->scales); /* and minima above them, four bits each */
        case Q3_K: return q3_k_integers(AT(q3_k, at));
        case Q6_K: return _mm_loadu_si128((const void *)AT(q6_k, at)->scales);
        case IQ4_XS: return iq4_xs_integers(AT(iq4_xs, at));
        case TQ1_0: case TQ2_0: return _mm_set1_epi8(1);
        default: return grid_scale_bytes(coding, at);
    }
}

INLINE float scale_factor(Coding coding, const uint8_t *at) {
    switch (coding) {
        case Q2_K: return from_half(AT(q2_k, at)->d);
        case Q3_K: return from_half(AT(q3_k, at)->d);
        case Q6_K: return from_half(AT(q6_k, at)->d);
        case IQ4_XS: return from_half(AT(iq4_xs, at)->d);
        case TQ1_0: return from_half(AT(tq1_0, at)->d);
        case TQ2_0: return from_half(AT(tq2_0, at)->d);
        default: return grid_factor(coding, at);
    }
}

/* The scales of a strip's groups, eight to a register, and what is added to them; of groups of 32 columns in one register. Where a
 * strip has fewer groups there is 0, or anything, behind them. */
typedef struct {
    __m256 scales[2], offsets[2];
} StripGroups;

/* Eight float16 that lie `apart` bytes apart. */
static inline __m256 eight_halves(const uint8_t *at, size_t apart) {
#define HALF_AT(i) (short)two_bytes(at + (i) * apart)
    return _mm256_cvtph_ps(_mm_setr_epi16(HALF_AT(0), HALF_AT(1), HALF_AT(2), HALF_AT(3), HALF_AT(4), HALF_AT(5), HALF_AT(6), HALF_AT(7)));
#undef HALF_AT
}

/* Eight scales of MXFP4 (mxfp4_scale), of which the first byte is the lowest. */
static inline __m256 eight_exponents(uint64_t bytes) {
    const __m256i exponents = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
    const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponents);
    const __m256i few = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponents);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, small, few));
}

/* Published scales. */

/* 1, 2, 4 or 8 numbers of so many bytes each; 0 behind them. */
INLINE __m256i some_numbers(const void *at, size_t bytes, size_t count) {
    switch (bytes * count) {
        case 1: return _mm256_zextsi128_si256(_mm_cvtsi32_si128(*(const uint8_t *)at));
        case 2: return _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)two_bytes(at)));
        case 4: return _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)four_bytes(at)));
        case 8: return _mm256_zextsi128_si256(_mm_loadl_epi64(at));
        case 16: return _mm256_zextsi128_si256(_mm_loadu_si128(at));
        default: return _mm256_loadu_si256(at);
    }
}

/* Whether shared_groups() knows a strip's scales: floats, each of a part of it that is a power of two, or of more. */
static inline int are_shared(const Matrix *matrix, size_t group, size_t width) {
    const size_t shared = matrix->scale_columns;
    if (width < STRIP || group != 32 || matrix->scale_kind > SCALE_HALF) return 0;
    return shared < STRIP ? !(shared & (shared - 1)) : shared % STRIP == 0 || shared >= matrix->columns;
}

/* from: number `first` of a matrix's scales on. */
INLINE void shared_groups(Coding coding, const Matrix *matrix, size_t first, float factor, StripGroups *to) {
    const size_t shared = matrix->scale_columns, count = shared < STRIP ? STRIP / shared : 1;
    const int groups = shared < STRIP ? __builtin_ctzll(shared / 32) : 3; /* two to this share one */
    const __m256i of = _mm256_srl_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm_cvtsi32_si128(groups));
    const size_t bytes = matrix->scale_kind == SCALE_FLOAT ? 4 : 2;
    const __m256i numbers = some_numbers((const uint8_t *)matrix->scales + first * bytes, bytes, count);
    __m256 scales;
    if (matrix->scale_kind == SCALE_FLOAT)
        scales = _mm256_castsi256_ps(numbers);
    else if (matrix->scale_kind == SCALE_BF16)
        scales = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(numbers)), 16));
    else
        scales = _mm256_cvtph_ps(_mm256_castsi256_si128(numbers));
    scales = _mm256_mul_ps(scales, _mm256_set1_ps(factor));
    if (coding == U4) {
        const __m128i zeros = _mm256_castsi256_si128(some_numbers((const uint8_t *)matrix->zeros_or_factors + first, 1, count));
        const __m256 negative = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(zeros)));
        to->offsets[0] = _mm256_permutevar8x32_ps(_mm256_mul_ps(scales, negative), of);
    }
    to->scales[0] = _mm256_permutevar8x32_ps(scales, of);
}

INLINE void published_groups(Coding coding, size_t group, const Matrix *matrix, size_t row, size_t column, size_t width, StripGroups *to) {
    const size_t first = published_row(matrix, row) + quotient(column, matrix->scale_columns);
    const uint8_t *scales = (const uint8_t *)matrix->scales + first; /* where they are bytes */
    const int whole = coding == E2M1 && width == STRIP && matrix->scale_columns == group;
    if (whole && group == 32 && matrix->scale_kind == SCALE_E8M0) { /* MXFP4 */
        to->scales[0] = eight_exponents(eight_bytes(scales));
    } else if (whole && group == 16 && has_factors(matrix)) { /* NVFP4 */
        const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)scales));
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xBFFF)); /* 2^-8 times as much */
        const __m128i of[] = {_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)};
        const float factor = published_factor(matrix, row);
        for (int i = 0; i < 2; i++) {
            const __m256 sizes = _mm256_mul_ps(_mm256_cvtph_ps(of[i]), _mm256_set1_ps(256));
            to->scales[i] = matrix->scale_kind == SCALE_E4M3_TIMES ? _mm256_mul_ps(sizes, _mm256_set1_ps(factor))
                                                                   : _mm256_div_ps(sizes, _mm256_set1_ps(4 * factor));
        }
    } else if (are_shared(matrix, group, width)) {
        shared_groups(coding, matrix, first, published_factor(matrix, row), to);
    } else {
        StripScales of;
        published_scales(matrix, row, column, width, &of);
        for (int i = 0; i < 2; i++) to->scales[i] = _mm256_loadu_ps(of.scales + 8 * i), to->offsets[i] = _mm256_loadu_ps(of.offsets + 8 * i);
    }
}

/* Other types: as strip_scales and published_scales find them. at: the strip of a row of a matrix from a column on. */
INLINE void strip_groups(Coding coding, size_t group, const Matrix *matrix, size_t row, size_t column, const uint8_t *at, size_t width,
                         StripGroups *to) {
    if (coding >= FIRST_PUBLISHED) {
        published_groups(coding, group, matrix, row, column, width, to);
    } else if (width < STRIP) {
        StripScales of;
        strip_scales(coding, at, width, &of);
        to->scales[0] = _mm256_loadu_ps(of.scales), to->offsets[0] = _mm256_loadu_ps(of.offsets);
    } else if (coding == MXFP4) {
        uint64_t bytes = 0;
        for (int i = 7; i >= 0; i--) bytes = bytes << 8 | AT(mxfp4, at)[i].exponent;
        to->scales[0] = eight_exponents(bytes);
    } else {
        to->scales[0] = eight_halves(AT(q4_0, at)->d, block_bytes(coding));
        if (has_offsets(coding)) to->offsets[0] = eight_halves(AT(q4_1, at)->m, block_bytes(coding));
    }
}

#endif
