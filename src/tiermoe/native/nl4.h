/* Scales and codes of NL4 (matrix.h) for a matrix: see quant/nl4.py, whose results these are bit for bit. */
#ifndef TIERMOE_NL4_H
#define TIERMOE_NL4_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const float *weights; /* (rows, columns), finite; rows a multiple of 64 */
    size_t rows, columns;
    size_t group;            /* columns that share a scale */
    const float *candidates; /* (count) scales to try, in units of a group's largest magnitude */
    size_t count;
    size_t steps;    /* of least squares from the best of them */
    uint8_t *blocks; /* the matrix in NL4 */
} Nl4;

void nl4_run(const Nl4 *job, size_t threads);

#endif
