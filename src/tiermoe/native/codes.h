/* Codes of a matrix in the order of matrix.h, and how far the weights that they stand for are from those they were made of:
 * what the encodings of quant/ say in torch, bit for bit. */
#ifndef TIERMOE_CODES_H
#define TIERMOE_CODES_H

#include "weights.h"

typedef struct {
    uint8_t step, place; /* the levels step * code + (5 - step) * place of the 16 of INT4; code 0 .. 3 */
} Ladder;

typedef struct {
    Coding coding;       /* INT8, INT6, INT4 or INT2 */
    Weights weights;     /* INT6: rows a multiple of 64; INT4, INT2: of 16 */
    size_t group;        /* of 32, 64, 128 or 256 columns; INT8: all of them */
    int exact;           /* whether weights are decoded to float32; else to bfloat16 */
    float *scales;       /* (rows, columns / group), as they are stored; INT6: to be found */
    const float *zeros;  /* INT4, INT2: beside the scales */
    uint8_t *codes;      /* to be written */
    uint8_t *chosen;     /* INT2: the ladders, to be written */
    const Ladder *ladders;
    size_t count;        /* of ladders, the first of equally good ones is taken */
    size_t together;     /* INT2: rows whose ladders torch chooses together, which decides how it sums */
    double *squares;     /* (blocks of 64 rows, 2): of what decoding differs by, and of the weights */
} Codes;

void codes_run(const Codes *job, size_t threads);

#endif
