#include "norm.h"

#include <math.h>

#include "vector.h"

TARGET float norm_scale(const bf16 *x, size_t width, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (size_t i = 0; i < width; i += 16) {
        const __m512 values = load_bf16(x + i);
        squares = _mm512_fmadd_ps(values, values, squares);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + epsilon);
}

TARGET void norm_apply(const bf16 *x, const bf16 *weight, float scale, size_t width, bf16 *out) {
    for (size_t i = 0; i < width; i += 16) {
        const __m512 scaled = as_bf16(_mm512_mul_ps(load_bf16(x + i), _mm512_set1_ps(scale)));
        store_bf16(out + i, _mm512_mul_ps(load_bf16(weight + i), scaled));
    }
}

enum { A_TASK = 1 << 16 }; /* values */

typedef struct {
    const bf16 *x, *weight;
    float epsilon;
    size_t rows, width, rows_each; /* of a task */
    bf16 *out;
} Job;

static void some_rows(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t begin = task * job->rows_each, rest = job->rows - begin;
    (void)thread;
    for (size_t r = begin; r < begin + (rest < job->rows_each ? rest : job->rows_each); r++) {
        const bf16 *x = job->x + r * job->width;
        norm_apply(x, job->weight, norm_scale(x, job->width, job->epsilon), job->width, job->out + r * job->width);
    }
}

void norm_run(const bf16 *x, const bf16 *weight, float epsilon, size_t rows, size_t width, bf16 *out, size_t threads,
              Pool pool) {
    const size_t each = A_TASK / width ? A_TASK / width : 1, tasks = (rows + each - 1) / each;
    Job job = {x, weight, epsilon, rows, width, each, out};
    const Phase phase = {NULL, some_rows, tasks};
    team_run(&phase, 1, &job, tasks > 1 ? threads : 1, pool);
}
