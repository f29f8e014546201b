/* Products with matrices that are kept row by row: INT8 and BF16. */
#ifndef TIERMOE_ROWS_H
#define TIERMOE_ROWS_H

#include "matrix.h"

/* matrix_block in INT8 and BF16. */
void rows_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                size_t stride);

#endif
