/* What the phases of attention.c, grouped_attention.c and latent_attention.c share. */
#ifndef TIERMOE_ATTENTION_JOB_H
#define TIERMOE_ATTENTION_JOB_H

#include "attention.h"
#include "attention_tiles.h"

/* A token's tile of positions. */
typedef struct {
    size_t token, tile;
    size_t place; /* among all tiles, those of a token one after the other */
} Work;

typedef struct {
    const Attention *layer;
    const Step *step;
    const Slabs *slabs;
    const bf16 *x;
    bf16 *out, *normed_out;
    size_t works, prepared_each, heads_each; /* heads of a task */
    size_t normed_each, one_head_each;
    Work *work;
    size_t *places;        /* (tokens + 1): of a token's first tile */
    bf16 *normed;          /* of each thread: normed inputs of what it multiplies */
    float *prepared;       /* of each thread and projection: what is known of what it multiplies */
    bf16 *one_head;        /* of each thread, (tokens, columns): of latent attention */
    bf16 *first;           /* (tokens, rows of query_first) */
    bf16 *projected_query; /* (tokens, rows of query) */
    bf16 *projected_key;
    bf16 *projected_value; /* of grouped attention */
    bf16 *query;           /* (tokens, heads, attended key columns): in position */
    bf16 *attended;        /* (tokens, columns of output) */
    float *results;        /* (works, heads, tile_result(...)) */
} Job;

/* Columns of a query, and of a key in the cache. */
static inline size_t key_width(const Attention *layer) {
    return layer->latent_columns ? layer->latent_columns + layer->rotary_columns : layer->key_columns;
}

/* Columns of a value in the cache. */
static inline size_t value_width(const Attention *layer) {
    return layer->latent_columns ? layer->latent_columns : layer->value_columns;
}

/* Where position `position` of a token's sequence and head lies. */
static inline size_t cache_row(const Job *job, size_t token, size_t kv_head) {
    const Slabs *slabs = job->slabs;
    const size_t slab = (size_t)job->step->slabs[token] * slabs->kv_heads + kv_head;
    return slab * slabs->room + (size_t)job->step->positions[token] % slabs->room;
}

/* Prepares x (tokens, columns) for this thread's products with up to PROJECTIONS matrices. */
enum { PROJECTIONS = 3 };
void attention_prepare(const Job *job, const Projection *const *projections, size_t count, const bf16 *x, size_t thread);

/* out[t * stride + i] = row BLOCK * block + i of the projection of x[t], for each token. x: as projection `which` of
 * attention_prepare's. */
void attention_multiply(const Job *job, const Projection *projection, size_t which, size_t block, const bf16 *x,
                        size_t thread, bf16 *out, size_t stride);

/* Tasks of the phases between the projections of hidden states and attention, and between attention and the output. */
void grouped_place(void *data, size_t thread, size_t task); /* (token, kv head) */
void grouped_merge(void *data, size_t thread, size_t task); /* (token, head) */
void latent_begin_queries(void *data, size_t thread);
void latent_queries(void *data, size_t thread, size_t block); /* of query's rows, where there is a query_first */
void latent_place(void *data, size_t thread, size_t task);    /* heads, then tokens */
void latent_merge(void *data, size_t thread, size_t head);

#endif
