#include "matrix.h"

#include "kernels.h"

size_t matrix_blocks(const Matrix *matrix) { return (matrix->rows + BLOCK - 1) / BLOCK; }

size_t matrix_groups(const Matrix *matrix) { return has_offsets(matrix->coding) ? matrix->columns / matrix->group : 0; }

void matrix_group_sums(const Matrix *matrix, const bf16 *x, size_t tokens, float *sums) {
    kernels->group_sums(x, matrix->group, matrix_groups(matrix), tokens, sums);
}

void matrix_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                  size_t stride) {
    kernels->block[matrix->coding](matrix, block, x, sums, tokens, out, stride);
}
