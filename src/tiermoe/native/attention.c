#include "attention.h"

#include <string.h>

#include "kernels.h"
#include "kv_codes.h"
#include "prompt_attention.h"
#include "team.h"

enum {
    PROJECTIONS = 3,      /* of one input, at the most */
    FEWEST_IN_BLOCKS = 8, /* tokens: fewer are faster one by one, with the same bits */
    MOST_IN_TILES = 64,   /* tokens of a step that is for threads of ours, and of which some are computed one by one: bounds
                           * the results of their tiles */
    HEAD_TOKENS = 64,     /* of latent attention: so many at a time go through a head's own matrix */
};

/* A token's tile of positions. */
typedef struct {
    size_t token, tile;
    size_t place; /* among all tiles, those of a token one after the other */
} Work;

/* A block of queries of tokens that follow each other, for every key/value head. */
typedef struct {
    size_t token, tokens; /* the first of them, and how many */
    size_t block;         /* among those of these tokens */
} PromptWork;

typedef struct {
    const Attention *layer;
    const Step *step;
    const Slabs *slabs;
    const bf16 *x;
    bf16 *out, *normed_out;
    size_t works, blocks, heads_each; /* heads of a task */
    size_t own;                       /* inputs are made by each thread for itself: 1, or by tasks for all: 0 */
    size_t prepared_each, normed_each, one_head_each, head_prepared_each, panels_each;
    Work *work;
    PromptWork *prompts;   /* (blocks) */
    size_t *places;        /* (tokens + 1): of a token's first tile; in a block there are none */
    float *panels;         /* of each thread: the workspace of a block */
    bf16 *normed;          /* of each thread, or of all: normed inputs of what is multiplied */
    float *prepared;       /* likewise, of each projection: what is known of what it multiplies */
    bf16 *one_head;        /* of each thread, (HEAD_TOKENS, columns): of latent attention */
    float *head_prepared;  /* of each thread: what is known of one_head */
    bf16 *first;           /* (tokens, rows of query_first) */
    bf16 *projected_query; /* (tokens, rows of query) */
    bf16 *projected_key;
    bf16 *projected_value; /* of grouped attention */
    bf16 *projected_gate;  /* of latent attention */
    bf16 *query;           /* (tokens, heads, attended key columns): in position; of a block of latent attention's, what was
                            * attended to then lies in its first columns */
    bf16 *attended;        /* (tokens, columns of output) */
    float *results;        /* (works, heads, tile_result(...)) */
} Job;

/* Columns of a query, and of a key in the cache. */
static inline size_t key_width(const Attention *layer) {
    return layer->latent_columns ? layer->latent_columns + layer->rotary_columns : layer->key_columns;
}

/* Columns of a value in the cache. */
static inline size_t value_width(const Attention *layer) {
    return layer->latent_columns ? layer->latent_columns : layer->value_columns;
}

/* Where position `position` of a token's sequence and head lies. */
static inline size_t cache_row(const Job *job, size_t token, size_t kv_head) {
    const Slabs *slabs = job->slabs;
    const size_t slab = (size_t)job->step->slabs[token] * slabs->kv_heads + kv_head;
    return slab * slabs->room + (size_t)job->step->positions[token] % slabs->room;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static size_t blocks(const Projection *projection) { return matrix_blocks(&projection->matrix); }

static size_t hidden(const Attention *layer) { return layer->output.matrix.rows; }

/* The last of the positions that a token attends to, counted among the chosen ones where there are such. */
static size_t last_of(const Step *step, size_t token) {
    const size_t position = (size_t)step->positions[token];
    if (!step->chosen) return position;
    const int32_t *chosen = step->chosen + token * step->most;
    size_t some = 0, none = step->most; /* so many are there, and from `none` on there is none */
    while (some < none) {
        const size_t middle = (some + none) / 2;
        if (chosen[middle] < 0) none = middle;
        else some = middle + 1;
    }
    return some && some - 1 < position ? some - 1 : position;
}

/* The first position that a token attends to. */
static size_t begin_of(const Attention *layer, const Step *step, size_t token) {
    const size_t position = (size_t)step->positions[token], first = step->first ? (size_t)step->first[token] : 0;
    return larger(first, window_begin(position, layer->window, layer->chunked));
}

static size_t first_tile(const Attention *layer, const Step *step, size_t token) {
    return begin_of(layer, step, token) / TILE;
}

static size_t last_tile(const Step *step, size_t token) { return last_of(step, token) / TILE; }

/* Tokens from `token` on that are of one sequence and follow each other. */
static size_t run_of(const Step *step, size_t token) {
    const int64_t *slabs = step->slabs + token, *positions = step->positions + token;
    size_t count = 1;
    while (token + count < step->tokens && slabs[count] == *slabs && positions[count] == *positions + (int64_t)count) count++;
    return count;
}

/* How many tokens from `token` on are computed by blocks of queries, those of one sequence that follow each other, or one
 * whose positions are chosen; 0: the token is computed by itself. */
static size_t in_blocks(const Step *step, size_t token) {
    if (step->first) return 0;
    if (step->chosen) return step->tokens >= FEWEST_IN_BLOCKS;
    const size_t count = run_of(step, token);
    return count < FEWEST_IN_BLOCKS && step->tokens <= MOST_IN_TILES ? 0 : count;
}

void step_measure(Step *step) {
    step->spread = 0;
    for (size_t a = 0, some; a < step->tokens; a += some) {
        some = run_of(step, a);
        step->spread = larger(step->spread, some - 1);
        for (size_t b = 0, others; b < a; b += others) {
            others = run_of(step, b);
            const int64_t first = step->positions[a] - step->positions[b + others - 1];
            const int64_t last = step->positions[a + some - 1] - step->positions[b];
            const int64_t most = -first > last ? -first : last;
            if (step->slabs[a] == step->slabs[b]) step->spread = larger(step->spread, (size_t)most);
        }
    }
}

static const char *chosen_misfit(const Attention *layer, const Step *step) {
    if (layer->window || step->first || !step->most) return "chosen positions beside a window or padding, or none";
    for (size_t t = 0; t < step->tokens; t++)
        for (size_t i = 0, last = step->chosen[t * step->most] < 0 ? 0 : last_of(step, t); i <= last; i++) {
            const int32_t chosen = step->chosen[t * step->most + i];
            if (chosen < 0 || chosen > step->positions[t]) return "a chosen position that is negative or beyond the token's own";
        }
    return NULL;
}

const char *attention_misfit(const Attention *layer, const Step *step, const Slabs *slabs) {
    if (slabs->kv_heads != layer->kv_heads || slabs->key_columns != key_width(layer))
        return "keys of another number of heads or columns than the layer's";
    if (slabs->value_columns != (layer->latent_columns ? 0 : layer->value_columns))
        return "values of another number of columns than the layer's";
    if (slabs->key_scales && layer->latent_columns) return "codes for latents";
    if (slabs->key_columns > MOST_KEY_COLUMNS) return "keys of more than 1024 columns";
    if (layer->rotary_columns && step->rotary_columns != layer->rotary_columns) return "cos and sin of another width than the layer rotates";
    if (slabs->ring && !layer->window) return "a ring for a layer without a window";
    if (slabs->ring && layer->window + step->spread > slabs->room)
        return "a ring with less room than the window and the step's tokens take";
    for (size_t t = 0; t < step->tokens; t++) {
        const int64_t position = step->positions[t], slab = step->slabs[t];
        if (slab < 0 || (size_t)slab >= slabs->slabs) return "a token of a slab that is not there";
        if (position < 0 || (!slabs->ring && (size_t)position >= slabs->room)) return "a position beyond the slab's room";
        if (step->first && (step->first[t] < 0 || step->first[t] > position))
            return "a first position that is negative or beyond the token's own";
    }
    return step->chosen ? chosen_misfit(layer, step) : NULL;
}

/* Floats of a token that projections want to know, at the most. */
static size_t most_prepared(const Projection *const *projections, size_t count) {
    size_t most = 0;
    for (size_t i = 0; i < count; i++)
        if (projections[i]->matrix.rows) most = larger(most, matrix_prepared(&projections[i]->matrix));
    return most;
}

/* The parts of the workspace, each on a line of its own. */
static size_t lay_out(Job *job, size_t threads, char *start) {
    const Attention *layer = job->layer;
    const size_t tokens = job->step->tokens, width = hidden(layer), latent = layer->latent_columns;
    const Projection *whole[] = {&layer->query, &layer->key, latent ? &layer->gate : &layer->value, &layer->output, &layer->query_first};
    const Projection *of_heads[] = {&layer->value, &layer->key_up};
    char *end = start;
    job->works = job->blocks = 0;
    for (size_t t = 0, some; t < tokens; t += some ? some : 1) {
        some = in_blocks(job->step, t);
        job->blocks += prompt_blocks(some, layer->heads, job->slabs);
        if (!some) job->works += last_tile(job->step, t) - first_tile(layer, job->step, t) + 1;
    }
    job->own = tokens <= PREPARED_ALONE;
    job->panels_each = job->blocks ? rows_workspace(key_width(layer), value_width(layer)) : 0;
    job->prepared_each = (tokens * most_prepared(whole, sizeof whole / sizeof *whole) + 15) / 16 * 16; /* each begins at a cache line */
    job->normed_each = tokens * larger(width, layer->query_first.matrix.rows);
    job->one_head_each = latent ? HEAD_TOKENS * larger(latent, layer->key_columns) : 0;
    job->head_prepared_each = latent ? (HEAD_TOKENS * most_prepared(of_heads, 2) + 15) / 16 * 16 : 0;
    const size_t group = layer->heads / layer->kv_heads, parts = (group + MOST_QUERIES - 1) / MOST_QUERIES;
    job->heads_each = (group + parts - 1) / parts;
#define PART(field, count)    \
    job->field = (void *)end; \
    end += ((count) * sizeof *job->field + 63) / 64 * 64;
    PART(work, job->works)
    PART(prompts, job->blocks)
    PART(places, tokens + 1)
    PART(panels, threads * job->panels_each)
    PART(normed, (job->own ? threads : 1) * job->normed_each)
    PART(prepared, (job->own ? threads : 1) * PROJECTIONS * job->prepared_each)
    PART(one_head, threads * job->one_head_each)
    PART(head_prepared, threads * job->head_prepared_each)
    PART(first, tokens * layer->query_first.matrix.rows)
    PART(projected_query, tokens * layer->query.matrix.rows)
    PART(projected_key, tokens * layer->key.matrix.rows)
    PART(projected_value, latent ? 0 : tokens * layer->value.matrix.rows)
    PART(projected_gate, tokens * layer->gate.matrix.rows)
    PART(query, tokens * layer->heads * key_width(layer))
    PART(attended, tokens * layer->output.matrix.columns)
    PART(results, job->works * layer->heads * tile_result(value_width(layer)))
#undef PART
    return (size_t)(end - start);
}

size_t attention_workspace(const Attention *layer, const Step *step, const Slabs *slabs, size_t threads) {
    Job job = {.layer = layer, .step = step, .slabs = slabs};
    return lay_out(&job, threads, NULL);
}

/* Whether a token is computed by itself, tile by tile. */
static int has_tiles(const Job *job, size_t token) { return job->places[token + 1] > job->places[token]; }

/* Tile by tile, so that tokens of one sequence find the keys and values of a tile where the one before has left them. */
static void list_work(Job *job) {
    const size_t tokens = job->step->tokens;
    size_t lowest = SIZE_MAX, highest = 0, count = 0, blocks = 0;
    job->places[0] = 0;
    for (size_t t = 0, some; t < tokens; t += some ? some : 1) {
        some = in_blocks(job->step, t);
        const size_t from = first_tile(job->layer, job->step, t), to = last_tile(job->step, t);
        for (size_t i = 0; i < prompt_blocks(some, job->layer->heads, job->slabs); i++)
            job->prompts[blocks++] = (PromptWork){t, some, i};
        for (size_t i = 0; i < some; i++) job->places[t + i + 1] = job->places[t];
        if (some) continue;
        job->places[t + 1] = job->places[t] + to - from + 1;
        if (from < lowest) lowest = from;
        if (to > highest) highest = to;
    }
    for (size_t tile = lowest; job->works && tile <= highest; tile++)
        for (size_t t = 0; t < tokens; t++) {
            const size_t from = first_tile(job->layer, job->step, t);
            if (!has_tiles(job, t) || tile < from || tile > last_tile(job->step, t)) continue;
            job->work[count++] = (Work){t, tile, job->places[t] + tile - from};
        }
}

/* Where a thread finds normed inputs, and what is known of inputs for projection `which`. */
static bf16 *normed_for(const Job *job, size_t thread) { return job->normed + thread * job->own * job->normed_each; }

static float *prepared_for(const Job *job, size_t which, size_t thread) {
    return job->prepared + (thread * job->own * PROJECTIONS + which) * job->prepared_each;
}

/* What up to PROJECTIONS matrices multiply: rows of x (tokens, columns), normed where there is a norm. */
typedef struct {
    const Projection *projections[PROJECTIONS];
    size_t count;
    const bf16 *x;
    const Norm *norm; /* NULL: as they are */
} Inputs;

/* What thread `thread` multiplies. */
static const bf16 *multiplied(const Job *job, const Inputs *inputs, size_t thread) {
    return inputs->norm ? normed_for(job, thread) : inputs->x;
}

/* Norms and prepares tokens begin .. end - 1. */
static void make_inputs(const Job *job, const Inputs *inputs, size_t begin, size_t end, size_t thread) {
    const size_t width = inputs->projections[0]->matrix.columns, at = begin * width;
    if (inputs->norm)
        for (size_t t = begin; t < end; t++) norm_row(inputs->norm, inputs->x + t * width, normed_for(job, thread) + t * width);
    for (size_t i = 0; i < inputs->count; i++) {
        const Matrix *matrix = &inputs->projections[i]->matrix;
        const size_t each = matrix_prepared(matrix);
        float *to = prepared_for(job, i, thread) + begin * each;
        if (i && matrices_alike(matrix, &inputs->projections[i - 1]->matrix))
            memcpy(to, prepared_for(job, i - 1, thread) + begin * each, (end - begin) * each * sizeof *to);
        else
            matrix_prepare(matrix, multiplied(job, inputs, thread) + at, end - begin, to);
    }
}

/* What is small every thread makes for itself: that costs less than waiting for another. */
static void make_own(const Job *job, const Inputs *inputs, size_t thread) {
    if (job->own) make_inputs(job, inputs, 0, job->step->tokens, thread);
}

static void make_some(const Job *job, const Inputs *inputs, size_t task) {
    const size_t begin = task * PREPARED_TASK, end = begin + PREPARED_TASK;
    make_inputs(job, inputs, begin, end < job->step->tokens ? end : job->step->tokens, 0);
}

/* out[t * stride + i] = row BLOCK * block + i of the projection of tokens. */
static void multiply(const Projection *projection, size_t block, const bf16 *x, const float *prepared, size_t tokens,
                     bf16 *out, size_t stride) {
    matrix_block(&projection->matrix, block, x, prepared, tokens, out, stride);
    for (size_t t = 0; projection->bias && t < tokens; t++)
        kernels->add(out + t * stride, 1, projection->bias + block * BLOCK, BLOCK);
}

/* A block of projection `which` of the inputs. */
static void multiply_inputs(const Job *job, const Inputs *inputs, size_t which, size_t block, size_t thread, bf16 *out) {
    const Projection *projection = inputs->projections[which];
    multiply(projection, block, multiplied(job, inputs, thread), prepared_for(job, which, thread), job->step->tokens,
             out + block * BLOCK, projection->matrix.rows);
}

/* Rotary embedding: out (columns) = head (columns) with its first `rotary` columns rotated; cos and sin (rotary). The pairs that rotate are
 * columns i and rotary / 2 + i, or, interleaved, columns 2 i and 2 i + 1; out has them as i and rotary / 2 + i in both
 * cases. head and out may be the same unless interleaved. */
static void rotate(const bf16 *head, const float *cos, const float *sin, size_t rotary, size_t columns, int interleaved,
            bf16 *out) {
    kernels->rotate(head, cos, sin, rotary, interleaved, out);
    if (out != head) memcpy(out + rotary, head + rotary, (columns - rotary) * sizeof *out);
}

/* A token's queries (columns) by its temperature. */
static void temper(const Step *step, size_t token, bf16 *queries, size_t columns) {
    if (!step->temperatures) return;
    for (size_t i = 0; i < columns; i++) queries[i] = to_bf16(from_bf16(queries[i]) * step->temperatures[token]);
}

/* Grouped attention: queries, keys and values of heads that share keys and values in groups. */

/* Rows of one token's heads as projected, and their norm's factor where it spans all heads. */
typedef struct {
    const bf16 *values;
    const Norm *norm;
    float scale;
    int whole;
    size_t stride; /* from head to head */
} Projected;

static Projected projected(const Attention *layer, const bf16 *values, const Norm *norm, size_t stride) {
    const int whole = norm->weight && norm->width != layer->key_columns;
    return (Projected){values, norm, whole ? norm_row_scale(norm, values) : 0, whole, stride};
}

/* Columns that `query` gives a head. */
static size_t query_columns(const Attention *layer) {
    return layer->key_columns + (layer->gated ? layer->value_columns : 0);
}

/* out = a head normed and in its position. */
static void place(const Job *job, size_t token, const Projected *from, size_t head, bf16 *out) {
    const Attention *layer = job->layer;
    const size_t columns = layer->key_columns, rotary = layer->rotary_columns;
    const bf16 *values = from->values + head * from->stride;
    bf16 normed[MOST_HEAD_COLUMNS];
    if (from->norm->weight && !layer->norms_rotated) {
        const float scale = from->whole ? from->scale : norm_row_scale(from->norm, values);
        norm_part(from->norm, values, scale, from->whole ? head * columns : 0, columns, normed);
        values = normed;
    }
    rotate(values, job->step->cos + token * rotary, job->step->sin + token * rotary, rotary, columns, layer->interleaved,
           out);
    if (from->norm->weight && layer->norms_rotated) {
        norm_row(from->norm, out, normed);
        memcpy(out, normed, columns * sizeof *out);
    }
}

static void grouped_place(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t token = task / layer->kv_heads, kv_head = task % layer->kv_heads;
    const size_t group = layer->heads / layer->kv_heads, columns = layer->key_columns, width = layer->value_columns;
    const size_t query_rows = layer->query.matrix.rows, key_rows = layer->key.matrix.rows;
    const Projected queries = projected(layer, job->projected_query + token * query_rows, &layer->query_norm,
                                        query_columns(layer));
    const Projected keys = projected(layer, job->projected_key + token * key_rows, &layer->key_norm, columns);
    const size_t row = cache_row(job, token, kv_head);
    const bf16 *values = job->projected_value + token * layer->value.matrix.rows + kv_head * width;
    const Slabs *slabs = job->slabs;
    (void)thread;
    if (slabs->key_scales) {
        bf16 key[MOST_HEAD_COLUMNS];
        place(job, token, &keys, kv_head, key);
        kv_encode(key, columns, slabs->bits, slabs->keys, row, slabs->key_scales);
        kv_encode(values, width, slabs->bits, slabs->values, row, slabs->value_scales);
    } else {
        place(job, token, &keys, kv_head, (bf16 *)slabs->keys + row * columns);
        memcpy((bf16 *)slabs->values + row * width, values, width * sizeof(bf16));
    }
    for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        bf16 *query = job->query + (token * layer->heads + head) * columns;
        place(job, token, &queries, head, query);
        temper(job->step, token, query, columns);
        if (slabs->bits == 4 && has_tiles(job, token)) hadamard_inverse(query, columns, query);
    }
}

static void grouped_merge(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t token = task / layer->heads, head = task % layer->heads, width = layer->value_columns;
    const size_t each = tile_result(width), place = job->places[token];
    bf16 *out = job->attended + task * width;
    (void)thread;
    if (has_tiles(job, token)) {
        kernels->merge_tiles(job->results + (place * layer->heads + head) * each, job->places[token + 1] - place,
                             layer->heads * each, width, layer->sinks ? layer->sinks + head : NULL, out);
        if (job->slabs->bits == 4) hadamard_inverse(out, width, out);
    }
    if (layer->gated)
        kernels->times_sigmoid(out, job->projected_query + task * query_columns(layer) + layer->key_columns, width);
}

/* Latent attention (DeepSeek-V2): what a head's keys and values are computed from lies in the cache, and their
 * matrices are applied to the query before and to the result after, so that nothing is computed for each position. */

/* out[t] = head `head`'s rows of the projection times this thread's one_head[t], for some tokens. */
static void multiply_head(const Job *job, const Projection *projection, size_t head, size_t tokens, size_t thread, bf16 *out,
                          size_t stride) {
    const size_t blocks = projection->matrix.rows / job->layer->heads / BLOCK;
    const bf16 *one_head = job->one_head + thread * job->one_head_each;
    float *prepared = job->head_prepared + thread * job->head_prepared_each;
    matrix_prepare(&projection->matrix, one_head, tokens, prepared);
    for (size_t b = 0; b < blocks; b++)
        multiply(projection, head * blocks + b, one_head, prepared, tokens, out + b * BLOCK, stride);
}

/* A head's queries of tokens begin .. end - 1: those without a position become latents, the others are rotated. */
static void place_queries(const Job *job, size_t head, size_t begin, size_t end, size_t thread) {
    const Attention *layer = job->layer;
    const size_t plain = layer->key_columns, rotary = layer->rotary_columns;
    const size_t width = key_width(layer), stride = layer->heads * width;
    bf16 *one_head = job->one_head + thread * job->one_head_each, *query = job->query + head * width;
    for (size_t t = begin; t < end; t++, one_head += plain) {
        const bf16 *projected = job->projected_query + (t * layer->heads + head) * (plain + rotary);
        bf16 *rotated = query + t * stride + layer->latent_columns;
        memcpy(one_head, projected, plain * sizeof *one_head);
        temper(job->step, t, one_head, plain);
        rotate(projected + plain, job->step->cos + t * rotary, job->step->sin + t * rotary, rotary, rotary,
               layer->interleaved, rotated);
        temper(job->step, t, rotated, rotary);
    }
    multiply_head(job, &layer->key_up, head, end - begin, thread, query + begin * stride, stride);
}

/* A token's latent and rotary key enter its cache. */
static void place_key(const Job *job, size_t token) {
    const Attention *layer = job->layer;
    const size_t rotary = layer->rotary_columns, latent = layer->latent_columns;
    const bf16 *projected = job->projected_key + token * layer->key.matrix.rows;
    bf16 *row = (bf16 *)job->slabs->keys + cache_row(job, token, 0) * key_width(layer);
    norm_row(&layer->key_norm, projected, row);
    rotate(projected + latent, job->step->cos + token * rotary, job->step->sin + token * rotary, rotary, rotary,
           layer->interleaved, row + latent);
}

/* The tokens of a task: of one head in turn. */
static size_t head_tasks(const Job *job) { return (job->step->tokens + HEAD_TOKENS - 1) / HEAD_TOKENS; }

static size_t head_end(const Job *job, size_t begin) {
    return begin + HEAD_TOKENS < job->step->tokens ? begin + HEAD_TOKENS : job->step->tokens;
}

static void latent_place(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t queries = job->layer->heads * head_tasks(job), begin = task / job->layer->heads * HEAD_TOKENS;
    if (task < queries)
        place_queries(job, task % job->layer->heads, begin, head_end(job, begin), thread);
    else
        place_key(job, task - queries);
}

/* Where latent attention has a gate: of each head one, or one for each column. */
static void gate_head(const Job *job, size_t token, size_t head, bf16 *out) {
    const size_t rows = job->layer->gate.matrix.rows, width = job->layer->value_columns;
    const bf16 *gates = job->projected_gate + token * rows;
    bf16 all[MOST_HEAD_COLUMNS];
    if (rows == job->layer->heads) {
        for (size_t c = 0; c < width; c++) all[c] = gates[head];
        kernels->times_sigmoid(out, all, width);
    } else {
        kernels->times_sigmoid(out, gates + head * width, width);
    }
}

static void latent_merge(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t latent = layer->latent_columns, each = tile_result(latent), stride = layer->heads * layer->value_columns;
    const size_t head = task % layer->heads, begin = task / layer->heads * HEAD_TOKENS, end = head_end(job, begin);
    bf16 *one_head = job->one_head + thread * job->one_head_each, *out = job->attended + head * layer->value_columns;
    for (size_t t = begin; t < end; t++, one_head += latent) {
        if (has_tiles(job, t))
            kernels->merge_tiles(job->results + (job->places[t] * layer->heads + head) * each, job->places[t + 1] - job->places[t],
                                 layer->heads * each, latent, layer->sinks ? layer->sinks + head : NULL, one_head);
        else
            memcpy(one_head, job->query + (t * layer->heads + head) * key_width(layer), latent * sizeof *one_head);
    }
    multiply_head(job, &layer->value, head, end - begin, thread, out + begin * stride, stride);
    for (size_t t = begin; layer->gate.matrix.rows && t < end; t++) gate_head(job, t, head, out + t * stride);
}

/* The stages of products: of the hidden states, of a narrow query, of what was attended to. */

/* out: where each projection's results go. */
static Inputs of_states(const Job *job, bf16 *out[PROJECTIONS]) {
    const Attention *layer = job->layer;
    const int two_steps = layer->query_first.matrix.rows != 0, latent = layer->latent_columns != 0;
    out[0] = two_steps ? job->first : job->projected_query;
    out[1] = job->projected_key, out[2] = latent ? job->projected_gate : job->projected_value;
    return (Inputs){
        .projections = {two_steps ? &layer->query_first : &layer->query, &layer->key, latent ? &layer->gate : &layer->value},
        .count = latent && !layer->gate.matrix.rows ? 2 : 3,
        .x = job->x,
        .norm = layer->before.weight ? &layer->before : NULL,
    };
}

static Inputs of_narrow(const Job *job) {
    return (Inputs){.projections = {&job->layer->query}, .count = 1, .x = job->first, .norm = &job->layer->query_norm};
}

static Inputs of_attended(const Job *job) {
    return (Inputs){.projections = {&job->layer->output}, .count = 1, .x = job->attended};
}

#define STAGE(name, inputs)                                              \
    static void begin_##name(void *data, size_t thread) {                \
        const Job *job = data;                                           \
        const Inputs stage = inputs;                                     \
        make_own(job, &stage, thread);                                   \
    }                                                                    \
    static void prepare_##name(void *data, size_t thread, size_t task) { \
        const Job *job = data;                                           \
        const Inputs stage = inputs;                                     \
        (void)thread;                                                    \
        make_some(job, &stage, task);                                    \
    }
STAGE(states, of_states(job, (bf16 *[PROJECTIONS]){0}))
STAGE(narrow, of_narrow(job))
STAGE(attended, of_attended(job))
#undef STAGE

static void project(void *data, size_t thread, size_t block) {
    const Job *job = data;
    bf16 *out[PROJECTIONS];
    const Inputs inputs = of_states(job, out);
    size_t which = 0;
    for (; block >= blocks(inputs.projections[which]); which++) block -= blocks(inputs.projections[which]);
    multiply_inputs(job, &inputs, which, block, thread, out[which]);
}

static void project_narrow(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Inputs inputs = of_narrow(job);
    multiply_inputs(job, &inputs, 0, block, thread, job->projected_query);
}

/* Keys and values of a token's sequence and head. */
static Positions positions_of(const Job *job, size_t token, size_t kv_head) {
    Positions positions = slab_positions(job->slabs, (size_t)job->step->slabs[token], kv_head, job->layer->latent_columns);
    if (job->step->chosen) positions.chosen = job->step->chosen + token * job->step->most;
    return positions;
}

/* A block of queries. */
static void attend_prompt(const Job *job, size_t thread, size_t task) {
    const Attention *layer = job->layer;
    const PromptWork *work = &job->prompts[task % job->blocks];
    const size_t kv_head = task / job->blocks, first = work->token * layer->heads;
    const size_t stride = layer->latent_columns ? key_width(layer) : layer->value_columns;
    const Prompt prompt = {
        .query = job->query + first * key_width(layer),
        .out = (layer->latent_columns ? job->query : job->attended) + first * stride,
        .out_stride = stride,
        .sinks = layer->sinks,
        .tokens = work->tokens,
        .heads = layer->heads,
        .first = last_of(job->step, work->token),
        .window = layer->window,
        .chunked = layer->chunked,
        .scale = layer->scale,
    };
    const Positions positions = positions_of(job, work->token, kv_head);
    prompt_block(&prompt, &positions, kv_head, layer->kv_heads, work->block, job->panels + thread * job->panels_each);
}

/* Some heads of a group over a tile, or a block of queries: these take longer, and come first. */
static void attend(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    if (task < layer->kv_heads * job->blocks) {
        attend_prompt(job, thread, task);
        return;
    }
    task -= layer->kv_heads * job->blocks;
    const size_t group = layer->heads / layer->kv_heads, parts = (group + job->heads_each - 1) / job->heads_each;
    const Work *work = &job->work[task % job->works];
    const size_t kv_head = task / job->works / parts, from = task / job->works % parts * job->heads_each;
    const size_t count = group - from < job->heads_each ? group - from : job->heads_each;
    const size_t head = kv_head * group + from, token = work->token, width = key_width(layer);
    const Positions positions = positions_of(job, token, kv_head);
    const size_t tile = work->tile * TILE, position = last_of(job->step, token);
    (void)thread;
    kernels->attend_tile(&positions, job->query + (token * layer->heads + head) * width, count,
                         larger(tile, begin_of(layer, job->step, token)),
                         position < tile + TILE ? position + 1 : tile + TILE, layer->scale,
                         job->results + (work->place * layer->heads + head) * tile_result(positions.value_columns));
}

static void add_output(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t width = hidden(layer);
    const Inputs inputs = of_attended(job);
    multiply_inputs(job, &inputs, 0, block, thread, job->out);
    for (size_t t = 0; layer->after.weight && t < job->step->tokens; t++) {
        const size_t at = t * width + block * BLOCK;
        kernels->add(job->out + at, layer->residual_multiplier, job->x + at, BLOCK);
    }
}

static void norm_output(void *data, size_t thread, size_t token) {
    const Job *job = data;
    const size_t at = token * hidden(job->layer);
    (void)thread;
    norm_row(&job->layer->after, job->out + at, job->normed_out + at);
}

void attention_run(const Attention *layer, const Step *step, const Slabs *slabs, const bf16 *x, bf16 *out, bf16 *normed,
                   void *workspace, size_t threads) {
    Job job = {.layer = layer, .step = step, .slabs = slabs, .x = x, .out = out, .normed_out = normed};
    lay_out(&job, threads, workspace);
    list_work(&job);
    const size_t group = layer->heads / layer->kv_heads, parts = (group + job.heads_each - 1) / job.heads_each;
    const int latent = layer->latent_columns != 0, two_steps = layer->query_first.matrix.rows != 0;
    const size_t tokens = step->tokens, some = job.own ? 0 : (tokens + PREPARED_TASK - 1) / PREPARED_TASK;
    bf16 *outs[PROJECTIONS];
    const Inputs states = of_states(&job, outs);
    size_t projected = 0;
    for (size_t i = 0; i < states.count; i++) projected += blocks(states.projections[i]);
    const Phase phases[] = {
        {NULL, prepare_states, some},
        {begin_states, project, projected},
        {NULL, prepare_narrow, two_steps ? some : 0},
        {begin_narrow, project_narrow, two_steps ? blocks(&layer->query) : 0},
        {NULL, latent ? latent_place : grouped_place,
         latent ? layer->heads * head_tasks(&job) + tokens : tokens * layer->kv_heads},
        {NULL, attend, layer->kv_heads * (job.blocks + parts * job.works)},
        {NULL, latent ? latent_merge : grouped_merge,
         latent ? layer->heads * head_tasks(&job) : job.works || layer->gated ? tokens * layer->heads : 0},
        {NULL, prepare_attended, some},
        {begin_attended, add_output, blocks(&layer->output)},
        {NULL, norm_output, layer->after.weight ? tokens : 0},
    };
    team_run(phases, sizeof phases / sizeof *phases, &job, threads, tokens <= MOST_IN_TILES ? OWN : TORCHS);
}
