/* What an instruction set provides: one table each (isa/), of which the program uses one. Everything around them, the
 * team of threads, the phases of a layer and the choice of experts, is compiled once and calls through `kernels`.
 *
 * Sums run in one order whatever the number of tokens, threads or blocks, and give the same bits in each table. Products with
 * packed weights, GGUF's blocks and published codes take activations as codes of 8 bits (isa/integers.h); weights are exact. */
#ifndef TIERMOE_KERNELS_H
#define TIERMOE_KERNELS_H

#include "attention_tiles.h"
#include "encode.h"
#include "expert.h"
#include "matrix.h"
#include "neurons.h"
#include "norm.h"
#include "route.h"
#include "scan.h"

/* Clang before 16 has dot products of bytes only where it compiles for a processor that has them. */
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define HAS_NEONDOT
#endif

typedef struct {
    const char *name; /* in TIERMOE_ISA */
    int (*runs)(void); /* whether this machine has the instructions */

    /* matrix_prepared, matrix_prepare, and the product of each coding (isa/products.h): matrix_block. */
    size_t (*prepared)(const Matrix *matrix);
    void (*prepare)(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared);
    void (*product[CODINGS])(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                           size_t stride);

    /* gated (tokens, 64), `stride` apart: a block of gate and up of each token through the expert's gate. */
    void (*gate)(const bf16 (*values)[2 * BLOCK], const Expert *expert, size_t tokens, bf16 *out, size_t stride);

    /* experts_combine of at least one row. */
    void (*combine)(const bf16 *const *rows, const float *weights, size_t count, size_t columns, bf16 *out);

    /* rows (columns) = rows * factor, rounded, plus others, rounded; columns a multiple of 16. */
    void (*add)(bf16 *rows, float factor, const bf16 *others, size_t columns);

    /* x (columns) = x * sigmoid(gate), the sigmoid rounded; columns a multiple of 16. */
    void (*times_sigmoid)(bf16 *x, const bf16 *gate, size_t columns);

    /* See norm.h. */
    float (*norm_scale)(const bf16 *x, size_t width, float epsilon);
    void (*norm_part)(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out);
    void (*layer_norm)(const Norm *norm, const bf16 *x, bf16 *out);

    /* The first `rotary` columns of a head rotated (rotate in attention.c); the columns beyond the rotated ones are the caller's. */
    void (*rotate)(const bf16 *head, const float *cos, const float *sin, size_t rotary, int interleaved, bf16 *out);

    /* logits (tokens, rows) = weight (rows, columns) times x (tokens, columns); columns a multiple of 32. */
    void (*logits)(const bf16 *weight, const bf16 *x, size_t tokens, size_t rows, size_t columns, float *logits);

    /* e^x and log(1 + e^x) of some numbers, in their place. */
    void (*exponentials)(float *x, size_t count);
    void (*softplus)(float *x, size_t count);

    /* See attention_tiles.h. */
    void (*attend_tile)(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                        float *results);
    void (*attend_rows)(const Positions *positions, const QueryRows *rows, float *workspace);
    void (*merge_tiles)(float *results, size_t tiles, size_t stride, size_t value_columns, const float *sink, bf16 *out);

    /* See convolution.h. out (columns, a multiple of 16) = the sum of taps[i] (rows `stride` apart) times inputs[i], and of the
     * bias, rounded; or silu of that, rounded. */
    void (*convolve)(const bf16 *const *inputs, size_t count, const bf16 *taps, size_t stride, const bf16 *bias, int silu,
                     size_t columns, float *out);

    /* Parts of delta.h; columns are multiples of 16. x becomes `scale` times x of length one. The `count` decays of a head, and
     * its beta. A state's columns `from` (keys, columns), rows `stride` apart, become `to`, which may be the same, by one token;
     * out (columns): what it gives. `decays` is one number, or a number for each row of the state. out = the norm of x, rounded,
     * times weight times the gate of a kind. */
    void (*delta_unit)(float *x, size_t columns, float scale);
    void (*delta_factors)(const bf16 *steps, const float *biases, float rate, float least_decay, size_t count, float *decays,
                          const bf16 *b, float *beta);
    void (*delta_rule)(const float *from, float *to, size_t keys, size_t stride, size_t columns, const float *key,
                       const float *query, const float *value, const float *decays, size_t count, float beta, float *out);
    void (*delta_gate)(const float *x, const bf16 *weight, float epsilon, int kind, const bf16 *gate, size_t columns, bf16 *out);

    /* Parts of scan.h: a token's time steps, at least `least_step`, and decays; a strip of a head; a norm of float32 columns; the
     * columns from .. from + columns of a row of Mamba-1. */
    void (*scan_steps)(const bf16 *raw, const float *biases, const float *rates, float least_step, size_t count, float *steps,
                       float *decays);
    void (*scan)(const ScanStrip *strip);
    void (*scan_norm)(const float *x, const bf16 *weight, float epsilon, size_t columns, bf16 *out);
    void (*scan_channels)(const ChannelScan *layer, const ChannelScanStep *step, size_t row, size_t from, size_t columns);

    /* Packing: a store has the same bytes whichever table made it. A block of Hqq, 0 where it is not solved, and a block of 64
     * rows of Codes. */
    int (*hqq)(const Hqq *job, size_t block);
    void (*encode)(const Codes *job, size_t block);

    /* products[i] = gate * (w3 . x) of used neurons begin .. end; sums[g] = the sum of x's columns of group g. */
    void (*neurons_up)(const Neurons *neurons, const float *x, const float *sums, size_t begin, size_t end, float *products);

    /* Bytes begin .. end of the columns of W2, at most BYTES_TASK: out = the sum of products[i] times column i, in each
     * strip. */
    void (*neurons_down)(const Neurons *neurons, const float *products, size_t begin, size_t end, bf16 *out);
} Kernels;

/* The tables of this build that this machine runs, the fastest first; ends with NULL. */
const Kernels *const *kernels_here(void);

/* The table in use: at first the fastest. Written by kernels_use alone, while no kernel runs. */
extern const Kernels *kernels;

/* Uses the table of that name; 0 where there is none that runs here. */
int kernels_use(const char *name);

#endif
