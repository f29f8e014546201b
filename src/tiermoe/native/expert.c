#include "expert.h"

#include "product.h"
#include "target.h"
#include "vector.h"

enum { TOKENS = 64 }; /* whose gate and up values of a block are kept on the stack */

typedef struct {
    const Expert *experts;
    size_t count, tokens;
    Sums x, inner; /* of the tokens, and of what is between the matrices: (count, tokens, I) */
    bf16 *out;
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

static void sum_x(void *data, size_t thread, size_t task) {
    (void)thread;
    sums_task(&((Job *)data)->x, task);
}

static void begin_first(void *data, size_t thread) { sums_begin(&((Job *)data)->x, thread); }

/* A block of the inner values of one expert. */
static void first(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t inner = job->experts->first.rows / 2, expert = task / (inner / BLOCK), block = task % (inner / BLOCK);
    const Int4 *matrix = &job->experts[expert].first;
    const size_t groups = matrix->columns / matrix->group;
    bf16 gate[TOKENS][BLOCK], up[TOKENS][BLOCK];
    for (size_t m = 0; m < job->tokens; m += TOKENS) {
        const size_t tokens = job->tokens - m < TOKENS ? job->tokens - m : TOKENS;
        const bf16 *x = job->x.x + m * matrix->columns;
        const float *sums = sums_of(&job->x, thread) + m * groups;
        int4_block(matrix, block, x, sums, tokens, gate[0], BLOCK);
        int4_block(matrix, block + inner / BLOCK, x, sums, tokens, up[0], BLOCK);
        gate_rows(gate, up, tokens, (bf16 *)job->inner.x + (expert * job->tokens + m) * inner + block * BLOCK, inner);
    }
}

static void sum_inner(void *data, size_t thread, size_t task) {
    (void)thread;
    sums_task(&((Job *)data)->inner, task);
}

static void begin_second(void *data, size_t thread) { sums_begin(&((Job *)data)->inner, thread); }

static void second(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t blocks = job->experts->second.rows / BLOCK, expert = task / blocks, block = task % blocks;
    const Int4 *matrix = &job->experts[expert].second;
    const size_t begin = expert * job->tokens;
    int4_block(matrix, block, job->inner.x + begin * matrix->columns,
               sums_of(&job->inner, thread) + begin * (matrix->columns / matrix->group), job->tokens,
               job->out + begin * matrix->rows + block * BLOCK, matrix->rows);
}

size_t experts_sums(const Expert *experts, size_t count, size_t tokens, size_t threads) {
    return sums_room(&experts->first, tokens, threads) + sums_room(&experts->second, count * tokens, threads);
}

void experts_run(const Expert *experts, size_t count, const bf16 *x, size_t tokens, bf16 *inner, float *sums, bf16 *out,
                 size_t threads, Pool pool) {
    const Int4 *up = &experts->first, *down = &experts->second;
    Job job = {experts, count, tokens, {up, x, tokens, sums}, {down, inner, count * tokens, NULL}, out};
    job.inner.room = sums + sums_room(up, tokens, threads);
    const Phase phases[] = {
        {NULL, sum_x, sums_tasks(&job.x)},
        {begin_first, first, count * (up->rows / 2 / BLOCK)},
        {NULL, sum_inner, sums_tasks(&job.inner)},
        {begin_second, second, count * (down->rows / BLOCK)},
    };
    team_run(phases, 4, &job, threads, pool);
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
