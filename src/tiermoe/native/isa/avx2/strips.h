/* Strips of a row of the blocks of GGUF files, of published codes and of INT8: codes as bytes, a part of 32 columns to a register,
 * and what their groups are scaled by. */
#ifndef TIERMOE_ISA_AVX2_STRIPS_H
#define TIERMOE_ISA_AVX2_STRIPS_H

#include "../../matrix.h"
#include "../integers.h"
#include "../strips.h"
#include "../x86_strips.h"
#include "bytes.h"

enum { PARTS = STRIP / X_PART };

static inline __m256i bytes_from(const uint8_t *at) { return _mm256_loadu_si256((const void *)at); }
static inline __m256i masked(__m256i bytes, int mask) { return _mm256_and_si256(bytes, _mm256_set1_epi8((char)mask)); }

/* The low nibbles of 16 bytes, then the high ones. */
static inline __m256i nibbles_at(const uint8_t *at) {
    const __m128i bytes = _mm_loadu_si128((const void *)at);
    return masked(_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1), 15);
}

/* The two nibbles of each of 16 bytes after each other. */
static inline __m256i nibble_pairs(const uint8_t *at) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)at));
    return masked(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), 15);
}

/* All bits of each byte whose bit of 32 is set. */
static inline __m256i bytes_of_bits(uint32_t bits) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}

/* 16 in each byte whose bit of 32 is set. */
static inline __m256i fifth_bits(const uint8_t *at) { return masked(bytes_of_bits(four_bytes(at)), 16); }

/* Of half a strip, or of a quarter, in pieces of 32 columns: 2 bits of each of 32 bytes. */
static inline __m256i twos_at(const uint8_t *codes, int p) { return masked(_mm256_srli_epi16(bytes_from(codes + p / 4 * 32), p % 4 * 2), 3); }

static inline __m256i high_or_low(const uint8_t *at, int high) { return masked(high ? _mm256_srli_epi16(bytes_from(at), 4) : bytes_from(at), 15); }

/* Bit `from` of each byte, in the place of bit `to`. */
static inline __m256i bit_moved(__m256i bytes, int from, int to) {
    return masked(from < to ? _mm256_slli_epi16(bytes, to - from) : _mm256_srli_epi16(bytes, from - to), 1 << to);
}

INLINE __m256i q6_k_part(const block_q6_k *block, int p) {
    const __m256i low = high_or_low(block->codes + p / 4 * 64 + p % 2 * 32, p % 4 / 2), two = bytes_from(block->high + p / 4 * 32);
    const int from = p % 4 * 2;
    return _mm256_or_si256(low, masked(from < 4 ? _mm256_slli_epi16(two, 4 - from) : _mm256_srli_epi16(two, from - 4), 0x30));
}

/* Bytes times 3^n, as tq1_0_code takes them apart. */
static inline __m256i tq1_0_digit(__m256i bytes) {
    const __m256i one = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(86)), bytes);
    const __m256i two = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8((char)171)), bytes);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(one, two));
}

static inline __m256i thrice(__m256i bytes, int times) {
    for (int n = 0; n < times; n++) bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes));
    return bytes;
}

/* 32 columns of each of five digits of the first bytes, 16 of each of the next, then 4 of each of four. */
INLINE __m256i tq1_0_part(const block_tq1_0 *block, int p) {
    const __m128i middle = _mm_loadu_si128((const void *)(block->codes + 32)), last = _mm_set1_epi32((int)four_bytes(block->last));
    const __m256i twice = _mm256_broadcastsi128_si256(middle), ones = _mm256_set_m128i(_mm_set1_epi8(-1), _mm_setzero_si128());
    if (p < 5) return tq1_0_digit(thrice(bytes_from(block->codes), p));
    if (p < 7) {
        const __m256i first = thrice(twice, 2 * (p - 5));
        return tq1_0_digit(_mm256_blendv_epi8(first, thrice(first, 1), ones));
    }
    const __m256i words = _mm256_broadcastsi128_si256(last), once = thrice(words, 1), two = thrice(words, 2);
    const __m256i low = _mm256_blend_epi32(words, once, 0x20), high = _mm256_blend_epi32(two, thrice(words, 3), 0x80);
    return tq1_0_digit(_mm256_blend_epi32(thrice(twice, 4), _mm256_blend_epi32(low, high, 0xC0), 0xF0));
}

/* Types of 32 columns to a block. */
INLINE __m256i block_part(Coding coding, const uint8_t *block) {
    switch (coding) {
        case Q8_0: return signed_bytes(bytes_from(AT(q8_0, block)->codes));
        case Q4_0: return nibbles_at(AT(q4_0, block)->codes);
        case Q4_1: return nibbles_at(AT(q4_1, block)->codes);
        case Q5_0: return _mm256_or_si256(nibbles_at(AT(q5_0, block)->codes), fifth_bits(AT(q5_0, block)->fifth));
        case Q5_1: return _mm256_or_si256(nibbles_at(AT(q5_1, block)->codes), fifth_bits(AT(q5_1, block)->fifth));
        case IQ4_NL: return looked_up(IQ4_NL, IQ4_CODES, nibbles_at(AT(iq4_nl, block)->codes));
        case MXFP4: return looked_up(MXFP4, FP4_CODES, nibbles_at(AT(mxfp4, block)->codes));
        case E2M1: return looked_up(E2M1, FP4_CODES, nibble_pairs(block));
        default: return nibble_pairs(block); /* S4, U4 */
    }
}

/* Part p of a strip, of all types whose codes are no places in a grid. */
INLINE __m256i part_bytes(Coding coding, const uint8_t *at, size_t number) {
    const int p = (int)number;
    switch (coding) {
        case INT8: return signed_bytes(bytes_from(at + 32 * p));
        case Q2_K: return twos_at(AT(q2_k, at)->codes, p);
        case Q3_K: return _mm256_or_si256(twos_at(AT(q3_k, at)->codes, p), bit_moved(bytes_from(AT(q3_k, at)->high), p, 2));
        case Q4_K: return high_or_low(AT(q4_k, at)->codes + p / 2 * 32, p % 2);
        case Q5_K: return _mm256_or_si256(high_or_low(AT(q5_k, at)->codes + p / 2 * 32, p % 2), bit_moved(bytes_from(AT(q5_k, at)->fifth), p, 4));
        case Q6_K: return q6_k_part(AT(q6_k, at), p);
        case IQ4_XS: return looked_up(IQ4_XS, IQ4_CODES, nibbles_at(AT(iq4_xs, at)->codes + 16 * p));
        case TQ1_0: return tq1_0_part(AT(tq1_0, at), p);
        case TQ2_0: return twos_at(AT(tq2_0, at)->codes, p);
        default: return block_part(coding, at + number * block_bytes(coding));
    }
}

/* The codes of a strip. */
INLINE void strip_bytes(Coding coding, const uint8_t *at, size_t width, uint8_t codes[STRIP]) {
    GridStrip strip;
    if (is_grid(coding)) grid_strip(coding, at, &strip);
    for (size_t p = 0; p < width / X_PART; p++) {
        __m256i bytes;
        if (is_grid(coding)) {
            const __m256i signs = bytes_of_bits(four_bytes(strip.signs + 4 * p)), sizes = grid_sizes(coding, at, &strip, p);
            bytes = coding <= IQ1_M ? _mm256_add_epi8(sizes, _mm256_or_si256(signs, _mm256_set1_epi8(1)))
                                    : _mm256_sub_epi8(_mm256_xor_si256(sizes, signs), signs);
            bytes = _mm256_add_epi8(bytes, _mm256_set1_epi8((char)above_code(coding)));
        } else {
            bytes = part_bytes(coding, at, p);
        }
        _mm256_storeu_si256((void *)(codes + p * X_PART), bytes);
    }
}

/* e4m3.h: columns as the float16 of 2^-8 times as much, exact and never slow; 64 of them, or 32. */
#define OWN_E4M3
static inline Vector e4m3_values(__m256i halves) {
    const __m256 place = _mm256_set1_ps(256);
    return (Vector){_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), place),
                    _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), place)};
}
static inline void load_e4m3(const uint8_t *from, size_t columns, Columns to[2]) {
    const __m256i mask = _mm256_set1_epi16((short)0xBF80);
    for (size_t i = 0; i < columns / DOT; i++) {
        const __m256i bytes = bytes_from(from + i * DOT);
        to[i].even = e4m3_values(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 1), mask));
        to[i].odd = e4m3_values(_mm256_and_si256(_mm256_srai_epi16(bytes, 1), mask));
    }
}

#endif
