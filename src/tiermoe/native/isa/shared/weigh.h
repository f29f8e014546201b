/* What a tile attends to: values weighted by the softened scores, over Vector. */

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i, for `width` columns from `begin` on. `keys`:
 * of the next tile, to be fetched; NULL: are. */
static inline __attribute__((always_inline)) void weigh(size_t count, size_t width, const Positions *positions,
                                                        const TileRows *rows, const bf16 (*weights)[TILE], size_t begin,
                                                        float *results, size_t stride, const Ahead *keys) {
    Vector sums[QUERIES][128 / LANES];
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) sums[q][r] = zeros();
    for (size_t i = 0; i < rows->count; i++) {
        if (keys) fetch(keys, i, 1);
        const bf16 *values = (const bf16 *)positions->values + tile_row(rows, i) * positions->value_stride + begin;
        for (size_t r = 0; r < width / LANES; r++) {
            const Vector some = load_bf16(values + LANES * r);
            for (size_t q = 0; q < count; q++) sums[q][r] = times_plus(some, all(from_bf16(weights[q][i])), sums[q][r]);
        }
    }
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) store(results + q * stride + begin + LANES * r, sums[q][r]);
}
