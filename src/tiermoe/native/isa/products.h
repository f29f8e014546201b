/* The quants of a set: its products with packed blocks, with rows, with GGUF's blocks and published codes, and what they want
 * to know of x beforehand. Where a set has none of its own, those of plain C over Eight (gguf_products.h, rows.h) serve. */
#ifndef TIERMOE_ISA_PRODUCTS_H
#define TIERMOE_ISA_PRODUCTS_H

#include "../kernels.h"
#include "activations.h"
#include "integers.h"
#include "strips.h"

#if defined(SIMD_AVX512)
#include "avx512/row_blocks.h"
#include "avx512/rows.h"
#include "avx512/gguf_products.h"
#elif defined(SIMD_AVX2)
#include "avx2/row_blocks.h"
#include "avx2/gguf_products.h"
#include "rows.h"
#else
#include "generic/row_blocks.h"
#include "rows.h"
#include "gguf_products.h"
#endif

PRODUCT(int4) { block_times(INT4, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(nl4) { block_times(NL4, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(nl3) { block_times(NL3, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(nl2) { block_times(NL2, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(tcq2) { block_times(TCQ2, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(int6) { block_times(INT6, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(int2) { block_times(INT2, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(int8) { rows_block(matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(bf16) { rows_block(matrix, block, x, prepared, tokens, out, stride); }

#if defined(SIMD_NEON) || !(defined(SIMD_AVX2) || defined(SIMD_AVX512))
#define STRIPS_PRODUCT(coding, name, columns, bytes, group, offsets) \
    PRODUCT(name) { strips_block(matrix, block, x, prepared, tokens, out, stride); }
EACH_STRIP_QUANT(STRIPS_PRODUCT)
#endif

#if !defined(SIMD_AVX2)
static size_t prepared_floats(const Matrix *matrix) {
    return of_integers(matrix->coding) ? integer_floats(matrix->columns) : matrix_groups(matrix);
}

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    if (!of_integers(matrix->coding)) {
        group_sums(x, matrix->group, matrix_groups(matrix), tokens, prepared);
        return;
    }
    for (size_t m = 0; m < tokens; m++)
        to_integers_of(x + m * matrix->columns, matrix->columns, prepared + m * integer_floats(matrix->columns));
}
#endif

#endif
