#include "delta.h"

#include <math.h>

#include "kernels.h"
#include "team.h"

enum { STRIP = 64 }; /* columns of values of a task of the recurrence: its part of a state stays in the nearest cache */

typedef struct {
    const Delta *layer;
    const DeltaStep *step;
    float *mixed;    /* (tokens, channels): after the convolution */
    float *decays;   /* (tokens, heads, decay_columns) */
    float *betas;    /* (tokens, heads) */
    float *attended; /* (tokens, heads, value_columns) */
} Job;

static size_t values_of(const Delta *layer) { return layer->heads * layer->value_columns; }

static size_t floats_of_token(const Delta *layer) {
    return layer->convolution.channels + layer->heads * (layer->decay_columns + 1) + values_of(layer);
}

size_t delta_workspace(const Delta *layer, size_t tokens) { return tokens * floats_of_token(layer) * sizeof(float); }

static void mix(void *data, size_t thread, size_t task) {
    const Job *job = data;
    (void)thread;
    convolution_task(&job->layer->convolution, &job->step->mixed, task, job->mixed, NULL);
}

/* A key head's query and key of a token, and the factors of the heads that share them. */
static void prepare(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Delta *layer = job->layer;
    const DeltaStep *step = job->step;
    const size_t keys = layer->key_heads * layer->key_columns, width = layer->decay_columns;
    const size_t token = task / layer->key_heads, key_head = task % layer->key_heads, shared = layer->heads / layer->key_heads;
    float *query = job->mixed + token * layer->convolution.channels + key_head * layer->key_columns;
    (void)thread;
    kernels->delta_unit(query, layer->key_columns, 1 / sqrtf((float)layer->key_columns));
    kernels->delta_unit(query + keys, layer->key_columns, 1);
    for (size_t head = key_head * shared; head < (key_head + 1) * shared; head++) {
        const size_t at = head * width;
        kernels->delta_factors(step->decays + token * step->decays_stride + at, layer->biases + at, layer->rates[head],
                               layer->least_decay, width, job->decays + token * layer->heads * width + at,
                               step->betas + token * step->betas_stride + head, job->betas + token * layer->heads + head);
    }
}

/* Some columns of a head's state, through the tokens of a row. */
static void recur(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Delta *layer = job->layer;
    const size_t width = layer->value_columns, strips = (width + STRIP - 1) / STRIP, channels = layer->convolution.channels;
    const size_t head = task / strips % layer->heads, row = task / strips / layer->heads, from = task % strips * STRIP;
    const size_t columns = width - from < STRIP ? width - from : STRIP, size = layer->key_columns * width;
    const size_t key_head = head / (layer->heads / layer->key_heads), keys = layer->key_heads * layer->key_columns;
    const float *before = job->step->states + ((size_t)job->step->mixed.rows.before[row] * layer->heads + head) * size + from;
    float *after = job->step->states + ((size_t)job->step->mixed.rows.after[row] * layer->heads + head) * size + from;
    (void)thread;
    for (size_t t = row_begin(&job->step->mixed.rows, row); t < (size_t)job->step->mixed.rows.ends[row]; t++, before = after) {
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
    const StateRows *rows = &step->mixed.rows;
    const size_t tokens = rows->tokens, channels = layer->convolution.channels;
    float *mixed = workspace, *decays = mixed + tokens * channels;
    float *betas = decays + tokens * layer->heads * layer->decay_columns, *attended = betas + tokens * layer->heads;
    Job job = {layer, step, mixed, decays, betas, attended};
    const Phase phases[] = {
        {NULL, mix, convolution_tasks(&layer->convolution, &step->mixed)},
        {NULL, prepare, tokens * layer->key_heads},
        {NULL, recur, rows->rows * layer->heads * ((layer->value_columns + STRIP - 1) / STRIP)},
        {NULL, gate, tokens},
    };
    team_run(phases, sizeof phases / sizeof *phases, &job, threads, OWN);
}
