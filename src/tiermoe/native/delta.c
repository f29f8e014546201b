#include "delta.h"

#include <math.h>
#include <string.h>

#include "kernels.h"
#include "team.h"

enum {
    MIXED = 512, /* channels of a task of the convolution */
    STRIP = 64,  /* columns of values of a task of the recurrence: its part of a state stays in the nearest cache */
};

typedef struct {
    const Delta *layer;
    const DeltaStep *step;
    float *mixed;    /* (tokens, channels): after the convolution */
    float *decays;   /* (tokens, heads, decay_columns) */
    float *betas;    /* (tokens, heads) */
    float *attended; /* (tokens, heads, value_columns) */
} Job;

static size_t begin_of(const DeltaStep *step, size_t row) { return row ? (size_t)step->ends[row - 1] : 0; }

static size_t values_of(const Delta *layer) { return layer->heads * layer->value_columns; }

size_t delta_channels(const Delta *layer) { return 2 * layer->key_heads * layer->key_columns + values_of(layer); }

static size_t floats_of_token(const Delta *layer) {
    return delta_channels(layer) + layer->heads * (layer->decay_columns + 1) + values_of(layer);
}

size_t delta_workspace(const Delta *layer, size_t tokens) { return tokens * floats_of_token(layer) * sizeof(float); }

/* Input `index` of a row, of which the first `kept` are those before its first token. */
static const bf16 *input(const Job *job, size_t row, size_t index) {
    const size_t kept = job->layer->kept, channels = delta_channels(job->layer);
    if (index < kept) return job->step->inputs + ((size_t)job->step->before[row] * kept + index) * channels;
    return job->step->mixed + (begin_of(job->step, row) + index - kept) * job->step->mixed_stride;
}

/* Some channels of a row: its tokens after the convolution, then the inputs that the next ones need. */
static void mix(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t channels = delta_channels(job->layer), blocks = (channels + MIXED - 1) / MIXED, kept = job->layer->kept;
    const size_t row = task / blocks, from = task % blocks * MIXED, rest = channels - from;
    const size_t columns = rest < MIXED ? rest : MIXED;
    const size_t begin = begin_of(job->step, row), tokens = (size_t)job->step->ends[row] - begin;
    (void)thread;
    for (size_t t = 0; t < tokens; t++) {
        const bf16 *inputs[MOST_TAPS];
        for (size_t i = 0; i <= kept; i++) inputs[i] = input(job, row, t + i) + from;
        kernels->delta_mix(inputs, kept + 1, job->layer->taps + from, channels, columns,
                           job->mixed + (begin + t) * channels + from);
    }
    bf16 *after = job->step->inputs + (size_t)job->step->after[row] * kept * channels;
    for (size_t i = 0; i < kept; i++) /* never onto one that is still to be read */
        memmove(after + i * channels + from, input(job, row, tokens + i) + from, columns * sizeof(bf16));
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* What a head, or a row of its state, keeps of itself. */
static float decay(const Delta *layer, size_t head, float step) {
    const float rate = layer->rates[head];
    return expf(layer->least_decay ? layer->least_decay * sigmoid(rate * step) : -rate * softplus(step));
}

static float rounded(float x) { return from_bf16(to_bf16(x)); }

/* A key head's query and key of a token, and the factors of the heads that share them. */
static void prepare(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Delta *layer = job->layer;
    const DeltaStep *step = job->step;
    const size_t keys = layer->key_heads * layer->key_columns, width = layer->decay_columns;
    const size_t token = task / layer->key_heads, key_head = task % layer->key_heads, shared = layer->heads / layer->key_heads;
    float *query = job->mixed + token * delta_channels(layer) + key_head * layer->key_columns;
    (void)thread;
    kernels->delta_unit(query, layer->key_columns, 1 / sqrtf((float)layer->key_columns));
    kernels->delta_unit(query + keys, layer->key_columns, 1);
    for (size_t head = key_head * shared; head < (key_head + 1) * shared; head++) {
        for (size_t at = head * width; at < (head + 1) * width; at++) {
            const float a = from_bf16(step->decays[token * step->decays_stride + at]);
            job->decays[token * layer->heads * width + at] = decay(layer, head, a + layer->biases[at]);
        }
        const float b = from_bf16(step->betas[token * step->betas_stride + head]);
        job->betas[token * layer->heads + head] = rounded(sigmoid(b));
    }
}

/* Some columns of a head's state, through the tokens of a row. */
static void recur(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Delta *layer = job->layer;
    const size_t width = layer->value_columns, strips = (width + STRIP - 1) / STRIP, channels = delta_channels(layer);
    const size_t head = task / strips % layer->heads, row = task / strips / layer->heads, from = task % strips * STRIP;
    const size_t columns = width - from < STRIP ? width - from : STRIP, size = layer->key_columns * width;
    const size_t key_head = head / (layer->heads / layer->key_heads), keys = layer->key_heads * layer->key_columns;
    const float *before = job->step->states + ((size_t)job->step->before[row] * layer->heads + head) * size + from;
    float *after = job->step->states + ((size_t)job->step->after[row] * layer->heads + head) * size + from;
    (void)thread;
    for (size_t t = begin_of(job->step, row); t < (size_t)job->step->ends[row]; t++, before = after) {
        const float *query = job->mixed + t * channels + key_head * layer->key_columns;
        const float *value = job->mixed + t * channels + 2 * keys + head * width + from;
        const size_t at = t * layer->heads + head;
        kernels->delta_rule(before, after, layer->key_columns, width, columns, query + keys, query, value,
                            job->decays + at * layer->decay_columns, layer->decay_columns, job->betas[at],
                            job->attended + at * width + from);
    }
}

static void gate(void *data, size_t thread, size_t token) {
    const Job *job = data;
    const Delta *layer = job->layer;
    const size_t width = layer->value_columns;
    (void)thread;
    for (size_t head = 0; head < layer->heads; head++)
        kernels->delta_gate(job->attended + (token * layer->heads + head) * width, layer->norm, layer->epsilon, layer->gate,
                            job->step->gates + token * job->step->gates_stride + head * width, width,
                            job->step->out + (token * layer->heads + head) * width);
}

void delta_run(const Delta *layer, const DeltaStep *step, void *workspace, size_t threads) {
    const size_t tokens = step->tokens, channels = delta_channels(layer);
    float *mixed = workspace, *decays = mixed + tokens * channels;
    float *betas = decays + tokens * layer->heads * layer->decay_columns, *attended = betas + tokens * layer->heads;
    Job job = {layer, step, mixed, decays, betas, attended};
    const Phase phases[] = {
        {NULL, mix, step->rows * ((channels + MIXED - 1) / MIXED)},
        {NULL, prepare, tokens * layer->key_heads},
        {NULL, recur, step->rows * layer->heads * ((layer->value_columns + STRIP - 1) / STRIP)},
        {NULL, gate, tokens},
    };
    team_run(phases, sizeof phases / sizeof *phases, &job, threads, OWN);
}
