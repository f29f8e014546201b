/* Products of a block with every coding that has blocks of its own, each a function of the kernels' table. What includes this
 * defines block_times. */
#define BLOCK_OF(name, coding)                                                                                           \
    static void name(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,     \
                     size_t stride) {                                                                                    \
        block_times(coding, matrix, block, x, sums, tokens, out, stride);                                                \
    }

BLOCK_OF(int4_block, INT4)
BLOCK_OF(nl4_block, NL4)
BLOCK_OF(nl3_block, NL3)
BLOCK_OF(nl2_block, NL2)
BLOCK_OF(int6_block, INT6)
