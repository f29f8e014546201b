/* Attention of few queries over tiles of a key/value cache (attention_tiles.h), and the order of sums that it shares with
 * attention of many (prompt.h), so that a query's bits are the same in both:
 *
 *   a score      sixteen chains, chain l over pairs l, 16 + l .. of columns, of each pair the second product, then the first,
 *                each fused; the sum of four after each other is (0 + 2) + (1 + 3), and that of these four likewise
 *   a weight     relative to the tile's largest score, rounded; their sum is of 16 parts, position i in part i mod 16, which
 *                are added half to half
 *   a value      one chain over pairs of positions, as a score's, of weights of 0 too
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

/* The rows of positions from a multiple of LANES on: of those before `begin` the row of that, which has a value that a weight of 0
 * leaves at 0, and of those from `end` on that of the last one before it. */
typedef struct {
    const Positions *positions;
    size_t first, before, last; /* the row of `begin`, and how far that and the last one before `end` are from the first position */
} TileRows;

static inline TileRows tile_rows(const Positions *positions, size_t from, size_t begin, size_t end) {
    return (TileRows){positions, begin % positions->room, begin - from, end - 1 - from};
}

/* How far from the first row the one of position i is. */
static inline size_t row_from_first(const TileRows *rows, size_t i) {
    const size_t at = i < rows->last ? i : rows->last;
    return at > rows->before ? at - rows->before : 0;
}

static inline size_t tile_row(const TileRows *rows, size_t i) {
    const size_t row = rows->first + row_from_first(rows, i), room = rows->positions->room;
    if (rows->positions->chosen) return (size_t)rows->positions->chosen[row];
    return row < room ? row : row % room;
}

/* Where the rows of `count` positions are, as bfloat16: of codes in `room`. */
static void find_rows(const TileRows *rows, const void *from, size_t stride, size_t columns, size_t count, bf16 *room, const bf16 **at) {
    const Positions *positions = rows->positions;
    if (positions->bits == 16 && !positions->chosen && rows->first + rows->last - rows->before < positions->room) {
        const bf16 *first = (const bf16 *)from + rows->first * stride;
        for (size_t i = 0; i < count; i++) at[i] = first + row_from_first(rows, i) * stride;
        return;
    }
    for (size_t i = 0; i < count; i++)
        at[i] = kept_row(from, stride, tile_row(rows, i), columns, positions->bits, room + (positions->bits == 16 ? 0 : i * columns));
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

static const float NO_SCORE = -1e30f; /* below any score: the largest of a query that has seen none is -FLT_MAX */

/* scores[q][i] = scale * query q times key i, for a number of queries known when compiling. `values`: what of the tile is read
 * after its keys; NULL: fetched already. */
INLINE void score(size_t count, const bf16 *const *keys, size_t positions, size_t columns, const bf16 *queries, float scale,
                  float (*scores)[TILE], const Ahead *values) {
    enum { FOUR = 4 };
    const size_t together = KEYS(count); /* keys */
    for (size_t i = 0; i < positions; i += together) {
        Dot sums[QUERIES * FOUR];
        float found[QUERIES * FOUR];
        if (values) fetch(values, i, together);
        for (size_t n = 0; n < count * together; n++) sums[n] = no_dot();
        for (size_t c = 0; c < columns; c += DOT)
            for (size_t j = 0; j < together; j++) {
                const Columns key = load_columns(keys[i + j] + c);
                for (size_t q = 0; q < count; q++)
                    sums[q * together + j] = dot(sums[q * together + j], load_columns(queries + q * columns + c), key);
            }
        for (size_t n = 0; n < count * together; n += FOUR) four_dots(sums + n, scale, found + n);
        for (size_t q = 0; q < count; q++) memcpy(scores[q] + i, found + q * together, together * sizeof *found);
    }
}

static void score_queries(const bf16 *const *keys, size_t positions, size_t columns, const bf16 *queries, size_t count,
                          float scale, float (*scores)[TILE], const Ahead *values) {
#define SCORE(n) \
    case n: score(n, keys, positions, columns, queries, scale, scores, values); break;
    for (size_t some; count; count -= some, queries += some * columns, scores += some, values = NULL) {
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

/* Up to MOST_QUERIES. room: for a tile's decoded keys, and then values, of codes. Nothing is fetched ahead of chosen rows: they
 * do not follow each other. */
static void attend_few(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                       bf16 *room, float *results) {
    const size_t from = begin / LANES * LANES, some = (end - from + LANES - 1) / LANES * LANES, bits = positions->bits;
    const size_t columns = positions->key_columns, width = positions->value_columns, stride = tile_result(width);
    float scores[MOST_QUERIES][TILE] __attribute__((aligned(64))), scales[2][TILE];
    bf16 weights[MOST_QUERIES][TILE] __attribute__((aligned(64)));
    const bf16 *at[TILE]; /* keys, and then values */
    const TileRows rows = tile_rows(positions, from, begin, end);
    const int coded = positions->key_scales != NULL, fetched = positions->chosen != NULL;
    const Ahead of_values = ahead_of(positions->values, positions->value_stride, bits, rows.first);
    const Ahead next_keys = ahead_of(positions->keys, positions->key_stride, bits, rows.first + end - begin);
    find_rows(&rows, positions->keys, positions->key_stride, columns, some, room, at);
    score_queries(at, some, columns, queries, count, scale, scores, fetched ? NULL : &of_values);
    find_rows(&rows, positions->values, positions->value_stride, width, some, room, at);
    for (size_t i = 0; coded && i < some; i++) {
        const size_t row = tile_row(&rows, i);
        scales[0][i] = from_bf16(positions->key_scales[row]), scales[1][i] = from_bf16(positions->value_scales[row]);
    }
    for (size_t q = 0; q < count; q++)
        soften(scores[q], begin - from, end - from, coded ? (const float(*)[TILE])scales : NULL, weights[q], results + q * stride);
    weigh_queries(at, some, width, (const bf16(*)[TILE])weights, count, results + TILE_HEADER, stride,
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

/* The tiles become one in the place of the first, LANES of them in turn: a lane has what is known after a tile's. */
static void merge(float *results, size_t tiles, size_t stride, size_t value_columns, const float *sink, bf16 *out) {
    float *sums = results + TILE_HEADER, before = sink ? *sink : -FLT_MAX, total = sink ? 1 : 0;
    float largest[2][LANES], factors[2][LANES]; /* before and of the tile; fade and own */
    for (size_t t = 0; t < tiles; t++) {
        if (t % LANES == 0) {
            for (size_t i = 0; i < LANES; i++) {
                largest[0][i] = before, largest[1][i] = t + i < tiles ? results[(t + i) * stride] : -FLT_MAX;
                before = largest[1][i] > before ? largest[1][i] : before;
            }
            const Running now = with_tile(load(largest[0]), zeros(), load(largest[1]), zeros());
            store(factors[0], now.fade), store(factors[1], now.own);
        }
        const float *tile = results + t * stride;
        const Vector fade = all(factors[0][t % LANES]), own = all(factors[1][t % LANES]);
        total = first_of(times_plus(all(tile[1]), own, times(all(total), fade)));
        for (size_t c = 0; c < value_columns; c += LANES) {
            const Vector faded = t ? times(load(sums + c), fade) : zeros();
            store(sums + c, times_plus(load(tile + TILE_HEADER + c), own, faded));
        }
    }
    for (size_t c = 0; c < value_columns; c += LANES) store_bf16(out + c, over(load(sums + c), all(total)));
}

#endif
