/* Rows of keys and values as bfloat16, whatever the cache holds. */

/* `columns` values of row `row` from column `from` on: where they lie, or, of codes, in `room`. A code is exact in
 * bfloat16; its scale is the caller's. */
static inline __attribute__((always_inline)) const bf16 *kept_row(const void *rows, size_t stride, size_t row, size_t from,
                                                                  size_t columns, int coded, bf16 *room) {
    if (!coded) return (const bf16 *)rows + row * stride + from;
    const int8_t *codes = (const int8_t *)rows + row * stride + from;
    for (size_t c = 0; c < columns; c++) {
        const float value = codes[c];
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        room[c] = (bf16)(bits >> 16);
    }
    return room;
}

/* A tile's rows of codes as bfloat16, in `room`, and where they are then. */
static const bf16 *unpacked(const void *rows, size_t stride, size_t columns, const TileRows *tile, bf16 *room) {
    for (size_t i = 0; i < tile->count; i++) kept_row(rows, stride, tile_row(tile, i), 0, columns, 1, room + i * columns);
    return room;
}

/* out[i] = the scale of position i of a tile, to the end of the lanes. */
static inline void tile_scales(const bf16 *scales, const TileRows *rows, float *out) {
    const size_t lanes = (rows->count + LANES - 1) / LANES * LANES;
    for (size_t i = 0; i < lanes; i++) out[i] = from_bf16(scales[tile_row(rows, i)]);
}
