/* delta.h over Vector. */
#include <math.h>

static void delta_mix(const bf16 *const *inputs, size_t count, const bf16 *taps, size_t stride, size_t columns, float *out) {
    for (size_t c = 0; c < columns; c += LANES) {
        Vector sum = zeros();
        for (size_t i = 0; i < count; i++)
            sum = times_plus(load_bf16(taps + i * stride + c), load_bf16(inputs[i] + c), sum);
        store(out + c, as_bf16(silu_of(as_bf16(sum))));
    }
}

static void delta_unit(float *x, size_t columns, float scale) {
    Vector squares = zeros();
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector values = load(x + c);
        squares = times_plus(values, values, squares);
    }
    const Vector factor = all(1.0f / sqrtf(sum_of(squares) + 1e-6f));
    for (size_t c = 0; c < columns; c += LANES) store(x + c, times(times(load(x + c), factor), all(scale)));
}

/* `count` vectors of columns: a number that is known where this is written into its caller, so that sums stay in registers. */
static inline __attribute__((always_inline)) void delta_vectors(const size_t count, const float *from, float *to, size_t keys,
                                                                size_t stride, const float *key, const float *query,
                                                                const float *value, float decay, float beta, float *out) {
    Vector sums[4], changes[4];
    for (size_t v = 0; v < count; v++) sums[v] = zeros();
    for (size_t k = 0; k < keys; k++)
        for (size_t v = 0; v < count; v++)
            sums[v] = times_plus(all(key[k]), load(from + k * stride + v * LANES), sums[v]);
    for (size_t v = 0; v < count; v++) {
        changes[v] = times(minus_times(load(value + v * LANES), all(decay), sums[v]), all(beta));
        sums[v] = zeros();
    }
    for (size_t k = 0; k < keys; k++)
        for (size_t v = 0; v < count; v++) {
            const Vector kept = times(load(from + k * stride + v * LANES), all(decay));
            const Vector state = times_plus(all(key[k]), changes[v], kept);
            store(to + k * stride + v * LANES, state);
            sums[v] = times_plus(all(query[k]), state, sums[v]);
        }
    for (size_t v = 0; v < count; v++) store(out + v * LANES, sums[v]);
}

static void delta_rule(const float *from, float *to, size_t keys, size_t stride, size_t columns, const float *key,
                       const float *query, const float *value, float decay, float beta, float *out) {
    size_t c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES)
        delta_vectors(4, from + c, to + c, keys, stride, key, query, value + c, decay, beta, out + c);
    for (; c < columns; c += LANES)
        delta_vectors(1, from + c, to + c, keys, stride, key, query, value + c, decay, beta, out + c);
}

static void delta_gate(const float *x, const bf16 *weight, float epsilon, const bf16 *gate, size_t columns, bf16 *out) {
    Vector squares = zeros();
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector values = as_bf16(load(x + c));
        squares = times_plus(values, values, squares);
    }
    const Vector factor = all(1.0f / sqrtf(sum_of(squares) / (float)columns + epsilon));
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector normed = as_bf16(times(as_bf16(load(x + c)), factor));
        const Vector weighted = as_bf16(times(load_bf16(weight + c), normed));
        store_bf16(out + c, times(weighted, silu_of(load_bf16(gate + c))));
    }
}
