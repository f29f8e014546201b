#include "neurons.h"

#include <string.h>

#include "kernels.h"
#include "team.h"

typedef struct {
    const Neurons *neurons;
    float *x, *sums, *products; /* (width), (width / group), (count) */
    bf16 *out;
} Job;

size_t neurons_workspace(const Neurons *neurons) {
    return neurons->width + neurons->width / neurons->group + neurons->count;
}

static void up(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t begin = task * NEURONS_TASK, rest = job->neurons->count - begin;
    (void)thread;
    kernels->neurons_up(job->neurons, job->x, job->sums, begin, begin + (rest < NEURONS_TASK ? rest : NEURONS_TASK),
                        job->products);
}

static void down(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t bytes = job->neurons->width * (size_t)job->neurons->bits / 8, begin = task * BYTES_TASK;
    (void)thread;
    kernels->neurons_down(job->neurons, job->products, begin, bytes - begin < BYTES_TASK ? bytes : begin + BYTES_TASK,
                          job->out);
}

void neurons_run(const Neurons *neurons, const bf16 *x, float *workspace, bf16 *out, size_t threads) {
    const size_t groups = neurons->width / neurons->group, bytes = neurons->width * (size_t)neurons->bits / 8;
    Job job = {neurons, workspace, workspace + neurons->width, workspace + neurons->width + groups, out};
    for (size_t g = 0; g < groups; g++) {
        job.sums[g] = 0;
        for (size_t c = g * neurons->group; c < (g + 1) * neurons->group; c++)
            job.x[c] = from_bf16(x[c]), job.sums[g] += job.x[c];
    }
    const Phase phases[] = {{NULL, up, (neurons->count + NEURONS_TASK - 1) / NEURONS_TASK},
                            {NULL, down, (bytes + BYTES_TASK - 1) / BYTES_TASK}};
    team_run(phases, 2, &job, threads, OWN);
}

void neurons_gather(const uint8_t *from, uint8_t *to, size_t row_bytes, const int64_t *used, size_t count) {
    for (size_t i = 0; i < count; i++)
        memcpy(to + (size_t)used[i] * row_bytes, from + (size_t)used[i] * row_bytes, row_bytes);
}
