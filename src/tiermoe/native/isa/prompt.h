/* attend_rows of attention_tiles.h over Vector and Unit: attention of a prompt's queries: each lane is a query of its own from
 * the first product to the last, so that nothing is summed across lanes. Numbers of queries, and sums, lie with the query as
 * the inner index. */
#ifndef TIERMOE_ISA_PROMPT_H
#define TIERMOE_ISA_PROMPT_H

#include <float.h>
#include <string.h>

#include "attention.h"
#include "simd.h"

enum { PLACES = 4 }; /* columns of values whose sums are in registers at a time, for ROW_VECTORS vectors of rows */

/* Keys by vectors of rows, whose scores are found at a time: of each two of sixteen chains in registers. */
enum { SCORE_KEYS = 4, SCORE_VECTORS = ROW_VECTORS < 2 ? 1 : 2, SCORE_ROWS = LANES * SCORE_VECTORS, IN_PAIR = 2 / IN_UNIT };

typedef struct {
    Unit *queries;  /* (QUERY_ROWS / SCORE_ROWS, key_columns / IN_UNIT, SCORE_ROWS): a chain's units after each other */
    Unit *weights;  /* (TILE / IN_UNIT, QUERY_ROWS) */
    Unit *keys;     /* (TILE, key_columns / IN_UNIT), where they are not taken from the cache */
    Unit *values;   /* (TILE / IN_UNIT, values_stride(value_columns)) */
    float *scores;  /* (TILE, QUERY_ROWS) */
    float *sums;    /* (value_columns, QUERY_ROWS) */
    float *largest, *total, *fade, *own, *begin, *end; /* (QUERY_ROWS) */
} Panels;

static Panels panels_in(float *at, const Positions *positions) {
    Panels p;
#define PANEL(field, count) p.field = (void *)at, at += (count);
    PANEL(queries, QUERY_ROWS * positions->key_columns)
    PANEL(sums, QUERY_ROWS * positions->value_columns)
    PANEL(keys, TILE * positions->key_columns)
    PANEL(values, TILE * values_stride(positions->value_columns))
    PANEL(weights, TILE * QUERY_ROWS)
    PANEL(scores, TILE * QUERY_ROWS)
    PANEL(largest, QUERY_ROWS)
    PANEL(total, QUERY_ROWS)
    PANEL(fade, QUERY_ROWS)
    PANEL(own, QUERY_ROWS)
    PANEL(begin, QUERY_ROWS)
    PANEL(end, QUERY_ROWS)
#undef PANEL
    return p;
}

/* Of a block's rows as many are computed as fill vectors; what is left of ROW_VECTORS of them takes one vector at a time,
 * or, being more than half, all. */
static size_t rows_computed(size_t rows) {
    enum { TOGETHER = LANES * ROW_VECTORS };
    const size_t rest = rows % TOGETHER, vectors = (rest + LANES - 1) / LANES;
    return rows - rest + (2 * vectors > ROW_VECTORS ? TOGETHER : vectors * LANES);
}

typedef struct {
    Vector of[SCORE_KEYS][SCORE_VECTORS];
} Scores;

/* The units of SCORE_KEYS keys, and of rows; units of a chain. */
typedef struct {
    const Unit *const *keys;
    const Unit *queries;
    size_t units;
} Scored;

INLINE Scores plus_scores(size_t vectors, Scores a, Scores b) {
    for (size_t j = 0; j < SCORE_KEYS; j++)
        for (size_t v = 0; v < vectors; v++) a.of[j][v] = plus(a.of[j][v], b.of[j][v]);
    return a;
}

/* Where unit `unit` of rows lies: chain `c` of sixteen has pairs c, 16 + c .. */
static inline size_t unit_place(size_t unit, size_t columns) {
    const size_t pair = unit / IN_PAIR;
    return (pair % 16 * (columns / 32) + pair / 16) * IN_PAIR + unit % IN_PAIR;
}

/* Chain `chain` of sixteen. */
INLINE Scores chain(size_t vectors, const Scored *s, size_t chain) {
    const Unit *rows = s->queries + chain * s->units * SCORE_ROWS;
    Scores sums;
    for (size_t j = 0; j < SCORE_KEYS; j++)
        for (size_t v = 0; v < vectors; v++) sums.of[j][v] = zeros();
    for (size_t u = 0; u < s->units; u++, rows += SCORE_ROWS) {
        const size_t at = (u / IN_PAIR * 16 + chain) * IN_PAIR + u % IN_PAIR;
        Units row[SCORE_VECTORS];
        for (size_t v = 0; v < vectors; v++) row[v] = units_from(rows + v * LANES);
        for (size_t j = 0; j < SCORE_KEYS; j++) {
            const Units key = unit_all(s->keys[j][at]);
            for (size_t v = 0; v < vectors; v++) sums.of[j][v] = units_times_plus(key, row[v], sums.of[j][v]);
        }
    }
    return sums;
}

/* The sum of four chains after each other. */
INLINE Scores four_chains(size_t vectors, const Scored *s, size_t first) {
    const Scores even = plus_scores(vectors, chain(vectors, s, first), chain(vectors, s, first + 2));
    return plus_scores(vectors, even, plus_scores(vectors, chain(vectors, s, first + 1), chain(vectors, s, first + 3)));
}

/* scores (keys, QUERY_ROWS) = scale * query times key, for some vectors of rows. ahead: the next tile's keys and values;
 * NULL: are fetched. */
INLINE void score_vectors(size_t vectors, const Unit *const *keys, size_t count, const Unit *queries, size_t columns, float scale,
                          float *scores, const Ahead *ahead) {
    for (size_t i = 0; i < count; i += SCORE_KEYS) {
        const Scored s = {keys + i, queries, columns / 32 * IN_PAIR};
        if (ahead) fetch(&ahead[0], i, SCORE_KEYS), fetch(&ahead[1], i, SCORE_KEYS);
        const Scores even = plus_scores(vectors, four_chains(vectors, &s, 0), four_chains(vectors, &s, 8));
        const Scores sums = plus_scores(vectors, even, plus_scores(vectors, four_chains(vectors, &s, 4), four_chains(vectors, &s, 12)));
        for (size_t j = 0; j < SCORE_KEYS; j++)
            for (size_t v = 0; v < vectors; v++)
                store(scores + (i + j) * QUERY_ROWS + v * LANES, times(sums.of[j][v], all(scale)));
    }
}

static void score_rows(const Unit *const *keys, size_t count, const Unit *queries, size_t columns, size_t rows, float scale,
                       float *scores, const Ahead ahead[2]) {
    const size_t each = columns / IN_UNIT * SCORE_ROWS;
    size_t r = 0;
    for (; r + SCORE_ROWS <= rows; r += SCORE_ROWS, queries += each, ahead = NULL)
        score_vectors(SCORE_VECTORS, keys, count, queries, columns, scale, scores + r, ahead);
    if (r < rows) score_vectors(1, keys, count, queries, columns, scale, scores + r, ahead);
}

/* sums[j][v] += the sum over `steps` of unit `step * stride` of factors[j] times the rows' units. */
INLINE void add_products(size_t vectors, const Unit *const *factors, size_t stride, const Unit *rows, size_t steps,
                         Vector sums[PLACES][ROW_VECTORS]) {
    for (size_t s = 0; s < steps; s++) {
        Units row[ROW_VECTORS];
        for (size_t v = 0; v < vectors; v++) row[v] = units_from(rows + s * QUERY_ROWS + v * LANES);
        for (size_t j = 0; j < PLACES; j++) {
            const Units factor = unit_all(factors[j][s * stride]);
            for (size_t v = 0; v < vectors; v++) sums[j][v] = units_times_plus(factor, row[v], sums[j][v]);
        }
    }
}

/* sums (columns, QUERY_ROWS) = fade * sums + own * values weighted, for some vectors of rows. */
INLINE void weigh_vectors(size_t vectors, const Unit *values, size_t columns, const Unit *weights, size_t steps,
                          const float *fade, const float *own, float *to) {
    for (size_t c = 0; c < columns; c += PLACES) {
        const Unit *some[PLACES];
        Vector sums[PLACES][ROW_VECTORS];
        for (size_t j = 0; j < PLACES; j++) {
            some[j] = values + c + j;
            for (size_t v = 0; v < vectors; v++) sums[j][v] = zeros();
        }
        add_products(vectors, some, values_stride(columns), weights, steps, sums);
        for (size_t j = 0; j < PLACES; j++)
            for (size_t v = 0; v < vectors; v++) {
                float *at = to + (c + j) * QUERY_ROWS + v * LANES;
                store(at, times_plus(sums[j][v], load(own + v * LANES), times(load(at), load(fade + v * LANES))));
            }
    }
}

static void weigh_rows(const Panels *p, size_t columns, size_t steps, size_t rows) {
    size_t r = 0;
    for (; r + LANES * ROW_VECTORS <= rows; r += LANES * ROW_VECTORS)
        weigh_vectors(ROW_VECTORS, p->values, columns, p->weights + r, steps, p->fade + r, p->own + r, p->sums + r);
    for (; r < rows; r += LANES)
        weigh_vectors(1, p->values, columns, p->weights + r, steps, p->fade + r, p->own + r, p->sums + r);
}

/* Takes away the scores of positions that a query does not attend to. */
static void mask_rows(const Panels *p, size_t begin, size_t count, size_t rows) {
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < rows; r += LANES) {
            const Vector at = all((float)(begin + i)), behind = minus(minus(load(p->end + r), all(1)), at);
            const Vector outside = smaller(zeros(), smaller(behind, minus(at, load(p->begin + r)))); /* whole numbers */
            float *score = p->scores + i * QUERY_ROWS + r;
            store(score, plus(load(score), times(larger_of(all(-1), outside), all(FLT_MAX))));
        }
}

/* The sum of LANES parts, as sum_of adds lanes. */
static inline Vector sum_of_parts(Vector parts[LANES]) {
    for (size_t half = LANES / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++) parts[i] = plus(parts[i], parts[i + half]);
    return parts[0];
}

/* weights = e^(score - the tile's largest), rounded; of codes each times its value's scale, and rounded then. */
static void soften_rows(const Panels *p, size_t count, size_t rows, const float *scales) {
    for (size_t r = 0; r < rows; r += LANES) {
        Vector largest = all(-FLT_MAX), parts[LANES];
        for (size_t i = 0; i < LANES; i++) parts[i] = zeros();
        for (size_t i = 0; i < count; i++) largest = larger_of(largest, load(p->scores + i * QUERY_ROWS + r));
        const Vector base = larger_of(largest, all(NO_SCORE));
        for (size_t i = 0; i < count; i += IN_UNIT) {
            Vector numbers[IN_UNIT];
            for (size_t k = 0; k < IN_UNIT; k++) {
                const Vector weight = exponential(minus(load(p->scores + (i + k) * QUERY_ROWS + r), base));
                Vector *part = parts + (i + k) % LANES;
                numbers[k] = as_bf16(scales ? times(weight, all(scales[i + k])) : weight);
                *part = plus(*part, scales ? weight : numbers[k]);
            }
            store_units(p->weights + step_of(i) * QUERY_ROWS + r, numbers);
        }
        const Running now = with_tile(load(p->largest + r), load(p->total + r), largest, sum_of_parts(parts));
        store(p->largest + r, now.largest), store(p->total + r, now.total);
        store(p->fade + r, now.fade), store(p->own + r, now.own);
    }
}

/* `count` keys and values of a tile. */
static void load_tile(const TileRows *rows, size_t count, const Panels *p, const Unit **keys) {
    const Positions *positions = rows->positions;
    const size_t columns = positions->key_columns, width = positions->value_columns, bits = positions->bits;
    bf16 room[IN_UNIT][MOST_CODED];
    for (size_t i = 0; i < count; i++) {
        Unit *its = p->keys + i * (columns / IN_UNIT);
        bf16 *codes = IN_UNIT == 1 ? room[0] : (bf16 *)its;
        keys[i] = units_of(kept_row(positions->keys, positions->key_stride, tile_row(rows, i), columns, bits, codes), columns, its);
    }
    for (size_t i = 0; i < count; i += IN_UNIT) {
        const bf16 *some[IN_UNIT];
        for (size_t k = 0; k < IN_UNIT; k++)
            some[k] = kept_row(positions->values, positions->value_stride, tile_row(rows, i + k), width, bits, room[k]);
        units_across(some, width, p->values + step_of(i) * values_stride(width));
    }
}

/* Scores of codes times their keys' scales. */
static void scale_rows(const Panels *p, const TileRows *at, size_t count, size_t rows, const bf16 *scales) {
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < rows; r += LANES) {
            float *score = p->scores + i * QUERY_ROWS + r;
            store(score, times(load(score), all(from_bf16(scales[tile_row(at, i)]))));
        }
}

/* Positions begin .. stop - 1, of one tile. */
static void attend_rows_tile(const Positions *positions, const QueryRows *rows, size_t begin, size_t stop, const Panels *p) {
    const size_t count = (stop - begin + PLACES - 1) / PLACES * PLACES;
    const size_t some = rows_computed(rows->count);
    const Unit *keys[TILE];
    float scales[TILE];
    const TileRows at = tile_rows(positions, begin, begin > rows->begin[0] ? begin : rows->begin[0], stop);
    load_tile(&at, count, p, keys);
    const Ahead ahead[] = {ahead_of(positions->keys, positions->key_stride, positions->bits, at.first + TILE),
                           ahead_of(positions->values, positions->value_stride, positions->bits, at.first + TILE)};
    score_rows(keys, count, p->queries, positions->key_columns, some, rows->scale, p->scores, ahead);
    if (positions->key_scales) {
        scale_rows(p, &at, count, some, positions->key_scales);
        for (size_t i = 0; i < count; i++) scales[i] = from_bf16(positions->value_scales[tile_row(&at, i)]);
    }
    if (begin < rows->begin[rows->count - 1] || begin + count > rows->end[0]) mask_rows(p, begin, count, some);
    soften_rows(p, count, some, positions->key_scales ? scales : NULL);
    weigh_rows(p, positions->value_columns, count / IN_UNIT, some);
}

/* Queries with the row as the inner index. */
static void load_rows(const Positions *positions, const QueryRows *rows, const Panels *p) {
    const size_t steps = positions->key_columns / IN_UNIT;
    Unit room[MOST_KEY_COLUMNS];
    for (size_t r = 0; r < QUERY_ROWS; r++) {
        const size_t row = r < rows->count ? r : rows->count - 1; /* those behind the last one are never looked at */
        const Unit *query = units_of(rows->queries[row], positions->key_columns, room);
        Unit *to = p->queries + r / SCORE_ROWS * steps * SCORE_ROWS + r % SCORE_ROWS;
        for (size_t s = 0; s < steps; s++) to[unit_place(s, positions->key_columns) * SCORE_ROWS] = query[s];
        p->begin[r] = (float)rows->begin[row], p->end[r] = (float)rows->end[row];
    }
}

/* What a row has seen before the first tile: its sink, or nothing. */
static void begin_rows(const Positions *positions, const QueryRows *rows, const Panels *p) {
    for (size_t r = 0; r < QUERY_ROWS; r++) {
        const float *sink = r < rows->count ? rows->sinks[r] : NULL;
        p->largest[r] = sink ? *sink : -FLT_MAX, p->total[r] = sink != NULL;
    }
    memset(p->sums, 0, sizeof *p->sums * QUERY_ROWS * positions->value_columns);
}

static void end_rows(const Positions *positions, const QueryRows *rows, const Panels *p) {
    bf16 *rounded = (bf16 *)p->scores;
    for (size_t from = 0; from < positions->value_columns; from += TILE) {
        const size_t rest = positions->value_columns - from, some = rest < TILE ? rest : TILE;
        for (size_t c = 0; c < some; c++)
            for (size_t r = 0; r < rows->count; r += LANES)
                store_bf16(rounded + c * QUERY_ROWS + r,
                           over(load(p->sums + (from + c) * QUERY_ROWS + r), load(p->total + r)));
        for (size_t r = 0; r < rows->count; r++)
            for (size_t c = 0; c < some; c++) rows->out[r][from + c] = rounded[c * QUERY_ROWS + r];
    }
}

static void attend_rows(const Positions *positions, const QueryRows *rows, float *workspace) {
    const size_t lowest = rows->begin[0] / LANES * LANES, highest = rows->end[rows->count - 1]; /* parts stay parts */
    const Panels p = panels_in(workspace, positions);
    load_rows(positions, rows, &p);
    begin_rows(positions, rows, &p);
    for (size_t tile = lowest / TILE * TILE; tile < highest; tile += TILE)
        attend_rows_tile(positions, rows, lowest > tile ? lowest : tile, highest < tile + TILE ? highest : tile + TILE, &p);
    end_rows(positions, rows, &p);
}

#endif
