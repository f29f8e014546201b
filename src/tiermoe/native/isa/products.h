/* The quants of a set: its products with packed blocks, with rows, with GGUF's blocks and published codes, and what they want
 * to know of x beforehand. Where a set has none of its own, those of plain C over Eight (strip_products.h, rows.h) serve. */
#ifndef TIERMOE_ISA_PRODUCTS_H
#define TIERMOE_ISA_PRODUCTS_H

#include "../kernels.h"
#include "activations.h"
#include "strips.h"

#if defined(SIMD_AVX512)
#include "avx512/blocks.h"
#include "avx512/rows.h"
#include "avx512/strip_products.h"
#elif defined(SIMD_AVX2)
#include "avx2/blocks.h"
#include "avx2/strip_products.h"
#include "rows.h"
#elif defined(SIMD_NEON)
#include "neon/blocks.h"
#include "rows.h"
#include "strip_products.h"
#else
#include "generic/blocks.h"
#include "generic/rows.h"
#include "strip_products.h"
#endif

#if defined(SIMD_NEON) || !(defined(SIMD_AVX2) || defined(SIMD_AVX512))
/* From 2 bits to 4: the level that a code stands for is step * code + (5 - step) * place, where the low two bits of a
 * ladder are step - 2 and its high two bits place. A level fits a nibble. */
static inline uint8_t level(unsigned code, unsigned ladder) {
    const unsigned step = (ladder & 3) + 2, place = ladder >> 2;
    return (uint8_t)(step * code + (5 - step) * place);
}

static void widen_codes(const uint8_t *pairs, const uint8_t *ladders, size_t count, size_t run, uint8_t *codes) {
    for (size_t n = 0; n < count; n++, ladders += run, codes += 4 * run)
        for (size_t i = 0; i < 4; i++, pairs += run, codes += run)
            for (size_t r = 0; r < run; r++) {
                const unsigned low = ladders[r] & 15, high = ladders[r] >> 4, pair = pairs[r];
                codes[r] = (uint8_t)(level(pair & 3, low) | level(pair >> 4 & 3, high) << 4);
                codes[4 * run + r] = (uint8_t)(level(pair >> 2 & 3, low) | level(pair >> 6, high) << 4);
            }
}
#endif

PRODUCT(int4) { block_times(INT4, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(nl4) { block_times(NL4, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(nl3) { block_times(NL3, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(nl2) { block_times(NL2, matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(int6) { block_times(INT6, matrix, block, x, prepared, tokens, out, stride); }

/* A block's codes become those of INT4, in memory that stays in the cache, and are multiplied as those are. */
PRODUCT(int2) {
    const size_t weights = BLOCK * matrix->columns, run = BLOCK * matrix->group / 16;
    const uint8_t *pairs = (const uint8_t *)matrix->weights + block * weights / 4;
    uint8_t codes[weights / 2] __attribute__((aligned(64)));
    widen_codes(pairs, (const uint8_t *)matrix->ladders + block * weights / 16, weights / 16 / run, run, codes);
    const bf16 *scales = (const bf16 *)matrix->scales + 2 * block * BLOCK;
    Matrix widened = *matrix;
    widened.coding = INT4, widened.weights = codes, widened.scales = scales, widened.ladders = NULL;
    PRODUCT_NAME(int4)(&widened, 0, x, prepared, tokens, out, stride);
}

PRODUCT(int8) { rows_block(matrix, block, x, prepared, tokens, out, stride); }
PRODUCT(bf16) { rows_block(matrix, block, x, prepared, tokens, out, stride); }

#if defined(SIMD_NEON) || !(defined(SIMD_AVX2) || defined(SIMD_AVX512))
#define STRIPS_PRODUCT(coding, name, columns, bytes, group, offsets) \
    PRODUCT(name) { strips_block(matrix, block, x, prepared, tokens, out, stride); }
EACH_STRIP_QUANT(STRIPS_PRODUCT)
#endif

#if !defined(SIMD_AVX2)
/* Where sums of groups are all that products want to know of x beforehand. */
static size_t prepared_floats(const Matrix *matrix) { return matrix_groups(matrix); }

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    group_sums(x, matrix->group, matrix_groups(matrix), tokens, prepared);
}
#endif

#endif
