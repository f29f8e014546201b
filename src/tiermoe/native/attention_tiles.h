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

/* Where the rows of a tile begin. */
typedef struct {
    size_t first, room, count;
} TileRows;

/* The row of a tile's position i; beyond the last one: that one again. */
static inline size_t tile_row(const TileRows *rows, size_t i) {
    const size_t at = rows->first + (i < rows->count ? i : rows->count - 1);
    return at < rows->room ? at : at - rows->room;
}

static inline size_t tile_result(size_t value_columns) { return TILE_HEADER + value_columns; }

/* What the kernels provide of it (kernels.h):
 *
 * attend_tile: results (count, tile_result(value_columns)): for each of queries (count, key_columns) the largest score of
 * positions begin .. end - 1, all of one tile, the sum of e^(score - largest), each rounded to bfloat16, and the values
 * weighted by them.
 *
 * merge_tiles: out (value_columns) = a query's results of `tiles` tiles, `stride` floats apart, in one softmax. sink: a
 * score without a value that joins it; NULL: none. */

#endif
