#include "expert.h"

#include <string.h>

#include "product.h"
#include "target.h"
#include "vector.h"

enum { TOKENS = 64 }; /* whose gate and up values of a block are kept on the stack */

typedef struct {
    const Share *shares;
    Sums x, inner; /* of the tokens, and of what is between the matrices: (results, I) */
    bf16 *out;
} Job;

/* x / (1 + e^-slope) */
TARGET static inline __m512 sigmoid_of(__m512 x, __m512 slope) {
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), slope))));
}

TARGET static inline __m512 silu_gate(const bf16 *gate, const bf16 *up) {
    const __m512 x = load_bf16(gate);
    return _mm512_mul_ps(as_bf16(sigmoid_of(x, x)), load_bf16(up));
}

/* pairs: 16 of a gate and an up. */
TARGET static inline __m512 clamped_gate(const bf16 *pairs, const Expert *expert) {
    const __m512i both = _mm512_loadu_si512(pairs);
    const __m512 limit = _mm512_set1_ps(expert->limit), one = _mm512_set1_ps(1);
    __m512 gate = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    __m512 up = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)));
    gate = as_bf16(_mm512_min_ps(limit, gate)); /* the second operand where one is undefined */
    up = as_bf16(_mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, up)));
    const __m512 slope = as_bf16(_mm512_mul_ps(gate, _mm512_set1_ps(expert->alpha)));
    const __m512 opening = as_bf16(_mm512_mul_ps(gate, as_bf16(sigmoid_of(one, slope))));
    return _mm512_mul_ps(as_bf16(_mm512_add_ps(up, one)), opening);
}

/* A block of first(x) for each token: 64 rows of gate, then of up, or 64 pairs of both. */
TARGET static void gate_rows(const bf16 (*values)[2 * BLOCK], const Expert *expert, size_t tokens, bf16 *out, size_t stride) {
    for (size_t m = 0; m < tokens; m++)
        for (int i = 0; i < BLOCK; i += 16) {
            const __m512 gated = expert->gate == CLAMPED ? clamped_gate(values[m] + 2 * i, expert)
                                                         : silu_gate(values[m] + i, values[m] + BLOCK + i);
            store_bf16(out + m * stride + i, gated);
        }
}

/* A block of rows of matrix times the tokens, plus the bias where there is one. */
static void block_of(const Matrix *matrix, const bf16 *bias, size_t block, const bf16 *x, const float *sums, size_t tokens,
                     bf16 *out, size_t stride) {
    matrix_block(matrix, block, x, sums, tokens, out, stride);
    for (size_t m = 0; bias && m < tokens; m++) add_rows(out + m * stride, bias + block * BLOCK, BLOCK);
}

static void sum_x(void *data, size_t thread, size_t task) {
    (void)thread;
    sums_task(&((Job *)data)->x, task);
}

static void begin_first(void *data, size_t thread) { sums_begin(&((Job *)data)->x, thread); }

/* A block of the inner values of one expert. */
static void first(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t inner = job->inner.matrix->columns, blocks = inner / BLOCK, block = task % blocks;
    const Share *share = &job->shares[task / blocks];
    const Matrix *matrix = &share->expert.first;
    const size_t groups = matrix_groups(matrix);
    const int pairs = share->expert.gate == CLAMPED;
    const size_t one = pairs ? 2 * block : block, other = pairs ? one + 1 : block + blocks;
    bf16 values[TOKENS][2 * BLOCK];
    for (size_t m = 0; m < share->tokens; m += TOKENS) {
        const size_t tokens = share->tokens - m < TOKENS ? share->tokens - m : TOKENS, row = share->from + m;
        const bf16 *x = job->x.x + row * matrix->columns, *bias = share->expert.first_bias;
        const float *sums = sums_of(&job->x, thread) + row * groups;
        block_of(matrix, bias, one, x, sums, tokens, values[0], 2 * BLOCK);
        block_of(matrix, bias, other, x, sums, tokens, values[0] + BLOCK, 2 * BLOCK);
        gate_rows(values, &share->expert, tokens, (bf16 *)job->inner.x + (share->to + m) * inner + block * BLOCK, inner);
    }
}

static void sum_inner(void *data, size_t thread, size_t task) {
    (void)thread;
    sums_task(&((Job *)data)->inner, task);
}

static void begin_second(void *data, size_t thread) { sums_begin(&((Job *)data)->inner, thread); }

static void second(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t blocks = job->inner.matrix->rows / BLOCK, block = task % blocks;
    const Share *share = &job->shares[task / blocks];
    const Matrix *matrix = &share->expert.second;
    block_of(matrix, share->expert.second_bias, block, job->inner.x + share->to * matrix->columns,
             sums_of(&job->inner, thread) + share->to * matrix_groups(matrix), share->tokens,
             job->out + share->to * matrix->rows + block * BLOCK, matrix->rows);
}

size_t experts_sums(const Expert *expert, size_t rows, size_t results, size_t threads) {
    return sums_room(&expert->first, rows, threads) + sums_room(&expert->second, results, threads);
}

void experts_run(const Share *shares, size_t count, const bf16 *x, size_t rows, size_t results, bf16 *inner, float *sums,
                 bf16 *out, size_t threads, Pool pool) {
    const Matrix *up = &shares->expert.first, *down = &shares->expert.second;
    Job job = {shares, {up, x, rows, sums}, {down, inner, results, sums + sums_room(up, rows, threads)}, out};
    const Phase phases[] = {
        {NULL, sum_x, sums_tasks(&job.x)},
        {begin_first, first, count * (up->rows / 2 / BLOCK)},
        {NULL, sum_inner, sums_tasks(&job.inner)},
        {begin_second, second, count * (down->rows / BLOCK)},
    };
    team_run(phases, 4, &job, threads, pool);
}

TARGET void experts_combine(const bf16 *const *rows, const float *weights, size_t count, size_t columns, bf16 *out) {
    if (!count) memset(out, 0, columns * sizeof *out);
    for (size_t i = 0; count && i < columns; i += 16) {
        __m512 total = as_bf16(_mm512_mul_ps(load_bf16(rows[0] + i), _mm512_set1_ps(weights[0])));
        for (size_t e = 1; e < count; e++) {
            const __m512 value = as_bf16(_mm512_mul_ps(load_bf16(rows[e] + i), _mm512_set1_ps(weights[e])));
            total = as_bf16(_mm512_add_ps(total, value));
        }
        store_bf16(out + i, total);
    }
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
