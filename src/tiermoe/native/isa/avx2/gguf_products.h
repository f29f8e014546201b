/* Products of tokens with the blocks of GGUF files and published codes of 4 bits, on integers (strip_tokens.h): a function for
 * each quant. */
#ifndef TIERMOE_ISA_AVX2_GGUF_PRODUCTS_H
#define TIERMOE_ISA_AVX2_GGUF_PRODUCTS_H

#include <string.h>

#include "../activations.h"
#include "row_blocks.h"
#include "strip_one_token.h"
#include "strip_tokens.h"

enum {
    IN_ORDER = 3,      /* tokens that take four rows from end to end: beyond, strips unpacked for more rows pay */
    WHOLE_FEW = 2,     /* tokens whose sums are in registers at a time */
    WHOLE_TOKENS = 32, /* that share what is unpacked of a strip */
};

/* What several tokens share of a strip of a row: `scales` of each sum that becomes floats. */
typedef struct {
    Part parts[PARTS];
    Eight scales[PARTS], offsets[2];
} Unpacked;

static inline Part part_scaled(Part part, __m256i scales) {
    return (Part){_mm256_mullo_epi16(part.even, scales), _mm256_mullo_epi16(part.odd, scales)};
}

/* Parts that are summed before they become floats. */
static inline size_t parts_summed(Coding coding, size_t group) {
    if (lanes_keep(coding) || lanes_are_groups(coding, group)) return PARTS;
    return scales_whole(coding) ? PARTS_SUMMED : 1;
}

INLINE void strip_unpack(Coding coding, size_t group, const uint8_t *at, const Groups *groups, size_t width, Unpacked *to) {
    for (int i = 0; i < offset_registers(coding); i++) to->offsets[i] = groups->offsets[i];
    if (lanes_are_groups(coding, group)) {
        to->scales[0] = groups->lanes;
        if (width == STRIP)
            lane_parts(coding, at, PARTS, to->parts);
        else
            lane_parts(coding, at, groups_of(width), to->parts);
        return;
    }
    uint8_t room[STRIP];
    at = looked_up_strip(coding, at, room);
    if (!scales_whole(coding)) {
        for (size_t p = 0; p < width / PART; p++)
            to->parts[p] = part_of(coding, at, 0, (int)p), to->scales[p] = lanes_of(group, groups, p);
        return;
    }
    if (lanes_keep(coding)) {
        __m256i bytes[PARTS];
        strip_bytes(coding, at, bytes);
        to->scales[0] = eight_all(groups->whole);
        for (int p = 0; p < PARTS; p++) to->parts[p] = part_scaled(words_of_bytes(coding, bytes[p]), groups->integers[p / 4]);
        return;
    }
    for (size_t half = 0; half < 2; half++) {
        to->scales[half] = eight_all(groups->whole);
        if (coding == Q6_K) {
            const __m256i lanes = groups->integers[half];
            const __m256i scales = _mm256_blend_epi16(lanes, _mm256_slli_epi32(lanes, 16), 0xAA);
            __m256i bytes[4];
            half_bytes(at, half, bytes);
            for (size_t t = 0; t < 4; t++)
                to->parts[4 * half + t] = part_scaled(words_of_bytes(coding, less(bytes[t], 32)), scales);
            continue;
        }
        for (int quarter = 0; quarter < PARTS_SUMMED; quarter++) {
            const __m256i lanes = whole_lanes(group, groups, half, quarter), scales = _mm256_packs_epi32(lanes, lanes);
            to->parts[4 * half + (size_t)quarter] = part_scaled(part_of(coding, at, half, quarter), scales);
        }
    }
}

/* totals[m][r] += a strip of four unpacked rows times that of some tokens, a number known when compiling, which lie `apart`
 * strips apart. `summed` parts at a time. */
INLINE void whole_times(size_t summed, int offset_of, size_t tokens, const Unpacked *rows, size_t parts, const Whole *x,
                        size_t apart, Eight (*totals)[STRIP_ROWS]) {
    Eight lanes[WHOLE_FEW][STRIP_ROWS];
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < STRIP_ROWS; r++) lanes[m][r] = lanes_begin(offset_of, rows[r].offsets, x[m * apart].sums);
    for (size_t p = 0, sum = 0; p < parts; sum++) {
        __m256i sums[WHOLE_FEW][STRIP_ROWS];
        for (size_t m = 0; m < tokens; m++)
            for (size_t r = 0; r < STRIP_ROWS; r++) sums[m][r] = _mm256_setzero_si256();
        for (const size_t end = p + summed; p < end; p++) {
            for (size_t r = 0; r < STRIP_ROWS; r++) {
                const __m256i even = in_register(rows[r].parts[p].even);
                for (size_t m = 0; m < tokens; m++)
                    sums[m][r] = in_register(plus_products(sums[m][r], even, x[m * apart].parts[p].even));
            }
            for (size_t r = 0; r < STRIP_ROWS; r++) {
                const __m256i odd = in_register(rows[r].parts[p].odd);
                for (size_t m = 0; m < tokens; m++)
                    sums[m][r] = in_register(plus_products(sums[m][r], odd, x[m * apart].parts[p].odd));
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (size_t r = 0; r < STRIP_ROWS; r++) lanes[m][r] = add_lanes(sums[m][r], rows[r].scales[sum], lanes[m][r]);
    }
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < STRIP_ROWS; r++)
            totals[m][r] = eight_times_plus(lanes[m][r], eight_all(x[m * apart].scale), totals[m][r]);
}

static void whole_tokens(size_t summed, int offset_of, const Unpacked *rows, size_t parts, const Whole *x, size_t apart,
                         size_t tokens, Eight (*totals)[STRIP_ROWS]) {
    __asm__("" : "+r"(summed)); /* were it known, the loop would be unrolled, and sums would leave their registers */
    size_t m = 0;
    for (; m + WHOLE_FEW <= tokens; m += WHOLE_FEW)
        whole_times(summed, offset_of, WHOLE_FEW, rows, parts, x + m * apart, apart, totals + m);
    if (m < tokens) whole_times(summed, offset_of, 1, rows, parts, x + m * apart, apart, totals + m);
}

/* Asks for the strip of the next four rows in time. */
INLINE void ask_below(Coding coding, const uint8_t *at, size_t row_bytes) {
    for (size_t ahead = 0; ahead < row_bytes_of(coding, STRIP); ahead += 64)
        __builtin_prefetch(at + STRIP_ROWS * row_bytes + ahead, 0, 2);
}

/* The strip of row r of the block from a column on, and its groups. */
INLINE const uint8_t *strip_at(Coding coding, const Matrix *matrix, const Rows *block, size_t group, size_t r, size_t begin,
                               size_t width, Groups *groups) {
    const size_t row = row_or_last(block, r), row_bytes = row_bytes_of(coding, matrix->columns);
    const uint8_t *at = block->weights + row * row_bytes + row_bytes_of(coding, begin);
    ask_below(coding, at, row_bytes);
    const size_t number = block->first + row;
    if (!lanes_are_groups(coding, group))
        groups_from(coding, matrix, number, begin, at, width, groups);
    else if (width == STRIP)
        lane_groups(coding, matrix, number, begin, at, PARTS, groups);
    else
        lane_groups(coding, matrix, number, begin, at, groups_of(width), groups);
    return at;
}

/* At most WHOLE_TOKENS tokens: a strip of four rows is unpacked for all of them, the same strip of all rows after it. */
INLINE void whole_rows(Coding coding, size_t group, const Matrix *matrix, const Rows *block, const Whole *x, size_t tokens,
                       float *totals) {
    const size_t columns = matrix->columns, strips = strips_of(columns);
    Unpacked rows[STRIP_ROWS];
    Eight lanes[BLOCK / STRIP_ROWS * WHOLE_TOKENS][STRIP_ROWS]; /* of the first four rows of each token, then of the next ones */
    memset(lanes, 0, BLOCK / STRIP_ROWS * tokens * sizeof *lanes);
    for (size_t begin = 0; begin < columns; begin += STRIP, x++) {
        const size_t width = scales_whole(coding) || columns - begin > STRIP ? STRIP : columns - begin;
        for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
            for (size_t i = 0; i < STRIP_ROWS; i++) {
                Groups groups;
                const uint8_t *at = strip_at(coding, matrix, block, group, r + i, begin, width, &groups);
                strip_unpack(coding, group, at, &groups, width, rows + i);
            }
            const size_t parts = lanes_are_groups(coding, group) ? PARTS : width / PART;
            whole_tokens(parts_summed(coding, group), offset_registers(coding), rows, parts, x, strips, tokens,
                         lanes + r / STRIP_ROWS * tokens);
        }
    }
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS)
        for (size_t m = 0; m < tokens; m++) {
            const Eight *four = lanes[r / STRIP_ROWS * tokens + m];
            _mm_storeu_ps(totals + m * BLOCK + r, four_sums(four[0], four[1], four[2], four[3]));
        }
}

/* Few tokens, whose strips of all columns the first cache holds: four rows from their first column to their last, so that
 * memory is read in order. */
INLINE void whole_many(Coding coding, size_t group, const Matrix *matrix, const Rows *block, const Whole *x, size_t tokens,
                       float *totals) {
    const size_t some = tokens <= IN_ORDER ? STRIP_ROWS : BLOCK, row_bytes = row_bytes_of(coding, matrix->columns);
    for (size_t r = 0; r < block->rows; r += some) {
        const size_t left = block->rows - r;
        const Rows rows = {block->weights + r * row_bytes, block->first + r, left < some ? left : some};
        whole_rows(coding, group, matrix, &rows, x, tokens, totals + r);
    }
}

INLINE void whole_some(Coding coding, size_t group, const Matrix *matrix, const Rows *block, const Whole *x, size_t tokens,
                       float *totals) {
    if (tokens > 1)
        whole_many(coding, group, matrix, block, x, tokens, totals);
    else if (lanes_keep(coding))
        block_alone(coding, matrix, block, x, totals);
    else if (lanes_are_groups(coding, group))
        groups_alone(coding, matrix, block, x, totals);
    else
        whole_alone(coding, group, matrix, block, x, totals);
}

/* A function for each quant: with all in one the compiler keeps fewer sums in registers. */
typedef void WholeTimes(const Matrix *matrix, const Rows *block, const Whole *x, size_t tokens, float *totals);

/* A block times the tokens, by the function of its quant. */
static void block_by(WholeTimes *times, const Matrix *matrix, size_t block, const float *prepared, size_t tokens, bf16 *out,
                     size_t stride) {
    const size_t begin = block * BLOCK, rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    const Rows here = {(const uint8_t *)matrix->weights + begin * row_bytes_of(matrix->coding, matrix->columns), begin, rows};
    const Whole *strips = (const Whole *)prepared;
    float totals[WHOLE_TOKENS * BLOCK];
    for (size_t parts = (tokens + WHOLE_TOKENS - 1) / WHOLE_TOKENS; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        times(matrix, &here, strips, some, totals);
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < rows; r++) out[m * stride + r] = to_bf16(totals[m * BLOCK + r]);
        strips += some * strips_of(matrix->columns), out += some * stride, tokens -= some;
    }
}

#define WHOLE_TIMES(name, coding, group)                                                                                     \
    static __attribute__((noinline)) void name##_times_##group(const Matrix *matrix, const Rows *block, const Whole *x,      \
                                                               size_t tokens, float *totals) {                             \
        whole_some(coding, group, matrix, block, x, tokens, totals);                                                         \
    }
#define WHOLE_PRODUCT(name, coding, group) \
    WHOLE_TIMES(name, coding, group)       \
    PRODUCT(name) { (void)x, block_by(name##_times_##group, matrix, block, prepared, tokens, out, stride); }

WHOLE_PRODUCT(q8_0, Q8_0, 32)
WHOLE_PRODUCT(q4_0, Q4_0, 32)
WHOLE_PRODUCT(q4_1, Q4_1, 32)
WHOLE_PRODUCT(q5_0, Q5_0, 32)
WHOLE_PRODUCT(q5_1, Q5_1, 32)
WHOLE_PRODUCT(q2_k, Q2_K, 16)
WHOLE_PRODUCT(q3_k, Q3_K, 16)
WHOLE_PRODUCT(q4_k, Q4_K, 32)
WHOLE_PRODUCT(q5_k, Q5_K, 32)
WHOLE_PRODUCT(q6_k, Q6_K, 16)
WHOLE_PRODUCT(iq1_s, IQ1_S, 32)
WHOLE_PRODUCT(iq1_m, IQ1_M, 16)
WHOLE_PRODUCT(iq2_xxs, IQ2_XXS, 32)
WHOLE_PRODUCT(iq2_xs, IQ2_XS, 16)
WHOLE_PRODUCT(iq2_s, IQ2_S, 16)
WHOLE_PRODUCT(iq3_xxs, IQ3_XXS, 32)
WHOLE_PRODUCT(iq3_s, IQ3_S, 32)
WHOLE_PRODUCT(iq4_nl, IQ4_NL, 32)
WHOLE_PRODUCT(iq4_xs, IQ4_XS, 32)
WHOLE_PRODUCT(tq1_0, TQ1_0, 32)
WHOLE_PRODUCT(tq2_0, TQ2_0, 32)
WHOLE_PRODUCT(mxfp4, MXFP4, 32)
WHOLE_PRODUCT(s4, S4, 32)
WHOLE_PRODUCT(u4, U4, 32)
WHOLE_TIMES(e2m1, E2M1, 16)
WHOLE_TIMES(e2m1, E2M1, 32)
PRODUCT(e2m1) {
    (void)x, block_by(matrix->group == 16 ? e2m1_times_16 : e2m1_times_32, matrix, block, prepared, tokens, out, stride);
}
PRODUCT(e4m3) { strips_block(matrix, block, x, prepared, tokens, out, stride); } /* whose values are no integers of few bits */

/* What products want to know of x beforehand: its integers, of blocks of rows by spans, of blocks of GGUF files and published
 * codes of 4 bits by strips; of others the sums of groups. */
static int of_strips(Coding coding) { return coding >= FIRST_GGUF && coding != E4M3; }

static size_t prepared_floats(const Matrix *matrix) {
    if (matrix->coding == INT8) return integer_floats(matrix->columns);
    if (of_integers(matrix->coding)) return matrix->columns / SPAN * SPAN_FLOATS;
    return of_strips(matrix->coding) ? strips_of(matrix->columns) * WHOLE_FLOATS : matrix_groups(matrix);
}

static void prepare_strips(const Matrix *matrix, const bf16 *x, Whole *strips) {
    for (size_t begin = 0; begin < matrix->columns; begin += STRIP, strips++) {
        const size_t width = matrix->columns - begin < STRIP ? matrix->columns - begin : STRIP;
        const size_t groups = has_offsets(matrix->coding) ? width / matrix->group : 0;
        float sums[STRIP_GROUPS];
        group_sums(x + begin, matrix->group, groups, 1, sums);
        to_whole(x + begin, width, sums, groups, strips);
        move_columns(matrix->coding, matrix->group, width / PART, strips);
    }
}

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    const size_t columns = matrix->columns;
    if (matrix->coding == INT8) {
        for (size_t m = 0; m < tokens; m++) to_integers_of(x + m * columns, columns, prepared + m * integer_floats(columns));
    } else if (of_integers(matrix->coding)) {
        for (size_t i = 0; i < tokens * columns / SPAN; i++) to_span(x + i * SPAN, (SpanX *)prepared + i);
    } else if (of_strips(matrix->coding)) {
        for (size_t m = 0; m < tokens; m++) prepare_strips(matrix, x + m * columns, (Whole *)prepared + m * strips_of(columns));
    } else {
        group_sums(x, matrix->group, matrix_groups(matrix), tokens, prepared);
    }
}

#endif
