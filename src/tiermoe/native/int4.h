/* Products with matrices in INT4. */
#ifndef TIERMOE_INT4_H
#define TIERMOE_INT4_H

#include "matrix.h"

/* matrix_block in INT4. */
void int4_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                size_t stride);

#endif
