/* Products with matrices that are kept in blocks of rows: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2. Four columns of codes are
 * transposed, so that each lane has those of one row (bytes.h). Lane l of register 4 h + k has row 32 h + 4 k + l, from the fourth
 * lane on row 32 h + 16 + 4 k + l - 4. Sums of a part are exact, so that one token and many may go different ways to the same bits. */
#ifndef TIERMOE_ISA_AVX2_ROW_BLOCKS_H
#define TIERMOE_ISA_AVX2_ROW_BLOCKS_H

#include <string.h>

#include "../../matrix.h"
#include "../../trellis.h"
#include "../integers.h"
#include "../nibbles.h"
#include "../simd.h"
#include "bytes.h"

enum {
    SUMS = 8,           /* registers of a block */
    HALF = SUMS / 2,    /* of them, of the first or the last 32 rows */
    BLOCK_TOKENS = 24,  /* that share what is unpacked of a part */
    BLOCK_TILE = 6,     /* of them, whose sums are in registers at a time */
    TILE_SUMS = 2,      /* registers of each of those */
    CODES_AHEAD = 2048, /* bytes that are asked for ahead of their use */
};

/* Keeps the compiler from adding products to each other first: then some sums would have no register. */
INLINE __m256i in_register(__m256i sums) {
    __asm__("" : "+x"(sums));
    return sums;
}

/* sums + the products of four columns: the sums of a part, to be taken by as_integers once where all of them may be together. */
INLINE __m256i plus_four(Coding coding, __m256i sums, __m256i weights, __m256i codes) {
    if (sums_together(coding) == FOURS) return in_register(plus_products(coding, sums, weights, codes));
    const __m256i products = plus_products(coding, _mm256_setzero_si256(), weights, codes);
    return in_register(_mm256_add_epi32(sums, as_integers(products)));
}

/* A group's, of the rows of a block. */
typedef struct {
    Eight scale[SUMS], zero[SUMS];
} Scales;

/* Numbers 4 k .. 4 k + 3 and 16 + 4 k .. of some. */
static inline __m256i two_fours(const void *from, int k) {
    const __m128i *four = from;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(four + k)), _mm_loadu_si128(four + 4 + k), 1);
}

/* The same of bfloat16, as floats. */
static inline Eight two_fours_of_bf16(const bf16 *from, int k) {
    const __m128i low = _mm_loadl_epi64((const void *)(from + 4 * k)), high = _mm_loadl_epi64((const void *)(from + 16 + 4 * k));
    return eight_of(_mm_unpacklo_epi64(low, high));
}

/* from: of 64 rows; in INT4 and INT2 pairs of a scale (low half) and a zero (high half). */
INLINE void scales_of(Coding coding, const bf16 *from, Scales *scales) {
    for (int n = 0; n < SUMS; n++) {
        const int half = n / HALF, k = n % HALF;
        if (!has_pairs(coding)) {
            scales->scale[n] = two_fours_of_bf16(from + 32 * half, k);
            continue;
        }
        const __m256i pairs = two_fours(from + 64 * half, k);
        scales->scale[n] = eight_bits(WORDS_LEFT(pairs, 16));
        scales->zero[n] = eight_bits(words_and(pairs, 0xFFFF0000));
    }
}

/* Bytes of four columns, rows 0 .. 31 of each in a register, to registers of four rows and four columns. */
INLINE void across(const __m256i columns[4], __m256i rows[HALF]) {
    const __m256i a = _mm256_unpacklo_epi8(columns[0], columns[1]), b = _mm256_unpackhi_epi8(columns[0], columns[1]);
    const __m256i c = _mm256_unpacklo_epi8(columns[2], columns[3]), d = _mm256_unpackhi_epi8(columns[2], columns[3]);
    rows[0] = _mm256_unpacklo_epi16(a, c), rows[1] = _mm256_unpackhi_epi16(a, c);
    rows[2] = _mm256_unpacklo_epi16(b, d), rows[3] = _mm256_unpackhi_epi16(b, d);
}

/* The codes of INT6 of one half of the rows in column i of four, a byte each. */
INLINE __m256i int6_bytes(const uint8_t *four, int half, int i) {
    __m256i low = words_from(four + i * 32), high = words_from(four + 128 + i / 2 * 32);
    if (half) low = WORDS_RIGHT(low, 4);
    if (i % 2 == 0) high = half ? WORDS_LEFT(high, 4) : WORDS_LEFT(high, 2);
    if (i % 2 == 1 && !half) high = WORDS_RIGHT(high, 2);
    return words_or(words_and(low, 0x0F0F0F0F), words_and(high, 0x30303030));
}

/* Whether the highest bit of a nibble is no bit of its code: then it is cleared before codes are transposed, and a lookup,
 * which takes no heed of the three bits below a byte's highest, needs no mask. */
static inline int is_short(Coding coding) { return coding == NL3 || coding == NL2; }

/* Column 3 of four of NL3, whose bits are the highest ones of the other columns' nibbles. An average of bytes shifts their
 * sum to the right. */
INLINE __m256i nl3_fourth(const uint8_t *four) {
    const __m256i low = words_and(words_from(four), 0x88888888), middle = words_and(words_from(four + 32), 0x88888888);
    const __m256i high = words_and(words_from(four + 64), 0x88888888);
    return _mm256_avg_epu8(_mm256_avg_epu8(WORDS_RIGHT(low, 1), middle), high);
}

/* The codes of column i of four, of one half of the rows in INT6, else of both. */
INLINE __m256i column_codes(Coding coding, const uint8_t *four, int half, int i) {
    if (coding == INT6) return int6_bytes(four, half, i);
    if (coding == NL3 && i == 3) return nl3_fourth(four);
    const __m256i nibbles = column_nibbles(coding, four, i);
    return is_short(coding) ? words_and(nibbles, 0x77777777) : nibbles;
}

/* The levels of TCQ2, plus 32, that bytes 0 .. 31 number. */
INLINE __m256i trellis_looked_up(__m256i bytes) {
    const __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)TRELLIS_CODES));
    const __m256i last = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(TRELLIS_CODES + 16)));
    const __m256i upper = _mm256_slli_epi16(bytes, 3); /* of a byte the highest bit says which table */
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(first, bytes), _mm256_shuffle_epi8(last, bytes), upper);
}

/* Four columns of TCQ2: levels, plus 32, of one half of the rows. A lane has a byte of each column, and what stands before it is one
 * lane away. */
INLINE void trellis_columns(const uint8_t *four, int half, __m256i rows[HALF]) {
    const __m256i bytes[] = {words_from(four), words_from(four + 32)}, order = _mm256_setr_epi32(7, 0, 1, 2, 3, 4, 5, 6);
    const __m256i by_one[] = {_mm256_permutevar8x32_epi32(bytes[0], order), _mm256_permutevar8x32_epi32(bytes[1], order)};
    const __m256i in_turn = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m256i kept = _mm256_set1_epi16((short)(TRELLIS_KEPT[2 * half] & 0xFF)), high = _mm256_set1_epi16((short)0xFF00);
    for (int n = 0; n < 2; n++) {
        const __m256i before = _mm256_blend_epi32(by_one[n], by_one[1 - n], 1);
        const __m256i first = words_or(_mm256_and_si256(before, kept), _mm256_slli_epi16(bytes[n], 8));
        const __m256i second = words_or(_mm256_and_si256(_mm256_srli_epi16(before, 8), kept), _mm256_and_si256(bytes[n], high));
        __m256i levels[2];
        for (int i = 0; i < 2; i++) {
            const __m256i factor = _mm256_set1_epi16((short)TRELLIS_FACTORS[2 * half + i]);
            const __m256i low = words_and(_mm256_mulhi_epu16(first, factor), 0x001F001F);
            const __m256i above = words_and(_mm256_slli_epi16(_mm256_mulhi_epu16(second, factor), 8), 0x1F001F00);
            levels[i] = trellis_looked_up(_mm256_shuffle_epi8(words_or(low, above), in_turn));
        }
        rows[2 * n] = _mm256_permute2x128_si256(levels[0], levels[1], 0x20);
        rows[2 * n + 1] = _mm256_permute2x128_si256(levels[0], levels[1], 0x31);
    }
}

/* Codings of which one half of the rows is unpacked after the other. */
static inline int by_halves(Coding coding) { return coding == INT6 || coding == TCQ2; }

/* Four columns of codes. rows: in INT6 and TCQ2 of one half, else of both, a nibble each. */
INLINE void four_columns(Coding coding, const uint8_t *codes, size_t c, int half, __m256i rows[HALF]) {
    __m256i columns[4];
    const uint8_t *four = codes + code_bytes(coding, c);
    if (coding == TCQ2) {
        trellis_columns(four, half, rows);
        return;
    }
    for (int i = 0; i < 4; i++) columns[i] = column_codes(coding, four, half, i);
    across(columns, rows);
}

/* Codes of a register of one half, from what four_columns made. */
INLINE __m256i codes_of(Coding coding, __m256i rows, int half) {
    if (by_halves(coding)) return rows;
    const __m256i codes = half ? WORDS_RIGHT(rows, 4) : rows, alone = words_and(codes, coding == INT2 ? 0x03030303 : 0x0F0F0F0F);
    return is_uneven(coding) ? looked_up(coding, uneven_levels(coding), is_short(coding) ? codes : alone) : alone;
}

INLINE void ask_ahead(Coding coding, const uint8_t *codes) {
    for (size_t at = 0; at < code_bytes(coding, 4); at += 64) __builtin_prefetch(codes + CODES_AHEAD + at, 0, 2);
}

/* totals (64) += a part's sums of register n (plus_four), scaled, and in INT4 and INT2 the zeros times the sum of x. */
INLINE void add_sums(Coding coding, __m256i sums, int n, const XIntegers *x, size_t part, const Scales *scales, float *totals) {
    const __m256i above = _mm256_set1_epi32(above_code(coding) * x->sums[part]);
    const Eight scale = eight_times(scales->scale[n], eight_all(x->scales[part]));
    sums = _mm256_sub_epi32(sums_together(coding) == FOURS ? as_integers(sums) : sums, above);
    Eight total = eight_times_plus(_mm256_cvtepi32_ps(sums), scale, eight_from(totals + 8 * n));
    if (has_pairs(coding)) total = eight_times_plus(scales->zero[n], eight_all((float)x->sums[part] * x->scales[part]), total);
    eight_to(totals + 8 * n, total);
}

/* totals (tokens, 64) += a part of a block's codes times one token's or two's, scaled: what is unpacked stays in registers. halves:
 * of the rows, from `first` on. */
INLINE void halves_of_few(Coding coding, size_t tokens, int first, int halves, const uint8_t *codes, const XIntegers *x, size_t part,
                          const Scales *scales, float *totals) {
    __m256i sums[2][SUMS];
    for (size_t m = 0; m < tokens; m++)
        for (int n = 0; n < halves * HALF; n++) sums[m][n] = _mm256_setzero_si256();
    for (size_t i = 0; i < FOURS; i++) {
        __m256i rows[HALF];
        if (first == 0) ask_ahead(coding, codes + code_bytes(coding, 4 * i));
        four_columns(coding, codes, 4 * i, first, rows);
        for (int k = 0; k < HALF; k++)
            for (int h = 0; h < halves; h++) {
                const __m256i weights = codes_of(coding, rows[k], first + h);
                for (size_t m = 0; m < tokens; m++)
                    sums[m][h * HALF + k] = plus_four(coding, sums[m][h * HALF + k], weights, four_codes(x[m].codes + part * X_PART + 4 * i));
            }
    }
    for (size_t m = 0; m < tokens; m++)
        for (int n = 0; n < halves * HALF; n++) add_sums(coding, sums[m][n], first * HALF + n, &x[m], part, scales, totals + m * BLOCK);
}

INLINE void part_of_few(Coding coding, size_t tokens, const uint8_t *codes, const XIntegers *x, size_t part, const Scales *scales,
                        float *totals) {
    if (tokens == 1 && !by_halves(coding)) {
        halves_of_few(coding, tokens, 0, 2, codes, x, part, scales, totals);
        return;
    }
    halves_of_few(coding, tokens, 0, 1, codes, x, part, scales, totals);
    halves_of_few(coding, tokens, 1, 1, codes, x, part, scales, totals);
}

INLINE void part_unpack(Coding coding, const uint8_t *codes, __m256i panel[FOURS][SUMS]) {
    for (size_t i = 0; i < FOURS; i++) {
        __m256i rows[HALF];
        ask_ahead(coding, codes + code_bytes(coding, 4 * i));
        for (int half = 0; half < 2; half++) {
            if (half == 0 || by_halves(coding)) four_columns(coding, codes, 4 * i, half, rows);
            for (int k = 0; k < HALF; k++) panel[i][half * HALF + k] = codes_of(coding, rows[k], half);
        }
    }
}

/* totals (tokens, 64) += a part that has been unpacked times a number of tokens known when compiling, some registers of
 * each at a time. */
INLINE void panel_tile(Coding coding, size_t tokens, __m256i panel[FOURS][SUMS], const XIntegers *x, size_t part,
                       const Scales *scales, float *totals) {
    for (int n = 0; n < SUMS; n += TILE_SUMS) {
        __m256i sums[BLOCK_TILE][TILE_SUMS];
        for (size_t m = 0; m < tokens; m++)
            for (int i = 0; i < TILE_SUMS; i++) sums[m][i] = _mm256_setzero_si256();
        for (size_t c = 0; c < FOURS; c++)
            for (size_t m = 0; m < tokens; m++) {
                const __m256i four = four_codes(x[m].codes + part * X_PART + 4 * c);
                for (int i = 0; i < TILE_SUMS; i++) sums[m][i] = plus_four(coding, sums[m][i], panel[c][n + i], four);
            }
        for (size_t m = 0; m < tokens; m++)
            for (int i = 0; i < TILE_SUMS; i++) add_sums(coding, sums[m][i], n + i, &x[m], part, scales, totals + m * BLOCK);
    }
}

#define PANEL_TILE_OF(n)                                          \
    case n:                                                       \
        panel_tile(coding, n, panel, x, part, scales, totals);    \
        break;

INLINE void panel_tiles(Coding coding, size_t tokens, __m256i panel[FOURS][SUMS], const XIntegers *x, size_t part,
                        const Scales *scales, float *totals) {
    for (size_t tiles = (tokens + BLOCK_TILE - 1) / BLOCK_TILE; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) {
            PANEL_TILE_OF(1) PANEL_TILE_OF(2) PANEL_TILE_OF(3) PANEL_TILE_OF(4) PANEL_TILE_OF(5) PANEL_TILE_OF(6)
        }
        x += some, totals += some * BLOCK, tokens -= some;
    }
}

/* totals (tokens, 64) += a part of a block's codes times x, scaled. */
INLINE void add_part(Coding coding, const uint8_t *codes, const XIntegers *x, size_t part, size_t tokens, const Scales *scales,
                     float *totals) {
    __m256i panel[FOURS][SUMS];
    if (tokens == 1) {
        part_of_few(coding, 1, codes, x, part, scales, totals);
        return;
    }
    if (tokens == 2 && !by_halves(coding) && coding != NL3) { /* what is quickly unpacked twice */
        part_of_few(coding, 2, codes, x, part, scales, totals);
        return;
    }
    part_unpack(coding, codes, panel);
    panel_tiles(coding, tokens, panel, x, part, scales, totals);
}

/* out (64) = the totals of a block, rounded. */
static inline void store_block(const float *totals, bf16 *out) {
    for (int n = 0; n < SUMS; n += 2) {
        const __m256i low = rounded_bits(eight_from(totals + 8 * n)), high = rounded_bits(eight_from(totals + 8 * n + 8));
        const __m256i eights = _mm256_packus_epi32(low, high); /* of rows 4 k .., and of rows 16 + 4 k .. */
        bf16 *to = out + 32 * (n / HALF) + 4 * (n % HALF);
        _mm_storeu_si128((void *)to, _mm256_castsi256_si128(eights));
        _mm_storeu_si128((void *)(to + 16), _mm256_extracti128_si256(eights, 1));
    }
}

/* A block times at most BLOCK_TOKENS tokens. */
INLINE void block_some(Coding coding, const Matrix *matrix, size_t block, const float *prepared, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, groups = columns / group;
    const size_t gap = is_uneven(coding) ? UNEVEN_SCALES : 0; /* bytes from one group's codes to the next one's */
    const size_t next = has_pairs(coding) ? 2 * matrix->rows : by_halves(coding) ? BLOCK : uneven_group_bytes(coding, group) / sizeof(bf16);
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * (code_bytes(coding, columns) + groups * gap);
    const bf16 *from = is_uneven(coding) ? (const bf16 *)codes
                                         : (const bf16 *)matrix->scales + block * BLOCK * (has_pairs(coding) ? 2 : groups);
    XIntegers x[BLOCK_TOKENS];
    float totals[BLOCK_TOKENS * BLOCK] __attribute__((aligned(32)));
    for (size_t m = 0; m < tokens; m++) x[m] = integers_at(prepared + m * integer_floats(columns), columns);
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t g = 0, part = 0; g < groups; g++, from += next) {
        Scales scales;
        scales_of(coding, from, &scales);
        for (size_t r = 0; r < (has_pairs(coding) ? 2 : 1) * BLOCK; r += 32) __builtin_prefetch(from + 2 * next + r, 0, 3);
        codes += gap;
        for (size_t c = 0; c < group; c += X_PART, part++, codes += code_bytes(coding, X_PART))
            add_part(coding, codes, x, part, tokens, &scales, totals);
    }
    for (size_t m = 0; m < tokens; m++) store_block(totals + m * BLOCK, out + m * stride);
}

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const float *prepared,
                        size_t tokens, bf16 *out, size_t stride) {
    for (size_t calls = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS; calls; calls--) {
        const size_t some = (tokens + calls - 1) / calls;
        block_some(coding, matrix, block, prepared, some, out, stride);
        prepared += some * integer_floats(matrix->columns), out += some * stride, tokens -= some;
    }
}

#endif
