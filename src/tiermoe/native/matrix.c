#include "matrix.h"

#include "kernels.h"

size_t matrix_blocks(const Matrix *matrix) { return (matrix->rows + BLOCK - 1) / BLOCK; }

size_t matrix_prepared(const Matrix *matrix) { return kernels->prepared(matrix); }

void matrix_prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    kernels->prepare(matrix, x, tokens, prepared);
}

int matrices_alike(const Matrix *a, const Matrix *b) {
    return a->coding == b->coding && a->columns == b->columns && a->group == b->group;
}

void matrix_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                  size_t stride) {
    kernels->block[matrix->coding](matrix, block, x, prepared, tokens, out, stride);
}
