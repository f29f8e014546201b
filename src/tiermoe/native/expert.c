#include "expert.h"

#include <string.h>

#include "kernels.h"

enum { TOKENS = 64 }; /* whose gate and up values of a block are kept on the stack */

typedef struct {
    const Share *shares;
    Prepared x, inner; /* of the tokens, and of what is between the matrices: (results, I) */
    bf16 *out;
} Job;

/* A block of rows of matrix times the tokens, plus the bias where there is one. */
static void block_of(const Matrix *matrix, const bf16 *bias, size_t block, const bf16 *x, const float *prepared, size_t tokens,
                     bf16 *out, size_t stride) {
    matrix_block(matrix, block, x, prepared, tokens, out, stride);
    for (size_t m = 0; bias && m < tokens; m++) kernels->add(out + m * stride, 1, bias + block * BLOCK, BLOCK);
}

static void prepare_x(void *data, size_t thread, size_t task) {
    (void)thread;
    prepare_task(&((Job *)data)->x, task);
}

static void begin_first(void *data, size_t thread) { prepare_begin(&((Job *)data)->x, thread); }

/* A block of the inner values of one expert. */
static void first(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t inner = job->inner.matrix->columns, blocks = inner / BLOCK, block = task % blocks;
    const Share *share = &job->shares[task / blocks];
    const Matrix *matrix = &share->expert.first;
    const size_t each = matrix_prepared(matrix);
    const int pairs = share->expert.gate == CLAMPED;
    const size_t one = pairs ? 2 * block : block, other = pairs ? one + 1 : block + blocks;
    bf16 values[TOKENS][2 * BLOCK];
    for (size_t m = 0; m < share->tokens; m += TOKENS) {
        const size_t tokens = share->tokens - m < TOKENS ? share->tokens - m : TOKENS, row = share->from + m;
        const bf16 *x = job->x.x + row * matrix->columns, *bias = share->expert.first_bias;
        const float *prepared = prepared_of(&job->x, thread) + row * each;
        block_of(matrix, bias, one, x, prepared, tokens, values[0], 2 * BLOCK);
        if (share->expert.gate != RELU_SQUARED)
            block_of(matrix, bias, other, x, prepared, tokens, values[0] + BLOCK, 2 * BLOCK);
        kernels->gate(values, &share->expert, tokens, (bf16 *)job->inner.x + (share->to + m) * inner + block * BLOCK, inner);
    }
}

static void prepare_inner(void *data, size_t thread, size_t task) {
    (void)thread;
    prepare_task(&((Job *)data)->inner, task);
}

static void begin_second(void *data, size_t thread) { prepare_begin(&((Job *)data)->inner, thread); }

static void second(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t blocks = job->inner.matrix->rows / BLOCK, block = task % blocks;
    const Share *share = &job->shares[task / blocks];
    const Matrix *matrix = &share->expert.second;
    block_of(matrix, share->expert.second_bias, block, job->inner.x + share->to * matrix->columns,
             prepared_of(&job->inner, thread) + share->to * matrix_prepared(matrix), share->tokens,
             job->out + share->to * matrix->rows + block * BLOCK, matrix->rows);
}

size_t experts_prepared(const Expert *expert, size_t rows, size_t results, size_t threads) {
    return prepared_room(&expert->first, rows, threads) + prepared_room(&expert->second, results, threads);
}

void experts_run(const Share *shares, size_t count, const bf16 *x, size_t rows, size_t results, bf16 *inner, float *room,
                 bf16 *out, size_t threads, Pool pool) {
    const Matrix *up = &shares->expert.first, *down = &shares->expert.second;
    Job job = {shares, {up, x, rows, room}, {down, inner, results, room + prepared_room(up, rows, threads)}, out};
    const Phase phases[] = {
        {NULL, prepare_x, prepare_tasks(&job.x)},
        {begin_first, first, count * (down->columns / BLOCK)},
        {NULL, prepare_inner, prepare_tasks(&job.inner)},
        {begin_second, second, count * (down->rows / BLOCK)},
    };
    team_run(phases, 4, &job, threads, pool);
}

void experts_combine(const bf16 *const *rows, const float *weights, size_t count, size_t columns, bf16 *out) {
    if (count)
        kernels->combine(rows, weights, count, columns, out);
    else
        memset(out, 0, columns * sizeof *out);
}

typedef struct {
    const bf16 *const *rows;
    const float *weights;
    size_t tokens, k, columns;
    bf16 *out;
} Combining;

enum { TOGETHER = 64 }; /* tokens of a task */

static void combine_some(void *data, size_t thread, size_t task) {
    const Combining *job = data;
    const size_t begin = task * TOGETHER, end = begin + TOGETHER < job->tokens ? begin + TOGETHER : job->tokens;
    (void)thread;
    for (size_t t = begin; t < end; t++) {
        const bf16 *rows[MOST_EXPERTS];
        float weights[MOST_EXPERTS];
        size_t count = 0;
        for (size_t i = t * job->k; i < (t + 1) * job->k; i++)
            if (job->rows[i]) rows[count] = job->rows[i], weights[count++] = job->weights[i];
        experts_combine(rows, weights, count, job->columns, job->out + t * job->columns);
    }
}

void experts_combine_many(const bf16 *const *rows, const float *weights, size_t tokens, size_t k, size_t columns, bf16 *out,
                          size_t threads, Pool pool) {
    Combining job = {rows, weights, tokens, k, columns, out};
    const Phase phase = {NULL, combine_some, (tokens + TOGETHER - 1) / TOGETHER};
    team_run(&phase, 1, &job, phase.tasks > 1 ? threads : 1, pool);
}
