/* Products of bfloat16 tokens with a matrix of 4-bit codes in the order of torch's CPU int4 operator (AVX-512).
 *
 * A matrix of N outputs and K inputs is kept in blocks of 64 rows; N is a multiple of 64. Within a block the column is
 * the outer index: 32 bytes a column, byte j holds row j (low nibble) and row 32 + j (high nibble). Every `group`
 * columns of a row share a scale and a zero, bfloat16 pairs (K / group, N, 2): w = (code - 8) * scale + zero.
 *
 * Codes minus 8 are exact in bfloat16, so the products of a group are summed in float32 before the scale is applied: the
 * weights are never rounded. Every output is summed in one order, whatever the number of tokens, threads or blocks.
 */
#ifndef TIERMOE_INT4_H
#define TIERMOE_INT4_H

#include <stddef.h>
#include <stdint.h>

enum { BLOCK = 64 }; /* rows of a block */

typedef uint16_t bf16;

typedef struct {
    const uint8_t *codes;
    const uint32_t *scales; /* (K / group, N): the scale in the low half of a word, the zero in the high half */
    size_t rows, columns, group;
} Int4;

/* sums[m * (columns / group) + g] = the sum of x[m]'s columns of group g. x: (tokens, columns). */
void int4_group_sums(const bf16 *x, size_t tokens, const Int4 *matrix, float *sums);

/* out[m * stride + i] = row 64 * block + i of the matrix times x[m], rounded to bfloat16. */
void int4_block(const Int4 *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                size_t stride);

#endif
