/* Products with matrices that are kept in blocks of rows: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2. */
#ifndef TIERMOE_ISA_AVX512_ROW_BLOCKS_H
#define TIERMOE_ISA_AVX512_ROW_BLOCKS_H

#include "../../matrix.h"
#include "../../trellis.h"
#include "../simd.h"

enum {
    BLOCK_TILE = 6,     /* tokens whose sums fit the registers */
    REGISTERS = 4,      /* of 16 rows: a block */
    PAIR_BYTES = 64,    /* of two columns of a block: the low four bits of their codes */
    HIGH_BYTES = 32,    /* likewise: the high two bits */
    GROUPS_AHEAD = 3,   /* whose scales are asked for ahead of their use */
    BYTES_AHEAD = 4096, /* of codes asked for ahead of their use */
};

/* bfloat16 of code - 8, twice: the table is indexed by 5 bits, of which the highest belongs to the next nibble. */
static const bf16 VALUES[32] __attribute__((aligned(64))) = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
};

/* From two columns of a block (64 bytes): byte i of both, each twice, to the 32 bits of lane i. */
static const uint8_t FIRST_HALF[64] __attribute__((aligned(64))) = {
    0, 0, 32, 32, 1, 1, 33, 33, 2,  2,  34, 34, 3,  3,  35, 35, 4,  4,  36, 36, 5,  5,  37, 37, 6,  6,  38, 38, 7,  7,  39, 39,
    8, 8, 40, 40, 9, 9, 41, 41, 10, 10, 42, 42, 11, 11, 43, 43, 12, 12, 44, 44, 13, 13, 45, 45, 14, 14, 46, 46, 15, 15, 47, 47,
};

/* What nibbles stand for, as VALUES. */
static inline __m512i values_of_codes(Coding coding) {
    if (coding == INT2) return _mm512_set1_epi64(0x3F800000BF80C000); /* -2, -1, 0, 1 */
    if (coding == TCQ2) {
        const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)TRELLIS_CODES)), middle = _mm512_set1_epi32(32);
        const __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(TRELLIS_CODES + 16)));
        return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_sub_epi32(high, middle)),
                                            _mm512_cvtepi32_ps(_mm512_sub_epi32(low, middle))); /* exact */
    }
    if (!is_uneven(coding)) return _mm512_load_si512(VALUES);
    const __m512i levels = _mm512_cvtepi8_epi32(_mm_load_si128((const void *)uneven_levels(coding)));
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(levels))); /* exact */
}

/* Columns 2 p and 2 p + 1 of four, 32 bytes of nibbles each. In INT2, NL3 and NL2 what lies above a code in its nibble belongs to
 * other columns. */
static inline __m512i pair_nibbles(Coding coding, const uint8_t *four, size_t p) {
    if (code_bits(coding) == 2) {
        const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)(four + p * 32)));
        return _mm512_srlv_epi16(twice, _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1));
    }
    if (coding != NL3 || p == 0) return _mm512_loadu_si512(four + p * PAIR_BYTES);
    const __m256i first = _mm256_loadu_si256((const void *)four), second = _mm256_loadu_si256((const void *)(four + 32));
    const __m256i third = _mm256_loadu_si256((const void *)(four + 64));
    const __m256i low = _mm256_and_si256(_mm256_srli_epi16(first, 3), _mm256_set1_epi8(0x11));
    const __m256i middle = _mm256_and_si256(_mm256_srli_epi16(second, 2), _mm256_set1_epi8(0x22));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(third, 1), _mm256_set1_epi8(0x44));
    return _mm512_inserti64x4(_mm512_castsi256_si512(third), _mm256_or_si256(_mm256_or_si256(low, middle), high), 1);
}

/* The values of two columns: register r holds rows 16 r .. 16 r + 15, a lane both columns of its row. */
static inline void nibbles_unpack(__m512i table, __m512i bytes, __m512i values[REGISTERS]) {
    const __m512i first = _mm512_load_si512(FIRST_HALF);
    const __m512i low = _mm512_permutexvar_epi8(first, bytes);
    const __m512i high = _mm512_permutexvar_epi8(_mm512_add_epi8(first, _mm512_set1_epi8(16)), bytes);
    values[0] = _mm512_permutexvar_epi16(low, table);
    values[1] = _mm512_permutexvar_epi16(high, table);
    values[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 4), table);
    values[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 4), table);
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

/* As FIRST_HALF, with byte i of the halves of a second register above them. */
static const uint8_t BOTH_PLANES[64] __attribute__((aligned(64))) = {
    0, 64, 32, 96, 1, 65, 33, 97, 2, 66, 34, 98, 3, 67, 35, 99, 4, 68, 36, 100, 5, 69, 37, 101, 6, 70, 38, 102, 7, 71, 39, 103,
    8, 72, 40, 104, 9, 73, 41, 105, 10, 74, 42, 106, 11, 75, 43, 107, 12, 76, 44, 108, 13, 77, 45, 109, 14, 78, 46, 110, 15, 79, 47, 111,
};

/* The same of 6 bits: `low` and `high` of two columns. They are brought side by side: the 16 bits of a column hold a row of
 * the block's first half in their lowest nibble and bits 10 and 11, one of its second half in bits 4 to 9. An index counts
 * by its 6 lowest bits. */
static inline void int6_unpack(const uint8_t *low, const uint8_t *high, __m512i values[REGISTERS]) {
    const __m512i first = _mm512_load_si512(VALUES_OF_6), last = _mm512_load_si512(VALUES_OF_6 + 32);
    const __m512i order = _mm512_load_si512(BOTH_PLANES), nibble = _mm512_set1_epi16(15);
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1); /* 4 for the second column */
    const __m512i bytes = _mm512_loadu_si512(low);
    const __m512i plane = _mm512_srlv_epi16(_mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)high)), shifts);
    for (int r = 0; r < REGISTERS / 2; r++) {
        const __m512i from = _mm512_add_epi8(order, _mm512_set1_epi8((char)(16 * r)));
        const __m512i both = _mm512_permutex2var_epi8(bytes, from, plane);
        /* the nibble from `both`, the rest from what is shifted */
        const __m512i index = _mm512_ternarylogic_epi64(nibble, both, _mm512_srli_epi16(both, 6), 0xCA);
        values[r] = _mm512_permutex2var_epi16(first, index, last);
        values[r + 2] = _mm512_permutex2var_epi16(first, _mm512_srli_epi16(both, 4), last);
    }
}

/* The same of columns 2 p and 2 p + 1 of four of TCQ2: a lane has a byte of each, and what stands before it is one lane away.
 * An index counts by its 5 lowest bits. */
static inline void trellis_unpack(__m512i table, const uint8_t *four, size_t p, __m512i values[REGISTERS]) {
    const __m512i bytes = _mm512_loadu_si512(four), before = _mm512_alignr_epi32(bytes, bytes, 15);
    const __m512i own = p ? _mm512_and_si512(bytes, _mm512_set1_epi16((short)0xFF00)) : _mm512_slli_epi16(bytes, 8);
    const __m512i others = p ? _mm512_srli_epi16(before, 8) : before;
    for (int r = 0; r < REGISTERS; r++) {
        const __m512i kept = _mm512_set1_epi16((short)(TRELLIS_KEPT[r] & 0xFF));
        const __m512i words = _mm512_ternarylogic_epi64(kept, others, own, 0xEA); /* kept & others | own */
        const __m512i product = _mm512_mulhi_epu16(words, _mm512_set1_epi16((short)TRELLIS_FACTORS[r]));
        values[r] = _mm512_permutexvar_epi16(product, table);
    }
}

static inline __m512 block_dot(__m512 sum, __m512i pairs, const bf16 *x) {
    const __m512i both = _mm512_set1_epi32(*(const int32_t *)x);
    return _mm512_dpbf16_ps(sum, (__m512bh)both, (__m512bh)pairs);
}

/* total + scale * sum + zero * x_sum: what a group of INT4 or INT2 adds to 16 rows. A pair of a scale (low half) and a zero (high
 * half) is read as one word. */
static inline __m512 paired_group(__m512 total, __m512 sum, float x_sum, const uint32_t *scales) {
    const __m512i both = _mm512_loadu_si512(scales);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)));
    total = _mm512_fmadd_ps(scale, sum, total);
    return _mm512_fmadd_ps(zero, _mm512_set1_ps(x_sum), total);
}

/* total + scale * sum */
static inline __m512 scaled_group(__m512 total, __m512 sum, const bf16 *scales) {
    const __m512i scale = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)scales)), 16);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(scale), sum, total);
}

static inline void store_rows(const __m512 totals[REGISTERS], bf16 *out) {
    for (int r = 0; r < REGISTERS; r += 2)
        _mm512_storeu_si512(out + 16 * r, (__m512i)_mm512_cvtne2ps_pbh(totals[r + 1], totals[r]));
}

/* Where a block's codes and scales lie, and how far a group's scales are from the next one's, in bytes. */
typedef struct {
    const uint8_t *codes, *scales;
    size_t group;
} Place;

static inline Place place_of(const Matrix *matrix, size_t block) {
    const uint8_t *codes = matrix->weights, *scales = matrix->scales;
    const size_t columns = matrix->columns, groups = columns / matrix->group;
    if (is_uneven(matrix->coding)) {
        const size_t group = uneven_group_bytes(matrix->coding, matrix->group);
        return (Place){codes + block * groups * group + UNEVEN_SCALES, codes + block * groups * group, group};
    }
    codes += block * code_bytes(matrix->coding, columns);
    if (has_pairs(matrix->coding))
        return (Place){codes, scales + block * BLOCK * 2 * sizeof(bf16), matrix->rows * 2 * sizeof(bf16)};
    return (Place){codes, scales + block * BLOCK * groups * sizeof(bf16), BLOCK * sizeof(bf16)};
}

/* Few tokens, a number known when compiling: each pair of columns is unpacked into registers and multiplied with all of
 * them, which hides the unpacking. What comes next is asked for in time: one token is bound by memory. */
INLINE void block_tile(Coding coding, size_t tokens, const Matrix *matrix, Place at, const bf16 *x, const float *sums,
                       bf16 *out, size_t stride) {
    const size_t groups = matrix->columns / matrix->group, fours = matrix->group / 4;
    const size_t four = code_bytes(coding, 4);
    const size_t row = has_pairs(coding) ? 2 * sizeof(bf16) : sizeof(bf16); /* bytes of its scales in a group */
    const size_t ahead_of_scales = is_uneven(coding) ? BYTES_AHEAD : GROUPS_AHEAD * at.group;
    const __m512i table = values_of_codes(coding);
    __m512 totals[BLOCK_TILE][REGISTERS];
    for (size_t m = 0; m < tokens; m++)
        for (int r = 0; r < REGISTERS; r++) totals[m][r] = _mm512_setzero_ps();
    for (size_t g = 0; g < groups; g++, at.scales += at.group) {
        __m512 group[BLOCK_TILE][REGISTERS];
        for (int r = 0; r < REGISTERS; r++) {
            _mm_prefetch((const char *)(at.scales + ahead_of_scales + 16 * r * row), _MM_HINT_T0);
            for (size_t m = 0; m < tokens; m++) group[m][r] = _mm512_setzero_ps();
        }
        for (size_t i = 0; i < fours; i++, at.codes += four) {
            for (size_t ahead = 0; ahead < four; ahead += 64)
                _mm_prefetch((const char *)(at.codes + BYTES_AHEAD + ahead), _MM_HINT_T1);
            for (size_t p = 0; p < 2; p++, x += 2) {
                __m512i values[REGISTERS];
                if (coding == TCQ2)
                    trellis_unpack(table, at.codes, p, values);
                else if (coding == INT6)
                    int6_unpack(at.codes + p * PAIR_BYTES, at.codes + 2 * PAIR_BYTES + p * HIGH_BYTES, values);
                else
                    nibbles_unpack(table, pair_nibbles(coding, at.codes, p), values);
                for (size_t m = 0; m < tokens; m++)
                    for (int r = 0; r < REGISTERS; r++)
                        group[m][r] = block_dot(group[m][r], values[r], x + m * matrix->columns);
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (int r = 0; r < REGISTERS; r++)
                totals[m][r] = has_pairs(coding) ? paired_group(totals[m][r], group[m][r], sums[m * groups + g],
                                                                (const uint32_t *)at.scales + 16 * r)
                                                 : scaled_group(totals[m][r], group[m][r], (const bf16 *)at.scales + 16 * r);
        if (is_uneven(coding)) at.codes += UNEVEN_SCALES; /* of the next group */
    }
    for (size_t m = 0; m < tokens; m++) store_rows(totals[m], out + m * stride);
}

#define BLOCK_TILE_OF(n)                                         \
    case n:                                                      \
        block_tile(coding, n, matrix, at, x, sums, out, stride); \
        break;

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens,
                        bf16 *out, size_t stride) {
    const Place at = place_of(matrix, block);
    const size_t groups = matrix_groups(matrix);
    for (size_t tiles = (tokens + BLOCK_TILE - 1) / BLOCK_TILE; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) {
            BLOCK_TILE_OF(1) BLOCK_TILE_OF(2) BLOCK_TILE_OF(3) BLOCK_TILE_OF(4) BLOCK_TILE_OF(5) BLOCK_TILE_OF(6)
        }
        x += some * matrix->columns, sums += some * groups, out += some * stride, tokens -= some;
    }
}

#endif
