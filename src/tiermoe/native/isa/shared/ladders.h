/* Products with matrices of INT2: a block's codes become those of INT4, in memory that stays in the cache, and are multiplied
 * as those are. */
static void int2_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t weights = BLOCK * matrix->columns, run = BLOCK * matrix->group / 16;
    const uint8_t *pairs = (const uint8_t *)matrix->weights + block * weights / 4;
    uint8_t codes[weights / 2] __attribute__((aligned(64)));
    widen_codes(pairs, (const uint8_t *)matrix->ladders + block * weights / 16, weights / 16 / run, run, codes);
    const bf16 *scales = (const bf16 *)matrix->scales + 2 * block * BLOCK;
    Matrix widened = *matrix;
    widened.coding = INT4, widened.weights = codes, widened.scales = scales, widened.ladders = NULL;
    int4_block(&widened, 0, x, sums, tokens, out, stride);
}
