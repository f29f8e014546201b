/* Rows of activations over Vector: gates of experts, weighted and residual sums, routers' logits, norms, rotary embedding,
 * and the steps of the gated delta rule (delta.h). */
#ifndef TIERMOE_ISA_ACTIVATIONS_H
#define TIERMOE_ISA_ACTIVATIONS_H

#include <math.h>

#include "../delta.h"
#include "../expert.h"
#include "../norm.h"
#include "simd.h"

static void times_sigmoid(bf16 *x, const bf16 *gate, size_t columns) {
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector sigmoid = as_bf16(over(all(1), one_and_exponential(load_bf16(gate + c))));
        store_bf16(x + c, times(load_bf16(x + c), sigmoid));
    }
}

/* x / (1 + e^-slope) */
static inline Vector sigmoid_of(Vector x, Vector slope) {
    return over(x, plus(all(1), exponential(minus(zeros(), slope))));
}

static inline Vector silu_gate(Vector gate, Vector up) { return times(as_bf16(sigmoid_of(gate, gate)), up); }

/* x * (1 + tanh u) / 2, which is x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + .044715 x^3) */
static inline Vector gelu_gate(Vector gate, Vector up) {
    const Vector cubic = times_plus(times(gate, gate), all(0.07135481627f), all(1.595769122f));
    return times(as_bf16(sigmoid_of(gate, times(gate, cubic))), up);
}

static inline Vector clamped_gate(Vector gate, Vector up, float alpha) {
    const Vector one = all(1), slope = as_bf16(times(gate, all(alpha)));
    const Vector opening = as_bf16(times(gate, as_bf16(sigmoid_of(one, slope))));
    return times(as_bf16(plus(up, one)), opening);
}

static inline Vector relu_squared(const bf16 *up) {
    const Vector x = larger_of(zeros(), load_bf16(up)); /* the second operand where it is undefined */
    return times(x, x);
}

/* Of 16 columns of a block from column i on. */
static inline Vector gate_of(const bf16 values[2 * BLOCK], int i, const Expert *expert) {
    if (expert->gate == RELU_SQUARED) return relu_squared(values + i);
    Vector gate = load_bf16(values + i), up = load_bf16(values + BLOCK + i);
    if (expert->gate == SILU) return silu_gate(gate, up);
    if (expert->gate == GELU_TANH) return gelu_gate(gate, up);
    if (expert->gate == CLAMPED) load_pairs(values + 2 * i, LANES, &gate, &up);
    const Vector limit = all(expert->limit);
    gate = as_bf16(smaller(limit, gate)); /* the second operand where one is undefined */
    up = as_bf16(larger_of(minus(zeros(), limit), smaller(limit, up)));
    return expert->gate == LIMITED_SILU ? silu_gate(gate, up) : clamped_gate(gate, up, expert->alpha);
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

/* Of a number of tokens known when compiling, two rows at a time. */
INLINE void logits_some(size_t tokens, const bf16 *weight, const bf16 *x, size_t rows, size_t columns, float *logits, size_t stride) {
    for (size_t r = 0; r < rows; r += 2) {
        const bf16 *row[] = {weight + r * columns, weight + (r + 1 < rows ? r + 1 : r) * columns};
        Dot sums[4][2];
        for (size_t m = 0; m < tokens; m++) sums[m][0] = sums[m][1] = no_dot();
        for (size_t c = 0; c < columns; c += DOT) {
            const Columns first = load_columns(row[0] + c), second = load_columns(row[1] + c);
            for (size_t m = 0; m < tokens; m++) {
                const Columns its = load_columns(x + m * columns + c);
                sums[m][0] = dot(sums[m][0], first, its), sums[m][1] = dot(sums[m][1], second, its);
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (size_t i = 0; i < 2 && r + i < rows; i++) logits[m * stride + r + i] = sum_of_dot(sums[m][i]);
    }
}

static void logits_of(const bf16 *weight, const bf16 *x, size_t tokens, size_t rows, size_t columns, float *logits) {
    for (; tokens >= 4; tokens -= 4, x += 4 * columns, logits += 4 * rows) logits_some(4, weight, x, rows, columns, logits, rows);
    for (; tokens; tokens--, x += columns, logits += rows) logits_some(1, weight, x, rows, columns, logits, rows);
}

/* Scores. */

static void exponentials(float *x, size_t count) {
    for (size_t i = 0; i < count; i += LANES) store_floats(x + i, count - i, exponential(load_floats(x + i, count - i)));
}

static void softplus_of(float *x, size_t count) {
    for (size_t i = 0; i < count; i += LANES) store_floats(x + i, count - i, softplus(load_floats(x + i, count - i)));
}

/* Norms. */

static float norm_factor(const bf16 *x, size_t width, float epsilon) {
    Vector squares = zeros();
    for (size_t i = 0; i < width; i += LANES) {
        const Vector values = load_bf16(x + i);
        squares = times_plus(values, values, squares);
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)width + epsilon);
}

static void norm_columns(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out) {
    const bf16 *weight = norm->weight + begin;
    for (size_t i = 0; i < width; i += LANES) {
        const Vector scaled = times(load_bf16(x + i), all(scale)), its = load_bf16(weight + i);
        const Vector factor = norm->kind == RMS_NORM_CENTRED ? plus(all(1), its) : its;
        store_bf16(out + i, times(factor, norm->kind == RMS_NORM ? as_bf16(scaled) : scaled));
    }
}

static void layer_norm(const Norm *norm, const bf16 *x, bf16 *out) {
    Vector sum = zeros(), squares = zeros();
    for (size_t i = 0; i < norm->width; i += LANES) sum = plus(sum, load_bf16(x + i));
    const Vector mean = all(sum_of(sum) / (float)norm->width);
    for (size_t i = 0; i < norm->width; i += LANES) {
        const Vector apart = minus(load_bf16(x + i), mean);
        squares = times_plus(apart, apart, squares);
    }
    const float variance = sum_of(squares) / (float)norm->width;
    const Vector scale = all(1.0f / sqrtf(variance + norm->epsilon));
    for (size_t i = 0; i < norm->width; i += LANES) {
        const Vector scaled = times(minus(load_bf16(x + i), mean), scale);
        store_bf16(out + i, times_plus(load_bf16(norm->weight + i), scaled, norm->bias ? load_bf16(norm->bias + i) : zeros()));
    }
}

/* Rotary embedding. */

/* bfloat16(bfloat16(a * b) + bfloat16(c * d)) is what is stored of this, or, at once, bfloat16(a * b + c * d). */
static inline Vector sum_of_products(int at_once, Vector a, Vector b, Vector c, Vector d) {
    const Vector first = times(a, b), second = times(c, d);
    return at_once ? plus(first, second) : plus(as_bf16(first), as_bf16(second));
}

static void rotate_columns(const bf16 *head, const float *cos, const float *sin, size_t rotary, int interleaved, bf16 *out) {
    const size_t half = rotary / 2;
    const int at_once = interleaved == 2;
    for (size_t i = 0; i < half; i += LANES) {
        const size_t some = half - i < LANES ? half - i : LANES;
        Vector first, second;
        if (interleaved)
            load_pairs(head + 2 * i, some, &first, &second);
        else
            first = load_some(head + i, some), second = load_some(head + half + i, some);
        const Vector negative = minus(zeros(), second);
        store_some(out + i, some, sum_of_products(at_once, first, load_floats(cos + i, some), negative, load_floats(sin + i, some)));
        store_some(out + half + i, some,
                   sum_of_products(at_once, second, load_floats(cos + half + i, some), first, load_floats(sin + half + i, some)));
    }
}

/* The gated delta rule. */

static void convolve(const bf16 *const *inputs, size_t count, const bf16 *taps, size_t stride, const bf16 *bias, int silu,
                     size_t columns, float *out) {
    for (size_t c = 0; c < columns; c += LANES) {
        Vector sum = zeros();
        for (size_t i = 0; i < count; i++)
            sum = times_plus(load_bf16(taps + i * stride + c), load_bf16(inputs[i] + c), sum);
        if (bias) sum = plus(sum, load_bf16(bias + c));
        const Vector found = as_bf16(sum);
        store(out + c, silu ? as_bf16(silu_of(found)) : found);
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

static void delta_factors(const bf16 *steps, const float *biases, float rate, float least_decay, size_t count, float *decays,
                          const bf16 *b, float *beta) {
    for (size_t c = 0; c < count; c += LANES) {
        const Vector step = plus(load_some(steps + c, count - c), load_floats(biases + c, count - c));
        const Vector share = over(all(least_decay), one_and_exponential(times(all(rate), step)));
        store_floats(decays + c, count - c, exponential(least_decay ? share : times(all(-rate), softplus(step))));
    }
    *beta = first_of(as_bf16(over(all(1), one_and_exponential(all(from_bf16(*b))))));
}

/* `count` vectors of columns, by one decay or, where `rows`, by one for each row of the state: numbers that are known where this
 * is written into its caller, so that sums stay in registers. */
INLINE void delta_vectors(const size_t count, const int rows, const float *from, float *to, size_t keys, size_t stride,
                          const float *key, const float *query, const float *value, const float *decays, float beta, float *out) {
    Vector sums[4], changes[4];
    const Vector one = all(rows ? 1 : decays[0]);
    for (size_t v = 0; v < count; v++) sums[v] = zeros();
    for (size_t k = 0; k < keys; k++)
        for (size_t v = 0; v < count; v++)
            sums[v] = times_plus(all(rows ? key[k] * decays[k] : key[k]), load(from + k * stride + v * LANES), sums[v]);
    for (size_t v = 0; v < count; v++) {
        changes[v] = times(minus_times(load(value + v * LANES), one, sums[v]), all(beta));
        sums[v] = zeros();
    }
    for (size_t k = 0; k < keys; k++)
        for (size_t v = 0; v < count; v++) {
            const Vector kept = times(load(from + k * stride + v * LANES), rows ? all(decays[k]) : one);
            const Vector state = times_plus(all(key[k]), changes[v], kept);
            store(to + k * stride + v * LANES, state);
            sums[v] = times_plus(all(query[k]), state, sums[v]);
        }
    for (size_t v = 0; v < count; v++) store(out + v * LANES, sums[v]);
}

INLINE void delta_columns(const int rows, const float *from, float *to, size_t keys, size_t stride, size_t columns,
                          const float *key, const float *query, const float *value, const float *decays, float beta, float *out) {
    size_t c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES)
        delta_vectors(4, rows, from + c, to + c, keys, stride, key, query, value + c, decays, beta, out + c);
    for (; c < columns; c += LANES)
        delta_vectors(1, rows, from + c, to + c, keys, stride, key, query, value + c, decays, beta, out + c);
}

static void delta_rule(const float *from, float *to, size_t keys, size_t stride, size_t columns, const float *key,
                       const float *query, const float *value, const float *decays, size_t count, float beta, float *out) {
    if (count > 1)
        delta_columns(1, from, to, keys, stride, columns, key, query, value, decays, beta, out);
    else
        delta_columns(0, from, to, keys, stride, columns, key, query, value, decays, beta, out);
}

static void delta_gate(const float *x, const bf16 *weight, float epsilon, int kind, const bf16 *gate, size_t columns, bf16 *out) {
    Vector squares = zeros();
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector values = as_bf16(load(x + c));
        squares = times_plus(values, values, squares);
    }
    const Vector factor = all(1.0f / sqrtf(sum_of(squares) / (float)columns + epsilon));
    for (size_t c = 0; c < columns; c += LANES) {
        const Vector wide = times(as_bf16(load(x + c)), factor), opening = load_bf16(gate + c);
        if (kind == DELTA_SIGMOID) {
            store_bf16(out + c, over(times(load_bf16(weight + c), wide), one_and_exponential(opening)));
            continue;
        }
        const Vector normed = as_bf16(wide);
        const Vector weighted = as_bf16(times(load_bf16(weight + c), normed));
        store_bf16(out + c, times(weighted, silu_of(opening)));
    }
}

#endif
