/* A matrix of weights as packing reads it. */
#ifndef TIERMOE_WEIGHTS_H
#define TIERMOE_WEIGHTS_H

#include "matrix.h"

typedef struct {
    const void *values; /* (rows, columns): bfloat16, or float32 where it is `wide` */
    size_t rows, columns;
    int wide;
} Weights;

static inline float weight_at(const Weights *weights, size_t index) {
    return weights->wide ? ((const float *)weights->values)[index] : from_bf16(((const bf16 *)weights->values)[index]);
}

#endif
