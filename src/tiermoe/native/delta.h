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

#include "quants.h"

enum {
    DELTA_COLUMNS = 16, /* a head's keys and values have a multiple of them */
    MOST_TAPS = 8,
};

/* What multiplies a norm: silu of the gate, rounded after each product, or its sigmoid, rounded once (Kimi). */
enum { DELTA_SILU, DELTA_SIGMOID };

typedef struct {
    const bf16 *taps;    /* (kept + 1, channels): the convolution's weights, those of the oldest input first */
    const float *rates;  /* (heads): the logarithm of a decay is -rate * softplus(a + bias), or, where least_decay is not 0,
                            least_decay * sigmoid(rate * (a + bias)) */
    const float *biases; /* (heads, decay_columns) */
    const bf16 *norm;    /* (value_columns) */
    float epsilon, least_decay;
    int gate;
    size_t kept; /* inputs before a token's own */
    size_t key_heads, heads; /* heads / key_heads heads share a query and a key */
    size_t key_columns, value_columns;
    size_t decay_columns; /* 1: a decay for each head; key_columns: for each row of its state */
} Delta;

/* Which tokens: those of a row one after the other, `ends` (rows) says behind which one each row ends. Inputs and states of a
 * row begin as those at place `before` and are left at `after`, which may be the same.
 *
 * mixed (tokens, channels): queries of all key heads, their keys, values of all heads; gates (tokens, heads * value_columns);
 * betas (tokens, heads), decays (tokens, heads * decay_columns); rows are as far apart as the strides say. inputs (places, kept, channels); states (places,
 * heads, key_columns, value_columns). */
typedef struct {
    size_t tokens, rows;
    const int64_t *ends, *before, *after;
    const bf16 *mixed, *gates, *betas, *decays;
    size_t mixed_stride, gates_stride, betas_stride, decays_stride;
    bf16 *inputs;
    float *states;
    bf16 *out; /* (tokens, heads * value_columns) */
} DeltaStep;

size_t delta_channels(const Delta *layer);

/* Bytes of workspace. */
size_t delta_workspace(const Delta *layer, size_t tokens);

void delta_run(const Delta *layer, const DeltaStep *step, void *workspace, size_t threads);

#endif
