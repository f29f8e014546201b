/* Half-quadratic quantization of blocks of a matrix: see quant/hqq.py, whose results these are bit for bit. */
#ifndef TIERMOE_HQQ_H
#define TIERMOE_HQQ_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const float *weights;     /* (rows, columns) */
    size_t rows, columns;
    size_t group;             /* weights of a row that share a scale; a multiple of 16 */
    size_t block;             /* rows solved together: they stop at the same step */
    float largest;            /* the largest code */
    const double *thresholds; /* (steps) errors up to this size are shrunk to nothing */
    size_t steps;
    uint8_t *codes;           /* (rows, columns) */
    float *scale, *offset;    /* (rows, columns / group) */
    float *workspace;         /* hqq_workspace floats */
    uint8_t *shrunk;          /* (blocks) set to 1 where an error is beyond its threshold: the block is not solved */
} Hqq;

/* Floats that hqq_run needs as workspace on so many threads. */
size_t hqq_workspace(const Hqq *job, size_t threads);

/* Finds codes, scales and offsets. */
void hqq_run(const Hqq *job, size_t threads);

#endif
