/* The attention half of a decoder layer, for tokens of any sequences and positions: norm, projections, rotary
 * embedding, attention over the key/value cache, output projection, residual, norm. Rounded to bfloat16 where the separate
 * operations round. A token's values depend on its sequence's earlier positions alone: neither the other tokens of a call nor the
 * threads change a bit. */
#ifndef TIERMOE_ATTENTION_H
#define TIERMOE_ATTENTION_H

#include "matrix.h"
#include "norm.h"
#include "slabs.h"

typedef struct {
    Matrix matrix;    /* no rows: there is no such projection */
    const bf16 *bias; /* NULL: none */
} Projection;

/* Grouped attention has queries, keys and values of the hidden states; heads / kv_heads heads share a key and a value. Where it
 * is gated, `query` gives each head a gate behind its query, as wide as a value, by whose sigmoid what it attends to is
 * multiplied.
 *
 * Latent attention has queries of the hidden states or of `query_first`'s normed outputs, a head's first key_columns without
 * a position, then rotary_columns with one. `key` gives a latent (latent_columns), which is normed, and one rotary key for
 * all heads; both are what the cache holds. key_up (heads * latent_columns, key_columns) takes a head's queries to latents;
 * `value` (heads * value_columns, latent_columns) takes what was attended to, latents, to a head's values. `gate`, of the hidden
 * states, gives each head a gate, or one for each of its columns, by whose sigmoid the values are multiplied. */
typedef struct {
    Projection query, key, value, output, query_first, key_up, gate;
    Norm before, after;         /* without a weight: x is normed, and what attention gives is all: no residual, no norm */
    Norm query_norm, key_norm;  /* grouped: as wide as a head, or as all of them; latent: of query_first's, of latents */
    const float *sinks;         /* (heads): a score without a value that joins a head's softmax; NULL: none */
    size_t heads, kv_heads;     /* latent: one kv head */
    size_t key_columns, value_columns, rotary_columns; /* of a head */
    size_t latent_columns;      /* 0: grouped */
    size_t window;              /* positions that a token attends to, its own included; 0: all */
    int chunked;                /* a token attends from a multiple of the window on */
    int gated;
    int interleaved;            /* columns 2 i and 2 i + 1 rotate together, not i and rotary_columns / 2 + i; 2: and are rounded
                                 * once, not after each product, too */
    int norms_rotated;          /* grouped: a head is normed after it is rotated, not before */
    float scale;                /* of scores */
    float residual_multiplier;  /* of the output before the residual sum */
} Attention;

/* Which tokens. Those of one sequence have different positions. */
typedef struct {
    size_t tokens;
    const int64_t *slabs, *positions; /* (tokens): whose cache, and where in it the token's key and value go */
    const int64_t *first;             /* (tokens): the first position that is no padding; NULL: 0 */
    const float *cos, *sin;           /* (tokens, rotary_columns) */
    const float *temperatures;        /* (tokens): what a token's queries are multiplied by; NULL: 1 */
    size_t rotary_columns;
    size_t spread; /* the most positions between two tokens of one sequence */
    const int32_t *chosen; /* (tokens, most): what a token attends to instead of all up to its own position, ascending; a
                            * token with fewer has them at its row's beginning, and then -1 or what is not looked at; NULL: all */
    size_t most;
} Step;

/* Fills in `spread`. */
void step_measure(Step *step);

/* NULL where the layer can do the step with these slabs, else what does not fit. */
const char *attention_misfit(const Attention *layer, const Step *step, const Slabs *slabs);

/* Bytes of workspace. */
size_t attention_workspace(const Attention *layer, const Step *step, const Slabs *slabs, size_t threads);

/* x (tokens, H) -> out (tokens, H): x + residual_multiplier * the attention's output, and normed (tokens, H): its norm.
 * x, out and normed lie apart. */
void attention_run(const Attention *layer, const Step *step, const Slabs *slabs, const bf16 *x, bf16 *out, bf16 *normed,
                   void *workspace, size_t threads);

#endif
