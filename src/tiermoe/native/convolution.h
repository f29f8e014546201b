/* A causal convolution over a token's last inputs, channel by channel, rounded to bfloat16 and, where asked for, its silu,
 * rounded again. A sum begins with the oldest input and ends with the bias, so a token's bits depend on its sequence's inputs
 * alone. */
#ifndef TIERMOE_CONVOLUTION_H
#define TIERMOE_CONVOLUTION_H

#include "quants.h"

enum { MOST_TAPS = 8 };

typedef struct {
    const bf16 *taps; /* (kept + 1, channels): the weights, those of the oldest input first */
    const bf16 *bias; /* (channels); NULL: none */
    size_t kept;      /* inputs before a token's own */
    size_t channels;  /* a multiple of 16 */
    int silu;
} Convolution;

/* Tokens of several sequences, those of a row one after the other: `ends` (rows) says behind which one each row ends. What is
 * kept of a row's sequence is at first that at place `before`, and is left at `after`, which may be the same. */
typedef struct {
    size_t tokens, rows;
    const int64_t *ends, *before, *after;
    const int64_t *prompts; /* (rows): whether it is a prompt's */
} StateRows;

typedef struct {
    StateRows rows;
    const bf16 *values; /* (tokens, channels), rows `stride` apart */
    size_t stride;
    bf16 *inputs; /* (places, kept, channels): the last ones of each sequence */
} ConvolutionStep;

static inline size_t row_begin(const StateRows *rows, size_t row) { return row ? (size_t)rows->ends[row - 1] : 0; }

/* The tasks of a step, and one of them: some channels of a row, into out (tokens, channels), float32 or, if that is NULL,
 * bfloat16. */
size_t convolution_tasks(const Convolution *layer, const ConvolutionStep *step);
void convolution_task(const Convolution *layer, const ConvolutionStep *step, size_t task, float *wide, bf16 *out);

/* out (tokens, channels) */
void convolution_run(const Convolution *layer, const ConvolutionStep *step, bf16 *out, size_t threads);

#endif
