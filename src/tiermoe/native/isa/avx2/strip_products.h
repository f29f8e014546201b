/* Products with rows of INT8, of the blocks of GGUF files and of published codes, strip by strip, over bytes. One token: products
 * with parts of eight rows, whose lanes are added up. More: four columns of eight rows become the lanes of a register, which meets
 * the same columns of one token after the other. In both a lane is a row then. */
#ifndef TIERMOE_ISA_AVX2_STRIP_PRODUCTS_H
#define TIERMOE_ISA_AVX2_STRIP_PRODUCTS_H

#include "../lane_groups.h"
#include "../simd.h"
#include "strips.h"

enum {
    STRIP_TOKENS = 64,    /* that share what is unpacked */
    STRIP_TILE = 3,       /* tokens whose sums are in registers at a time */
};

/* A strip of eight rows. */
typedef struct {
    __m256i fours[PARTS][FOURS];
    LaneGroups groups;
} LanePanel;

/* Sixteen columns of eight rows, to four registers of four columns. */
INLINE void sixteen_by_lanes(const uint8_t *const row[LANE_ROWS], size_t c, __m256i fours[4]) {
    __m256i v[4];
    for (size_t i = 0; i < 4; i++) {
        const __m128i low = _mm_loadu_si128((const void *)(row[i] + c)), high = _mm_loadu_si128((const void *)(row[4 + i] + c));
        v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
    transpose(v);
    for (size_t i = 0; i < 4; i++) fours[i] = v[i];
}

/* Eight floats of each of eight rows, by lanes. */
INLINE void floats_by_lanes(const Eight from[LANE_ROWS], Eight to[LANE_ROWS]) {
    __m256i v[LANE_ROWS];
    for (size_t i = 0; i < LANE_ROWS; i++) v[i] = _mm256_castps_si256(from[i]);
    transpose(v), transpose(v + 4);
    for (size_t i = 0; i < 4; i++) {
        to[i] = eight_bits(_mm256_permute2x128_si256(v[i], v[4 + i], 0x20));
        to[4 + i] = eight_bits(_mm256_permute2x128_si256(v[i], v[4 + i], 0x31));
    }
}

/* The strip from a column on of rows `first` .. of a matrix, of the last one before `end` again where there are fewer: where they
 * begin, and their scales. What comes next is asked for in time. */
INLINE void lane_strips(Coding coding, size_t group, const Matrix *matrix, size_t first, size_t end, size_t column, size_t width,
                        const uint8_t *row[LANE_ROWS], LaneGroups *groups) {
    const size_t row_bytes = row_bytes_of(coding, matrix->columns), bytes = row_bytes_of(coding, width);
    Eight scales[2][LANE_ROWS], offsets[2][LANE_ROWS];
    __m128i group_of[LANE_ROWS];
    LaneFactors factors;
    for (size_t i = 0; i < LANE_ROWS; i++) {
        const size_t its = least(first + i, end - 1);
        StripGroups of;
        row[i] = (const uint8_t *)matrix->weights + its * row_bytes + row_bytes_of(coding, column);
        for (size_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(row[i] + LANE_ROWS * row_bytes + ahead, 0, 2);
        if (by_bytes(coding)) group_of[i] = group_bytes(coding, row[i], i, &factors);
        if (coding == INT8 || by_bytes(coding)) continue;
        strip_groups(coding, group, matrix, its, column, row[i], width, &of);
        for (size_t h = 0; h < 32 / group; h++) scales[h][i] = of.scales[h], offsets[h][i] = of.offsets[h];
    }
    if (by_bytes(coding)) {
        __m256i fours[4];
        for (size_t i = 0; i < 4; i++) fours[i] = _mm256_set_m128i(group_of[4 + i], group_of[i]);
        transpose(fours);
        groups_of_bytes(coding, group, (const LaneWords *)fours, &factors, groups);
        return;
    }
    for (size_t h = 0; coding != INT8 && h < 32 / group; h++) {
        floats_by_lanes(scales[h], groups->scales + 8 * h);
        if (has_offsets(coding)) floats_by_lanes(offsets[h], groups->offsets + 8 * h);
    }
}

/* total + the sums of group g of a strip, scaled; x: of the part that it is in. */
INLINE Eight plus_group(Coding coding, Eight total, __m256i sums, const LaneGroups *groups, size_t g, float unit, int32_t x_sum) {
    const Eight units = eight_all(unit);
    total = eight_times_plus(_mm256_cvtepi32_ps(sums), coding == INT8 ? units : eight_times(groups->scales[g], units), total);
    return has_offsets(coding) ? eight_times_plus(groups->offsets[g], eight_all((float)x_sum * unit), total) : total;
}

/* One token: a part of eight rows times its codes, whose lanes are added up. */

/* Of each pair of registers the sums of lanes 0 and 2, and 1 and 3, of each half, one after the other. */
INLINE void add_lanes(int together, size_t count, __m256i v[LANE_ROWS]) {
    for (size_t i = 0; i < count / 2; i++) {
        const __m256i low = count == LANE_ROWS ? _mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]) : _mm256_unpacklo_epi64(v[2 * i], v[2 * i + 1]);
        const __m256i high = count == LANE_ROWS ? _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]) : _mm256_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
        v[i] = together ? plus_sums(low, high) : _mm256_add_epi32(low, high);
    }
}

INLINE void all_as_integers(size_t count, __m256i v[LANE_ROWS]) {
    for (size_t i = 0; i < count; i++) v[i] = as_integers(v[i]);
}

/* sums (2) = those of the first and of the last sixteen columns of a part, of eight rows. v: its products. */
INLINE void part_sums(Coding coding, __m256i v[LANE_ROWS], __m256i sums[2]) {
    const size_t most = sums_together(coding);
    if (most < 2) all_as_integers(8, v);
    add_lanes(most >= 2, 8, v);
    if (most == 2) all_as_integers(4, v);
    add_lanes(most >= 4, 4, v);
    if (most >= 4) all_as_integers(2, v);
    sums[0] = _mm256_permute2x128_si256(v[0], v[1], 0x20), sums[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31);
}

/* total (8 rows) + a strip times one token. */
INLINE Eight strip_of_one(Coding coding, size_t group, const Matrix *matrix, size_t first, size_t end, size_t column, size_t width,
                          const XIntegers *x, Eight total) {
    const uint8_t *row[LANE_ROWS];
    uint8_t looked_up_codes[is_grid(coding) ? LANE_ROWS : 1][STRIP] __attribute__((aligned(32)));
    LaneGroups groups;
    lane_strips(coding, group, matrix, first, end, column, width, row, &groups);
    for (size_t i = 0; is_grid(coding) && i < LANE_ROWS; i++) strip_bytes(coding, row[i], width, looked_up_codes[i]);
#pragma GCC unroll 8
    for (size_t p = 0; p < width / X_PART; p++) {
        const size_t part = column / X_PART + p;
        const __m256i codes = bytes_from((const uint8_t *)x->codes + part * X_PART);
        const int32_t all = x->sums[part], half = x->firsts[part];
        __m256i v[LANE_ROWS], sums[2];
        for (size_t i = 0; i < LANE_ROWS; i++)
            v[i] = plus_products(coding, _mm256_setzero_si256(),
                                 is_grid(coding) ? bytes_from(looked_up_codes[i] + p * X_PART) : part_bytes(coding, row[i], p), codes);
        part_sums(coding, v, sums);
        if (group == 16) {
            sums[0] = _mm256_sub_epi32(sums[0], _mm256_set1_epi32(above_code(coding) * half));
            sums[1] = _mm256_sub_epi32(sums[1], _mm256_set1_epi32(above_code(coding) * (all - half)));
            total = plus_group(coding, total, sums[0], &groups, 2 * p, x->scales[part], half);
            total = plus_group(coding, total, sums[1], &groups, 2 * p + 1, x->scales[part], all - half);
        } else {
            sums[0] = _mm256_sub_epi32(_mm256_add_epi32(sums[0], sums[1]), _mm256_set1_epi32(above_code(coding) * all));
            total = plus_group(coding, total, sums[0], &groups, p, x->scales[part], all);
        }
    }
    return total;
}

/* Several: what is unpacked becomes lanes. */

INLINE void panel_strip(Coding coding, size_t group, const Matrix *matrix, size_t first, size_t end, size_t column, size_t width,
                        LanePanel *panel) {
    uint8_t codes[coding == INT8 ? 1 : LANE_ROWS][STRIP] __attribute__((aligned(32)));
    const uint8_t *row[LANE_ROWS];
    lane_strips(coding, group, matrix, first, end, column, width, row, &panel->groups);
    for (size_t i = 0; coding != INT8 && i < LANE_ROWS; i++) strip_bytes(coding, row[i], width, codes[i]), row[i] = codes[i];
    for (size_t c = 0; c < width; c += 16) {
        __m256i *fours = panel->fours[c / X_PART] + c % X_PART / 4;
        sixteen_by_lanes(row, c, fours);
        for (size_t i = 0; coding == INT8 && i < 4; i++) fours[i] = signed_bytes(fours[i]);
    }
}

/* totals (tokens, 8 rows) += a strip times some tokens, a number known when compiling. */
INLINE void strip_times(Coding coding, size_t group, size_t tokens, const LanePanel *panel, const XIntegers *x, size_t column,
                        size_t width, Eight *totals) {
    const size_t halves = group == 16 ? 2 : 1, in_group = FOURS / halves, run = least(sums_together(coding), in_group);
    for (size_t g = 0; g < width / X_PART * halves; g++) {
        const size_t part = column / X_PART + g / halves;
        const __m256i *weights = panel->fours[g / halves] + g % halves * in_group;
        __m256i sums[STRIP_TILE];
        for (size_t m = 0; m < tokens; m++) sums[m] = _mm256_set1_epi32(-above_code(coding) * sum_of_codes(&x[m], part, g % halves, halves));
        for (size_t i = 0; i < in_group; i += run)
            for (size_t m = 0; m < tokens; m++) {
                const int8_t *codes = x[m].codes + part * X_PART + g % halves * 16;
                __m256i some = _mm256_setzero_si256();
                for (size_t j = i; j < i + run; j++) some = plus_products(coding, some, weights[j], four_codes(codes + 4 * j));
                sums[m] = _mm256_add_epi32(sums[m], as_integers(some));
            }
        for (size_t m = 0; m < tokens; m++)
            totals[m] = plus_group(coding, totals[m], sums[m], &panel->groups, g, x[m].scales[part], sum_of_codes(&x[m], part, g % halves, halves));
    }
}

#define STRIP_TIMES_OF(n) \
    case n: strip_times(coding, group, n, panel, x, column, width, totals); break;

INLINE void panel_times(Coding coding, size_t group, const LanePanel *panel, const float *prepared, size_t tokens, size_t columns,
                        size_t column, size_t width, Eight *totals) {
    for (size_t tiles = (tokens + STRIP_TILE - 1) / STRIP_TILE, some; tiles; tiles--, tokens -= some) {
        XIntegers x[STRIP_TILE];
        some = (tokens + tiles - 1) / tiles;
        for (size_t m = 0; m < some; m++) x[m] = integers_at(prepared + m * integer_floats(columns), columns);
        switch (some) { STRIP_TIMES_OF(1) STRIP_TIMES_OF(2) STRIP_TIMES_OF(3) }
        prepared += some * integer_floats(columns), totals += some;
    }
}

/* totals += a strip of eight rows times the tokens. */
INLINE void lanes_strip(Coding coding, size_t group, const Matrix *matrix, size_t first, size_t end, size_t column, size_t width,
                        const float *prepared, size_t tokens, Eight *totals) {
    if (tokens == 1) {
        const XIntegers x = integers_at(prepared, matrix->columns);
        *totals = strip_of_one(coding, group, matrix, first, end, column, width, &x, *totals);
    } else {
        LanePanel panel;
        panel_strip(coding, group, matrix, first, end, column, width, &panel);
        panel_times(coding, group, &panel, prepared, tokens, matrix->columns, column, width, totals);
    }
}

/* At most STRIP_TOKENS tokens. */
INLINE void lanes_times(Coding coding, size_t group, const Matrix *matrix, size_t first, size_t end, const float *prepared,
                        size_t tokens, Eight *totals) {
    size_t c = 0, columns = matrix->columns;
    for (size_t m = 0; m < tokens; m++) totals[m] = eight_zeros();
    for (; c + STRIP <= columns; c += STRIP) lanes_strip(coding, group, matrix, first, end, c, STRIP, prepared, tokens, totals);
    if (block_columns(coding) < STRIP && c < columns)
        lanes_strip(coding, group, matrix, first, end, c, columns - c, prepared, tokens, totals);
}

INLINE void strips_block(Coding coding, size_t group, const Matrix *matrix, size_t block, const float *prepared, size_t tokens,
                         bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, end = least(matrix->rows, begin + BLOCK);
    for (size_t some; tokens; tokens -= some, prepared += some * integer_floats(matrix->columns), out += some * stride) {
        some = least(tokens, STRIP_TOKENS);
        for (size_t r = begin; r < end; r += LANE_ROWS) {
            Eight totals[STRIP_TOKENS];
            lanes_times(coding, group, matrix, r, end, prepared, some, totals);
            for (size_t m = 0; m < some; m++) {
                float rows[LANE_ROWS];
                eight_to(rows, totals[m]);
                for (size_t i = 0; i < least(LANE_ROWS, end - r); i++) {
                    const float scale = coding == INT8 ? from_bf16(((const bf16 *)matrix->scales)[r + i]) : 1;
                    out[m * stride + r - begin + i] = to_bf16(rows[i] * scale);
                }
            }
        }
    }
}

#endif
