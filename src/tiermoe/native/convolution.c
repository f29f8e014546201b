#include "convolution.h"

#include <string.h>

#include "kernels.h"
#include "team.h"

enum { MIXED = 512 }; /* channels of a task */

size_t convolution_tasks(const Convolution *layer, const ConvolutionStep *step) {
    return step->rows.rows * ((layer->channels + MIXED - 1) / MIXED);
}

/* Input `index` of a row, of which the first `kept` are those before its first token. */
static const bf16 *input(const Convolution *layer, const ConvolutionStep *step, size_t row, size_t index) {
    if (index < layer->kept)
        return step->inputs + ((size_t)step->rows.before[row] * layer->kept + index) * layer->channels;
    return step->values + (row_begin(&step->rows, row) + index - layer->kept) * step->stride;
}

/* Its tokens, then the inputs that the next ones need. */
void convolution_task(const Convolution *layer, const ConvolutionStep *step, size_t task, float *wide, bf16 *out) {
    const size_t channels = layer->channels, blocks = (channels + MIXED - 1) / MIXED, kept = layer->kept;
    const size_t row = task / blocks, from = task % blocks * MIXED, rest = channels - from;
    const size_t columns = rest < MIXED ? rest : MIXED;
    const size_t begin = row_begin(&step->rows, row), tokens = (size_t)step->rows.ends[row] - begin;
    const bf16 *bias = layer->bias ? layer->bias + from : NULL;
    float found[MIXED];
    for (size_t t = 0; t < tokens; t++) {
        const size_t at = (begin + t) * channels + from;
        const bf16 *inputs[MOST_TAPS];
        for (size_t i = 0; i <= kept; i++) inputs[i] = input(layer, step, row, t + i) + from;
        float *to = wide ? wide + at : found;
        kernels->convolve(inputs, kept + 1, layer->taps + from, channels, bias, layer->silu, columns, to);
        for (size_t c = 0; !wide && c < columns; c++) out[at + c] = to_bf16(found[c]);
    }
    bf16 *after = step->inputs + (size_t)step->rows.after[row] * kept * channels;
    for (size_t i = 0; i < kept; i++) /* never onto one that is still to be read */
        memmove(after + i * channels + from, input(layer, step, row, tokens + i) + from, columns * sizeof(bf16));
}

typedef struct {
    const Convolution *layer;
    const ConvolutionStep *step;
    bf16 *out;
} Job;

static void run_task(void *data, size_t thread, size_t task) {
    const Job *job = data;
    (void)thread;
    convolution_task(job->layer, job->step, task, NULL, job->out);
}

void convolution_run(const Convolution *layer, const ConvolutionStep *step, bf16 *out, size_t threads) {
    Job job = {layer, step, out};
    const Phase phase = {NULL, run_task, convolution_tasks(layer, step)};
    team_run(&phase, 1, &job, threads, OWN);
}
