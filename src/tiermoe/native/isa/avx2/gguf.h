/* Products with the blocks of GGUF files and with published codes of 4 bits, on integers.
 *
 * The columns of a token's strip become integers of 15 bits and a sign times a power of two: what is at least about 1/128 of
 * the largest stays as it is, the others are rounded by at most about 2^-15 of it. Products of 32 columns are summed in 8 lanes
 * of 32 bits, exactly: so the order is of no account. Types whose blocks have 256 columns have integers for scales, too, and
 * 128 columns are summed before they become floats, of Q4_K and Q5_K all 256. Strips are added up lane by lane, then the
 * lanes: for one token as for many. */
#include "gguf_parts.h"
#include "gguf_groups.h"

enum {
    PARTS_SUMMED = 4,  /* times their scales, as integers: at most 128 * 32 * 32512 * 16 in a lane; all
                        * PARTS where lanes_keep(coding), at most 63 * 31 * 32512 * 32, or lanes are groups, 127 * 32512 * 32 */
    ALONE_AHEAD = 4096, /* bytes that are asked for ahead of their use */
    IN_ORDER = 3,      /* tokens that take four rows from end to end: beyond, strips unpacked for more rows pay */
    WHOLE_FEW = 2,     /* tokens whose sums are in registers at a time */
    WHOLE_TOKENS = 32, /* that share what is unpacked of a strip */
};

/* A strip of a token: integers times `scale`, beside the sums of its groups over the scale. */
typedef struct {
    Part parts[PARTS];
    union {
        float sums[STRIP_GROUPS];
        __m256i above[2]; /* of Q6_K: 32 times the sums of the lanes of each half */
    };
    float scale;
} Whole;
enum { WHOLE_FLOATS = sizeof(Whole) / sizeof(float) };

/* What several tokens share of a strip of a row: `scales` of each sum that becomes floats. */
typedef struct {
    Part parts[PARTS];
    Eight scales[PARTS], offsets[2];
} Unpacked;

static inline __attribute__((always_inline)) Eight add_lanes(__m256i sums, Eight scale, Eight lanes) {
    return eight_times_plus(_mm256_cvtepi32_ps(sums), scale, lanes);
}

/* strip_alone of Q6_K, whose lanes are of one group in each half. */
static inline __attribute__((always_inline)) Eight q6_k_alone(const uint8_t *at, const Groups *groups, const Whole *x) {
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
static inline __attribute__((always_inline)) Eight strip_alone(Coding coding, size_t group, const uint8_t *at,
                                                               const Groups *groups, size_t width, const Whole *x) {
    if (coding == Q6_K) return q6_k_alone(at, groups, x);
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

static inline Part part_scaled(Part part, __m256i scales) {
    return (Part){_mm256_mullo_epi16(part.even, scales), _mm256_mullo_epi16(part.odd, scales)};
}

/* Parts that are summed before they become floats. */
static inline size_t parts_summed(Coding coding, size_t group) {
    if (lanes_keep(coding) || lanes_are_groups(coding, group)) return PARTS;
    return scales_whole(coding) ? PARTS_SUMMED : 1;
}

static inline __attribute__((always_inline)) void strip_unpack(Coding coding, size_t group, const uint8_t *at,
                                                               const Groups *groups, size_t width, Unpacked *to) {
    for (int i = 0; i < offset_registers(coding); i++) to->offsets[i] = groups->offsets[i];
    if (lanes_are_groups(coding, group)) {
        to->scales[0] = groups->lanes;
        if (width == STRIP)
            lane_parts(coding, at, PARTS, to->parts);
        else
            lane_parts(coding, at, groups_of(width), to->parts);
        return;
    }
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
static inline __attribute__((always_inline)) void whole_times(size_t summed, int offset_of, size_t tokens, const Unpacked *rows,
                                                              size_t parts, const Whole *x, size_t apart, Eight (*totals)[STRIP_ROWS]) {
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

/* sums: of the strip's groups, of which there are so many. */
static void to_whole(const bf16 *x, size_t width, const float *sums, size_t groups, Whole *to) {
    const Place place = place_of(x, width);
    const Eight factor = eight_all(place.place);
    for (size_t p = 0; p < width / PART; p++, x += PART) {
        const Columns first = load_columns(x), last = load_columns(x + 16);
        to->parts[p] = (Part){in_order(to_words(first.even, last.even, factor)), in_order(to_words(first.odd, last.odd, factor))};
    }
    to->scale = place.unit;
    for (size_t g = 0; g < STRIP_GROUPS; g++) to->sums[g] = g < groups ? sums[g] * place.place : 0;
}

/* Words of 16 bits as bytes: signed ones times 256, and what is left of them, signed. */
static inline Part to_bytes(Part words) {
    const __m256i half = _mm256_set1_epi16(128), low = _mm256_set1_epi16(0xFF);
    const __m256i even = _mm256_add_epi16(words.even, half), odd = _mm256_add_epi16(words.odd, half);
    return (Part){_mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_andnot_si256(low, odd)),
                  _mm256_or_si256(_mm256_and_si256(words.even, low), _mm256_slli_epi16(words.odd, 8))};
}

static inline size_t strips_of(size_t columns) { return (columns + STRIP - 1) / STRIP; }

/* Brings columns to where they are when lanes_keep(coding), and in Q6_K. */
static void keep_lanes(int q6_k, Whole *x) {
    __m256i even[2][4], odd[2][4]; /* of even groups, and of odd ones; in Q6_K of the halves */
    for (int p = 0; p < PARTS; p++) {
        const int set = q6_k ? p / 4 : p % 2, at = q6_k ? p % 4 : p / 2;
        even[set][at] = x->parts[p].even, odd[set][at] = x->parts[p].odd;
    }
    for (int g = 0; g < 2; g++) {
        const __m256i all = _mm256_set1_epi16(32);
        transpose(even[g]), transpose(odd[g]);
        __m256i above = _mm256_setzero_si256();
        for (int t = 0; t < 4; t++) {
            const Part words = {even[g][t], odd[g][t]};
            x->parts[4 * g + t] = words;
            above = plus_products(plus_products(above, words.even, all), words.odd, all);
        }
        if (q6_k) x->above[g] = above;
    }
}

/* Eight registers of dwords: that l of register g to lane g of the l-th. */
static inline void transpose_eight(__m256i v[PARTS]) {
    transpose(v), transpose(v + 4);
    for (int t = 0; t < 4; t++) {
        const __m256i first = v[t], last = v[4 + t];
        v[t] = _mm256_permute2x128_si256(first, last, 0x20), v[4 + t] = _mm256_permute2x128_si256(first, last, 0x31);
    }
}

/* Brings columns to where they are when lanes are groups; those of groups that the strip does not have are zeros. */
static void groups_to_lanes(int adjoin, size_t groups, Whole *x) {
    __m256i even[PARTS], odd[PARTS];
    for (size_t g = 0; g < PARTS; g++) {
        const Part part = g < groups ? x->parts[g] : (Part){_mm256_setzero_si256(), _mm256_setzero_si256()};
        even[g] = adjoin ? _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(part.even, 0xD8), 0xD8) : part.even;
        odd[g] = adjoin ? _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(part.odd, 0xD8), 0xD8) : part.odd;
    }
    transpose_eight(even), transpose_eight(odd);
    for (int t = 0; t < 4; t++) { /* low nibbles are of even columns where nibbles adjoin, of the first 16 elsewhere */
        x->parts[t] = adjoin ? (Part){even[2 * t], even[2 * t + 1]} : (Part){even[t], odd[t]};
        x->parts[4 + t] = adjoin ? (Part){odd[2 * t], odd[2 * t + 1]} : (Part){even[4 + t], odd[4 + t]};
    }
}

/* Brings the columns of a strip of so many groups to where they are multiplied. */
static void move_columns(Coding coding, size_t group, size_t groups, Whole *x) {
    if (lanes_keep(coding) || coding == Q6_K) keep_lanes(coding == Q6_K, x);
    if (lanes_are_groups(coding, group)) groups_to_lanes(nibbles_adjoin(coding), groups, x);
}

/* Where a strip of a row of the block lies: the last row's again where there are fewer. */
static inline size_t row_or_last(const Rows *block, size_t r) { return r < block->rows ? r : block->rows - 1; }

#include "gguf_alone.h"
#include "gguf_groups_alone.h"

/* Asks for the strip of the next four rows in time. */
static inline __attribute__((always_inline)) void ask_below(Coding coding, const uint8_t *at, size_t row_bytes) {
    for (size_t ahead = 0; ahead < row_bytes_of(coding, STRIP); ahead += 64)
        __builtin_prefetch(at + STRIP_ROWS * row_bytes + ahead, 0, 2);
}

/* The strip of row r of the block from a column on, and its groups. */
static inline __attribute__((always_inline)) const uint8_t *strip_at(Coding coding, const Matrix *matrix, const Rows *block,
                                                                     size_t group, size_t r, size_t begin, size_t width,
                                                                     Groups *groups) {
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

/* One token: a row from its first column to its last, so that memory is read in order. */
static inline __attribute__((always_inline)) Eight row_alone(Coding coding, size_t group, const Matrix *matrix, size_t row,
                                                             const uint8_t *at, const Whole *x) {
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

static inline __attribute__((always_inline)) void whole_alone(Coding coding, size_t group, const Matrix *matrix,
                                                              const Rows *block, const Whole *x, float *totals) {
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

/* At most WHOLE_TOKENS tokens: a strip of four rows is unpacked for all of them, the same strip of all rows after it. */
static inline __attribute__((always_inline)) void whole_rows(Coding coding, size_t group, const Matrix *matrix,
                                                             const Rows *block, const Whole *x, size_t tokens, float *totals) {
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
static inline __attribute__((always_inline)) void whole_many(Coding coding, size_t group, const Matrix *matrix,
                                                             const Rows *block, const Whole *x, size_t tokens, float *totals) {
    const size_t some = tokens <= IN_ORDER ? STRIP_ROWS : BLOCK, row_bytes = row_bytes_of(coding, matrix->columns);
    for (size_t r = 0; r < block->rows; r += some) {
        const size_t left = block->rows - r;
        const Rows rows = {block->weights + r * row_bytes, block->first + r, left < some ? left : some};
        whole_rows(coding, group, matrix, &rows, x, tokens, totals + r);
    }
}

static inline __attribute__((always_inline)) void whole_some(Coding coding, size_t group, const Matrix *matrix,
                                                             const Rows *block, const Whole *x, size_t tokens, float *totals) {
    if (tokens > 1)
        whole_many(coding, group, matrix, block, x, tokens, totals);
    else if (lanes_keep(coding))
        block_alone(coding, matrix, block, x, totals);
    else if (lanes_are_groups(coding, group))
        groups_alone(coding, matrix, block, x, totals);
    else
        whole_alone(coding, group, matrix, block, x, totals);
}

/* A function for each type: with all in one the compiler keeps fewer sums in registers. */
#define WHOLE_TYPE(name, coding, group)                                                                                   \
    static __attribute__((noinline)) void name(const Matrix *matrix, const Rows *block, const Whole *x, size_t tokens, \
                                               float *totals) {                                                          \
        whole_some(coding, group, matrix, block, x, tokens, totals);                                                     \
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

typedef void (*WholeTimes)(const Matrix *matrix, const Rows *block, const Whole *x, size_t tokens, float *totals);

static const WholeTimes WHOLE_TIMES[CODINGS] = {
    [Q8_0] = q8_0_times,     [Q4_0] = q4_0_times,     [Q4_1] = q4_1_times,   [Q5_0] = q5_0_times, [Q5_1] = q5_1_times,
    [Q2_K] = q2_k_times,     [Q3_K] = q3_k_times,     [Q4_K] = q4_k_times,   [Q5_K] = q5_k_times, [Q6_K] = q6_k_times,
    [IQ4_NL] = iq4_nl_times, [IQ4_XS] = iq4_xs_times, [MXFP4] = mxfp4_times, [S4] = s4_times,     [U4] = u4_times,
    [E2M1] = e2m1_times,
};

static void gguf_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                       size_t stride) {
    if (matrix->coding == E4M3) { /* whose values are no integers of few bits */
        strips_block(matrix, block, x, prepared, tokens, out, stride);
        return;
    }
    const size_t begin = block * BLOCK, rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    const Rows here = {(const uint8_t *)matrix->weights + begin * row_bytes_of(matrix->coding, matrix->columns), begin, rows};
    const WholeTimes times = matrix->coding == E2M1 && matrix->group == 16 ? e2m1_16_times : WHOLE_TIMES[matrix->coding];
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
