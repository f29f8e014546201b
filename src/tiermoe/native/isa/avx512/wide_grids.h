/* Whole strips of IQ2, IQ3 and TQ2_0 in the registers of wide_strips.h.
 *
 * A place in a grid is a word of the numbers of its columns' sizes (../../gguf_grids.h), of eight columns in IQ2, of four in
 * IQ3. A grid's words fill 8 to 32 registers, out of which those of a strip are permuted. That of IQ1 has too many. */
#ifndef TIERMOE_ISA_AVX512_WIDE_GRIDS_H
#define TIERMOE_ISA_AVX512_WIDE_GRIDS_H

#include "strips.h"

enum { WIDE = 8 }; /* registers of a strip */

static inline int is_permuted(Coding coding) { return coding >= IQ2_XXS && coding <= IQ3_S; }

#define FOUR_TIMES(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__

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

/* Every other word of pairs of registers: of each pair the even ones, behind them those of all pairs the odd ones. */
static inline void part_words(size_t pairs, const __m512i *from, __m512i *to) {
    const __m512i even = _mm512_load_si512(EVEN), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    for (size_t i = 0; i < pairs; i++) {
        to[i] = _mm512_permutex2var_epi16(from[2 * i], even, from[2 * i + 1]);
        to[pairs + i] = _mm512_permutex2var_epi16(from[2 * i], odd, from[2 * i + 1]);
    }
}

/* IQ2: eight columns to a place. */

/* bfloat16 of the sizes by the lowest two bits of an index of five. */
static const bf16 IQ2_SIZES[32] __attribute__((aligned(64))) = {
    FOUR_TIMES(0x4100, 0x41C8, 0x422C, 0, 0x4100, 0x41C8, 0x422C, 0), /* 8, 25, 43 */
};

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

/* Register j has column 8 n + j in word n. */
INLINE void wide_eights(Coding coding, const uint8_t *at, __m512i values[WIDE]) {
    const __m512i words = eight_words(coding, at);
    const __m512i signs = _mm512_cvtepu8_epi16(strip_signs(coding, at)), sign = _mm512_set1_epi16((short)0x8000);
    const __m512i table = _mm512_load_si512(IQ2_SIZES);
    for (int j = 0; j < WIDE; j++) {
        const __m512i sizes = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, (unsigned)(2 * j)), table);
        values[j] = _mm512_ternarylogic_epi64(sizes, _mm512_slli_epi16(signs, (unsigned)(15 - j)), sign, 0x78); /* a ^ (b & c) */
    }
}

/* IQ3: four columns to a place. */

/* bfloat16 by three bits and a sign. */
static const bf16 IQ3_XXS_VALUES[32] __attribute__((aligned(64))) = {
    0x4080, 0x4140, 0x41A0, 0x41E0, 0x4210, 0x4230, 0x4250, 0x4278, 0xC080, 0xC140, 0xC1A0, 0xC1E0, 0xC210, 0xC230, 0xC250, 0xC278,
    0x4080, 0x4140, 0x41A0, 0x41E0, 0x4210, 0x4230, 0x4250, 0x4278, 0xC080, 0xC140, 0xC1A0, 0xC1E0, 0xC210, 0xC230, 0xC250, 0xC278,
};
static const bf16 IQ3_S_VALUES[32] __attribute__((aligned(64))) = {
    0x3F80, 0x4040, 0x40A0, 0x40E0, 0x4110, 0x4130, 0x4150, 0x4170, 0xBF80, 0xC040, 0xC0A0, 0xC0E0, 0xC110, 0xC130, 0xC150, 0xC170,
    0x3F80, 0x4040, 0x40A0, 0x40E0, 0x4110, 0x4130, 0x4150, 0x4170, 0xBF80, 0xC040, 0xC0A0, 0xC0E0, 0xC110, 0xC130, 0xC150, 0xC170,
};

/* Four signs, in the highest bits of a word's nibbles. */
#define SIGN_NIBBLES                                                                                                  \
    0x0000, 0x0008, 0x0080, 0x0088, 0x0800, 0x0808, 0x0880, 0x0888, 0x8000, 0x8008, 0x8080, 0x8088, 0x8800, 0x8808, 0x8880, 0x8888
static const uint16_t NIBBLE_SIGNS[32] __attribute__((aligned(64))) = {SIGN_NIBBLES, SIGN_NIBBLES};

/* Register 4 h + j has column 32 (n / 4) + 16 h + 4 (n % 4) + j in word n. */
INLINE void wide_fours(Coding coding, const uint8_t *at, __m512i values[WIDE]) {
    const __m512i codes = _mm512_loadu_si512(coding == IQ3_XXS ? AT(iq3_xxs, at)->codes : AT(iq3_s, at)->codes);
    const __m512i signs = _mm512_castsi256_si512(strip_signs(coding, at)), spread_signs = _mm512_load_si512(NIBBLE_SIGNS);
    const __m512i table = _mm512_load_si512(coding == IQ3_XXS ? IQ3_XXS_VALUES : IQ3_S_VALUES);
    for (int h = 0; h < 2; h++) {
        __m512i places = words_from(codes, 4 * h, 8, 1);
        if (coding == IQ3_S)
            places = with_bits(places, bytes_by_four(AT(iq3_s, at)->high), h ? by_four(4, 3, 2, 1) : by_four(8, 7, 6, 5), 1 << 8);
        const __m512i four = _mm512_srlv_epi16(words_from(signs, 2 * h, 4, 2), by_four(0, 4, 0, 4));
        const __m512i sizes = permuted_words(coding == IQ3_XXS ? IQ3_XXS_WORDS : IQ3_S_WORDS, coding == IQ3_XXS ? 4 : 8, places);
        const __m512i words = _mm512_or_si512(sizes, _mm512_permutexvar_epi16(four, spread_signs));
        for (int j = 0; j < 4; j++) values[4 * h + j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, (unsigned)(4 * j)), table);
    }
}

/* TQ2_0 */

static const bf16 TERNARY[32] __attribute__((aligned(64))) = {
    FOUR_TIMES(0xBF80, 0x0000, 0x3F80, 0x4000, 0xBF80, 0x0000, 0x3F80, 0x4000),
};

/* Register 2 q + o has column 128 (n / 16) + 32 q + 2 (n % 16) + o in word n. */
INLINE void wide_tq2_0(const uint8_t *at, __m512i values[WIDE]) {
    const __m512i words = _mm512_loadu_si512(AT(tq2_0, at)->codes), table = _mm512_load_si512(TERNARY);
    for (int q = 0; q < 4; q++)
        for (int o = 0; o < 2; o++)
            values[2 * q + o] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, (unsigned)(2 * q + 8 * o)), table);
}

/* All of them. */

/* to = the columns of a strip in the order of the registers. */
INLINE void arrange_grid(Coding coding, const bf16 *x, bf16 *to) {
    __m512i of[WIDE], twos[WIDE], fours[WIDE];
    for (int i = 0; i < WIDE; i++) of[i] = _mm512_loadu_si512(x + 32 * i);
    part_words(4, of, twos);
    if (coding == TQ2_0) {
        for (int o = 0; o < 2; o++)
            for (int q = 0; q < 4; q++) {
                const __m512i first = twos[4 * o + q / 2], last = twos[4 * o + 2 + q / 2];
                const __m512i both = q % 2 ? _mm512_shuffle_i64x2(first, last, 0xEE) : _mm512_shuffle_i64x2(first, last, 0x44);
                _mm512_storeu_si512(to + 32 * (2 * q + o), both);
            }
        return;
    }
    for (int odd = 0; odd < 2; odd++) part_words(2, twos + 4 * odd, fours + 4 * odd); /* of columns 4 n, 4 n + 2; 4 n + 1, 4 n + 3 */
    for (int j = 0; j < 4; j++) {
        const __m512i *pair = fours + 4 * (j % 2) + 2 * (j / 2);
        __m512i both[2];
        if (coding < IQ3_XXS) {
            part_words(1, pair, both);
        } else {
            const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
            both[0] = _mm512_permutex2var_epi64(pair[0], even, pair[1]);
            both[1] = _mm512_permutex2var_epi64(pair[0], _mm512_add_epi64(even, _mm512_set1_epi64(1)), pair[1]);
        }
        _mm512_storeu_si512(to + 32 * j, both[0]), _mm512_storeu_si512(to + 32 * (4 + j), both[1]);
    }
}

#endif
