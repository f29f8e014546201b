#include "expert.h"

#include "product.h"
#include "target.h"
#include "team.h"
#include "vector.h"

enum { TOKENS = 64 }; /* whose gate and up values of a block are kept on the stack */

typedef struct {
    const Expert *experts;
    size_t count, tokens;
    const bf16 *x;
    bf16 *inner, *out;
    float *sums, *inner_sums; /* room for them */
    Tasks first, second;
} Job;

TARGET static void gate_rows(const bf16 (*gate)[BLOCK], const bf16 (*up)[BLOCK], size_t tokens, bf16 *out, size_t stride) {
    for (size_t m = 0; m < tokens; m++)
        for (int i = 0; i < BLOCK; i += 16) {
            const __m512 x = load_bf16(gate[m] + i);
            const __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
            const __m512 silu = as_bf16(_mm512_div_ps(x, denominator));
            store_bf16(out + m * stride + i, _mm512_mul_ps(silu, load_bf16(up[m] + i)));
        }
}

/* Block `block` of the inner values of one expert. */
static void first_block(const Job *job, const float *sums, size_t expert, size_t block) {
    const Int4 *first = &job->experts[expert].first;
    const size_t inner = first->rows / 2, groups = first->columns / first->group;
    bf16 gate[TOKENS][BLOCK], up[TOKENS][BLOCK];
    for (size_t m = 0; m < job->tokens; m += TOKENS) {
        const size_t tokens = job->tokens - m < TOKENS ? job->tokens - m : TOKENS;
        const bf16 *x = job->x + m * first->columns;
        int4_block(first, block, x, sums + m * groups, tokens, gate[0], BLOCK);
        int4_block(first, block + inner / BLOCK, x, sums + m * groups, tokens, up[0], BLOCK);
        gate_rows(gate, up, tokens, job->inner + (expert * job->tokens + m) * inner + block * BLOCK, inner);
    }
}

static void second_block(const Job *job, const float *sums, size_t expert, size_t block) {
    const Int4 *second = &job->experts[expert].second;
    const size_t begin = expert * job->tokens;
    int4_block(second, block, job->inner + begin * second->columns,
               sums + begin * (second->columns / second->group), job->tokens,
               job->out + begin * second->rows + block * BLOCK, second->rows);
}

static void work(void *data) {
    Job *job = data;
    const Int4 *first = &job->experts->first, *second = &job->experts->second;
    const size_t inner_blocks = first->rows / 2 / BLOCK, blocks = second->rows / BLOCK;
    const float *sums = product_sums(first, job->x, job->tokens, job->sums);
    for (size_t task; (task = atomic_fetch_add(&job->first, 1)) < job->count * inner_blocks;)
        first_block(job, sums, task / inner_blocks, task % inner_blocks);
    team_wait();
    sums = product_sums(second, job->inner, job->count * job->tokens, job->inner_sums);
    for (size_t task; (task = atomic_fetch_add(&job->second, 1)) < job->count * blocks;)
        second_block(job, sums, task / blocks, task % blocks);
}

size_t experts_sums(const Expert *experts, size_t count, size_t tokens, size_t threads) {
    return sums_room(&experts->first, tokens, threads) + sums_room(&experts->second, count * tokens, threads);
}

void experts_run(const Expert *experts, size_t count, const bf16 *x, size_t tokens, bf16 *inner, float *sums, bf16 *out,
                 unsigned threads) {
    float *inner_sums = sums + sums_room(&experts->first, tokens, threads);
    Job job = {experts, count, tokens, x, inner, out, sums, inner_sums, 0, 0};
    team_run(work, &job, threads);
}

TARGET void experts_combine(const bf16 *const *rows, const float *weights, size_t count, size_t columns, bf16 *out) {
    for (size_t i = 0; i < columns; i += 16) {
        __m512 total = as_bf16(_mm512_mul_ps(load_bf16(rows[0] + i), _mm512_set1_ps(weights[0])));
        for (size_t e = 1; e < count; e++) {
            const __m512 value = as_bf16(_mm512_mul_ps(load_bf16(rows[e] + i), _mm512_set1_ps(weights[e])));
            total = as_bf16(_mm512_add_ps(total, value));
        }
        store_bf16(out + i, total);
    }
}
