/* The quants of a set: its products with packed blocks, with rows, with strips of GGUF's blocks and of published codes, and what
 * they want to know of x beforehand. Where a set has none of its own, those of plain C serve. */
#ifndef TIERMOE_ISA_PRODUCTS_H
#define TIERMOE_ISA_PRODUCTS_H

#include "../kernels.h"
#include "activations.h"
#include "integers.h"
#include "strips.h"

#if defined(SIMD_AVX512)
#include "avx512/e4m3.h"
#include "avx512/row_blocks.h"
#include "avx512/rows.h"
#include "avx512/strip_products.h"
#elif defined(SIMD_AVX2)
#include "avx2/row_blocks.h"
#include "avx2/strip_products.h"
#include "rows.h"
#elif defined(SIMD_NEON)
#include "neon/row_blocks.h"
#include "neon/strip_products.h"
#include "rows.h"
#else
#include "generic/row_blocks.h"
#include "rows.h"
#include "strip_products.h"
#endif
#include "e4m3.h"

#define BLOCKS_PRODUCT(coding, name) \
    PRODUCT(name) { (void)x, block_times(coding, matrix, block, prepared, tokens, out, stride); }
BLOCKS_PRODUCT(INT4, int4)
BLOCKS_PRODUCT(NL4, nl4)
BLOCKS_PRODUCT(NL3, nl3)
BLOCKS_PRODUCT(NL2, nl2)
BLOCKS_PRODUCT(TCQ2, tcq2)
BLOCKS_PRODUCT(INT6, int6)
BLOCKS_PRODUCT(INT2, int2)

PRODUCT(bf16) { (void)prepared, rows_block(matrix, block, x, tokens, out, stride); }

#define STRIPS_PRODUCT(coding, name, columns, bytes, group, offsets) \
    PRODUCT(name) { (void)x, strips_block(coding, group, matrix, block, prepared, tokens, out, stride); }
EACH_GGUF_QUANT(STRIPS_PRODUCT)
STRIPS_PRODUCT(INT8, int8, 1, 1, 32, 0)
STRIPS_PRODUCT(S4, s4, 32, 16, 32, 0)
STRIPS_PRODUCT(U4, u4, 32, 16, 32, 1)
PRODUCT(e2m1) {
    (void)x;
    if (matrix->group == 16)
        strips_block(E2M1, 16, matrix, block, prepared, tokens, out, stride);
    else
        strips_block(E2M1, 32, matrix, block, prepared, tokens, out, stride);
}

static size_t token_floats(const Matrix *matrix) { return of_integers(matrix->coding) ? integer_floats(matrix->columns) : 0; }

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    const size_t floats = token_floats(matrix);
    for (; floats && tokens; tokens--, x += matrix->columns, prepared += floats) to_integers_of(x, matrix->columns, prepared);
}

#endif
