/* Whole strips of some types, each with what belongs to it, and what chooses among all types.
 *
 * A whole strip is in eight registers of bfloat16, of which each has columns of all groups: two lanes to 32 columns, one to 16.
 * So one scale of each lane serves all eight of them.
 *
 * Bytes of a strip are brought together by quarters of 128 bits and pairs of lanes, and the words of a register are shifted:
 * in Q4_K, Q5_K and Q6_K those of its first lanes for the low nibbles, those of the others for the high ones. There register
 * 4 i + 2 s + o has columns at even (o = 0) or odd places, from the i-th half of what is brought together; s: the pairs of
 * lanes are exchanged. */
#ifndef TIERMOE_ISA_AVX512_WIDE_STRIPS_H
#define TIERMOE_ISA_AVX512_WIDE_STRIPS_H

#include "row_blocks.h"
#include "strips.h"
#include "wide_grids.h"

static inline int is_wide(Coding coding, size_t group) {
    switch (coding) {
        case Q4_K: case Q5_K: case Q6_K: case TQ2_0: case MXFP4: case S4: case U4: return 1;
        default: return is_permuted(coding) || (coding == E2M1 && group == 32);
    }
}

/* In each 128 bits: `first` in the words of two lanes, `second` in those of the others. */
static inline __m512i by_pairs(int first, int second) {
    const int64_t low = first * 0x0001000100010001, high = second * 0x0001000100010001;
    return _mm512_set4_epi64(high, low, high, low);
}

static inline __m512i pairs_exchanged(__m512i words) { return _mm512_shuffle_epi32(words, 0x4E); }

/* Of a type: its values in registers (wide_...), the columns of 64 that quarters of registers 0, 2, 4 and 6 have (IN_...; those
 * of the others lie one column on, or two), and its scales where they are taken apart otherwise than in strips.h. */

/* Q4_K and Q5_K */

/* bfloat16 of 0 to 31. */
static const bf16 FIVE_BITS[32] __attribute__((aligned(64))) = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0x4180, 0x4188, 0x4190, 0x4198, 0x41A0, 0x41A8, 0x41B0, 0x41B8, 0x41C0, 0x41C8, 0x41D0, 0x41D8, 0x41E0, 0x41E8, 0x41F0, 0x41F8,
};

static const uint16_t IN_PAIRS[32] __attribute__((aligned(64))) = {
    0,  2,  4,  6,  40, 42, 44, 46, 8,  10, 12, 14, 32, 34, 36, 38, 16, 18, 20, 22, 56, 58, 60, 62, 24, 26, 28, 30, 48, 50, 52, 54,
};

/* Eight scales of Q4_K or Q5_K, and behind them its eight minima, negative. */
static inline __m512 k_lanes(const block_q4_k *block) {
    uint32_t halves_at;
    memcpy(&halves_at, block->d, 4); /* and m */
    const __m512i integers = _mm512_cvtepu8_epi32(k_integers(block));
    const __m128 both = _mm_xor_ps(_mm_cvtph_ps(_mm_cvtsi32_si128((int)halves_at)), _mm_setr_ps(0, -0.0f, 0, 0));
    const __m512i of = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_mul_ps(_mm512_permutexvar_ps(of, _mm512_castps128_ps512(both)), _mm512_cvtepi32_ps(integers));
}

/* The group of each word of 32 columns' registers, plus `more`. */
static inline __m512i by_group(int more) {
    const int64_t each = 0x0001000100010001;
    return _mm512_set_epi64((more + 7) * each, (more + 6) * each, (more + 5) * each, (more + 4) * each, (more + 3) * each,
                            (more + 2) * each, (more + 1) * each, more * each);
}

/* Fifth bits lie in 32 bytes of their own, bit g for group g. */
static inline void wide_nibbles(int five, const uint8_t *codes, const uint8_t *fifth, __m512i values[WIDE]) {
    const __m512i one = _mm512_loadu_si512(codes), other = _mm512_loadu_si512(codes + 64);
    const __m512i halves[] = {_mm512_shuffle_i64x2(one, other, 0x88), _mm512_shuffle_i64x2(one, other, 0xDD)};
    const __m512i table = _mm512_load_si512(five ? FIVE_BITS : NIBBLES), nibble = _mm512_set1_epi16(15);
    for (int i = 0; i < 2; i++)
        for (int s = 0; s < 2; s++) {
            const __m512i words = s ? pairs_exchanged(halves[i]) : halves[i];
            __m512i even = _mm512_srlv_epi16(words, by_pairs(0, 4)), odd = _mm512_srlv_epi16(words, by_pairs(8, 12));
            if (five) {
                const __m512i bits = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(fifth + 16 * i)));
                const __m512i same = s ? pairs_exchanged(bits) : bits;
                even = chosen(nibble, even, _mm512_srlv_epi16(_mm512_slli_epi16(same, 4), by_group(0)));
                odd = chosen(nibble, odd, _mm512_srlv_epi16(same, by_group(4)));
            }
            values[4 * i + 2 * s] = _mm512_permutexvar_epi16(even, table);
            values[4 * i + 2 * s + 1] = _mm512_permutexvar_epi16(odd, table);
        }
}

/* Q6_K */

/* Twice the quarter of its 128 columns that each word of 16 columns' registers is of, plus `more`. */
static inline __m512i by_quarter(int more) {
    const int64_t each = 0x0001000100010001;
    const int64_t of[] = {more * each, (more + 4) * each, (more + 2) * each, (more + 6) * each};
    return _mm512_set_epi64(of[3], of[2], of[3], of[2], of[1], of[0], of[1], of[0]);
}

/* bfloat16 of code - 32. */
static const bf16 VALUES_OF_6[64] __attribute__((aligned(64))) = {
    0xC200, 0xC1F8, 0xC1F0, 0xC1E8, 0xC1E0, 0xC1D8, 0xC1D0, 0xC1C8, 0xC1C0, 0xC1B8, 0xC1B0,
    0xC1A8, 0xC1A0, 0xC198, 0xC190, 0xC188, 0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130,
    0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000,
    0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130,
    0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4188, 0x4190, 0x4198, 0x41A0, 0x41A8, 0x41B0,
    0x41B8, 0x41C0, 0x41C8, 0x41D0, 0x41D8, 0x41E0, 0x41E8, 0x41F0, 0x41F8,
};

/* Half of the registers' lanes are of one half of a block, every other one. An index counts by its 6 lowest bits: four of
 * `low`, two of `high`. */
static inline void wide_q6_k(const block_q6_k *block, __m512i values[WIDE]) {
    const __m512i first = _mm512_load_si512(VALUES_OF_6), last = _mm512_load_si512(VALUES_OF_6 + 32);
    const __m512i one = _mm512_loadu_si512(block->codes), other = _mm512_loadu_si512(block->codes + 64), nibble = _mm512_set1_epi16(15);
    const __m512i above_one = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)block->high));
    const __m512i above_other = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(block->high + 32)));
    const __m512i low[] = {_mm512_unpacklo_epi32(one, other), _mm512_unpackhi_epi32(one, other)};
    const __m512i high[] = {_mm512_unpacklo_epi32(above_one, above_other), _mm512_unpackhi_epi32(above_one, above_other)};
    for (int i = 0; i < 2; i++)
        for (int s = 0; s < 2; s++) {
            const __m512i words = s ? pairs_exchanged(low[i]) : low[i], above = s ? pairs_exchanged(high[i]) : high[i];
            const __m512i even = chosen(nibble, _mm512_srlv_epi16(words, by_pairs(0, 4)),
                                        _mm512_srlv_epi16(_mm512_slli_epi16(above, 4), by_quarter(0)));
            const __m512i odd = chosen(nibble, _mm512_srlv_epi16(words, by_pairs(8, 12)), _mm512_srlv_epi16(above, by_quarter(4)));
            values[4 * i + 2 * s] = _mm512_permutex2var_epi16(first, even, last);
            values[4 * i + 2 * s + 1] = _mm512_permutex2var_epi16(first, odd, last);
        }
}

/* Instead of quarters_of: from half of the columns of each 64 of a strip four registers, of which each has those of one pair of
 * lanes of all of them. */
static inline void lanes_from(const __m512i of[4], __m512i to[4]) {
    for (int i = 0; i < 2; i++) {
        const __m512i low = i ? _mm512_unpackhi_epi32(of[0], of[2]) : _mm512_unpacklo_epi32(of[0], of[2]);
        const __m512i high = i ? _mm512_unpackhi_epi32(of[1], of[3]) : _mm512_unpacklo_epi32(of[1], of[3]);
        const __m512d a = _mm512_castsi512_pd(low), b = _mm512_castsi512_pd(high);
        to[2 * i] = _mm512_castpd_si512(_mm512_shuffle_pd(a, b, 0xAA));
        to[2 * i + 1] = _mm512_castpd_si512(_mm512_shuffle_pd(a, b, 0x55));
    }
}

/* MXFP4 */

static const uint16_t IN_BLOCKS[32] __attribute__((aligned(64))) = {
    0,  2,  4,  6,  32, 34, 36, 38, 8,  10, 12, 14, 40, 42, 44, 46, 16, 18, 20, 22, 48, 50, 52, 54, 24, 26, 28, 30, 56, 58, 60, 62,
};

/* Where the first eight bytes of codes of each block of MXFP4 lie; the others lie 8 bytes on. */
static const uint8_t MXFP4_CODES[64] __attribute__((aligned(64))) = {
    1,  2,  3,  4,  5,  6,  7,  8,  18, 19, 20, 21, 22,  23,  24,  25,  35,  36,  37,  38,  39,  40,
    41, 42, 52, 53, 54, 55, 56, 57, 58, 59, 69, 70, 71,  72,  73,  74,  75,  76,  86,  87,  88,  89,
    90, 91, 92, 93, 103, 104, 105, 106, 107, 108, 109, 110, 120, 121, 122, 123, 124, 125, 126, 127,
};

/* Low or high nibbles of the even or odd bytes of eight pairs of lanes. */
static inline __m512i nibbles_at(__m512i bytes, int high, int odd, __m512i table) {
    return _mm512_permutexvar_epi16(_mm512_srlv_epi16(bytes, _mm512_set1_epi16((short)(4 * high + 8 * odd))), table);
}

/* A register has half of half of the nibbles of each block's first or last bytes: its number, with the highest bit first, is
 * which nibble, which half of the bytes and whether the bytes are odd ones. */
static inline void wide_mxfp4(const uint8_t *at, __m512i values[WIDE]) {
    const __m512i codes = _mm512_load_si512(MXFP4_CODES), table = _mm512_load_si512(FP4_VALUES);
    for (int i = 0; i < 2; i++) {
        const __m512i bytes = _mm512_permutex2var_epi8(_mm512_loadu_si512(at + 8 * i), codes, _mm512_loadu_si512(at + 64 + 8 * i));
        for (int high = 0; high < 2; high++)
            for (int odd = 0; odd < 2; odd++) values[4 * high + 2 * i + odd] = nibbles_at(bytes, high, odd, table);
    }
}

/* E2M1, S4 and U4 */

static const uint16_t IN_BYTES[32] __attribute__((aligned(64))) = {
    0,  4,  8,  12, 32, 36, 40, 44, 1,  5,  9,  13, 33, 37, 41, 45, 16, 20, 24, 28, 48, 52, 56, 60, 17, 21, 25, 29, 49, 53, 57, 61,
};

/* A register's number: which half of the bytes, which nibble, and whether the bytes are odd ones. */
static inline void wide_pairs(const uint8_t *at, const bf16 of[32], __m512i values[WIDE]) {
    const __m512i one = _mm512_loadu_si512(at), other = _mm512_loadu_si512(at + 64), table = _mm512_load_si512(of);
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    for (int i = 0; i < 2; i++) {
        const __m512i bytes = _mm512_permutex2var_epi64(one, _mm512_add_epi64(even, _mm512_set1_epi64(i)), other);
        for (int high = 0; high < 2; high++)
            for (int odd = 0; odd < 2; odd++) values[4 * i + 2 * high + odd] = nibbles_at(bytes, high, odd, table);
    }
}

/* All types. */

INLINE void spread_wide(Coding coding, const uint8_t *at, __m512i values[WIDE]) {
    switch (coding) {
        case IQ2_XXS: case IQ2_XS: case IQ2_S: wide_eights(coding, at, values); return;
        case IQ3_XXS: case IQ3_S: wide_fours(coding, at, values); return;
        case TQ2_0: wide_tq2_0(at, values); return;
        case Q4_K: wide_nibbles(0, AT(q4_k, at)->codes, NULL, values); return;
        case Q5_K: wide_nibbles(1, AT(q5_k, at)->codes, AT(q5_k, at)->fifth, values); return;
        case Q6_K: wide_q6_k(AT(q6_k, at), values); return;
        case MXFP4: wide_mxfp4(at, values); return;
        case E2M1: wide_pairs(at, FP4_VALUES, values); return;
        case S4: wide_pairs(at, NIBBLES_LESS_8, values); return;
        default: wide_pairs(at, NIBBLES, values); /* U4 */
    }
}

/* The scales and offsets of a strip's groups, in order, as strip_scales finds them; 0 behind them. For most types they do not
 * go through memory, which a wide load would have to wait for. */
INLINE void groups_from(Coding coding, size_t group, const uint8_t *at, RowPlace place, size_t width, __m512 *scales,
                        __m512 *offsets) {
    *offsets = _mm512_setzero_ps();
    if (coding >= FIRST_PUBLISHED) {
        *scales = published_lanes(coding, group, place, width, offsets);
    } else if (coding == Q4_K || coding == Q5_K) {
        const __m512 both = k_lanes(AT(q4_k, at));
        *scales = both; /* the second half is asked for by no column */
        *offsets = _mm512_zextps256_ps512(_mm512_extractf32x8_ps(both, 1));
    } else if (coding == Q2_K) {
        *scales = sixteen_times(from_half(AT(q2_k, at)->d), q2_k_integers(AT(q2_k, at), 0));
        *offsets = sixteen_times(-from_half(AT(q2_k, at)->m), q2_k_integers(AT(q2_k, at), 1));
    } else if (coding == Q3_K) {
        *scales = sixteen_times(from_half(AT(q3_k, at)->d), q3_k_integers(AT(q3_k, at)));
    } else if (coding == Q6_K) {
        *scales = sixteen_times(from_half(AT(q6_k, at)->d), _mm_loadu_si128((const void *)AT(q6_k, at)->scales));
    } else if (is_grid(coding)) {
        *scales = sixteen_times(grid_factor(coding, at), grid_scale_bytes(coding, at));
    } else if (width == STRIP && block_columns(coding) < STRIP && coding != MXFP4) {
        *scales = eight_halves(AT(q4_0, at)->d, block_bytes(coding));
        if (has_offsets(coding)) *offsets = eight_halves(AT(q4_1, at)->m, block_bytes(coding));
    } else if (width == STRIP && coding == MXFP4) {
        uint64_t bytes = 0;
        for (int i = 7; i >= 0; i--) bytes = bytes << 8 | AT(mxfp4, at)[i].exponent;
        *scales = eight_exponents(bytes);
    } else {
        StripScales of;
        const __mmask16 groups = groups_of(width, group);
        strip_scales(coding, at, width, &of);
        *scales = _mm512_maskz_loadu_ps(groups, of.scales);
        if (has_offsets(coding)) *offsets = _mm512_maskz_loadu_ps(groups, of.offsets);
    }
}

/* The scale of each lane. */
static inline __m512 wide_scales(Coding coding, size_t group, __m512 scales) {
    if (is_permuted(coding) && group == 16) return scales;
    const __m512i of_32 = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i of_16 = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    return _mm512_permutexvar_ps(coding == Q6_K ? of_16 : of_32, scales);
}

/* From half of the columns of each 64 of a strip: four registers, of which each has those of one quarter of all of them. */
static inline void quarters_of(const __m512i of[4], __m512i to[4]) {
    const __m512i a = _mm512_shuffle_i32x4(of[0], of[1], 0x44), b = _mm512_shuffle_i32x4(of[2], of[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(of[0], of[1], 0xEE), d = _mm512_shuffle_i32x4(of[2], of[3], 0xEE);
    to[0] = _mm512_shuffle_i32x4(a, b, 0x88), to[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
    to[2] = _mm512_shuffle_i32x4(c, d, 0x88), to[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

static inline const uint16_t *wide_order(Coding coding) {
    switch (coding) {
        case Q4_K: case Q5_K: return IN_PAIRS;
        case Q6_K: return EVEN;
        case MXFP4: return IN_BLOCKS;
        default: return IN_BYTES;
    }
}

/* to = the columns of a strip in the order of the registers. */
INLINE void arrange_strip(Coding coding, const bf16 *x, bf16 *to) {
    if (is_permuted(coding) || coding == TQ2_0) {
        arrange_grid(coding, x, to);
        return;
    }
    const __m512i first = _mm512_load_si512(wide_order(coding));
    for (int other = 0; other < 2; other++) {
        const int step = coding >= FIRST_PUBLISHED ? 2 : 1;
        const __m512i order = _mm512_add_epi16(first, _mm512_set1_epi16((short)(other * step)));
        __m512i of[4], registers[4];
        for (int i = 0; i < 4; i++)
            of[i] = _mm512_permutex2var_epi16(_mm512_loadu_si512(x + 64 * i), order, _mm512_loadu_si512(x + 64 * i + 32));
        if (coding == Q6_K)
            lanes_from(of, registers);
        else
            quarters_of(of, registers);
        for (int i = 0; i < 4; i++) _mm512_storeu_si512(to + 32 * (2 * i + other), registers[i]);
    }
}

#endif
