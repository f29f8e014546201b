/* The types whose codes are places in a grid (strips.h) on x86-64 processors with AVX2 or more: a strip's places and signs are
 * taken apart together. Of each type:
 *   strip_signs   of 256 columns, as strips.h has them
 *   places        sixteen of them, the i-th time; of IQ2_XXS and IQ3_XXS they are bytes of the block
 *   scale_bytes   twice the scales of a block's groups, rounded down to even ones: bits 1 .. 4 of each byte */
#ifndef TIERMOE_ISA_X86_GRIDS_H
#define TIERMOE_ISA_X86_GRIDS_H

#include "strips.h"

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

#endif
