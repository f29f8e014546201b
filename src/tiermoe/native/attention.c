#include "attention.h"

#include <float.h>
#include <string.h>

#include "norm.h"
#include "product.h"
#include "team.h"
#include "vector.h"

enum { LANES = 16, LARGEST_HEAD = 256, SMALLEST_GROUP = 32 };

typedef struct {
    const Attention *layer;
    const Step *step;
    float *sums, *scores; /* of each thread */
    bf16 *normed;         /* of each thread */
    bf16 *query, *key, *value, *attended;
    size_t sums_each, scores_each;
} Job;

/* The parts of the workspace, each on a line of its own. */
static size_t lay_out(Job *job, size_t sequences, size_t length, size_t threads, char *begin) {
    const Attention *layer = job->layer;
    const size_t hidden = layer->query.columns, queries = layer->query.rows, keys = layer->key.rows;
    char *end = begin;
    job->sums_each = sequences * (hidden > queries ? hidden : queries) / SMALLEST_GROUP;
    job->scores_each = (length + LANES) / LANES * LANES;
#define PART(field, count)          \
    job->field = (void *)end;       \
    end += ((count) * sizeof *job->field + 63) / 64 * 64;
    PART(sums, threads * job->sums_each)
    PART(scores, threads * job->scores_each)
    PART(normed, threads * sequences * hidden)
    PART(query, sequences * queries)
    PART(key, sequences * keys)
    PART(value, sequences * keys)
    PART(attended, sequences * queries)
#undef PART
    return (size_t)(end - begin);
}

size_t attention_workspace(const Attention *layer, size_t sequences, size_t length, size_t threads) {
    Job job = {.layer = layer};
    return lay_out(&job, sequences, length, threads, NULL);
}

/* What is small every thread computes for itself: that costs less than waiting for another. */
static void begin_projections(void *data, size_t thread) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t hidden = layer->query.columns, sequences = job->step->sequences;
    bf16 *normed = job->normed + thread * sequences * hidden;
    for (size_t s = 0; s < sequences; s++) {
        const bf16 *x = job->step->x + s * hidden;
        norm_apply(x, layer->norm_before, norm_scale(x, hidden, layer->epsilon), hidden, normed + s * hidden);
    }
    matrix_group_sums(&layer->query, normed, sequences, job->sums + thread * job->sums_each);
}

/* A block of rows of matrix times every sequence's x, plus the bias where there is one. */
static void multiply(const Job *job, const Matrix *matrix, size_t block, const bf16 *x, size_t thread, const bf16 *bias, bf16 *out) {
    bf16 *rows = out + block * BLOCK;
    matrix_block(matrix, block, x, job->sums + thread * job->sums_each, job->step->sequences, rows, matrix->rows);
    if (!bias) return;
    for (size_t s = 0; s < job->step->sequences; s++) add_rows(rows + s * matrix->rows, bias + block * BLOCK, BLOCK);
}

static void project(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const bf16 *normed = job->normed + thread * job->step->sequences * layer->query.columns;
    const struct {
        const Matrix *matrix;
        const bf16 *bias;
        bf16 *out;
    } projections[] = {{&layer->query, layer->query_bias, job->query},
                       {&layer->key, layer->key_bias, job->key},
                       {&layer->value, layer->value_bias, job->value}};
    for (int i = 0; i < 3; i++) {
        const size_t blocks = projections[i].matrix->rows / BLOCK;
        if (block < blocks) {
            multiply(job, projections[i].matrix, block, normed, thread, projections[i].bias, projections[i].out);
            return;
        }
        block -= blocks;
    }
}

/* head = head * cos + (-second half, first half) * sin */
TARGET static void rotate(bf16 *head, const Step *step, size_t sequence, size_t columns) {
    const size_t half = columns / 2, at = step->one_position ? 0 : sequence * columns;
    const bf16 *cos = step->cos + at, *sin = step->sin + at;
    for (size_t i = 0; i < half; i += LANES) {
        const __m512 first = load_bf16(head + i), second = load_bf16(head + half + i);
        const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), second);
        const __m512 a = as_bf16(_mm512_mul_ps(first, load_bf16(cos + i)));
        const __m512 b = as_bf16(_mm512_mul_ps(minus, load_bf16(sin + i)));
        const __m512 c = as_bf16(_mm512_mul_ps(second, load_bf16(cos + half + i)));
        const __m512 d = as_bf16(_mm512_mul_ps(first, load_bf16(sin + half + i)));
        store_bf16(head + i, _mm512_add_ps(a, b));
        store_bf16(head + half + i, _mm512_add_ps(c, d));
    }
}

/* Queries or keys as projected, the weight of their norm (NULL: none) and, where it spans all heads, its scale. */
typedef struct {
    const bf16 *values, *weight;
    float scale;
    int whole;
} Projected;

static Projected projected(const Attention *layer, const bf16 *values, size_t count, const bf16 *weight) {
    const int whole = weight && layer->norm_width != layer->head_columns;
    return (Projected){values, weight, whole ? norm_scale(values, count, layer->epsilon) : 0, whole};
}

/* out = head `head` of a sequence after its norm, in its position. */
static void place(const Job *job, size_t sequence, const Projected *from, size_t head, bf16 *out) {
    const Attention *layer = job->layer;
    const size_t columns = layer->head_columns;
    const bf16 *values = from->values + head * columns;
    if (from->weight) {
        const float scale = from->whole ? from->scale : norm_scale(values, columns, layer->epsilon);
        norm_apply(values, from->weight + (from->whole ? head * columns : 0), scale, columns, out);
    } else {
        memcpy(out, values, columns * sizeof(bf16));
    }
    rotate(out, job->step, sequence, columns);
}

/* scores[i] = scale * query times key i, four at a time; room for count rounded up to four. */
TARGET static void score(const bf16 *query, const bf16 *keys, size_t columns, size_t count, float scale, float *scores) {
    for (size_t i = 0; i < count; i += 4) {
        __m512 sums[4];
        for (size_t j = 0; j < 4; j++) /* beyond the last one: that one again */
            sums[j] = products(query, keys + (i + j < count ? i + j : count - 1) * columns, columns);
        _mm_storeu_ps(scores + i, _mm_mul_ps(four_sums(sums[0], sums[1], sums[2], sums[3]), _mm_set1_ps(scale)));
    }
}

/* Scores become e^(score - largest), in float32; returns their sum. */
TARGET static float soften(float *scores, size_t count) {
    const size_t lanes = (count + LANES - 1) / LANES * LANES;
    __m512 largest = _mm512_set1_ps(-FLT_MAX), sum = _mm512_setzero_ps();
    for (size_t i = count; i < lanes; i++) scores[i] = -FLT_MAX;
    for (size_t i = 0; i < lanes; i += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (size_t i = 0; i < lanes; i += LANES) {
        const __mmask16 there = count - i < LANES ? (__mmask16)((1u << (count - i)) - 1) : 0xFFFF;
        const __m512 weights = _mm512_maskz_mov_ps(there, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), largest)));
        _mm512_storeu_ps(scores + i, weights);
        sum = _mm512_add_ps(sum, weights);
    }
    return _mm512_reduce_add_ps(sum);
}

/* One head of queries over `count` keys and values of its group. */
TARGET static void attend(const Job *job, const bf16 *query, const bf16 *keys, const bf16 *values, size_t count, float *scores,
                          bf16 *out) {
    const size_t columns = job->layer->head_columns;
    score(query, keys, columns, count, job->layer->scale, scores);
    const __m512 scale = _mm512_set1_ps(1 / soften(scores, count));
    __m512 sums[LARGEST_HEAD / LANES];
    for (size_t r = 0; r < columns / LANES; r++) sums[r] = _mm512_setzero_ps();
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < columns / LANES; r++)
            sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(scores[i]), load_bf16(values + i * columns + r * LANES), sums[r]);
    for (size_t r = 0; r < columns / LANES; r++) store_bf16(out + r * LANES, _mm512_mul_ps(sums[r], scale));
}

/* Key and value of a sequence enter its cache; the heads of queries that share them attend. */
static void attend_group(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const Step *step = job->step;
    const size_t sequence = task / layer->kv_heads, kv_head = task % layer->kv_heads;
    const size_t columns = layer->head_columns, group = layer->heads / layer->kv_heads;
    const size_t first = step->first ? (size_t)step->first[sequence] : 0;
    const size_t query_rows = layer->query.rows, key_rows = layer->key.rows;
    const Projected queries = projected(layer, job->query + sequence * query_rows, query_rows, layer->norm_query);
    const Projected keys_of = projected(layer, job->key + sequence * key_rows, key_rows, layer->norm_key);
    bf16 *keys = step->keys + task * step->room * columns, *values = step->values + task * step->room * columns;
    place(job, sequence, &keys_of, kv_head, keys + step->length * columns);
    memcpy(values + step->length * columns, job->value + sequence * key_rows + kv_head * columns, columns * sizeof(bf16));
    for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        bf16 query[LARGEST_HEAD];
        place(job, sequence, &queries, head, query);
        attend(job, query, keys + first * columns, values + first * columns, step->length + 1 - first,
               job->scores + thread * job->scores_each, job->attended + sequence * query_rows + head * columns);
    }
}

static void begin_outputs(void *data, size_t thread) {
    const Job *job = data;
    matrix_group_sums(&job->layer->output, job->attended, job->step->sequences, job->sums + thread * job->sums_each);
}

static void add_output(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Matrix *output = &job->layer->output;
    multiply(job, output, block, job->attended, thread, job->layer->output_bias, job->step->out);
    for (size_t s = 0; s < job->step->sequences; s++) {
        const size_t at = s * output->rows + block * BLOCK;
        add_rows(job->step->out + at, job->step->x + at, BLOCK);
    }
}

static void norm_output(void *data, size_t thread, size_t sequence) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t hidden = layer->query.columns;
    const bf16 *out = job->step->out + sequence * hidden;
    (void)thread;
    norm_apply(out, layer->norm_after, norm_scale(out, hidden, layer->epsilon), hidden, job->step->normed + sequence * hidden);
}

void attention_run(const Attention *layer, const Step *step, void *workspace, size_t threads) {
    Job job = {.layer = layer, .step = step};
    lay_out(&job, step->sequences, step->length, threads, workspace);
    const Phase phases[] = {
        {begin_projections, project, (layer->query.rows + 2 * layer->key.rows) / BLOCK},
        {NULL, attend_group, step->sequences * layer->kv_heads},
        {begin_outputs, add_output, layer->query.columns / BLOCK},
        {NULL, norm_output, step->sequences},
    };
    team_run(phases, 4, &job, threads, OWN);
}
