/* Strips of a row of the blocks of GGUF files, of published codes and of INT8: codes as bytes, above_zero(coding) above what they
 * stand for, 64 columns to a register, and what their groups are scaled by. */
#ifndef TIERMOE_ISA_AVX512_STRIPS_H
#define TIERMOE_ISA_AVX512_STRIPS_H

#include "../strips.h"
#include "../x86_strips.h"
#include "row_blocks.h"

enum {
    PIECE = 64, /* columns of a register */
    PIECES = STRIP / PIECE,
};

/* (a & mask) | b */
static inline __m512i with_masked(__m512i b, __m512i a, int mask) {
    return _mm512_ternarylogic_epi64(_mm512_set1_epi8((char)mask), a, b, 0xEA);
}

/* In the lower half of a register one number, in the upper one another. */
static inline __m512i by_halves(int lower, int upper) {
    return _mm512_inserti64x4(_mm512_set1_epi32(lower), _mm256_set1_epi32(upper), 1);
}

/* 32 bytes twice. */
static inline __m512i twice(const uint8_t *at) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)at)); }

/* What four bits of each byte number in a table of signed bytes, 128 above it. The bits above them are of no account. */
static inline __m512i looked_up(const int8_t table[16], __m512i bytes) {
    const __m512i four_times = _mm512_broadcast_i32x4(_mm_load_si128((const void *)table)); /* six bits choose */
    return _mm512_permutexvar_epi8(bytes, _mm512_xor_si512(four_times, _mm512_set1_epi8((char)0x80)));
}

/* Twice 16 bytes, of which the low nibbles are 16 columns and the high ones the next 16: in the low bits of bytes, beside others. */
static inline __m512i narrow_nibbles(const uint8_t *one, const uint8_t *other) {
    const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)one));
    const __m512i both = _mm512_mask_broadcast_i32x4(first, 0xFF00, _mm_loadu_si128((const void *)other));
    return _mm512_srlv_epi16(both, _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004,
                                                    0x0004000400040004, 0, 0));
}

/* Twice 16 bytes of pairs: the low nibble is an even column, the high one the odd one behind it. Likewise. */
static inline __m512i nibble_pairs(const uint8_t *one, const uint8_t *other) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const void *)one));
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_inserti128_si256(first, _mm_loadu_si128((const void *)other), 1));
    return _mm512_or_si512(words, _mm512_slli_epi16(words, 4));
}

/* Types of 32 columns to a block: a register has those of two blocks. */
INLINE __m512i piece_of_two(Coding coding, const uint8_t *one, const uint8_t *two) {
    switch (coding) {
        case Q8_0: {
            const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)AT(q8_0, one)->codes));
            const __m512i both = _mm512_inserti64x4(first, _mm256_loadu_si256((const void *)AT(q8_0, two)->codes), 1);
            return _mm512_xor_si512(both, _mm512_set1_epi8((char)0x80));
        }
        case Q4_0: return low_bits(narrow_nibbles(AT(q4_0, one)->codes, AT(q4_0, two)->codes), 15);
        case Q4_1: return low_bits(narrow_nibbles(AT(q4_1, one)->codes, AT(q4_1, two)->codes), 15);
        case Q5_0: case Q5_1: { /* which end alike */
            const size_t before = block_bytes(coding) - 20;
            const __mmask64 fifth = four_bytes(one + before) | (uint64_t)four_bytes(two + before) << 32;
            const __m512i four = low_bits(narrow_nibbles(one + before + 4, two + before + 4), 15);
            return _mm512_mask_add_epi8(four, fifth, four, _mm512_set1_epi8(16));
        }
        case IQ4_NL: return looked_up(IQ4_CODES, narrow_nibbles(AT(iq4_nl, one)->codes, AT(iq4_nl, two)->codes));
        case MXFP4: return looked_up(FP4_CODES, narrow_nibbles(AT(mxfp4, one)->codes, AT(mxfp4, two)->codes));
        case E2M1: return looked_up(FP4_CODES, nibble_pairs(one, two));
        default: return low_bits(nibble_pairs(one, two), 15); /* S4, U4 */
    }
}

/* Q4_K and Q5_K. Fifth bits lie in 32 bytes of their own, bit g for group g. */
INLINE void k_pieces(int five, const uint8_t *codes, const uint8_t *fifth, __m512i pieces[PIECES]) {
    for (int k = 0; k < PIECES; k++) {
        pieces[k] = low_bits(_mm512_srlv_epi32(twice(codes + 32 * k), by_halves(0, 4)), 15);
        if (five) pieces[k] = with_masked(pieces[k], _mm512_rolv_epi32(twice(fifth), by_halves(4 - 2 * k, 3 - 2 * k)), 16);
    }
}

/* Quarters of half a strip, two bits of each of 32 bytes. */
INLINE __m512i two_bits(const uint8_t *codes, int k) {
    return low_bits(_mm512_srlv_epi32(twice(codes + k / 2 * 32), by_halves(k % 2 * 4, k % 2 * 4 + 2)), 3);
}

static inline void q3_k_pieces(const block_q3_k *block, __m512i pieces[PIECES]) {
    for (int k = 0; k < PIECES; k++) /* bit 2 k, and 2 k + 1, to bit 2 */
        pieces[k] = with_masked(two_bits(block->codes, k), _mm512_rolv_epi32(twice(block->high), by_halves(2 - 2 * k, 1 - 2 * k)), 4);
}

static inline void q6_k_pieces(const block_q6_k *block, __m512i pieces[PIECES]) {
    for (int half = 0; half < 2; half++) {
        const __m512i low = _mm512_loadu_si512(block->codes + 64 * half), high = twice(block->high + 32 * half);
        pieces[2 * half] = with_masked(low_bits(low, 15), _mm512_rolv_epi32(high, by_halves(4, 2)), 48);
        pieces[2 * half + 1] = with_masked(low_bits(_mm512_srli_epi32(low, 4), 15), _mm512_rolv_epi32(high, by_halves(0, 30)), 48);
    }
}

/* Types whose codes are places in a grid.
 *
 * A place in a grid is a word of the numbers of its columns' sizes (../../gguf_grids.h), of eight columns in IQ2, of four in
 * IQ3. A grid's words fill 8 to 32 registers, out of which those of a strip are permuted. That of IQ1 has too many. */

#define FOUR_TIMES(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__
#define SIXTEEN_TIMES(...) FOUR_TIMES(FOUR_TIMES(__VA_ARGS__))

/* Words of a grid of 64 times 4, 8 or 16. */
INLINE __m512i permuted_words(const uint16_t *grid, int registers, __m512i places) {
    __m512i found[16];
    for (int i = 0; i < registers; i++)
        found[i] = _mm512_permutex2var_epi16(_mm512_loadu_si512(grid + 64 * i), places, _mm512_loadu_si512(grid + 64 * i + 32));
    for (int bit = 6; registers > 1; bit++, registers /= 2) {
        const __mmask32 other = _mm512_test_epi16_mask(places, _mm512_set1_epi16((short)(1 << bit)));
        for (int i = 0; i < registers / 2; i++) found[i] = _mm512_mask_blend_epi16(other, found[2 * i], found[2 * i + 1]);
    }
    return found[0];
}

/* The byte of 64 at `first` plus a word's number of four (n / 4) times `four` and its place among them (n % 4) over `shared`,
 * in each of 32 words. */
INLINE __m512i words_from(__m512i bytes, int first, int four, int shared) {
    uint16_t from[32] __attribute__((aligned(64)));
    for (int n = 0; n < 32; n++) from[n] = (uint16_t)(first + n / 4 * four + n % 4 / shared);
    return _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_load_si512(from), bytes);
}

/* For each of four words. */
static inline __m512i by_four(int first, int second, int third, int fourth) {
    return _mm512_set1_epi64((int64_t)((uint64_t)fourth << 48 | (uint64_t)third << 32 | (uint64_t)second << 16 | (uint64_t)first));
}

/* Places with their bits from 8 on: those of `bytes`, once they are moved there. */
INLINE __m512i with_bits(__m512i places, __m512i bytes, __m512i moved, int mask) {
    return _mm512_ternarylogic_epi64(places, _mm512_sllv_epi16(bytes, moved), _mm512_set1_epi16((short)mask), 0xF8); /* a | (b & c) */
}

/* Eight bytes, each in four words. */
INLINE __m512i bytes_by_four(const uint8_t *at) {
    return words_from(_mm512_castsi128_si512(_mm_loadl_epi64((const void *)at)), 0, 1, 4);
}

/* Those of eight columns to a place: 32. */
INLINE __m512i eight_words(Coding coding, const uint8_t *at) {
    switch (coding) {
        case IQ2_XXS: return permuted_words(IQ2_XXS_WORDS, 4, words_from(_mm512_loadu_si512(AT(iq2_xxs, at)->codes), 0, 8, 1));
        case IQ2_XS: return permuted_words(IQ2_XS_WORDS, 8, _mm512_loadu_si512(AT(iq2_xs, at)->codes));
        default: {
            const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)AT(iq2_s, at)->codes));
            return permuted_words(IQ2_S_WORDS, 16, with_bits(low, bytes_by_four(AT(iq2_s, at)->high), by_four(8, 6, 4, 2), 3 << 8));
        }
    }
}

/* 128 above the sizes by the lowest two bits of an index; by its lowest three, or four. */
static const uint8_t IQ2_SIZES[64] __attribute__((aligned(64))) = {
    SIXTEEN_TIMES(128 + 8, 128 + 25, 128 + 43, 128),
};
static const uint8_t IQ3_XXS_SIZES[64] __attribute__((aligned(64))) = {
    FOUR_TIMES(128 + 4, 128 + 12, 128 + 20, 128 + 28, 128 + 36, 128 + 44, 128 + 52, 128 + 62, 0, 0, 0, 0, 0, 0, 0, 0),
};
static const uint8_t IQ3_S_SIZES[64] __attribute__((aligned(64))) = {
    FOUR_TIMES(129, 131, 133, 135, 137, 139, 141, 143, 0, 0, 0, 0, 0, 0, 0, 0),
};

/* Those of four columns to a place: the i-th 32 places. */
INLINE __m512i four_words(Coding coding, const uint8_t *at, int i) {
    const uint8_t *codes = coding == IQ3_XXS ? AT(iq3_xxs, at)->codes : AT(iq3_s, at)->codes;
    const __m512i places = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(codes + 32 * i)));
    if (coding == IQ3_XXS) return permuted_words(IQ3_XXS_WORDS, 4, places);
    const __mmask32 high = four_bytes(AT(iq3_s, at)->high + 4 * i);
    return permuted_words(IQ3_S_WORDS, 8, _mm512_mask_or_epi32(places, 0xFFFF, places, _mm512_maskz_set1_epi16(high, 256)));
}

/* Words `first` .. of some, each `times` times. */
INLINE __m512i words_repeated(__m512i words, int first, int times) {
    uint16_t from[32] __attribute__((aligned(64)));
    for (int n = 0; n < 32; n++) from[n] = (uint16_t)(first + n / times);
    return _mm512_permutexvar_epi16(_mm512_load_si512(from), words);
}

INLINE void permuted_pieces(Coding coding, const uint8_t *at, __m512i pieces[PIECES]) {
    const int four = coding >= IQ3_XXS; /* columns to a place; else eight */
    const __m512i words[] = {four ? four_words(coding, at, 0) : eight_words(coding, at), four ? four_words(coding, at, 1) : _mm512_setzero_si512()};
    const __m512i sizes = _mm512_load_si512(coding == IQ3_XXS ? IQ3_XXS_SIZES : coding == IQ3_S ? IQ3_S_SIZES : IQ2_SIZES);
    const __m512i shifts = _mm512_set1_epi64(four ? 0x2C2824200C080400 : 0x0E0C0A0806040200);
    uint64_t signs[PIECES];
    _mm256_storeu_si256((void *)signs, strip_signs(coding, at));
    for (int k = 0; k < PIECES; k++) {
        const __m512i each = four ? words_repeated(words[k / 2], k % 2 * 16, 2) : words_repeated(words[0], 8 * k, 4);
        const __m512i above = _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(shifts, each), sizes);
        pieces[k] = _mm512_mask_sub_epi8(above, signs[k], _mm512_setzero_si512(), above); /* 128 - size is 256 less 128 + size */
    }
}

/* IQ1 */
INLINE void grid_pieces(Coding coding, const uint8_t *at, __m512i pieces[PIECES]) {
    GridStrip strip;
    grid_strip(coding, at, &strip);
    for (size_t k = 0; k < PIECES; k++) {
        const __m512i first = _mm512_castsi256_si512(grid_sizes(coding, at, &strip, 2 * k));
        const __m512i sizes = _mm512_inserti64x4(first, grid_sizes(coding, at, &strip, 2 * k + 1), 1);
        const __m512i deltas = _mm512_mask_blend_epi8(eight_bytes(strip.signs + 8 * k), _mm512_set1_epi8((char)129), _mm512_set1_epi8(127));
        pieces[k] = _mm512_add_epi8(sizes, deltas);
    }
}

/* All types. A strip of fewer columns, of a row's end, has 0, or anything, in what is missing. */

/* at: the strip's; INT8's codes. */
INLINE void strip_pieces(Coding coding, const uint8_t *at, size_t width, __m512i pieces[PIECES]) {
    const uint8_t *one = at;
    switch (coding) {
        case INT8:
            for (size_t k = 0; k < PIECES; k++) {
                const __m512i codes = k * PIECE < width ? _mm512_loadu_si512(at + k * PIECE) : _mm512_setzero_si512();
                pieces[k] = _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80));
            }
            return;
        case Q4_K: k_pieces(0, AT(q4_k, at)->codes, NULL, pieces); return;
        case Q5_K: k_pieces(1, AT(q5_k, at)->codes, AT(q5_k, at)->fifth, pieces); return;
        case Q2_K: case TQ2_0:
            for (int k = 0; k < PIECES; k++) pieces[k] = two_bits(coding == Q2_K ? AT(q2_k, at)->codes : AT(tq2_0, at)->codes, k);
            return;
        case Q3_K: q3_k_pieces(AT(q3_k, at), pieces); return;
        case Q6_K: q6_k_pieces(AT(q6_k, at), pieces); return;
        case IQ4_XS:
            for (int k = 0; k < PIECES; k++) {
                const uint8_t *codes = AT(iq4_xs, at)->codes + 32 * k;
                pieces[k] = looked_up(IQ4_CODES, narrow_nibbles(codes, codes + 16));
            }
            return;
        case IQ2_XXS: case IQ2_XS: case IQ2_S: case IQ3_XXS: case IQ3_S: permuted_pieces(coding, at, pieces); return;
        case IQ1_S: case IQ1_M: grid_pieces(coding, at, pieces); return;
        case TQ1_0: {
            int8_t codes[STRIP] __attribute__((aligned(64)));
            strip_codes(coding, at, width, codes);
            for (int k = 0; k < PIECES; k++)
                pieces[k] = _mm512_xor_si512(_mm512_load_si512(codes + k * PIECE), _mm512_set1_epi8((char)0x80));
            return;
        }
        default: break;
    }
    for (size_t k = 0; k < PIECES; k++, one += 2 * block_bytes(coding)) {
        pieces[k] = _mm512_setzero_si512();
        if (k * PIECE < width) pieces[k] = piece_of_two(coding, one, width - k * PIECE > 32 ? one + block_bytes(coding) : one);
    }
}

#endif
