#include "attention_tiles.h"

#include <float.h>

#include "vector.h"

enum {
    LANES = 16,
    KEYS = 4,    /* scored at a time */
    QUERIES = 4, /* that share what is loaded of keys and values */
    MOST_COLUMNS = 128 /* of values */
};

/* Where the rows of a tile begin. */
typedef struct {
    size_t first, room, count;
} Rows;

static inline size_t row(const Rows *rows, size_t i) {
    const size_t at = rows->first + (i < rows->count ? i : rows->count - 1); /* beyond the last one: that one again */
    return at < rows->room ? at : at - rows->room;
}

/* scores[q][i] = scale * query q times key i. */
TARGET static inline __attribute__((always_inline)) void score(size_t count, const Positions *positions, const Rows *rows,
                                                               const bf16 *queries, float scale,
                                                               float (*scores)[TILE]) {
    const size_t columns = positions->key_columns;
    for (size_t i = 0; i < rows->count; i += KEYS) {
        const bf16 *keys[KEYS];
        __m512 sums[QUERIES][KEYS];
        for (size_t j = 0; j < KEYS; j++) {
            keys[j] = positions->keys + row(rows, i + j) * positions->key_stride;
            for (size_t q = 0; q < count; q++) sums[q][j] = _mm512_setzero_ps();
        }
        for (size_t c = 0; c < columns; c += 32)
            for (size_t j = 0; j < KEYS; j++) {
                const __m512bh key = (__m512bh)_mm512_loadu_si512(keys[j] + c);
                for (size_t q = 0; q < count; q++)
                    sums[q][j] = _mm512_dpbf16_ps(sums[q][j], (__m512bh)_mm512_loadu_si512(queries + q * columns + c), key);
            }
        for (size_t q = 0; q < count; q++)
            _mm_storeu_ps(scores[q] + i,
                          _mm_mul_ps(four_sums(sums[q][0], sums[q][1], sums[q][2], sums[q][3]), _mm_set1_ps(scale)));
    }
}

/* weights[i] = e^(scores[i] - largest), rounded, 0 from `count` on to the end of the lanes; header: largest and sum. */
TARGET static void soften(float *scores, size_t count, bf16 *weights, float *header) {
    const size_t lanes = (count + LANES - 1) / LANES * LANES;
    __m512 largest = _mm512_set1_ps(-FLT_MAX), sum = _mm512_setzero_ps();
    for (size_t i = count; i < lanes; i++) scores[i] = -FLT_MAX;
    for (size_t i = 0; i < lanes; i += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
    header[0] = _mm512_reduce_max_ps(largest);
    largest = _mm512_set1_ps(header[0]);
    for (size_t i = 0; i < lanes; i += LANES) {
        const __mmask16 there = count - i < LANES ? (__mmask16)((1u << (count - i)) - 1) : 0xFFFF;
        const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), largest));
        const __m512 rounded = _mm512_maskz_mov_ps(there, as_bf16(weight));
        store_bf16(weights + i, rounded);
        sum = _mm512_add_ps(sum, rounded);
    }
    header[1] = _mm512_reduce_add_ps(sum);
}

/* Columns 0 .. 15 and 16 .. 31 of two registers that hold four columns of each eight. */
TARGET static inline void store_columns(__m512 low, __m512 high, float *out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(out + LANES, _mm512_permutex2var_ps(low, second, high));
}

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i, for `width` columns from `begin`
 * on: two positions at a time, whose columns become pairs. */
TARGET static inline __attribute__((always_inline)) void weigh(size_t count, size_t width, const Positions *positions,
                                                               const Rows *rows, const bf16 (*weights)[TILE], size_t begin,
                                                               float *results, size_t stride) {
    __m512 sums[QUERIES][MOST_COLUMNS / LANES];
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) sums[q][r] = _mm512_setzero_ps();
    for (size_t i = 0; i < rows->count; i += 2) {
        const bf16 *even = positions->values + row(rows, i) * positions->value_stride + begin;
        const bf16 *odd = positions->values + row(rows, i + 1) * positions->value_stride + begin;
        __m512i pairs[MOST_COLUMNS / LANES];
        for (size_t r = 0; r < width / LANES; r += 2) {
            const __m512i a = _mm512_loadu_si512(even + LANES * r), b = _mm512_loadu_si512(odd + LANES * r);
            pairs[r] = _mm512_unpacklo_epi16(a, b), pairs[r + 1] = _mm512_unpackhi_epi16(a, b);
        }
        for (size_t q = 0; q < count; q++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(weights[q] + i));
            for (size_t r = 0; r < width / LANES; r++)
                sums[q][r] = _mm512_dpbf16_ps(sums[q][r], both, (__m512bh)pairs[r]);
        }
    }
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r += 2)
            store_columns(sums[q][r], sums[q][r + 1], results + q * stride + begin + LANES * r);
}

TARGET static inline __attribute__((always_inline)) void attend_some(size_t count, const Positions *positions,
                                                                     const Rows *rows, const bf16 *queries, float scale,
                                                                     float *results) {
    const size_t columns = positions->value_columns, stride = tile_result(columns);
    float scores[QUERIES][TILE] __attribute__((aligned(64)));
    bf16 weights[QUERIES][TILE] __attribute__((aligned(64)));
    score(count, positions, rows, queries, scale, scores);
    for (size_t q = 0; q < count; q++) soften(scores[q], rows->count, weights[q], results + q * stride);
    size_t c = 0; /* as many columns at a time as have sums in the registers: 16 of them hide what an addition takes */
    for (; count < 3 && c + 128 <= columns; c += 128)
        weigh(count, 128, positions, rows, weights, c, results + TILE_HEADER, stride);
    for (; c + 64 <= columns; c += 64) weigh(count, 64, positions, rows, weights, c, results + TILE_HEADER, stride);
    for (; c < columns; c += 32) weigh(count, 32, positions, rows, weights, c, results + TILE_HEADER, stride);
}

#define SOME_OF(n)                                                 \
    case n:                                                        \
        attend_some(n, positions, &rows, queries, scale, results); \
        break;

TARGET void attend_tile(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                        float *results) {
    const Rows rows = {begin % positions->room, positions->room, end - begin};
    for (size_t some; count; count -= some) {
        some = count < QUERIES ? count : QUERIES;
        switch (some) { SOME_OF(1) SOME_OF(2) SOME_OF(3) SOME_OF(4) }
        queries += some * positions->key_columns, results += some * tile_result(positions->value_columns);
    }
}

TARGET static inline float power(float exponent) {
    return _mm512_cvtss_f32(exponential(_mm512_set1_ps(exponent)));
}

TARGET void merge_tiles(const float *results, size_t tiles, size_t stride, size_t value_columns, const bf16 *sink, bf16 *out) {
    float largest = sink ? from_bf16(*sink) : -FLT_MAX, sum = 0;
    for (size_t t = 0; t < tiles; t++)
        if (results[t * stride] > largest) largest = results[t * stride];
    for (size_t t = 0; t < tiles; t++) sum = __builtin_fmaf(results[t * stride + 1], power(results[t * stride] - largest), sum);
    if (sink) sum += power(from_bf16(*sink) - largest);
    for (size_t c = 0; c < value_columns; c += 4 * LANES) {
        const size_t registers = value_columns - c < 4 * LANES ? 2 : 4;
        __m512 sums[4];
        for (size_t r = 0; r < 4; r++) sums[r] = _mm512_setzero_ps();
        for (size_t t = 0; t < tiles; t++) {
            const float *tile = results + t * stride;
            const __m512 weight = _mm512_set1_ps(power(tile[0] - largest) / sum);
            for (size_t r = 0; r < registers; r++)
                sums[r] = _mm512_fmadd_ps(_mm512_loadu_ps(tile + TILE_HEADER + c + LANES * r), weight, sums[r]);
        }
        for (size_t r = 0; r < registers; r++) store_bf16(out + c + LANES * r, sums[r]);
    }
}
