/* What is made of 1 / (1 + e^-x). */
static inline Vector one_and_exponential(Vector x) { return plus(all(1), exponential(minus(zeros(), x))); }

/* x * sigmoid(x) */
static inline Vector silu_of(Vector x) { return over(x, one_and_exponential(x)); }

static void times_sigmoid(bf16 *x, const bf16 *gate, size_t columns) {
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector sigmoid = as_bf16(over(all(1), one_and_exponential(load_bf16(gate + c))));
        store_bf16(x + c, times(load_bf16(x + c), sigmoid));
    }
}
