/* The recurrences of state-space layers (scan.h) over Vector. */
#ifndef TIERMOE_ISA_SCAN_H
#define TIERMOE_ISA_SCAN_H

#include <math.h>

#include "../scan.h"
#include "simd.h"

/* Of `count` heads. */
static void scan_steps(const bf16 *raw, const float *biases, const float *rates, float least_step, size_t count, float *steps,
                       float *decays) {
    for (size_t h = 0; h < count; h += LANES) {
        const size_t some = count - h;
        const Vector step = larger_of(all(least_step), softplus(plus(load_some(raw + h, some), load_floats(biases + h, some))));
        store_floats(steps + h, some, step);
        store_floats(decays + h, some, exponential(minus(zeros(), times(load_floats(rates + h, some), step))));
    }
}

/* `tokens` tokens from `t` on, in `count` vectors of columns from `c` on: a state is read and written once for all of them. Numbers
 * that are known where this is written into its caller, so that sums stay in registers. */
INLINE void scan_vectors(const size_t tokens, const size_t count, const ScanStrip *strip, size_t t, size_t c) {
    const float *from = (t ? strip->after : strip->before) + c;
    const float *keys = strip->keys + t * strip->shared_stride, *queries = strip->queries + t * strip->shared_stride;
    float *to = strip->after + c;
    Vector sums[4][2], added[4][2], decays[4];
    for (size_t m = 0; m < tokens; m++) {
        const Vector step = all(strip->steps[(t + m) * strip->heads_stride]);
        decays[m] = all(strip->decays[(t + m) * strip->heads_stride]);
        for (size_t v = 0; v < count; v++) {
            added[m][v] = times(load_bf16(strip->values + (t + m) * strip->values_stride + c + v * LANES), step);
            sums[m][v] = zeros();
        }
    }
    for (size_t k = 0; k < strip->state; k++)
        for (size_t v = 0; v < count; v++) {
            Vector state = load(from + k * strip->width + v * LANES);
            for (size_t m = 0; m < tokens; m++) {
                state = times_plus(all(keys[m * strip->shared_stride + k]), added[m][v], times(state, decays[m]));
                sums[m][v] = times_plus(all(queries[m * strip->shared_stride + k]), state, sums[m][v]);
            }
            store(to + k * strip->width + v * LANES, state);
        }
    for (size_t m = 0; m < tokens; m++)
        for (size_t v = 0; v < count; v++) {
            const size_t at = c + v * LANES;
            const Vector value = load_bf16(strip->values + (t + m) * strip->values_stride + at);
            const Vector gate = load_bf16(strip->gates + (t + m) * strip->gates_stride + at);
            store(strip->out + (t + m) * strip->out_stride + at,
                  times(times_plus(value, all(strip->skip), sums[m][v]), silu_of(gate)));
        }
}

INLINE void scan_columns(const size_t count, const ScanStrip *strip, size_t c) {
    size_t t = 0;
    for (; t + 4 <= strip->tokens; t += 4) scan_vectors(4, count, strip, t, c);
    for (; t < strip->tokens; t++) scan_vectors(1, count, strip, t, c);
}

static void scan(const ScanStrip *strip) {
    size_t c = 0;
    for (; c + 2 * LANES <= strip->columns; c += 2 * LANES) scan_columns(2, strip, c);
    for (; c < strip->columns; c += LANES) scan_columns(1, strip, c);
}

/* out = x / sqrt(mean(x^2) + epsilon) times weight */
static void scan_norm(const float *x, const bf16 *weight, float epsilon, size_t columns, bf16 *out) {
    Vector squares = zeros();
    for (size_t c = 0; c < columns; c += LANES) squares = times_plus(load(x + c), load(x + c), squares);
    const Vector factor = all(1.0f / sqrtf(sum_of(squares) / (float)columns + epsilon));
    for (size_t c = 0; c < columns; c += LANES) store_bf16(out + c, times(load_bf16(weight + c), times(load(x + c), factor)));
}

/* Columns from .. from + columns of a row. Rows of states and rates are far apart, often by what makes them share a line of the
 * nearest cache: some of their columns are put together. */
static void scan_channels(const ChannelScan *layer, const ChannelScanStep *step, size_t row, size_t from, size_t columns) {
    float states[MOST_CHANNEL_STATE * LANES], rates[MOST_CHANNEL_STATE * LANES];
    const size_t begin = row_begin(&step->rows, row), end = (size_t)step->rows.ends[row], size = layer->state * layer->channels;
    const float *before = step->states + (size_t)step->rows.before[row] * size;
    float *after = step->states + (size_t)step->rows.after[row] * size;
    for (size_t c = from; c < from + columns; c += LANES) {
        for (size_t k = 0; k < layer->state; k++) {
            store(states + k * LANES, load(before + k * layer->channels + c));
            store(rates + k * LANES, minus(zeros(), load(layer->rates + k * layer->channels + c)));
        }
        for (size_t t = begin; t < end; t++) {
            const bf16 *key = step->keys + t * step->keys_stride, *query = step->queries + t * step->queries_stride;
            const Vector value = load_bf16(step->values + t * step->values_stride + c);
            const Vector gate = load_bf16(step->gates + t * step->gates_stride + c);
            const Vector time = softplus(load_bf16(step->times + t * step->times_stride + c)), added = times(value, time);
            Vector sum = zeros();
            for (size_t k = 0; k < layer->state; k++) {
                const Vector decay = exponential(times(load(rates + k * LANES), time));
                const Vector kept = times(load(states + k * LANES), decay);
                const Vector state = times_plus(all(from_bf16(key[k])), added, kept);
                store(states + k * LANES, state);
                sum = times_plus(all(from_bf16(query[k])), state, sum);
            }
            store_bf16(step->out + t * layer->channels + c,
                       times(times_plus(value, load(layer->skips + c), sum), silu_of(gate)));
        }
        for (size_t k = 0; k < layer->state; k++) store(after + k * layer->channels + c, load(states + k * LANES));
    }
}

#endif
