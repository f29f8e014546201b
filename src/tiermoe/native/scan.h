/* The recurrences of state-space layers after their convolutions, token after token: Mamba-2 (Granite 4, Nemotron-H;
 * arXiv:2405.21060), with the norm that follows, and Mamba-1 (Jamba; arXiv:2312.00752). A state S (state, columns) becomes
 *
 *   S' = D S + key (x) step value      and gives      (S'^T query + skip value) silu(gate),
 *
 * where D = exp(-rate step) multiplies all of a head's S (Mamba-2), or has a rate for each of its numbers and a step for each
 * of its columns (Mamba-1). States and what lies between are float32; a token's bits depend on its sequence alone. */
#ifndef TIERMOE_SCAN_H
#define TIERMOE_SCAN_H

#include "convolution.h"

enum {
    SCAN_COLUMNS = 16,       /* a head's columns, and Mamba-1's channels, are a multiple of them */
    MOST_CHANNEL_STATE = 256, /* rows of Mamba-1's state */
};

typedef struct {
    const float *rates, *biases, *skips; /* (heads) */
    const bf16 *norm;                    /* (heads * columns): its root mean squares are those of a group */
    float epsilon;
    float least_step; /* of prompts */
    size_t heads, columns;
    size_t groups, state; /* heads / groups heads share a query and a key, of `state` columns */
} Scan;

/* mixed (tokens, heads * columns + 2 groups * state): values of all heads, keys of all groups, their queries; times (tokens,
 * heads), the steps' softplus before their biases; gates (tokens, heads * columns); rows are as far apart as the strides say.
 * states (places, heads, state, columns). */
typedef struct {
    StateRows rows;
    const bf16 *mixed, *times, *gates;
    size_t mixed_stride, times_stride, gates_stride;
    float *states;
    bf16 *out; /* (tokens, heads * columns) */
} ScanStep;

/* Bytes of workspace. */
size_t scan_workspace(const Scan *layer, size_t tokens);

void scan_run(const Scan *layer, const ScanStep *step, void *workspace, size_t threads);

/* Mamba-1. */
typedef struct {
    const float *rates; /* (state, channels) */
    const float *skips; /* (channels) */
    size_t state, channels;
} ChannelScan;

/* values, times, gates (tokens, channels), keys, queries (tokens, state), rows as far apart as the strides say. states (places,
 * state, channels). */
typedef struct {
    StateRows rows;
    const bf16 *values, *times, *gates, *keys, *queries;
    size_t values_stride, times_stride, gates_stride, keys_stride, queries_stride;
    float *states;
    bf16 *out; /* (tokens, channels) */
} ChannelScanStep;

void channel_scan_run(const ChannelScan *layer, const ChannelScanStep *step, size_t threads);

/* Some columns of a head's state, through the tokens of a row: what an instruction set computes. Rows of a state are `width`
 * apart. */
typedef struct {
    size_t tokens, state, columns, width;
    const float *before;
    float *after;
    const bf16 *values, *gates;
    size_t values_stride, gates_stride;
    const float *keys, *queries, *steps, *decays; /* of a token; `shared_stride` and `heads_stride` behind that of the one before */
    size_t shared_stride, heads_stride;
    float skip;
    float *out;
    size_t out_stride;
} ScanStrip;

#endif
