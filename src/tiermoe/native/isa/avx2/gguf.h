/* Products with the blocks of GGUF files and with published codes of 4 bits, on integers.
 *
 * The columns of a token's strip become integers of 15 bits and a sign times a power of two: what is at least 1/128 of the
 * largest stays as it is, the others are rounded by at most 2^-15 of it. Products of 32 columns are summed in 8 lanes of 32
 * bits, exactly: so the order is of no account. Types whose blocks have 256 columns have integers for scales, too, and 128
 * columns are summed before they become floats. Lanes are added up after a strip, then the strips: for one token as for many. */
#include "gguf_parts.h"

enum {
    PARTS_SUMMED = 4,  /* times their scales, as integers: at most 128 * 32 * 32640 * 16 in a lane */
    WHOLE_FEW = 2,     /* tokens whose sums are in registers at a time */
    WHOLE_TOKENS = 32, /* that share what is unpacked of a strip */
};

/* A strip of a token: integers times `scale`, beside the sums of its groups over the scale. */
typedef struct {
    Part parts[PARTS];
    float sums[STRIP_GROUPS], scale;
} Whole;

/* What several tokens share of a strip of a row: `scales` of each sum that becomes floats. */
typedef struct {
    Part parts[PARTS];
    Eight scales[PARTS], offsets[2];
} Unpacked;

/* totals[r] += scale * the sum of the lanes of row r. */
static inline void add_rows(float *totals, const Eight lanes[STRIP_ROWS], float scale) {
    const __m128 sums = four_sums(lanes[0], lanes[1], lanes[2], lanes[3]);
    _mm_storeu_ps(totals, _mm_fmadd_ps(sums, _mm_set1_ps(scale), _mm_loadu_ps(totals)));
}

static inline __attribute__((always_inline)) Eight add_lanes(__m256i sums, Eight scale, Eight lanes) {
    return eight_times_plus(_mm256_cvtepi32_ps(sums), scale, lanes);
}

/* Of a strip of one row times that of one token. */
static inline __attribute__((always_inline)) Eight strip_alone(Coding coding, size_t group, const uint8_t *at,
                                                               const Groups *groups, size_t width, const Whole *x) {
    Eight lanes = lanes_begin(offset_registers(coding), groups->offsets, x->sums);
    if (!scales_whole(coding)) {
        for (size_t p = 0; p < width / PART; p++) {
            const Part part = part_of(coding, at, 0, (int)p);
            lanes = add_lanes(part_times(&part, &x->parts[p]), lanes_of(group, groups, p), lanes);
        }
        return lanes;
    }
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

static inline __attribute__((always_inline)) void strip_unpack(Coding coding, size_t group, const uint8_t *at,
                                                               const Groups *groups, size_t width, Unpacked *to) {
    for (int i = 0; i < offset_registers(coding); i++) to->offsets[i] = groups->offsets[i];
    if (!scales_whole(coding)) {
        for (size_t p = 0; p < width / PART; p++)
            to->parts[p] = part_of(coding, at, 0, (int)p), to->scales[p] = lanes_of(group, groups, p);
        return;
    }
    for (size_t half = 0; half < 2; half++) {
        to->scales[half] = eight_all(groups->whole);
        for (int quarter = 0; quarter < PARTS_SUMMED; quarter++) {
            const __m256i lanes = whole_lanes(group, groups, half, quarter), scales = _mm256_packs_epi32(lanes, lanes);
            const Part part = part_of(coding, at, half, quarter);
            const Part scaled = {_mm256_mullo_epi16(part.even, scales), _mm256_mullo_epi16(part.odd, scales)};
            to->parts[4 * half + (size_t)quarter] = scaled;
        }
    }
}

/* totals[m * BLOCK + r] += a strip of four unpacked rows times that of some tokens, a number known when compiling. `summed`
 * parts at a time. */
static inline __attribute__((always_inline)) void whole_times(size_t summed, int offset_of, size_t tokens, const Unpacked *rows,
                                                              size_t parts, const Whole *x, float *totals) {
    Eight lanes[WHOLE_FEW][STRIP_ROWS];
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < STRIP_ROWS; r++) lanes[m][r] = lanes_begin(offset_of, rows[r].offsets, x[m].sums);
    for (size_t p = 0, sum = 0; p < parts; sum++) {
        __m256i sums[WHOLE_FEW][STRIP_ROWS];
        for (size_t m = 0; m < tokens; m++)
            for (size_t r = 0; r < STRIP_ROWS; r++) sums[m][r] = _mm256_setzero_si256();
        for (const size_t end = p + summed; p < end; p++) {
            for (size_t r = 0; r < STRIP_ROWS; r++)
                for (size_t m = 0; m < tokens; m++)
                    sums[m][r] = plus_products(sums[m][r], rows[r].parts[p].even, x[m].parts[p].even);
            for (size_t r = 0; r < STRIP_ROWS; r++)
                for (size_t m = 0; m < tokens; m++)
                    sums[m][r] = plus_products(sums[m][r], rows[r].parts[p].odd, x[m].parts[p].odd);
        }
        for (size_t m = 0; m < tokens; m++)
            for (size_t r = 0; r < STRIP_ROWS; r++) lanes[m][r] = add_lanes(sums[m][r], rows[r].scales[sum], lanes[m][r]);
    }
    for (size_t m = 0; m < tokens; m++) add_rows(totals + m * BLOCK, lanes[m], x[m].scale);
}

static void whole_tokens(size_t summed, int offset_of, const Unpacked *rows, size_t parts, const Whole *x, size_t tokens,
                         float *totals) {
    __asm__("" : "+r"(summed)); /* were it known, the loop would be unrolled, and sums would leave their registers */
    size_t m = 0;
    for (; m + WHOLE_FEW <= tokens; m += WHOLE_FEW)
        whole_times(summed, offset_of, WHOLE_FEW, rows, parts, x + m, totals + m * BLOCK);
    if (m < tokens) whole_times(summed, offset_of, 1, rows, parts, x + m, totals + m * BLOCK);
}

/* The float of 2^exponent; undefined from 128 on. */
static inline float power_of_two(int exponent) { return from_bf16(exponent < 128 ? (bf16)((exponent + 127) << 7) : 0x7FC0); }

/* The bits of the largest of some numbers, without their signs. */
static inline unsigned largest_bits(const bf16 *x, size_t width) {
    __m256i largest = _mm256_setzero_si256();
    for (size_t c = 0; c < width; c += 16) {
        const __m256i bits = _mm256_and_si256(bytes_from((const uint8_t *)(x + c)), _mm256_set1_epi16(0x7FFF));
        largest = _mm256_max_epu16(largest, bits);
    }
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    return 0xFFFFu & ~(unsigned)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
}

/* Sixteen numbers times a factor, to the nearest integers. */
static inline __m256i to_words(Eight a, Eight b, Eight factor) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(a, factor)), high = _mm256_cvtps_epi32(_mm256_mul_ps(b, factor));
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
}

/* sums: of the strip's groups, of which there are so many. */
static void to_whole(const bf16 *x, size_t width, const float *sums, size_t groups, Whole *to) {
    const int most = (int)(largest_bits(x, width) >> 7) - 127, exponent = most < -112 ? -112 : most; /* of the largest number */
    const float place = power_of_two(exponent < 128 ? 14 - exponent : 0);
    const Eight factor = eight_all(place);
    for (size_t p = 0; p < width / PART; p++, x += PART) {
        const Columns first = load_columns(x), last = load_columns(x + 16);
        to->parts[p] = (Part){to_words(first.even, last.even, factor), to_words(first.odd, last.odd, factor)};
    }
    to->scale = power_of_two(exponent < 128 ? exponent - 14 : 128);
    for (size_t g = 0; g < STRIP_GROUPS; g++) to->sums[g] = g < groups ? sums[g] * place : 0;
}

/* Where a strip of a row of the block lies: the last row's again where there are fewer. */
static inline size_t row_or_last(const Rows *block, size_t r) { return r < block->rows ? r : block->rows - 1; }

/* Asks for the strip of the next four rows in time. */
static inline __attribute__((always_inline)) void ask_below(Coding coding, const uint8_t *at, size_t row_bytes) {
    for (size_t ahead = 0; ahead < row_bytes_of(coding, STRIP); ahead += 64)
        __builtin_prefetch(at + STRIP_ROWS * row_bytes + ahead, 0, 2);
}

/* The strip of row r of the block from a column on, and its groups. */
static inline __attribute__((always_inline)) const uint8_t *strip_at(Coding coding, const Matrix *matrix, const Rows *block,
                                                                     size_t r, size_t begin, size_t width, Groups *groups) {
    const size_t row = row_or_last(block, r), row_bytes = row_bytes_of(coding, matrix->columns);
    const uint8_t *at = block->weights + row * row_bytes + row_bytes_of(coding, begin);
    ask_below(coding, at, row_bytes);
    groups_from(coding, matrix, block->first + row, begin, at, width, groups);
    return at;
}

/* One token, in strips: four rows at a time from their first column to their last. */
static inline __attribute__((always_inline)) void whole_alone(Coding coding, size_t group, const Matrix *matrix,
                                                              const Rows *block, const Whole *x, float *totals) {
    const size_t columns = matrix->columns;
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS)
        for (size_t begin = 0; begin < columns; begin += STRIP) {
            const size_t width = scales_whole(coding) || columns - begin > STRIP ? STRIP : columns - begin;
            Eight lanes[STRIP_ROWS];
            for (size_t i = 0; i < STRIP_ROWS; i++) {
                Groups groups;
                const uint8_t *at = strip_at(coding, matrix, block, r + i, begin, width, &groups);
                lanes[i] = strip_alone(coding, group, at, &groups, width, x + begin / STRIP);
            }
            add_rows(totals + r, lanes, x[begin / STRIP].scale);
        }
}

/* At most WHOLE_TOKENS tokens: a strip of four rows is unpacked for all of them. */
static inline __attribute__((always_inline)) void whole_many(Coding coding, size_t group, const Matrix *matrix,
                                                             const Rows *block, const bf16 *x, const float *sums, size_t tokens,
                                                             float *totals) {
    const size_t columns = matrix->columns, all_groups = matrix_groups(matrix);
    Whole strips[WHOLE_TOKENS];
    Unpacked rows[STRIP_ROWS];
    for (size_t begin = 0; begin < columns; begin += STRIP) {
        const size_t width = scales_whole(coding) || columns - begin > STRIP ? STRIP : columns - begin;
        for (size_t m = 0; m < tokens; m++)
            to_whole(x + m * columns + begin, width, sums + m * all_groups + (all_groups ? begin / group : 0),
                     all_groups ? width / group : 0, strips + m);
        for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
            for (size_t i = 0; i < STRIP_ROWS; i++) {
                Groups groups;
                const uint8_t *at = strip_at(coding, matrix, block, r + i, begin, width, &groups);
                strip_unpack(coding, group, at, &groups, width, rows + i);
            }
            whole_tokens(scales_whole(coding) ? PARTS_SUMMED : 1, offset_registers(coding), rows, width / PART, strips, tokens,
                         totals + r);
        }
    }
}

static inline __attribute__((always_inline)) void whole_some(Coding coding, size_t group, const Matrix *matrix,
                                                             const Rows *block, const bf16 *x, const float *sums, size_t tokens,
                                                             float *totals) {
    const size_t columns = matrix->columns, all_groups = matrix_groups(matrix);
    if (tokens > 1) {
        whole_many(coding, group, matrix, block, x, sums, tokens, totals);
        return;
    }
    Whole strips[(columns + STRIP - 1) / STRIP];
    for (size_t begin = 0; begin < columns; begin += STRIP) {
        const size_t width = columns - begin > STRIP ? STRIP : columns - begin;
        to_whole(x + begin, width, sums + (all_groups ? begin / group : 0), all_groups ? width / group : 0,
                 strips + begin / STRIP);
    }
    whole_alone(coding, group, matrix, block, strips, totals);
}

/* A function for each type: with all in one the compiler keeps fewer sums in registers. */
#define WHOLE_TYPE(name, coding, group)                                                                                   \
    static __attribute__((noinline)) void name(const Matrix *matrix, const Rows *block, const bf16 *x, const float *sums, \
                                               size_t tokens, float *totals) {                                            \
        whole_some(coding, group, matrix, block, x, sums, tokens, totals);                                                \
    }

WHOLE_TYPE(q8_0_times, Q8_0, 32)
WHOLE_TYPE(q4_0_times, Q4_0, 32)
WHOLE_TYPE(q4_1_times, Q4_1, 32)
WHOLE_TYPE(q5_0_times, Q5_0, 32)
WHOLE_TYPE(q5_1_times, Q5_1, 32)
WHOLE_TYPE(q2_k_times, Q2_K, 16)
WHOLE_TYPE(q3_k_times, Q3_K, 16)
WHOLE_TYPE(q4_k_times, Q4_K, 32)
WHOLE_TYPE(q5_k_times, Q5_K, 32)
WHOLE_TYPE(q6_k_times, Q6_K, 16)
WHOLE_TYPE(iq4_nl_times, IQ4_NL, 32)
WHOLE_TYPE(iq4_xs_times, IQ4_XS, 32)
WHOLE_TYPE(mxfp4_times, MXFP4, 32)
WHOLE_TYPE(s4_times, S4, 32)
WHOLE_TYPE(u4_times, U4, 32)
WHOLE_TYPE(e2m1_times, E2M1, 32)
WHOLE_TYPE(e2m1_16_times, E2M1, 16)

typedef void (*WholeTimes)(const Matrix *matrix, const Rows *block, const bf16 *x, const float *sums, size_t tokens,
                           float *totals);

static const WholeTimes WHOLE_TIMES[CODINGS] = {
    [Q8_0] = q8_0_times,     [Q4_0] = q4_0_times,     [Q4_1] = q4_1_times,   [Q5_0] = q5_0_times, [Q5_1] = q5_1_times,
    [Q2_K] = q2_k_times,     [Q3_K] = q3_k_times,     [Q4_K] = q4_k_times,   [Q5_K] = q5_k_times, [Q6_K] = q6_k_times,
    [IQ4_NL] = iq4_nl_times, [IQ4_XS] = iq4_xs_times, [MXFP4] = mxfp4_times, [S4] = s4_times,     [U4] = u4_times,
    [E2M1] = e2m1_times,
};

static void gguf_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    if (matrix->coding == E4M3) { /* whose values are no integers of few bits */
        strips_block(matrix, block, x, sums, tokens, out, stride);
        return;
    }
    const size_t begin = block * BLOCK, rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    const Rows here = {(const uint8_t *)matrix->weights + begin * row_bytes_of(matrix->coding, matrix->columns), begin, rows};
    const WholeTimes times = matrix->coding == E2M1 && matrix->group == 16 ? e2m1_16_times : WHOLE_TIMES[matrix->coding];
    float totals[WHOLE_TOKENS * BLOCK];
    for (size_t parts = (tokens + WHOLE_TOKENS - 1) / WHOLE_TOKENS; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        memset(totals, 0, some * BLOCK * sizeof *totals);
        times(matrix, &here, x, sums, some, totals);
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < rows; r++) out[m * stride + r] = to_bf16(totals[m * BLOCK + r]);
        x += some * matrix->columns, sums += some * matrix_groups(matrix), out += some * stride, tokens -= some;
    }
}
