/* Attention of few queries over the positions of a key/value cache, in tiles of positions.
 *
 * A tile's boundaries are multiples of TILE, whatever is attended to, and its results depend on the query and on the
 * positions alone. Tiles are merged in ascending order. So neither the other queries nor the threads change a bit. */
#ifndef TIERMOE_ATTENTION_TILES_H
#define TIERMOE_ATTENTION_TILES_H

#include "quants.h"

enum {
    TILE = 128,        /* positions */
    MOST_QUERIES = 8,  /* of a call: what shares a pass over keys and values */
    TILE_HEADER = 16,  /* floats of a query's result before its sums: the largest score, the sum of weights */
};

/* Keys and values of one sequence and head: position p lies in row p % room, or in row chosen[p]. Rows are bfloat16, or,
 * where there are scales, codes that a row's scale multiplies: 8 bits are a signed number, 4 bits one of CODES_OF_4, of each
 * 32 columns the first 16 in the low halves of 16 bytes. */
typedef struct {
    const void *keys, *values;
    const bf16 *key_scales, *value_scales; /* of each row; NULL: rows of bfloat16 */
    size_t bits;                           /* of a column: 16, or 8 or 4 of codes */
    size_t key_columns, value_columns;     /* multiples of 32, at most MOST_KEY_COLUMNS, with scales MOST_CODED */
    size_t key_stride, value_stride;       /* columns from one row to the next */
    size_t room;
    const int32_t *chosen; /* NULL: all rows */
} Positions;

/* The first position that the token at `position` attends to: of a window (0: all) that ends with it, or, chunked, begins at
 * a multiple of its size. */
static inline size_t window_begin(size_t position, size_t window, int chunked) {
    if (!window || position < window) return 0;
    return chunked ? position - position % window : position + 1 - window;
}

enum { MOST_CODED = 512, MOST_KEY_COLUMNS = 1024 }; /* columns of a row of codes, and of any key */

/* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, as IQ4_NL of GGUF files has: nearer to each other in the middle,
 * where most numbers of a row are. */
static const bf16 CODES_OF_4[16] = {0xC2FE, 0xC2D0, 0xC2A6, 0xC282, 0xC244, 0xC20C, 0xC1B0, 0xC120,
                                    0x3F80, 0x4150, 0x41C8, 0x4218, 0x4254, 0x428A, 0x42B2, 0x42E2};

static inline size_t tile_result(size_t value_columns) { return TILE_HEADER + value_columns; }

/* Queries of a prompt that attend over the same keys and values, each to positions begin .. end - 1; both ascend from one
 * to the next. out: value_columns of each, which may lie in its query. sinks: a score without a value that joins the softmax;
 * NULL: none. */
enum { QUERY_ROWS = 64 };
typedef struct {
    size_t count;
    const bf16 *queries[QUERY_ROWS];
    bf16 *out[QUERY_ROWS];
    size_t begin[QUERY_ROWS], end[QUERY_ROWS];
    const float *sinks[QUERY_ROWS];
    float scale;
} QueryRows;

/* From one row of a tile's values to the next: they would fall on the same few sets of the cache else. */
static inline size_t values_stride(size_t columns) { return columns + 16; }

/* Floats of the workspace that attend_rows takes. */
static inline size_t rows_workspace(size_t key_columns, size_t value_columns) {
    return (QUERY_ROWS + TILE) * (key_columns + values_stride(value_columns)) + (2 * TILE + 6) * QUERY_ROWS;
}

/* What the kernels provide of it (kernels.h):
 *
 * attend_tile: results (count, tile_result(value_columns)): for each of queries (count, key_columns) the largest score of
 * positions begin .. end - 1, all of one tile, the sum of e^(score - largest), each rounded to bfloat16, and the values
 * weighted by them.
 *
 * attend_rows: the attention of queries of a prompt, tile by tile of TILE positions, in one softmax that goes along.
 * A query's bits do not depend on the others of the call: tiles begin at multiples of TILE.
 *
 * merge_tiles: out (value_columns) = a query's results of `tiles` tiles, `stride` floats apart, in one softmax. sink: a
 * score without a value that joins it; NULL: none. */

#endif
