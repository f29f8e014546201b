/* The attention half of a decoder layer for one token of each of several sequences: norm, projections, rotary embedding,
 * attention over the key/value cache, output projection, residual, norm. Rounded to bfloat16 where the separate operations
 * round. A sequence's values do not depend on the others. */
#ifndef TIERMOE_ATTENTION_H
#define TIERMOE_ATTENTION_H

#include "matrix.h"

typedef struct {
    Matrix query, key, value, output;
    const bf16 *query_bias, *key_bias, *value_bias, *output_bias; /* NULL: none */
    const bf16 *norm_before, *norm_after;
    const bf16 *norm_query, *norm_key; /* NULL: none */
    size_t norm_width;                 /* of a norm of queries and keys: a head, or all of them */
    size_t heads, kv_heads, head_columns;
    float epsilon, scale;
} Attention;

typedef struct {
    size_t sequences;
    const bf16 *x;         /* (sequences, H) */
    const bf16 *cos, *sin; /* (sequences, head_columns), or (head_columns) of the position that all are at */
    int one_position;
    const int64_t *first;  /* (sequences): the first position that is no padding; NULL: 0 */
    bf16 *keys, *values;   /* (sequences, kv_heads, room, head_columns): position `length` is written, first .. length are
                              attended to */
    size_t room, length;
    bf16 *out;    /* (sequences, H): x + the attention's output */
    bf16 *normed; /* (sequences, H): its norm */
} Step;

/* Bytes of workspace for `length` positions before this one. */
size_t attention_workspace(const Attention *layer, size_t sequences, size_t length, size_t threads);

void attention_run(const Attention *layer, const Step *step, void *workspace, size_t threads);

#endif
