/* Fewer than LANES numbers in bfloat16, over load_bf16 and store_bf16. */

/* The first `count` of them, at most LANES; 0 behind them. */
static inline Vector load_some(const bf16 *from, size_t count) {
    if (count >= LANES) return load_bf16(from);
    bf16 some[LANES] = {0};
    memcpy(some, from, count * sizeof *some);
    return load_bf16(some);
}
static inline void store_some(bf16 *to, size_t count, Vector v) {
    bf16 some[LANES];
    store_bf16(some, v);
    memcpy(to, some, (count < LANES ? count : LANES) * sizeof *some);
}
