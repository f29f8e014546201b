/* Rows of hidden and inner values over Vector: gates of experts, weighted sums, residual sums, sums of groups. */

/* x / (1 + e^-slope) */
static inline Vector sigmoid_of(Vector x, Vector slope) {
    return over(x, plus(all(1), exponential(minus(zeros(), slope))));
}

static inline Vector silu_gate(const bf16 *gate, const bf16 *up) {
    const Vector x = load_bf16(gate);
    return times(as_bf16(sigmoid_of(x, x)), load_bf16(up));
}

/* x * (1 + tanh u) / 2, which is x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + .044715 x^3) */
static inline Vector gelu_gate(const bf16 *gate, const bf16 *up) {
    const Vector x = load_bf16(gate), cubic = times_plus(times(x, x), all(0.07135481627f), all(1.595769122f));
    return times(as_bf16(sigmoid_of(x, times(x, cubic))), load_bf16(up));
}

static inline Vector clamped_gate(Vector gate, Vector up, const Expert *expert) {
    const Vector limit = all(expert->limit), one = all(1);
    gate = as_bf16(smaller(limit, gate)); /* the second operand where one is undefined */
    up = as_bf16(larger_of(minus(zeros(), limit), smaller(limit, up)));
    const Vector slope = as_bf16(times(gate, all(expert->alpha)));
    const Vector opening = as_bf16(times(gate, as_bf16(sigmoid_of(one, slope))));
    return times(as_bf16(plus(up, one)), opening);
}

/* Of 16 columns of a block from column i on. */
static inline Vector gate_of(const bf16 values[2 * BLOCK], int i, const Expert *expert) {
    if (expert->gate == SILU) return silu_gate(values + i, values + BLOCK + i);
    if (expert->gate == GELU_TANH) return gelu_gate(values + i, values + BLOCK + i);
    Vector gate = load_bf16(values + i), up = load_bf16(values + BLOCK + i);
    if (expert->gate == CLAMPED) load_pairs(values + 2 * i, LANES, &gate, &up);
    return clamped_gate(gate, up, expert);
}

static void gate_rows(const bf16 (*values)[2 * BLOCK], const Expert *expert, size_t tokens, bf16 *out, size_t stride) {
    for (size_t m = 0; m < tokens; m++)
        for (int i = 0; i < BLOCK; i += LANES) store_bf16(out + m * stride + i, gate_of(values[m], i, expert));
}

static void combine(const bf16 *const *rows, const float *weights, size_t count, size_t columns, bf16 *out) {
    for (size_t i = 0; i < columns; i += LANES) {
        Vector total = as_bf16(times(load_bf16(rows[0] + i), all(weights[0])));
        for (size_t e = 1; e < count; e++)
            total = as_bf16(plus(total, as_bf16(times(load_bf16(rows[e] + i), all(weights[e])))));
        store_bf16(out + i, total);
    }
}

static void add(bf16 *rows, float factor, const bf16 *others, size_t columns) {
    for (size_t i = 0; i < columns; i += LANES) {
        Vector values = load_bf16(rows + i);
        if (factor != 1) values = as_bf16(times(values, all(factor)));
        store_bf16(rows + i, plus(values, load_bf16(others + i)));
    }
}

static void logits_of(const bf16 *weight, const bf16 *x, size_t rows, size_t columns, float *logits) {
    for (size_t r = 0; r < rows; r++, weight += columns) {
        Dot sum = no_dot();
        for (size_t c = 0; c < columns; c += DOT) sum = dot(sum, load_columns(weight + c), load_columns(x + c));
        logits[r] = sum_of_dot(sum);
    }
}
