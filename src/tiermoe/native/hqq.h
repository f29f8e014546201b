/* Half-quadratic quantization of blocks of a matrix: see quant/quantizers.py, whose results these are bit for bit. */
#ifndef TIERMOE_HQQ_H
#define TIERMOE_HQQ_H

#include <stddef.h>
#include <stdint.h>

#include "weights.h"

enum { MOST_GROUP = 256, MOST_STEPS = 32 };

typedef struct {
    Weights weights;
    size_t group;             /* weights of a row that share a scale; a multiple of 16, at most MOST_GROUP */
    size_t block;             /* rows solved together: they stop at the same step */
    float largest;            /* the largest code */
    const double *thresholds; /* (steps) errors up to this size are shrunk to nothing */
    size_t steps;             /* at most MOST_STEPS */
    uint8_t *codes;           /* (rows, columns), or NULL where nobody asks for them */
    float *scale, *offset;    /* (rows, columns / group) */
    uint8_t *shrunk;          /* (blocks) set to 1 where an error is beyond its threshold: the block is not solved */
} Hqq;

/* Finds codes, scales and offsets. */
void hqq_run(const Hqq *job, size_t threads);

#endif
