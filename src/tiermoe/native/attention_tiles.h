/* Attention of few queries over the positions of a key/value cache, in tiles of positions.
 *
 * A tile's boundaries are multiples of TILE, whatever is attended to, and its results depend on the query and on the
 * positions alone. Tiles are merged in ascending order. So neither the other queries nor the threads change a bit. */
#ifndef TIERMOE_ATTENTION_TILES_H
#define TIERMOE_ATTENTION_TILES_H

#include "matrix.h"

enum {
    TILE = 256,        /* positions */
    MOST_QUERIES = 8,  /* of a call: what shares a pass over keys and values */
    TILE_HEADER = 16,  /* floats of a query's result before its sums: the largest score, the sum of weights */
};

/* Keys and values of one sequence and head: position p lies in row p % room. */
typedef struct {
    const bf16 *keys, *values;
    size_t key_columns, value_columns; /* multiples of 32 */
    size_t key_stride, value_stride;   /* values from one row to the next */
    size_t room;
} Positions;

static inline size_t tile_result(size_t value_columns) { return TILE_HEADER + value_columns; }

/* results (count, tile_result(value_columns)): for each of queries (count, key_columns) the largest score of positions
 * begin .. end - 1, all of one tile, the sum of e^(score - largest), each rounded to bfloat16, and the values weighted by
 * them. */
void attend_tile(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                 float *results);

/* out (value_columns) = a query's results of `tiles` tiles, `stride` floats apart, in one softmax. sink: a score without a
 * value that joins it; NULL: none. */
void merge_tiles(const float *results, size_t tiles, size_t stride, size_t value_columns, const bf16 *sink, bf16 *out);

#endif
