/* Scales and codes of NL4, NL3 and NL2 (matrix.h) for a matrix: see quant/uneven.py, whose results these are bit for bit. */
#ifndef TIERMOE_UNEVEN_H
#define TIERMOE_UNEVEN_H

#include <stddef.h>
#include <stdint.h>

#include "matrix.h"

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
