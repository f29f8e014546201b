/* Attention of few queries over tiles of a key/value cache (attention_tiles.h), and the order of sums that it shares with
 * attention of many (prompt.h), so that a query's bits are the same in both:
 *
 *   a score      one chain over pairs of columns: of each pair the second product, then the first, each fused
 *   a weight     relative to the tile's largest score, rounded; their sum is of 16 parts, position i in part i mod 16, which
 *                are added half to half
 *   a value      one chain over pairs of positions, of weights of 0 too, as a score's
 *   tiles        in ascending order, what is known before and a tile each by a factor (Running) */
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

/* The row of each of `count` positions from `from` on: of those before `begin` the row of that, which has a value that a weight
 * of 0 leaves at 0, and of those from `end` on that of the last one before it. */
static void rows_of_tile(const Positions *positions, size_t from, size_t begin, size_t end, size_t count, size_t *rows) {
    size_t row = begin % positions->room;
    for (size_t i = 0; i < count; i++) {
        rows[i] = positions->chosen ? (size_t)positions->chosen[row] : row;
        if (from + i >= begin && from + i + 1 < end && ++row == positions->room) row = 0;
    }
}

#if defined(SIMD_AVX512)
#include "avx512/attention.h"
#else
/* What a step of a chain takes of one factor: a float32 number. Steps are in the order of a chain: of each pair the second
 * number comes first. */
typedef float Unit;
typedef Vector Units; /* of LANES rows */
enum { IN_UNIT = 1, ROW_VECTORS = 1 }; /* numbers in a unit; vectors of rows whose sums are in registers at a time */

static inline size_t step_of(size_t number) { return number ^ 1; }
static inline Units units_from(const Unit *from) { return load(from); }
static inline Units unit_all(Unit unit) { return all(unit); }
static inline Vector units_times_plus(Units a, Units b, Vector sum) { return times_plus(a, b, sum); }

/* The units of a row: where they lie, or in `room`. */
static inline const Unit *units_of(const bf16 *row, size_t columns, Unit *room) {
    for (size_t c = 0; c < columns; c++) room[step_of(c)] = from_bf16(row[c]);
    return room;
}

/* out[c] = the unit of column c of IN_UNIT rows. */
static inline void units_across(const bf16 *const *rows, size_t columns, Unit *out) {
    for (size_t c = 0; c < columns; c++) out[c] = from_bf16(rows[0][c]);
}

#if !defined(OWN_ACROSS)
/* out[s * stride + r] = unit s of row r, for LANES rows. */
static inline void rows_across(const bf16 *const *rows, size_t columns, Unit *out, size_t stride) {
    for (size_t c = 0; c < columns; c++)
        for (size_t r = 0; r < LANES; r++) out[step_of(c) * stride + r] = from_bf16(rows[r][c]);
}
#endif

/* The units of IN_UNIT vectors of numbers that are bfloat16. */
static inline void store_units(Unit *to, const Vector *numbers) { store(to, numbers[0]); }

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i, for `width` columns from `begin` on. `keys`:
 * of the next tile, to be fetched; NULL: are. */
INLINE void weigh(size_t count, size_t width, const bf16 *const *values, size_t positions, const bf16 (*weights)[TILE],
                  size_t begin, float *results, size_t stride, const Ahead *keys) {
    Vector sums[QUERIES][128 / LANES];
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) sums[q][r] = zeros();
    for (size_t s = 0; s < positions; s++) {
        const size_t i = step_of(s);
        if (keys) fetch(keys, i, 1);
        for (size_t r = 0; r < width / LANES; r++) {
            const Vector some = load_bf16(values[i] + begin + LANES * r);
            for (size_t q = 0; q < count; q++) sums[q][r] = times_plus(some, all(from_bf16(weights[q][i])), sums[q][r]);
        }
    }
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) store(results + q * stride + begin + LANES * r, sums[q][r]);
}
#endif

enum { MOST_PLACES = 8, MOST_VECTORS = 4 };

/* sums[j][v] += the sum over `steps` of unit `step * stride` of factors[j] times the rows' units, which are `across` apart from
 * step to step. */
INLINE void add_products(size_t places, size_t vectors, const Unit *const *factors, size_t stride, const Unit *rows,
                         size_t across, size_t steps, Vector sums[MOST_PLACES][MOST_VECTORS]) {
    for (size_t s = 0; s < steps; s++) {
        Units row[MOST_VECTORS];
        for (size_t v = 0; v < vectors; v++) row[v] = units_from(rows + s * across + v * LANES);
        for (size_t j = 0; j < places; j++) {
            const Units factor = unit_all(factors[j][s * stride]);
            for (size_t v = 0; v < vectors; v++) sums[j][v] = units_times_plus(factor, row[v], sums[j][v]);
        }
    }
}

static const float NO_SCORE = -1e30f; /* below any score: the largest of a query that has seen none is -FLT_MAX */

/* Scores of few queries: keys across the lanes, which the queries share. */

typedef struct {
    const Positions *positions;
    const size_t *rows; /* of each position of the tile that is computed, to the end of the lanes */
    size_t count;
    float scale;
    const float *key_scales; /* of codes; else NULL */
    const Ahead *values;     /* what of the tile is read after its keys */
} TileKeys;

/* scores[q][i] = scale * query q times key i, for `places` queries, `vectors` times LANES keys at a time. */
INLINE void score(size_t places, size_t vectors, const TileKeys *keys, const bf16 *queries, float (*scores)[TILE]) {
    const size_t columns = keys->positions->key_columns, steps = columns / IN_UNIT, across = vectors * LANES;
    Unit panel[steps * across], room[IN_UNIT == 1 ? MOST_PLACES * columns : 1];
    const Unit *factors[MOST_PLACES];
    for (size_t q = 0; q < places; q++)
        factors[q] = units_of(queries + q * columns, columns, IN_UNIT == 1 ? room + q * columns : room);
    for (size_t i = 0; i < keys->count; i += across) {
        Vector sums[MOST_PLACES][MOST_VECTORS];
        for (size_t v = 0; v < vectors; v++) {
            const bf16 *some[LANES];
            bf16 decoded[LANES][MOST_CODED];
            for (size_t r = 0; r < LANES; r++) {
                const size_t at = i + v * LANES + r, row = keys->rows[at < keys->count ? at : keys->count - 1];
                some[r] = kept_row(keys->positions->keys, keys->positions->key_stride, row, columns, keys->positions->bits, decoded[r]);
            }
            rows_across(some, columns, panel + v * LANES, across);
        }
        if (keys->values) fetch(keys->values, i, across);
        for (size_t q = 0; q < places; q++)
            for (size_t v = 0; v < vectors; v++) sums[q][v] = zeros();
        add_products(places, vectors, factors, 1, panel, across, steps, sums);
        for (size_t q = 0; q < places; q++)
            for (size_t v = 0; v < vectors && i + v * LANES < keys->count; v++)
                store(scores[q] + i + v * LANES, times(sums[q][v], all(keys->scale)));
    }
}

/* As many vectors of keys as sums stay in registers; of many queries some after the others. */
static void score_queries(TileKeys keys, const bf16 *queries, size_t count, float (*scores)[TILE]) {
#define SCORE(n, vectors) \
    case n: score(n, vectors, &keys, queries, scores); break;
    for (size_t some; count; count -= some, queries += some * keys.positions->key_columns, scores += some, keys.values = NULL) {
        some = count < SCORED ? count : SCORED;
        switch (some) {
            SCORE(1, MOST_VECTORS)
            SCORE(2, SCORED / 2)
            SCORE(3, SCORED / 4)
            SCORE(4, SCORED / 4)
#if SCORED > 4
            SCORE(5, 1)
            SCORE(6, 1)
            SCORE(7, 1)
            SCORE(8, 1)
#endif
        }
    }
#undef SCORE
}

/* weights[i] = e^(scores[i] - largest), rounded, 0 outside of begin .. end - 1, to the end of the lanes; header: largest and sum.
 * Of codes scores are multiplied with their keys' scales before, and weights with their values', which the sum is without. */
static void soften(float *scores, size_t begin, size_t end, const float (*scales)[TILE], bf16 *weights, float *header) {
    const size_t lanes = (end + LANES - 1) / LANES * LANES;
    Vector largest = all(-FLT_MAX), sum = zeros();
    for (size_t i = 0; scales && i < lanes; i += LANES) store(scores + i, times(load(scores + i), load(scales[0] + i)));
    for (size_t i = 0; i < begin; i++) scores[i] = -FLT_MAX;
    for (size_t i = end; i < lanes; i++) scores[i] = -FLT_MAX;
    for (size_t i = 0; i < lanes; i += LANES) largest = larger_of(largest, load(scores + i));
    header[0] = largest_of(largest);
    largest = larger_of(all(header[0]), all(NO_SCORE));
    for (size_t i = 0; i < lanes; i += LANES) {
        const Vector weight = exponential(minus(load(scores + i), largest));
        const Vector rounded = as_bf16(scales ? times(weight, load(scales[1] + i)) : weight);
        store_bf16(weights + i, rounded);
        sum = plus(sum, scales ? weight : rounded);
    }
    header[1] = sum_of(sum);
}

/* Values of few queries: columns across the lanes. */

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i. */
INLINE void weigh_some(size_t count, const bf16 *const *values, size_t positions, size_t columns, const bf16 (*weights)[TILE],
                       float *sums, size_t stride, const Ahead *keys) {
    size_t c = 0; /* as many columns at a time as have sums in the registers */
    for (; WIDEST(count) >= 128 && c + 128 <= columns; c += 128, keys = NULL)
        weigh(count, 128, values, positions, weights, c, sums, stride, keys);
    for (; WIDEST(count) >= 64 && c + 64 <= columns; c += 64, keys = NULL)
        weigh(count, 64, values, positions, weights, c, sums, stride, keys);
    for (; c < columns; c += 32, keys = NULL) weigh(count, 32, values, positions, weights, c, sums, stride, keys);
}

static void weigh_queries(const bf16 *const *values, size_t positions, size_t columns, const bf16 (*weights)[TILE], size_t count,
                          float *sums, size_t stride, const Ahead *keys) {
#define WEIGH(n) \
    case n: weigh_some(n, values, positions, columns, weights, sums, stride, keys); break;
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

/* Up to MOST_QUERIES. room: for a tile's decoded values, of codes. Nothing is fetched ahead of chosen rows: they do not follow
 * each other. */
static void attend_few(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                       bf16 *room, float *results) {
    const size_t from = begin / LANES * LANES, some = (end - from + LANES - 1) / LANES * LANES;
    const size_t width = positions->value_columns, stride = tile_result(width), bits = positions->bits;
    float scores[MOST_QUERIES][TILE] __attribute__((aligned(64))), scales[2][TILE];
    bf16 weights[MOST_QUERIES][TILE] __attribute__((aligned(64)));
    const bf16 *values[TILE];
    size_t rows[TILE];
    rows_of_tile(positions, from, begin, end, some, rows);
    const Ahead of_values = ahead_of(positions->values, positions->value_stride, bits, rows[0]);
    const Ahead next_keys = ahead_of(positions->keys, positions->key_stride, bits, rows[end - 1 - from] + 1);
    const int coded = positions->key_scales != NULL, fetched = positions->chosen != NULL;
    for (size_t i = 0; i < some; i++) {
        if (coded) scales[0][i] = from_bf16(positions->key_scales[rows[i]]), scales[1][i] = from_bf16(positions->value_scales[rows[i]]);
        values[i] = kept_row(positions->values, positions->value_stride, rows[i], width, bits, room + (coded ? i * width : 0));
    }
    const TileKeys keys = {positions, rows, some, scale, NULL, fetched ? NULL : &of_values};
    score_queries(keys, queries, count, scores);
    for (size_t q = 0; q < count; q++)
        soften(scores[q], begin - from, end - from, coded ? (const float(*)[TILE])scales : NULL, weights[q], results + q * stride);
    weigh_queries(values, some, width, (const bf16(*)[TILE])weights, count, results + TILE_HEADER, stride,
                  fetched ? NULL : &next_keys);
}

static void attend_codes(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                         float *results) {
    bf16 room[TILE * MOST_CODED];
    attend_few(positions, queries, count, begin, end, scale, room, results);
}

static void attend(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                   float *results) {
    if (positions->key_scales)
        attend_codes(positions, queries, count, begin, end, scale, results);
    else
        attend_few(positions, queries, count, begin, end, scale, NULL, results);
}

/* What rows, one in each lane, know after some tiles: the largest score, and the sum of weights relative to it. The next tile's
 * sums are multiplied by `own`, those before by `fade`. */
typedef struct {
    Vector largest, total, fade, own;
} Running;

static inline Running with_tile(Vector largest, Vector total, Vector tiles_largest, Vector tiles_total) {
    Running r = {.largest = larger_of(largest, tiles_largest)};
    const Vector base = larger_of(r.largest, all(NO_SCORE));
    r.fade = exponential(minus(largest, base)), r.own = exponential(minus(tiles_largest, base));
    r.total = times_plus(tiles_total, r.own, times(total, r.fade));
    return r;
}

/* The tiles become one in the place of the first. */
static void merge(float *results, size_t tiles, size_t stride, size_t value_columns, const float *sink, bf16 *out) {
    float *sums = results + TILE_HEADER;
    Vector largest = all(sink ? *sink : -FLT_MAX), total = all(sink ? 1 : 0);
    for (size_t t = 0; t < tiles; t++) {
        const float *tile = results + t * stride;
        const Running now = with_tile(largest, total, all(tile[0]), all(tile[1]));
        largest = now.largest, total = now.total;
        for (size_t c = 0; c < value_columns; c += LANES) {
            const Vector before = t ? times(load(sums + c), now.fade) : zeros();
            store(sums + c, times_plus(load(tile + TILE_HEADER + c), now.own, before));
        }
    }
    for (size_t c = 0; c < value_columns; c += LANES) store_bf16(out + c, over(load(sums + c), total));
}

#endif
