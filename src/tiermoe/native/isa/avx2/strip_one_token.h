/* One token times the blocks of GGUF files and published codes of 4 bits: rows from their first column to their last. */
#ifndef TIERMOE_ISA_AVX2_STRIP_ONE_TOKEN_H
#define TIERMOE_ISA_AVX2_STRIP_ONE_TOKEN_H

#include "strip_tokens.h"

/* strip_alone of Q6_K, whose lanes are of one group in each half. */
INLINE Eight q6_k_alone(const uint8_t *at, const Groups *groups, const Whole *x) {
    Eight lanes = eight_zeros();
    for (size_t half = 0; half < 2; half++) {
        __m256i parts[4], sums = _mm256_setzero_si256();
        half_bytes(at, half, parts);
        for (int t = 0; t < 4; t++) {
            const Part words = {_mm256_and_si256(parts[t], _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(parts[t], 8)};
            sums = _mm256_add_epi32(sums, part_times(&words, &x->parts[4 * half + (size_t)t]));
        }
        sums = _mm256_mullo_epi32(_mm256_sub_epi32(sums, x->above[half]), groups->integers[half]);
        lanes = add_lanes(sums, eight_all(groups->whole), lanes);
    }
    return lanes;
}

/* Of a strip of one row times that of one token. */
INLINE Eight strip_alone(Coding coding, size_t group, const uint8_t *at, const Groups *groups, size_t width, const Whole *x) {
    if (coding == Q6_K) return q6_k_alone(at, groups, x);
    Eight lanes = lanes_begin(offset_registers(coding), groups->offsets, x->sums);
    if (!scales_whole(coding)) {
        for (size_t p = 0; p < width / PART; p++) {
            const Part part = part_of(coding, at, 0, (int)p);
            lanes = add_lanes(part_times(&part, &x->parts[p]), lanes_of(group, groups, p), lanes);
        }
        return lanes;
    }
    uint8_t room[STRIP];
    at = looked_up_strip(coding, at, room);
    for (size_t half = 0; half < 2; half++) {
        __m256i sums = _mm256_setzero_si256();
        for (int quarter = 0; quarter < PARTS_SUMMED; quarter++) {
            const Part part = part_of(coding, at, half, quarter);
            const __m256i products = part_times(&part, &x->parts[4 * half + (size_t)quarter]);
            sums = _mm256_add_epi32(sums, _mm256_mullo_epi32(products, whole_lanes(group, groups, half, quarter)));
        }
        lanes = add_lanes(sums, eight_all(groups->whole), lanes);
    }
    return lanes;
}

/* One token: a row from its first column to its last, so that memory is read in order. */
INLINE Eight row_alone(Coding coding, size_t group, const Matrix *matrix, size_t row, const uint8_t *at, const Whole *x) {
    const size_t columns = matrix->columns;
    Eight lanes = eight_zeros();
    for (size_t begin = 0; begin < columns; begin += STRIP, at += row_bytes_of(coding, STRIP), x++) {
        const size_t width = scales_whole(coding) || columns - begin > STRIP ? STRIP : columns - begin;
        Groups groups;
        for (size_t ahead = 0; ahead < row_bytes_of(coding, STRIP); ahead += 64)
            __builtin_prefetch(at + ALONE_AHEAD + ahead, 0, 2);
        groups_from(coding, matrix, row, begin, at, width, &groups);
        lanes = eight_times_plus(strip_alone(coding, group, at, &groups, width, x), eight_all(x->scale), lanes);
    }
    return lanes;
}

INLINE void whole_alone(Coding coding, size_t group, const Matrix *matrix, const Rows *block, const Whole *x, float *totals) {
    const size_t row_bytes = row_bytes_of(coding, matrix->columns);
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
        Eight lanes[STRIP_ROWS];
        for (size_t i = 0; i < STRIP_ROWS; i++) {
            const size_t row = row_or_last(block, r + i);
            lanes[i] = row_alone(coding, group, matrix, block->first + row, block->weights + row * row_bytes, x);
        }
        _mm_storeu_ps(totals + r, four_sums(lanes[0], lanes[1], lanes[2], lanes[3]));
    }
}

/* One token times Q4_K and Q5_K: four rows at a time, whose scales are taken apart together.
 *
 * Lane r + 4 h is of row r and of columns 16 h .. 16 h + 15 of each group. Sums of the groups 2 j and 2 j + 1 are integers, in
 * all the same as those of lane 4 h + j in gguf_products.h, and become floats in the same order: the bits are those among many tokens. */
enum { GROUPS = STRIP / PART, PAIRS = GROUPS / 2, STEPS = 4 };

/* A strip of a token: bytes of columns 4 t .. 4 t + 3 of each half of a group, four times: `high` times 256 and `low`; beside
 * what minima are multiplied by in lanes of groups j and 4 + j. */
typedef struct {
    struct {
        __m256i high, low;
    } steps[GROUPS][STEPS];
    Eight sums[PAIRS], scale;
} Alone;

/* x: as keep_lanes leaves it, part 4 o + t of columns 4 t .. of the groups 2 j + o in lanes j and 4 + j. */
static inline void to_alone(const Whole *x, Alone *to) {
    for (int o = 0; o < 2; o++)
        for (int t = 0; t < STEPS; t++) {
            const Part bytes = to_bytes(x->parts[4 * o + t]);
#define STEP_OF(j)                                                                  \
    to->steps[2 * j + o][t].high = _mm256_shuffle_epi32(bytes.even, (j) * 0x55); \
    to->steps[2 * j + o][t].low = _mm256_shuffle_epi32(bytes.odd, (j) * 0x55);
            STEP_OF(0) STEP_OF(1) STEP_OF(2) STEP_OF(3)
#undef STEP_OF
        }
    for (int j = 0; j < PAIRS; j++) to->sums[j] = _mm256_set_m128(_mm_set1_ps(x->sums[PAIRS + j]), _mm_set1_ps(x->sums[j]));
    to->scale = eight_all(x->scale);
}

/* Of a strip of four rows: scales of each group, words, twice each; minima times their factor in lanes of groups j and 4 + j. */
typedef struct {
    __m256i scales[GROUPS];
    Eight offsets[PAIRS], whole;
} RowGroups;

/* k_bytes of two rows. */
static inline __m256i two_k_bytes(__m256i blocks) {
    const __m256i low = _mm256_and_si256(blocks, _mm256_setr_epi32(0, 0x3F3F3F3F, 0x3F3F3F3F, 0, 0, 0x3F3F3F3F, 0x3F3F3F3F, 0));
    const __m256i twos = _mm256_srli_epi16(_mm256_shuffle_epi32(blocks, 0x81), 2);
    const __m256i nibbles = _mm256_srlv_epi32(_mm256_shuffle_epi32(blocks, 0xFF), _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4));
    const __m256i two = _mm256_setr_epi32(0x30303030, 0, 0, 0x30303030, 0x30303030, 0, 0, 0x30303030);
    const __m256i nibble = _mm256_setr_epi32(0x0F0F0F0F, 0, 0, 0x0F0F0F0F, 0x0F0F0F0F, 0, 0, 0x0F0F0F0F);
    return _mm256_or_si256(low, _mm256_or_si256(_mm256_and_si256(twos, two), _mm256_and_si256(nibbles, nibble)));
}

/* The byte of each row that is `c` of its four, in the first byte of the row's lane, or (words) in both of its words. Rows lie
 * in the order 0, 2, 1, 3. */
static inline __m256i rows_bytes(__m256i rows, int c, int words) {
    const int each = words ? 0x00010001 : 1, of_row = 4 * each, first = (words ? (int)0x80008000 : (int)0x80808000) + c * each;
    const __m128i order = _mm_setr_epi32(first, first + 2 * of_row, first + of_row, first + 3 * of_row);
    return _mm256_shuffle_epi8(rows, _mm256_broadcastsi128_si256(order));
}

INLINE void row_groups(const uint8_t *const at[STRIP_ROWS], RowGroups *to) {
    __m128i blocks[STRIP_ROWS];
    for (int r = 0; r < STRIP_ROWS; r++) blocks[r] = _mm_loadu_si128((const void *)at[r]);
    const __m256i first = two_k_bytes(_mm256_set_m128i(blocks[1], blocks[0])), last = two_k_bytes(_mm256_set_m128i(blocks[3], blocks[2]));
    const __m256i scales = _mm256_unpacklo_epi32(first, last), minima = _mm256_unpackhi_epi32(first, last);
    const __m256i from_0 = _mm256_permute4x64_epi64(scales, 0xDD), from_4 = _mm256_permute4x64_epi64(scales, 0x88);
    for (int c = 0; c < PAIRS; c++) to->scales[c] = rows_bytes(from_0, c, 1), to->scales[PAIRS + c] = rows_bytes(from_4, c, 1);
    /* factors of scales, then of minima */
    const __m128i low = _mm_unpacklo_epi32(blocks[0], blocks[1]), high = _mm_unpacklo_epi32(blocks[2], blocks[3]);
    const __m128i halves = _mm_shuffle_epi8(_mm_unpacklo_epi64(low, high),
                                            _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const Eight factors = _mm256_cvtph_ps(halves);
    to->whole = _mm256_permute2f128_ps(factors, factors, 0x00);
    const Eight least = _mm256_xor_ps(_mm256_permute2f128_ps(factors, factors, 0x11), _mm256_set1_ps(-0.0f));
    const __m256i of_halves = _mm256_permute4x64_epi64(minima, 0xD8);
    for (int j = 0; j < PAIRS; j++)
        to->offsets[j] = _mm256_mul_ps(least, _mm256_cvtepi32_ps(rows_bytes(of_halves, j, 0)));
}

/* The codes of groups 2 j and 2 j + 1 of four rows. */
INLINE void rows_codes(Coding coding, const uint8_t *const at[STRIP_ROWS], int j, const __m256i fifths[STEPS],
                       __m256i even[STEPS], __m256i odd[STEPS]) {
    __m256i four[STRIP_ROWS];
    for (int r = 0; r < STRIP_ROWS; r++) four[r] = bytes_from((coding == Q5_K ? AT(q5_k, at[r])->codes : AT(q4_k, at[r])->codes) + 32 * j);
    transpose(four);
    for (int t = 0; t < STEPS; t++) {
        even[t] = masked(four[t], 15), odd[t] = masked(_mm256_srli_epi16(four[t], 4), 15);
        if (coding == Q4_K) continue;
        const __m256i first = j < 2 ? _mm256_slli_epi16(fifths[t], 4 - 2 * j) : _mm256_srli_epi16(fifths[t], 2 * j - 4);
        const __m256i second = j < 2 ? _mm256_slli_epi16(fifths[t], 3 - 2 * j) : _mm256_srli_epi16(fifths[t], 2 * j - 3);
        even[t] = _mm256_or_si256(even[t], masked(first, 16)), odd[t] = _mm256_or_si256(odd[t], masked(second, 16));
    }
}

/* high and low += a group's codes times x, scaled: sums of words, at most 31 * 128 * 2 * 4 in each. */
INLINE void add_group(const __m256i codes[STEPS], const Alone *x, int g, __m256i scales, __m256i *high, __m256i *low) {
    __m256i first = _mm256_maddubs_epi16(codes[0], x->steps[g][0].high), second = _mm256_maddubs_epi16(codes[0], x->steps[g][0].low);
    for (int t = 1; t < STEPS; t++) {
        first = _mm256_add_epi16(first, _mm256_maddubs_epi16(codes[t], x->steps[g][t].high));
        second = _mm256_add_epi16(second, _mm256_maddubs_epi16(codes[t], x->steps[g][t].low));
    }
    *high = plus_products(*high, first, scales), *low = plus_products(*low, second, scales);
}

/* out: the products of four rows. */
INLINE __m128 four_alone(Coding coding, const uint8_t *const rows[STRIP_ROWS], size_t columns, size_t ahead, const Alone *x) {
    Eight lanes[PAIRS];
    const uint8_t *at[STRIP_ROWS];
    for (int j = 0; j < PAIRS; j++) lanes[j] = eight_zeros();
    for (int r = 0; r < STRIP_ROWS; r++) at[r] = rows[r];
    for (size_t begin = 0; begin < columns; begin += STRIP, x++) {
        __m256i fifths[STEPS], even[STEPS], odd[STEPS];
        RowGroups groups;
        for (int r = 0; r < STRIP_ROWS; r++)
            for (size_t i = 0; i < row_bytes_of(coding, STRIP); i += 64) __builtin_prefetch(at[r] + ahead + i, 0, 2);
        row_groups(at, &groups);
        for (int r = 0; coding == Q5_K && r < STRIP_ROWS; r++) fifths[r] = bytes_from(AT(q5_k, at[r])->fifth);
        if (coding == Q5_K) transpose(fifths);
        for (int j = 0; j < PAIRS; j++) {
            __m256i high = _mm256_setzero_si256(), low = high;
            rows_codes(coding, at, j, fifths, even, odd);
            add_group(even, x, 2 * j, groups.scales[2 * j], &high, &low);
            add_group(odd, x, 2 * j + 1, groups.scales[2 * j + 1], &high, &low);
            const __m256i sums = _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
            lanes[j] = eight_times_plus(add_lanes(sums, groups.whole, eight_times(groups.offsets[j], x->sums[j])), x->scale, lanes[j]);
        }
        for (int r = 0; r < STRIP_ROWS; r++) at[r] += row_bytes_of(coding, STRIP);
    }
    const Eight both = _mm256_add_ps(_mm256_add_ps(lanes[0], lanes[1]), _mm256_add_ps(lanes[2], lanes[3]));
    return _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
}

/* totals (64) = a block times a token. */
INLINE void block_alone(Coding coding, const Matrix *matrix, const Rows *block, const Whole *x, float *totals) {
    const size_t row_bytes = row_bytes_of(coding, matrix->columns), strips = strips_of(matrix->columns);
    Alone alone[strips];
    for (size_t s = 0; s < strips; s++) to_alone(x + s, alone + s);
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
        const uint8_t *rows[STRIP_ROWS];
        for (size_t i = 0; i < STRIP_ROWS; i++) rows[i] = block->weights + row_or_last(block, r + i) * row_bytes;
        _mm_storeu_ps(totals + r, four_alone(coding, rows, matrix->columns, STRIP_ROWS * row_bytes, alone));
    }
}

/* One token times types whose lanes are groups (strips.h): codes as unsigned bytes. */

/* The bytes of x for the unsigned codes: signed ones times 256, and what is left of them; `above` is what codes are above their
 * worth, times the sums of groups. */
typedef struct {
    Part bytes[PARTS];
    __m256i above;
} GroupBytes;

/* x: as groups_to_lanes leaves it. */
static inline void to_group_bytes(Coding coding, const Whole *x, GroupBytes *to) {
    const __m256i above = _mm256_set1_epi16((short)code_above(coding));
    to->above = _mm256_setzero_si256();
    for (int p = 0; p < PARTS; p++) {
        to->bytes[p] = to_bytes(x->parts[p]);
        to->above = plus_products(plus_products(to->above, x->parts[p].even, above), x->parts[p].odd, above);
    }
}

/* What unsigned codes, at most 24, and bytes come to: sums of words, at most 24 * 128 * 2 * 4 in each. */
INLINE __m256i group_products(Coding coding, const uint8_t *at, size_t groups, const GroupBytes *x) {
    __m256i four[4], sums = _mm256_setzero_si256();
    lane_nibbles(coding, at, groups, four);
    for (int half = 0; half < 2; half++) {
        __m256i high = _mm256_setzero_si256(), low = high;
        for (int t = 0; t < 4; t++) {
            const __m256i nibbles = masked(half ? _mm256_srli_epi16(four[t], 4) : four[t], 15);
            const __m256i codes = unsigned_codes(coding, nibbles);
            high = _mm256_add_epi16(high, _mm256_maddubs_epi16(codes, x->bytes[4 * half + t].even));
            low = _mm256_add_epi16(low, _mm256_maddubs_epi16(codes, x->bytes[4 * half + t].odd));
        }
        sums = plus_products(plus_products(sums, high, _mm256_set1_epi16(256)), low, _mm256_set1_epi16(1));
    }
    return _mm256_sub_epi32(sums, x->above);
}

/* A strip of a row times that of the token. */
INLINE Eight strip_of_groups(Coding coding, const Matrix *matrix, size_t row, size_t column, const uint8_t *at, size_t count,
                             const Whole *x, const GroupBytes *bytes) {
    Groups groups;
    __m256i sums;
    lane_groups(coding, matrix, row, column, at, count, &groups);
    if (coding == IQ4_NL) { /* whose codes are too large for bytes */
        Part parts[PARTS];
        lane_parts(coding, at, count, parts);
        sums = part_times(parts, x->parts);
        for (int p = 1; p < PARTS; p++) sums = _mm256_add_epi32(sums, part_times(parts + p, x->parts + p));
    } else {
        sums = group_products(coding, at, count, bytes);
    }
    return add_lanes(sums, groups.lanes, lanes_begin(offset_registers(coding), groups.offsets, x->sums));
}

/* A row from its first column to its last. */
INLINE Eight row_of_groups(Coding coding, const Matrix *matrix, size_t row, const uint8_t *at, const Whole *x,
                           const GroupBytes *bytes) {
    const size_t strip = row_bytes_of(coding, STRIP), whole = matrix->columns / STRIP * STRIP, left = matrix->columns - whole;
    Eight lanes = eight_zeros();
    size_t column = 0;
    for (; column < whole; column += STRIP, at += strip, x++, bytes++) {
        for (size_t ahead = 0; ahead < strip; ahead += 64) __builtin_prefetch(at + ALONE_AHEAD + ahead, 0, 2);
        const Eight sums = strip_of_groups(coding, matrix, row, column, at, PARTS, x, bytes);
        lanes = eight_times_plus(sums, eight_all(x->scale), lanes);
    }
    if (!left) return lanes;
    const Eight sums = strip_of_groups(coding, matrix, row, column, at, groups_of(left), x, bytes);
    return eight_times_plus(sums, eight_all(x->scale), lanes);
}

/* totals (64) = a block times one token: the bits are those among many tokens, since sums of a group are integers. */
INLINE void groups_alone(Coding coding, const Matrix *matrix, const Rows *block, const Whole *x, float *totals) {
    const size_t row_bytes = row_bytes_of(coding, matrix->columns), strips = strips_of(matrix->columns);
    GroupBytes bytes[strips];
    for (size_t s = 0; s < strips; s++) to_group_bytes(coding, x + s, bytes + s);
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
        Eight lanes[STRIP_ROWS];
        for (size_t i = 0; i < STRIP_ROWS; i++) {
            const size_t row = row_or_last(block, r + i);
            lanes[i] = row_of_groups(coding, matrix, block->first + row, block->weights + row * row_bytes, x, bytes);
        }
        _mm_storeu_ps(totals + r, four_sums(lanes[0], lanes[1], lanes[2], lanes[3]));
    }
}

#endif
