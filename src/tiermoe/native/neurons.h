/* One token through some neurons of an expert W2 (gates * W3 x), each a record of its own: row j of W3 beside column j of
 * W2, laid out as formats/neurons.py says. */
#ifndef TIERMOE_NEURONS_H
#define TIERMOE_NEURONS_H

#include <stddef.h>
#include <stdint.h>

#include "quants.h"

typedef struct {
    const uint8_t *records;
    size_t record_bytes;
    size_t width;        /* columns of W3 and rows of W2: a multiple of 16 * 8 / bits */
    size_t group;        /* weights that share a scale: a multiple of 16 that divides a strip, width * bits / 8, and a task */
    int bits;            /* 4 or 2 */
    int two_level;       /* whether scales and zeros are bytes, multiples of one unit; so they are at 2 bits */
    const int64_t *used; /* the neurons, ascending */
    size_t count;
    const bf16 *gates; /* act(W1 x) of every neuron */
} Neurons;

enum {
    NEURONS_TASK = 16, /* neurons */
    BYTES_TASK = 256,  /* of a column of W2 */
};

/* Floats that neurons_run needs. */
size_t neurons_workspace(const Neurons *neurons);

/* out (width) = the sum over the used neurons of gate_j (w3_j . x) w2_j, in ascending order of j. */
void neurons_run(const Neurons *neurons, const bf16 *x, float *workspace, bf16 *out, size_t threads);

/* to[i] = from[i] for the `count` rows in `used`, each of `row_bytes` bytes. */
void neurons_gather(const uint8_t *from, uint8_t *to, size_t row_bytes, const int64_t *used, size_t count);

#endif
