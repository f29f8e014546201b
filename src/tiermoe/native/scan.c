#include "scan.h"

#include "kernels.h"
#include "team.h"

enum { STRIP = 64 }; /* columns of a task of a recurrence */

typedef struct {
    const Scan *layer;
    const ScanStep *step;
    float *shared;  /* (tokens, 2 groups * state): keys and queries */
    float *steps;   /* (tokens, heads) */
    float *decays;  /* the same */
    float *scanned; /* (tokens, heads * columns) */
} Job;

static size_t shared_columns(const Scan *layer) { return 2 * layer->groups * layer->state; }

static size_t strips_of(size_t columns) { return (columns + STRIP - 1) / STRIP; }

size_t scan_workspace(const Scan *layer, size_t tokens) {
    const size_t floats = shared_columns(layer) + 2 * layer->heads + layer->heads * layer->columns;
    return tokens * floats * sizeof(float);
}

/* The row of a token. */
static size_t row_of(const StateRows *rows, size_t token) {
    size_t row = 0;
    while ((size_t)rows->ends[row] <= token) row++;
    return row;
}

static void prepare(void *data, size_t thread, size_t token) {
    const Job *job = data;
    const Scan *layer = job->layer;
    const ScanStep *step = job->step;
    const size_t heads = layer->heads, shared = shared_columns(layer);
    const float least = step->rows.prompts[row_of(&step->rows, token)] ? layer->least_step : 0;
    const bf16 *from = step->mixed + token * step->mixed_stride + layer->heads * layer->columns;
    (void)thread;
    for (size_t i = 0; i < shared; i++) job->shared[token * shared + i] = from_bf16(from[i]);
    kernels->scan_steps(step->times + token * step->times_stride, layer->biases, layer->rates, least, layer->heads,
                        job->steps + token * heads, job->decays + token * heads);
}

static void recur(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Scan *layer = job->layer;
    const ScanStep *step = job->step;
    const size_t width = layer->columns, strips = strips_of(width), heads = layer->heads, shared = shared_columns(layer);
    const size_t head = task / strips % layer->heads, row = task / strips / layer->heads, from = task % strips * STRIP;
    const size_t begin = row_begin(&step->rows, row), at = head * width + from, size = layer->state * width;
    const size_t group = head / (layer->heads / layer->groups);
    const float *keys = job->shared + begin * shared + group * layer->state;
    (void)thread;
    const ScanStrip strip = {
        .tokens = (size_t)step->rows.ends[row] - begin,
        .state = layer->state,
        .columns = width - from < STRIP ? width - from : STRIP,
        .width = width,
        .before = step->states + ((size_t)step->rows.before[row] * layer->heads + head) * size + from,
        .after = step->states + ((size_t)step->rows.after[row] * layer->heads + head) * size + from,
        .values = step->mixed + begin * step->mixed_stride + at,
        .gates = step->gates + begin * step->gates_stride + at,
        .values_stride = step->mixed_stride,
        .gates_stride = step->gates_stride,
        .keys = keys,
        .queries = keys + layer->groups * layer->state,
        .steps = job->steps + begin * heads + head,
        .decays = job->decays + begin * heads + head,
        .shared_stride = shared,
        .heads_stride = heads,
        .skip = layer->skips[head],
        .out = job->scanned + begin * layer->heads * width + at,
        .out_stride = layer->heads * width,
    };
    kernels->scan(&strip);
}

static void norm_group(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Scan *layer = job->layer;
    const size_t width = layer->heads * layer->columns / layer->groups, from = task % layer->groups * width;
    const size_t at = task / layer->groups * layer->heads * layer->columns + from;
    (void)thread;
    kernels->scan_norm(job->scanned + at, layer->norm + from, layer->epsilon, width, job->step->out + at);
}

void scan_run(const Scan *layer, const ScanStep *step, void *workspace, size_t threads) {
    const size_t tokens = step->rows.tokens, heads = layer->heads;
    float *shared = workspace, *steps = shared + tokens * shared_columns(layer), *decays = steps + tokens * heads;
    Job job = {layer, step, shared, steps, decays, decays + tokens * heads};
    const Phase phases[] = {
        {NULL, prepare, tokens},
        {NULL, recur, step->rows.rows * layer->heads * strips_of(layer->columns)},
        {NULL, norm_group, tokens * layer->groups},
    };
    team_run(phases, sizeof phases / sizeof *phases, &job, threads, OWN);
}

typedef struct {
    const ChannelScan *layer;
    const ChannelScanStep *step;
} ChannelJob;

static void recur_channels(void *data, size_t thread, size_t task) {
    const ChannelJob *job = data;
    const size_t channels = job->layer->channels, strips = strips_of(channels), from = task % strips * STRIP;
    (void)thread;
    kernels->scan_channels(job->layer, job->step, task / strips, from, channels - from < STRIP ? channels - from : STRIP);
}

void channel_scan_run(const ChannelScan *layer, const ChannelScanStep *step, size_t threads) {
    ChannelJob job = {layer, step};
    const Phase phase = {NULL, recur_channels, step->rows.rows * strips_of(layer->channels)};
    team_run(&phase, 1, &job, threads, OWN);
}
