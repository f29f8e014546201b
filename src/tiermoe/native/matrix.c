#include "matrix.h"

#include <immintrin.h>

#include "int4.h"
#include "rows.h"
#include "target.h"

size_t matrix_blocks(const Matrix *matrix) { return (matrix->rows + BLOCK - 1) / BLOCK; }

size_t matrix_groups(const Matrix *matrix) { return matrix->coding == BF16 ? 0 : matrix->columns / matrix->group; }

TARGET void matrix_group_sums(const Matrix *matrix, const bf16 *x, size_t tokens, float *sums) {
    const size_t groups = matrix_groups(matrix);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    for (size_t i = 0; i < tokens * groups; i++) {
        __m512 sum = _mm512_setzero_ps();
        for (size_t column = 0; column < matrix->group; column += 32) {
            const __m512i values = _mm512_loadu_si512(x + i * matrix->group + column);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)values, ones);
        }
        sums[i] = _mm512_reduce_add_ps(sum);
    }
}

void matrix_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                  size_t stride) {
    (matrix->coding == INT4 ? int4_block : rows_block)(matrix, block, x, sums, tokens, out, stride);
}
