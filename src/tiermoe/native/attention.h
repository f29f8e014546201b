/* The attention half of a decoder layer for one token: norm, projections, rotary embedding, attention over the key/value
 * cache, output projection, residual, norm. Rounded to bfloat16 where the separate operations round. */
#ifndef TIERMOE_ATTENTION_H
#define TIERMOE_ATTENTION_H

#include "int4.h"

typedef struct {
    Int4 query, key, value, output;
    const bf16 *query_bias, *key_bias, *value_bias, *output_bias; /* NULL: none */
    const bf16 *norm_before, *norm_after;
    const bf16 *norm_query, *norm_key; /* NULL: none */
    size_t norm_width;                 /* of a norm of queries and keys: a head, or all of them */
    size_t heads, kv_heads, head_columns;
    float epsilon, scale;
} Attention;

typedef struct {
    const bf16 *x;         /* (H) */
    const bf16 *cos, *sin; /* (head_columns) of this position */
    bf16 *keys, *values;   /* (kv_heads, room, head_columns): position `length` is written, 0 .. length are attended to */
    size_t room, length;
    bf16 *out;    /* (H): x + the attention's output */
    bf16 *normed; /* (H): its norm */
} Step;

/* Bytes of workspace for `length` positions before this one. */
size_t attention_workspace(const Attention *layer, size_t length, size_t threads);

void attention_run(const Attention *layer, const Step *step, void *workspace, size_t threads);

#endif
