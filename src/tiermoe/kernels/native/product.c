#include "product.h"

#include "team.h"

typedef struct {
    const Int4 *matrix;
    const bf16 *x;
    size_t tokens;
    float *sums;
    bf16 *out;
    Tasks blocks;
} Product;

enum { FEW = 8 }; /* tokens whose sums each thread makes for itself */

size_t sums_room(const Int4 *matrix, size_t tokens, size_t threads) {
    return tokens * (matrix->columns / matrix->group) * (tokens <= FEW ? threads : 1);
}

const float *product_sums(const Int4 *matrix, const bf16 *x, size_t tokens, float *sums) {
    const size_t rank = team_rank(), size = team_size(), groups = matrix->columns / matrix->group;
    if (tokens <= FEW) {
        int4_group_sums(x, tokens, matrix, sums + rank * tokens * groups);
        return sums + rank * tokens * groups;
    }
    const size_t begin = tokens * rank / size, end = tokens * (rank + 1) / size;
    int4_group_sums(x + begin * matrix->columns, end - begin, matrix, sums + begin * groups);
    team_wait();
    return sums;
}

static void work(void *data) {
    Product *job = data;
    const Int4 *matrix = job->matrix;
    const float *sums = product_sums(matrix, job->x, job->tokens, job->sums);
    for (size_t block; (block = atomic_fetch_add(&job->blocks, 1)) < matrix->rows / BLOCK;)
        int4_block(matrix, block, job->x, sums, job->tokens, job->out + block * BLOCK, matrix->rows);
}

void product_run(const Int4 *matrix, const bf16 *x, size_t tokens, float *sums, bf16 *out, unsigned threads) {
    Product job = {matrix, x, tokens, sums, out, 0};
    team_run(work, &job, threads);
}
