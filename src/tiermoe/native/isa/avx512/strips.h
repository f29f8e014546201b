/* The blocks of GGUF files and published codes (../strips.h) in registers.
 *
 * 64 columns are unpacked into two registers of bfloat16: those at even places and those at odd ones. So the 16-bit words of a
 * block's bytes are two columns each, and both registers' lanes belong to the same groups: 4 lanes to 16 columns, 8 to 32.
 * Whole strips of some types are unpacked otherwise (wide_strips.h). */
#ifndef TIERMOE_ISA_AVX512_STRIPS_H
#define TIERMOE_ISA_AVX512_STRIPS_H

#include "../../matrix.h"
#include "../strips.h"
#include "../x86_grids.h"
#include "../simd.h"

enum { SPREAD = 64 }; /* columns unpacked at a time */

/* bfloat16 of 0 to 15, of those less 8, and of what the nibbles of IQ4 and FP4 stand for, twice: the tables are indexed by 5
 * bits, of which the highest belongs to the next nibble. */
static const bf16 NIBBLES[32] __attribute__((aligned(64))) = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
};
static const bf16 NIBBLES_LESS_8[32] __attribute__((aligned(64))) = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
};
static const bf16 IQ4_VALUES[32] __attribute__((aligned(64))) = {
    0xC2FE, 0xC2D0, 0xC2A6, 0xC282, 0xC244, 0xC20C, 0xC1B0, 0xC120, 0x3F80, 0x4150, 0x41C8, 0x4218, 0x4254, 0x428A, 0x42B2, 0x42E2,
    0xC2FE, 0xC2D0, 0xC2A6, 0xC282, 0xC244, 0xC20C, 0xC1B0, 0xC120, 0x3F80, 0x4150, 0x41C8, 0x4218, 0x4254, 0x428A, 0x42B2, 0x42E2,
};
static const bf16 FP4_VALUES[32] __attribute__((aligned(64))) = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0, 0x4100, 0x4140, 0x0000, 0xBF80, 0xC000, 0xC040, 0xC080, 0xC0C0, 0xC100, 0xC140,
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0, 0x4100, 0x4140, 0x0000, 0xBF80, 0xC000, 0xC040, 0xC080, 0xC0C0, 0xC100, 0xC140,
};

/* Of what bytes of five bits are, with their sign. */
static const bf16 SIGNED_FIVE[32] __attribute__((aligned(64))) = {
    0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xC180, 0xC170, 0xC160, 0xC150, 0xC140, 0xC130, 0xC120, 0xC110, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
};

/* The low and high bytes of the bfloat16 0 to 127. */
static const uint8_t SIZE_LOW[128] __attribute__((aligned(64))) = {
    0x00, 0x80, 0x00, 0x40, 0x80, 0xA0, 0xC0, 0xE0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x88, 0x90, 0x98,
    0xA0, 0xA8, 0xB0, 0xB8, 0xC0, 0xC8, 0xD0, 0xD8, 0xE0, 0xE8, 0xF0, 0xF8, 0x00, 0x04, 0x08, 0x0C, 0x10, 0x14, 0x18, 0x1C,
    0x20, 0x24, 0x28, 0x2C, 0x30, 0x34, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C, 0x50, 0x54, 0x58, 0x5C, 0x60, 0x64, 0x68, 0x6C,
    0x70, 0x74, 0x78, 0x7C, 0x80, 0x82, 0x84, 0x86, 0x88, 0x8A, 0x8C, 0x8E, 0x90, 0x92, 0x94, 0x96, 0x98, 0x9A, 0x9C, 0x9E,
    0xA0, 0xA2, 0xA4, 0xA6, 0xA8, 0xAA, 0xAC, 0xAE, 0xB0, 0xB2, 0xB4, 0xB6, 0xB8, 0xBA, 0xBC, 0xBE, 0xC0, 0xC2, 0xC4, 0xC6,
    0xC8, 0xCA, 0xCC, 0xCE, 0xD0, 0xD2, 0xD4, 0xD6, 0xD8, 0xDA, 0xDC, 0xDE, 0xE0, 0xE2, 0xE4, 0xE6, 0xE8, 0xEA, 0xEC, 0xEE,
    0xF0, 0xF2, 0xF4, 0xF6, 0xF8, 0xFA, 0xFC, 0xFE,
};
static const uint8_t SIZE_HIGH[128] __attribute__((aligned(64))) = {
    0x00, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
};

/* Likewise of the FP8 0x00 to 0x7F. */
static const uint8_t E4M3_LOW[128] __attribute__((aligned(64))) = {
    0x00, 0x00, 0x80, 0xC0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0, 0x00, 0x10, 0x20, 0x30,
    0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
    0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0,
    0xC0, 0xD0, 0xE0, 0xF0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0, 0x00, 0x10, 0x20, 0x30,
    0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
    0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
};
static const uint8_t E4M3_HIGH[128] __attribute__((aligned(64))) = {
    0x00, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3D, 0x3D, 0x3D, 0x3D,
    0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E,
    0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F,
    0x3F, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43,
    0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43,
};

/* Even columns of 64. */
static const uint16_t EVEN[32] __attribute__((aligned(64))) = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62,
};

/* bits of a where mask has ones, of b elsewhere */
static inline __m512i chosen(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(mask, a, b, 0xCA); }

/* Each byte signed, -128 too. */
static inline void spread_bytes(__m512i codes, __m512i values[2]) {
    const __m512i sizes = _mm512_abs_epi8(codes), word = _mm512_set1_epi16(0xFF), sign = _mm512_set1_epi8((char)0x80);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(SIZE_LOW), sizes, _mm512_load_si512(SIZE_LOW + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(SIZE_HIGH), sizes, _mm512_load_si512(SIZE_HIGH + 64));
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(sizes), _mm512_set1_epi8(0x43)); /* of 128 */
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xF8);                              /* high | (codes & sign) */
    values[0] = chosen(word, low, _mm512_slli_epi16(high, 8));
    values[1] = chosen(word, _mm512_srli_epi16(low, 8), high);
}

/* Each byte as FP8 (E4M3). */
static inline void spread_e4m3(__m512i codes, __m512i values[2]) {
    const __m512i word = _mm512_set1_epi16(0xFF), sign = _mm512_set1_epi8((char)0x80); /* an index counts by 7 bits */
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(E4M3_LOW), codes, _mm512_load_si512(E4M3_LOW + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(E4M3_HIGH), codes, _mm512_load_si512(E4M3_HIGH + 64));
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xF8); /* high | (codes & sign) */
    values[0] = chosen(word, low, _mm512_slli_epi16(high, 8));
    values[1] = chosen(word, _mm512_srli_epi16(low, 8), high);
}

/* Nibbles, or five bits, of words, each already shifted so that its column's are lowest, as a table has them. */
static inline void spread_nibbles(__m512i words, const bf16 table[32], __m512i values[2]) {
    const __m512i of = _mm512_load_si512(table);
    values[0] = _mm512_permutexvar_epi16(words, of);
    values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), of);
}

/* Twice 16 bytes, of which the low nibbles are 16 columns and the high ones the next 16. */
static inline __m512i narrow_nibbles(const uint8_t *one, const uint8_t *other) {
    const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)one));
    const __m512i both = _mm512_mask_broadcast_i32x4(first, 0xFF00, _mm_loadu_si128((const void *)other));
    return _mm512_srlv_epi16(both, _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004,
                                                    0x0004000400040004, 0, 0));
}

/* 16 bytes and another 16 of pairs: the low nibble is an even column, the high one the odd one behind it. */
static inline void spread_pairs(const uint8_t *one, const uint8_t *other, const bf16 table[32], __m512i values[2]) {
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const void *)one));
    const __m256i bytes = _mm256_inserti128_si256(first, _mm_loadu_si128((const void *)other), 1);
    const __m512i words = _mm512_cvtepu8_epi16(bytes), of = _mm512_load_si512(table);
    values[0] = _mm512_permutexvar_epi16(words, of);
    values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), of);
}

/* Of IQ1. */
INLINE void grid_bytes(Coding coding, const uint8_t *at, int8_t *codes) {
    GridStrip strip;
    grid_strip(coding, at, &strip);
    for (size_t p = 0; p < STRIP / SPREAD; p++) {
        const __m512i first = _mm512_castsi256_si512(grid_sizes(coding, at, &strip, 2 * p));
        const __m512i sizes = _mm512_inserti64x4(first, grid_sizes(coding, at, &strip, 2 * p + 1), 1);
        const __m512i deltas = _mm512_mask_blend_epi8(eight_bytes(strip.signs + 8 * p), _mm512_set1_epi8(1), _mm512_set1_epi8(-1));
        _mm512_store_si512(codes + SPREAD * p, _mm512_add_epi8(sizes, deltas));
    }
}

/* Whether the codes of a strip are brought to bytes first. */
static inline int by_bytes(Coding coding) {
    switch (coding) {
        case Q5_0: case Q5_1: case Q2_K: case Q3_K: case IQ1_S: case IQ1_M: case TQ1_0: return 1;
        default: return 0;
    }
}

/* Those codes; 0 in what is missing of the last 64. */
INLINE void bytes_of_strip(Coding coding, const uint8_t *at, size_t width, int8_t *codes) {
    if (is_grid(coding)) {
        grid_bytes(coding, at, codes);
        return;
    }
    strip_codes(coding, at, width, codes);
    if (width % SPREAD) memset(codes + width, 0, 32);
}

/* Columns 64 p .. of a strip of a row that begins at `at`. other: 1 where all 64 are there, 0 where there are 32: then the
 * second half is of no account. codes: of the strip, by_bytes. */
INLINE void spread(Coding coding, const uint8_t *at, size_t p, size_t other, const int8_t *codes, __m512i values[2]) {
    const uint8_t *one = at + 2 * p * block_bytes(coding), *two = one + other * block_bytes(coding);
    switch (coding) {
        case Q8_0: {
            const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)AT(q8_0, one)->codes));
            spread_bytes(_mm512_inserti64x4(first, _mm256_loadu_si256((const void *)AT(q8_0, two)->codes), 1), values);
            return;
        }
        case Q4_0: spread_nibbles(narrow_nibbles(AT(q4_0, one)->codes, AT(q4_0, two)->codes), NIBBLES_LESS_8, values); return;
        case Q4_1: spread_nibbles(narrow_nibbles(AT(q4_1, one)->codes, AT(q4_1, two)->codes), NIBBLES, values); return;
        case IQ4_NL: spread_nibbles(narrow_nibbles(AT(iq4_nl, one)->codes, AT(iq4_nl, two)->codes), IQ4_VALUES, values); return;
        case IQ4_XS: spread_nibbles(narrow_nibbles(AT(iq4_xs, at)->codes + 32 * p, AT(iq4_xs, at)->codes + 16 + 32 * p), IQ4_VALUES, values); return;
        case MXFP4: spread_nibbles(narrow_nibbles(AT(mxfp4, one)->codes, AT(mxfp4, two)->codes), FP4_VALUES, values); return;
        case IQ1_S: case IQ1_M: case TQ1_0: spread_nibbles(_mm512_load_si512(codes + SPREAD * p), SIGNED_FIVE, values); return;
        case E2M1: spread_pairs(one, two, FP4_VALUES, values); return;
        case S4: spread_pairs(one, two, NIBBLES_LESS_8, values); return;
        case U4: spread_pairs(one, two, NIBBLES, values); return;
        case E4M3: {
            const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)one));
            spread_e4m3(_mm512_inserti64x4(first, _mm256_loadu_si256((const void *)two), 1), values);
            return;
        }
        default: spread_bytes(_mm512_load_si512(codes + SPREAD * p), values);
    }
}

/* The scale of each lane of columns 64 p .. of a strip. */
static inline __m512 lane_scales(size_t group, __m512 scales, size_t p) {
    const __m512i of_32 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i of_16 = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const int first = (int)(p * (SPREAD / group));
    return _mm512_permutexvar_ps(_mm512_add_epi32(group == 32 ? of_32 : of_16, _mm512_set1_epi32(first)), scales);
}

static inline __mmask16 groups_of(size_t width, size_t group) { return (__mmask16)((1u << width / group) - 1); }

/* Bytes, signed, times a factor. */
static inline __m512 sixteen_times(float factor, __m128i bytes) {
    return _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

/* Eight float16 that lie `apart` bytes apart. */
static inline __m512 eight_halves(const uint8_t *at, size_t apart) {
    uint16_t halves_at[8];
    for (size_t i = 0; i < 8; i++) memcpy(halves_at + i, at + i * apart, 2);
    const __m128i all_halves = _mm_setr_epi16((short)halves_at[0], (short)halves_at[1], (short)halves_at[2], (short)halves_at[3],
                                              (short)halves_at[4], (short)halves_at[5], (short)halves_at[6], (short)halves_at[7]);
    return _mm512_zextps256_ps512(_mm256_cvtph_ps(all_halves));
}

/* Eight scales of MXFP4, of which the first byte is the lowest. */
static inline __m512 eight_exponents(uint64_t bytes) {
    const __m256i exponents = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
    const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)), 23);
    const __mmask8 small = _mm256_cmplt_epi32_mask(exponents, _mm256_set1_epi32(2));
    const __m256i bits = _mm256_mask_sllv_epi32(usual, small, _mm256_set1_epi32(0x00200000), exponents);
    return _mm512_zextps256_ps512(_mm256_castsi256_ps(bits));
}

/* Where a strip lies: in a row of a matrix, whose scales begin there, from a column on. */
typedef struct {
    const Matrix *matrix;
    size_t row, scales, column;
} RowPlace;

INLINE RowPlace row_place(Coding coding, const Matrix *matrix, size_t row) {
    return (RowPlace){matrix, row, coding < FIRST_PUBLISHED ? 0 : published_row(matrix, row), 0};
}

/* Scales of a strip of eight groups, each for a part of it that is a power of two, or for more, and the zeros beside them. */
static inline __m512 shared_scales(Coding coding, RowPlace place, __m512 *offsets) {
    const Matrix *matrix = place.matrix;
    const size_t shared = matrix->scale_columns, count = shared < STRIP ? STRIP / shared : 1;
    const size_t at = place.scales + quotient(place.column, shared);
    const __mmask16 there = first_lanes(count);
    const int groups = shared < STRIP ? __builtin_ctzll(shared / 32) : 3; /* two to this share one */
    const __m512i of = _mm512_srl_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                        _mm_cvtsi32_si128(groups));
    __m512 scales;
    if (matrix->scale_kind == SCALE_FLOAT)
        scales = _mm512_maskz_loadu_ps(there, (const float *)matrix->scales + at);
    else if (matrix->scale_kind == SCALE_BF16)
        scales = load_some((const bf16 *)matrix->scales + at, count);
    else
        scales = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, (const uint16_t *)matrix->scales + at));
    if (has_offsets(coding)) {
        const __m128i zeros = _mm_maskz_loadu_epi8(there, (const uint8_t *)matrix->zeros_or_factors + at);
        const __m512 negative = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(zeros)));
        *offsets = _mm512_permutexvar_ps(of, _mm512_mul_ps(scales, negative));
    }
    return _mm512_permutexvar_ps(of, scales);
}

/* Whether shared_scales() knows them. */
static inline int are_shared(const Matrix *matrix, size_t group, size_t width) {
    const size_t shared = matrix->scale_columns;
    if (width < STRIP || group != 32 || matrix->scale_kind > SCALE_HALF) return 0;
    return shared < STRIP ? !(shared & (shared - 1)) : shared % STRIP == 0 || shared >= matrix->columns;
}

INLINE __m512 published_lanes(Coding coding, size_t group, RowPlace place, size_t width, __m512 *offsets) {
    const Matrix *matrix = place.matrix;
    const uint8_t *scales_of_row = (const uint8_t *)matrix->scales + place.scales;
    const int whole = coding == E2M1 && width == STRIP && matrix->scale_columns == group;
    if (whole && group == 32 && matrix->scale_kind == SCALE_E8M0) { /* MXFP4 */
        uint64_t bytes;
        memcpy(&bytes, scales_of_row + place.column / 32, sizeof bytes);
        return eight_exponents(bytes);
    }
    if (whole && group == 16 && has_factors(matrix)) { /* NVFP4 */
        const __m128i sixteen = _mm_loadu_si128((const void *)(scales_of_row + place.column / 16));
        const __m256i bytes = _mm256_cvtepi8_epi16(sixteen);
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xBFFF));
        const __m512 scales = _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256));
        const float factor = published_factor(matrix, place.row);
        if (matrix->scale_kind == SCALE_E4M3_TIMES) return _mm512_mul_ps(scales, _mm512_set1_ps(factor));
        return _mm512_div_ps(scales, _mm512_set1_ps(4 * factor));
    }
    if (coding != E2M1 && are_shared(matrix, group, width)) return shared_scales(coding, place, offsets);
    StripScales of;
    published_scales(matrix, place.row, place.column, width, &of);
    if (has_offsets(coding)) *offsets = _mm512_maskz_loadu_ps(groups_of(width, group), of.offsets);
    return _mm512_maskz_loadu_ps(groups_of(width, group), of.scales);
}

#endif
