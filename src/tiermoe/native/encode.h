/* Packing: what a matrix of weights becomes in the codings of our own, bit for bit as the encodings and quantisers in Python
 * say by torch's operations. A store has the same bytes whichever instruction set made it. */
#ifndef TIERMOE_ENCODE_H
#define TIERMOE_ENCODE_H

#include "quants.h"

/* A matrix as packing reads it. */
typedef struct {
    const void *values; /* (rows, columns): bfloat16, or float32 where it is `wide` */
    size_t rows, columns;
    int wide;
} Weights;

static inline float weight_at(const Weights *weights, size_t index) {
    return weights->wide ? ((const float *)weights->values)[index] : from_bf16(((const bf16 *)weights->values)[index]);
}

/* Codes in the order of quants.h, and how far the weights that they stand for are from those they were made of. */
typedef struct {
    Coding coding;       /* INT8, INT6, INT4 or INT2 */
    Weights weights;     /* INT6: rows a multiple of 64; INT4, INT2: of 16 */
    size_t group;        /* of 32, 64, 128 or 256 columns; INT8: all of them */
    int exact;           /* whether weights are decoded to float32; else to bfloat16 */
    float *scales;       /* (rows, columns / group), as they are stored; INT6: to be found */
    const float *zeros;  /* INT4, INT2: beside the scales */
    uint8_t *codes;      /* to be written */
    double *squares;     /* (blocks of 64 rows, 2): of what decoding differs by, and of the weights */
} Codes;

void codes_run(const Codes *job, size_t threads);

/* Half-quadratic quantization of blocks of a matrix (formats/quantizers.py). */
enum { MOST_GROUP = 256, MOST_STEPS = 32 };

typedef struct {
    Weights weights;
    size_t group;             /* weights of a row that share a scale; a multiple of 16, at most MOST_GROUP */
    size_t block;             /* rows solved together: they stop at the same step */
    float largest;            /* the largest code */
    const double *thresholds; /* (steps) errors up to this size are shrunk to nothing */
    size_t steps;             /* at most MOST_STEPS */
    uint8_t *codes;           /* (rows, columns), or NULL: not wanted */
    float *scale, *offset;    /* (rows, columns / group) */
    uint8_t *shrunk;          /* (blocks) set to 1 where an error is beyond its threshold: the block is not solved */
} Hqq;

/* Finds codes, scales and offsets. */
void hqq_run(const Hqq *job, size_t threads);

/* Scales and codes of NL4, NL3 and NL2 for a matrix (formats/nonuniform.py). */
typedef struct {
    Coding coding;
    const float *weights; /* (rows, columns), finite; rows a multiple of 64 */
    size_t rows, columns;
    size_t group;            /* columns that share a scale */
    const float *candidates; /* (count) scales to try, in units of a group's largest magnitude */
    size_t count;
    size_t steps;    /* of least squares from the best of them */
    uint8_t *blocks; /* the matrix in this coding */
} Uneven;

void uneven_run(const Uneven *job, size_t threads);

#endif
