#include "matrix.h"

#include "kernels.h"

size_t matrix_blocks(const Matrix *matrix) { return (matrix->rows + BLOCK - 1) / BLOCK; }

size_t matrix_prepared(const Matrix *matrix) { return kernels->prepared(matrix); }

void matrix_prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    kernels->prepare(matrix, x, tokens, prepared);
}

int matrices_alike(const Matrix *a, const Matrix *b) {
    return a->coding == b->coding && a->columns == b->columns && a->group == b->group;
}

void matrix_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                  size_t stride) {
    kernels->product[matrix->coding](matrix, block, x, prepared, tokens, out, stride);
}

enum { A_LINE = 16 }; /* floats of a cache line */

size_t prepared_room(const Matrix *matrix, size_t tokens, size_t threads) {
    const size_t floats = tokens * matrix_prepared(matrix) * (tokens <= PREPARED_ALONE ? threads : 1);
    return (floats + A_LINE - 1) / A_LINE * A_LINE; /* so that what comes behind begins as this does */
}

size_t prepare_tasks(const Prepared *prepared) {
    const int none = prepared->tokens <= PREPARED_ALONE || matrix_prepared(prepared->matrix) == 0;
    return none ? 0 : (prepared->tokens + PREPARED_TASK - 1) / PREPARED_TASK;
}

void prepare_task(const Prepared *prepared, size_t task) {
    const size_t begin = task * PREPARED_TASK, rest = prepared->tokens - begin;
    matrix_prepare(prepared->matrix, prepared->x + begin * prepared->matrix->columns, rest < PREPARED_TASK ? rest : PREPARED_TASK,
                      prepared->room + begin * matrix_prepared(prepared->matrix));
}

void prepare_begin(const Prepared *prepared, size_t thread) {
    if (prepared->tokens <= PREPARED_ALONE) matrix_prepare(prepared->matrix, prepared->x, prepared->tokens, (float *)prepared_of(prepared, thread));
}

const float *prepared_of(const Prepared *prepared, size_t thread) {
    return prepared->room + (prepared->tokens <= PREPARED_ALONE ? thread * prepared->tokens * matrix_prepared(prepared->matrix) : 0);
}

typedef struct {
    Prepared x;
    bf16 *out;
} Product;

static void prepare(void *data, size_t thread, size_t task) {
    (void)thread;
    prepare_task(&((Product *)data)->x, task);
}

static void begin(void *data, size_t thread) { prepare_begin(&((Product *)data)->x, thread); }

static void block(void *data, size_t thread, size_t task) {
    const Product *job = data;
    const Prepared *prepared = &job->x;
    matrix_block(prepared->matrix, task, prepared->x, prepared_of(prepared, thread), prepared->tokens, job->out + task * BLOCK,
               prepared->matrix->rows);
}

void product_run(const Matrix *matrix, const bf16 *x, size_t tokens, float *room, bf16 *out, size_t threads,
                 Pool pool) {
    Product job = {{matrix, x, tokens, room}, out};
    const Phase phases[] = {{NULL, prepare, prepare_tasks(&job.x)}, {begin, block, matrix_blocks(matrix)}};
    team_run(phases, 2, &job, threads, pool);
}
