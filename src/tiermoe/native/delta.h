/* The gated delta rule of linear attention layers (Qwen3-Next, after arXiv:2412.06464, and Kimi Delta Attention,
 * arXiv:2510.26692), for tokens of several sequences, between the projections of their hidden states and the output
 * projection: a convolution over a token's last inputs, queries and keys of length one, the recurrence, a norm with a gate. A
 * head's state S (key_columns, value_columns) becomes
 *
 *   S' = D S + key (x) beta (value - (D S)^T key)      and gives      S'^T query,
 *
 * where D multiplies all of S by a head's decay, or each of its rows by a decay of its own (Kimi).
 *
 * Rounded to bfloat16 where the separate operations round; states are float32. A token's values depend on its sequence's
 * state alone: neither the other tokens of a call nor the threads change a bit. */
#ifndef TIERMOE_DELTA_H
#define TIERMOE_DELTA_H

#include "convolution.h"

enum { DELTA_COLUMNS = 16 }; /* a head's keys and values have a multiple of them */

/* What multiplies a norm: silu of the gate, rounded after each product, or its sigmoid, rounded once (Kimi). */
enum { DELTA_SILU, DELTA_SIGMOID };

typedef struct {
    Convolution convolution; /* of queries of all key heads, their keys, values of all heads */
    const float *rates;  /* (heads): the logarithm of a decay is -rate * softplus(a + bias), or, where least_decay is not 0,
                            least_decay * sigmoid(rate * (a + bias)) */
    const float *biases; /* (heads, decay_columns) */
    const bf16 *norm;    /* (value_columns) */
    float epsilon, least_decay;
    int gate;
    size_t key_heads, heads; /* heads / key_heads heads share a query and a key */
    size_t key_columns, value_columns;
    size_t decay_columns; /* 1: a decay for each head; key_columns: for each row of its state */
} Delta;

/* gates (tokens, heads * value_columns); betas (tokens, heads), decays (tokens, heads * decay_columns); rows are as far apart as
 * the strides say. states (places, heads, key_columns, value_columns). */
typedef struct {
    ConvolutionStep mixed;
    const bf16 *gates, *betas, *decays;
    size_t gates_stride, betas_stride, decays_stride;
    float *states;
    bf16 *out; /* (tokens, heads * value_columns) */
} DeltaStep;

/* Bytes of workspace. */
size_t delta_workspace(const Delta *layer, size_t tokens);

void delta_run(const Delta *layer, const DeltaStep *step, void *workspace, size_t threads);

#endif
