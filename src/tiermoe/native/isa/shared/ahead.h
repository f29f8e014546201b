/* What is read next is fetched into the second cache while this core computes: a tile is too short for the processor to
 * notice by itself in time. */
typedef struct {
    const char *from;
    size_t each; /* bytes of a position */
} Ahead;

/* Rows from `row` on, as they lie in memory. */
static inline Ahead ahead_of(const void *rows, size_t stride, int coded, size_t row) {
    const size_t each = stride * (coded ? 1 : sizeof(bf16));
    return (Ahead){(const char *)rows + row * each, each};
}

/* Of positions i .. i + count - 1. */
static inline void fetch(const Ahead *ahead, size_t i, size_t count) {
    for (size_t at = i * ahead->each; at < (i + count) * ahead->each; at += 64) __builtin_prefetch(ahead->from + at, 0, 2);
}
