/* Attention of few queries over tiles of a key/value cache (attention_tiles.h). */
#ifndef TIERMOE_ISA_ATTENTION_H
#define TIERMOE_ISA_ATTENTION_H

#include <float.h>
#include <string.h>

#include "../attention_tiles.h"
#include "simd.h"


/* Rows of keys and values as bfloat16, whatever the dtype of the cache. */

/* The columns of row `row`: where they lie, or, of codes, in `room`. A code is exact in bfloat16; its scale is the caller's. */
INLINE const bf16 *kept_row(const void *rows, size_t stride, size_t row, size_t columns, size_t bits, bf16 *room) {
    if (bits == 16) return (const bf16 *)rows + row * stride;
    const int8_t *codes = (const int8_t *)rows + row * stride * bits / 8;
    if (bits == 4) {
        for (size_t c = 0; c < columns; c += 32) look_up_32(CODES_OF_4, (const uint8_t *)codes + c / 2, room + c);
        return room;
    }
    for (size_t c = 0; c < columns; c++) {
        const float value = codes[c];
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        room[c] = (bf16)(bits >> 16);
    }
    return room;
}

/* A tile's rows of codes as bfloat16, in `room`, and where they are then. */
static const bf16 *unpacked(const void *rows, size_t stride, size_t columns, size_t bits, const TileRows *tile, bf16 *room) {
    for (size_t i = 0; i < tile->count; i++) kept_row(rows, stride, tile_row(tile, i), columns, bits, room + i * columns);
    return room;
}

/* out[i] = the scale of position i of a tile, to the end of the lanes. */
static inline void tile_scales(const bf16 *scales, const TileRows *rows, float *out) {
    const size_t lanes = (rows->count + LANES - 1) / LANES * LANES;
    for (size_t i = 0; i < lanes; i++) out[i] = from_bf16(scales[tile_row(rows, i)]);
}

#if defined(SIMD_AVX512)
#include "avx512/attention.h"
#else
/* What a tile attends to: values weighted by the softened scores, over Vector. */

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i, for `width` columns from `begin` on. `keys`:
 * of the next tile, to be fetched; NULL: are. */
INLINE void weigh(size_t count, size_t width, const Positions *positions, const TileRows *rows, const bf16 (*weights)[TILE],
                  size_t begin, float *results, size_t stride, const Ahead *keys) {
    Vector sums[QUERIES][128 / LANES];
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) sums[q][r] = zeros();
    for (size_t i = 0; i < rows->count; i++) {
        if (keys) fetch(keys, i, 1);
        const bf16 *values = (const bf16 *)positions->values + tile_row(rows, i) * positions->value_stride + begin;
        for (size_t r = 0; r < width / LANES; r++) {
            const Vector some = load_bf16(values + LANES * r);
            for (size_t q = 0; q < count; q++) sums[q][r] = times_plus(some, all(from_bf16(weights[q][i])), sums[q][r]);
        }
    }
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) store(results + q * stride + begin + LANES * r, sums[q][r]);
}
#endif

enum { KEYS = 4 }; /* scored at a time */

/* scores[q][i] = scale * query q times key i. `values`: what of the tile is read after its keys; NULL: fetched already. */
INLINE void score(size_t count, const Positions *positions, const TileRows *rows, const bf16 *queries, float scale,
                  float (*scores)[TILE], const Ahead *values) {
    const size_t columns = positions->key_columns;
    for (size_t i = 0; i < rows->count; i += KEYS) {
        const bf16 *keys[KEYS];
        Dot sums[QUERIES][KEYS];
        if (values) fetch(values, i, KEYS);
        for (size_t j = 0; j < KEYS; j++) {
            keys[j] = (const bf16 *)positions->keys + tile_row(rows, i + j) * positions->key_stride;
            for (size_t q = 0; q < count; q++) sums[q][j] = no_dot();
        }
        for (size_t c = 0; c < columns; c += DOT)
            for (size_t j = 0; j < KEYS; j++) {
                const Columns key = load_columns(keys[j] + c);
                for (size_t q = 0; q < count; q++) sums[q][j] = dot(sums[q][j], load_columns(queries + q * columns + c), key);
            }
        for (size_t q = 0; q < count; q++) four_dots(sums[q], scale, scores[q] + i);
    }
}

/* weights[i] = e^(scores[i] - largest), rounded, 0 from `count` on to the end of the lanes; header: largest and sum. Of
 * codes scores are multiplied with their keys' scales before, and weights with their values', which the sum is without. */
static void soften(float *scores, size_t count, const float (*scales)[TILE], bf16 *weights, float *header) {
    const size_t lanes = (count + LANES - 1) / LANES * LANES;
    Vector largest = all(-FLT_MAX), sum = zeros();
    for (size_t i = 0; scales && i < lanes; i += LANES) store(scores + i, times(load(scores + i), load(scales[0] + i)));
    for (size_t i = count; i < lanes; i++) scores[i] = -FLT_MAX;
    for (size_t i = 0; i < lanes; i += LANES) largest = larger_of(largest, load(scores + i));
    header[0] = largest_of(largest);
    largest = all(header[0]);
    for (size_t i = 0; i < lanes; i += LANES) {
        const Vector weight = keep(exponential(minus(load(scores + i), largest)), count - i);
        const Vector rounded = as_bf16(scales ? times(weight, load(scales[1] + i)) : weight);
        store_bf16(weights + i, rounded);
        sum = plus(sum, scales ? weight : rounded);
    }
    header[1] = sum_of(sum);
}

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i. */
INLINE void weigh_some(size_t count, const Positions *positions, const TileRows *rows, const bf16 (*weights)[TILE], float *sums,
                       size_t stride, const Ahead *keys) {
    const size_t columns = positions->value_columns;
    size_t c = 0; /* as many columns at a time as have sums in the registers */
    for (; WIDEST(count) >= 128 && c + 128 <= columns; c += 128, keys = NULL)
        weigh(count, 128, positions, rows, weights, c, sums, stride, keys);
    for (; WIDEST(count) >= 64 && c + 64 <= columns; c += 64, keys = NULL)
        weigh(count, 64, positions, rows, weights, c, sums, stride, keys);
    for (; c < columns; c += 32, keys = NULL) weigh(count, 32, positions, rows, weights, c, sums, stride, keys);
}

static void score_queries(const Positions *positions, const TileRows *rows, const bf16 *queries, size_t count, float scale,
                          float (*scores)[TILE], const Ahead *values) {
#define SCORE(n) \
    case n: score(n, positions, rows, queries, scale, scores, values); break;
    for (size_t some; count; count -= some, queries += some * positions->key_columns, scores += some, values = NULL) {
        some = count < QUERIES ? count : QUERIES;
        switch (some) {
            SCORE(1)
            SCORE(2)
#if QUERIES > 2
            SCORE(3)
            SCORE(4)
#endif
        }
    }
#undef SCORE
}

static void weigh_queries(const Positions *positions, const TileRows *rows, const bf16 (*weights)[TILE], size_t count,
                          float *sums, size_t stride, const Ahead *keys) {
#define WEIGH(n) \
    case n: weigh_some(n, positions, rows, weights, sums, stride, keys); break;
    for (size_t some; count; count -= some, weights += some, sums += some * stride, keys = NULL) {
        some = count < QUERIES ? count : QUERIES;
        switch (some) {
            WEIGH(1)
            WEIGH(2)
#if QUERIES > 2
            WEIGH(3)
            WEIGH(4)
#endif
        }
    }
#undef WEIGH
}

/* Up to MOST_QUERIES. Nothing is fetched ahead of chosen rows: they do not follow each other. */
static void attend_few(const Positions *positions, const TileRows *rows, const bf16 *queries, size_t count, float scale,
                       const float (*scales)[TILE], bf16 *room, float *results) {
    const size_t stride = tile_result(positions->value_columns);
    float scores[MOST_QUERIES][TILE] __attribute__((aligned(64)));
    bf16 weights[MOST_QUERIES][TILE] __attribute__((aligned(64)));
    const TileRows in_room = {0, TILE, rows->count, NULL}, *at = room ? &in_room : rows;
    const Ahead values = ahead_of(positions->values, positions->value_stride, positions->bits, rows->first);
    const Ahead next_keys = ahead_of(positions->keys, positions->key_stride, positions->bits, rows->first + rows->count);
    Positions here = *positions;
    if (room) {
        here.keys = unpacked(positions->keys, positions->key_stride, positions->key_columns, positions->bits, rows, room);
        here.key_stride = positions->key_columns;
    }
    score_queries(&here, at, queries, count, scale, scores, rows->chosen ? NULL : &values);
    for (size_t q = 0; q < count; q++) soften(scores[q], rows->count, scales, weights[q], results + q * stride);
    if (room) {
        here.values = unpacked(positions->values, positions->value_stride, positions->value_columns, positions->bits, rows, room);
        here.value_stride = positions->value_columns;
    }
    weigh_queries(&here, at, (const bf16(*)[TILE])weights, count, results + TILE_HEADER, stride,
                  rows->chosen ? NULL : &next_keys);
}

static void attend_codes(const Positions *positions, const TileRows *rows, const bf16 *queries, size_t count, float scale,
                         float *results) {
    bf16 room[TILE * MOST_CODED];
    float scales[2][TILE];
    tile_scales(positions->key_scales, rows, scales[0]), tile_scales(positions->value_scales, rows, scales[1]);
    attend_few(positions, rows, queries, count, scale, (const float(*)[TILE])scales, room, results);
}

static void attend(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                   float *results) {
    const TileRows rows = {begin % positions->room, positions->room, end - begin, positions->chosen};
    if (positions->key_scales)
        attend_codes(positions, &rows, queries, count, scale, results);
    else
        attend_few(positions, &rows, queries, count, scale, NULL, NULL, results);
}

static inline float power(float exponent) { return first_of(exponential(all(exponent))); }

static void merge(const float *results, size_t tiles, size_t stride, size_t value_columns, const float *sink, bf16 *out) {
    float largest = sink ? *sink : -FLT_MAX, sum = 0;
    for (size_t t = 0; t < tiles; t++)
        if (results[t * stride] > largest) largest = results[t * stride];
    for (size_t t = 0; t < tiles; t++) {
        const Vector weight = all(power(results[t * stride] - largest));
        sum = first_of(times_plus(all(results[t * stride + 1]), weight, all(sum)));
    }
    if (sink) sum += power(*sink - largest);
    for (size_t c = 0; c < value_columns; c += 4 * LANES) {
        const size_t registers = value_columns - c < 4 * LANES ? 2 : 4;
        Vector sums[4];
        for (size_t r = 0; r < 4; r++) sums[r] = zeros();
        for (size_t t = 0; t < tiles; t++) {
            const float *tile = results + t * stride;
            const Vector weight = all(power(tile[0] - largest) / sum);
            for (size_t r = 0; r < registers; r++)
                sums[r] = times_plus(load(tile + TILE_HEADER + c + LANES * r), weight, sums[r]);
        }
        for (size_t r = 0; r < registers; r++) store_bf16(out + c + LANES * r, sums[r]);
    }
}

#endif
