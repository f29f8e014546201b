#include "norm.h"

#include "kernels.h"

float norm_row_scale(const Norm *norm, const bf16 *x) {
    return norm->kind == LAYER_NORM ? 0 : kernels->norm_scale(x, norm->width, norm->epsilon);
}

void norm_part(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out) {
    kernels->norm_part(norm, x, scale, begin, width, out);
}

void norm_row(const Norm *norm, const bf16 *x, bf16 *out) {
    if (norm->kind == LAYER_NORM)
        kernels->layer_norm(norm, x, out);
    else
        kernels->norm_part(norm, x, norm_row_scale(norm, x), 0, norm->width, out);
}

enum { A_TASK = 1 << 16 }; /* values */

typedef struct {
    Norm norm;
    const bf16 *x;
    size_t rows, rows_each; /* of a task */
    bf16 *out;
} Job;

static void some_rows(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t begin = task * job->rows_each, rest = job->rows - begin;
    (void)thread;
    for (size_t r = begin; r < begin + (rest < job->rows_each ? rest : job->rows_each); r++)
        norm_row(&job->norm, job->x + r * job->norm.width, job->out + r * job->norm.width);
}

void norm_run(const bf16 *x, const bf16 *weight, float epsilon, NormKind kind, size_t rows, size_t width, bf16 *out,
              size_t threads, Pool pool) {
    const size_t each = A_TASK / width ? A_TASK / width : 1, tasks = (rows + each - 1) / each;
    const Norm norm = {.weight = weight, .width = width, .epsilon = epsilon, .kind = kind};
    Job job = {norm, x, rows, each, out};
    const Phase phase = {NULL, some_rows, tasks};
    team_run(&phase, 1, &job, tasks > 1 ? threads : 1, pool);
}
