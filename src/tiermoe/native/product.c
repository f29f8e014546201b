#include "product.h"

enum {
    FEW = 8,      /* tokens whose sums each thread makes for itself */
    A_TASK = 32,  /* tokens */
};

size_t sums_room(const Matrix *matrix, size_t tokens, size_t threads) {
    return tokens * matrix_groups(matrix) * (tokens <= FEW ? threads : 1);
}

size_t sums_tasks(const Sums *sums) {
    const int none = sums->tokens <= FEW || matrix_groups(sums->matrix) == 0;
    return none ? 0 : (sums->tokens + A_TASK - 1) / A_TASK;
}

void sums_task(const Sums *sums, size_t task) {
    const size_t begin = task * A_TASK, rest = sums->tokens - begin;
    matrix_group_sums(sums->matrix, sums->x + begin * sums->matrix->columns, rest < A_TASK ? rest : A_TASK,
                      sums->room + begin * matrix_groups(sums->matrix));
}

void sums_begin(const Sums *sums, size_t thread) {
    if (sums->tokens <= FEW) matrix_group_sums(sums->matrix, sums->x, sums->tokens, (float *)sums_of(sums, thread));
}

const float *sums_of(const Sums *sums, size_t thread) {
    return sums->room + (sums->tokens <= FEW ? thread * sums->tokens * matrix_groups(sums->matrix) : 0);
}

typedef struct {
    Sums sums;
    bf16 *out;
} Product;

static void sum(void *data, size_t thread, size_t task) {
    (void)thread;
    sums_task(&((Product *)data)->sums, task);
}

static void begin(void *data, size_t thread) { sums_begin(&((Product *)data)->sums, thread); }

static void block(void *data, size_t thread, size_t task) {
    const Product *job = data;
    const Sums *sums = &job->sums;
    matrix_block(sums->matrix, task, sums->x, sums_of(sums, thread), sums->tokens, job->out + task * BLOCK,
               sums->matrix->rows);
}

void product_run(const Matrix *matrix, const bf16 *x, size_t tokens, float *sums, bf16 *out, size_t threads,
                 Pool pool) {
    Product job = {{matrix, x, tokens, sums}, out};
    const Phase phases[] = {{NULL, sum, sums_tasks(&job.sums)}, {begin, block, matrix_blocks(matrix)}};
    team_run(phases, 2, &job, threads, pool);
}
