#include "attention.h"

#include <string.h>

#include "kernels.h"
#include "kv_codes.h"
#include "prompt_attention.h"
#include "team.h"

enum {
    PROJECTIONS = 3,      /* of one input, at the most */
    FEWEST_IN_BLOCKS = 8, /* tokens: fewer are faster one by one, with the same bits */
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
    size_t works, blocks, prepared_each, heads_each; /* heads of a task */
    size_t normed_each, one_head_each, panels_each;
    Work *work;
    PromptWork *prompts;   /* (blocks) */
    size_t *places;        /* (tokens + 1): of a token's first tile; in a block there are none */
    float *panels;         /* of each thread: the workspace of a block */
    bf16 *normed;          /* of each thread: normed inputs of what it multiplies */
    float *prepared;       /* of each thread and projection: what is known of what it multiplies */
    bf16 *one_head;        /* of each thread, (tokens, columns): of latent attention */
    bf16 *first;           /* (tokens, rows of query_first) */
    bf16 *projected_query; /* (tokens, rows of query) */
    bf16 *projected_key;
    bf16 *projected_value; /* of grouped attention */
    bf16 *query;           /* (tokens, heads, attended key columns): in position */
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
    return step->chosen && position >= step->most ? step->most - 1 : position;
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

/* How many tokens from `token` on, those of a sequence that follow each other, are computed by blocks of queries; 0: the token
 * is computed by itself. */
static size_t in_blocks(const Attention *layer, const Step *step, size_t token) {
    const int64_t *slabs = step->slabs + token, *positions = step->positions + token;
    size_t count = 0;
    if (layer->latent_columns || step->first || step->chosen) return 0;
    while (token + count < step->tokens && slabs[count] == *slabs && positions[count] == *positions + (int64_t)count) count++;
    return count < FEWEST_IN_BLOCKS ? 0 : count;
}

void step_measure(Step *step) {
    step->spread = 0;
    for (size_t a = 0; a < step->tokens; a++)
        for (size_t b = 0; b < a; b++) {
            const int64_t apart = step->positions[a] - step->positions[b];
            const size_t distance = (size_t)(apart < 0 ? -apart : apart);
            if (step->slabs[a] == step->slabs[b] && distance > step->spread) step->spread = distance;
        }
}

static const char *chosen_misfit(const Attention *layer, const Step *step) {
    if (layer->window || step->first || !step->most) return "chosen positions beside a window or padding, or none";
    for (size_t t = 0; t < step->tokens; t++)
        for (size_t i = 0; i <= last_of(step, t); i++) {
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
    if (step->rotary_columns != layer->rotary_columns) return "cos and sin of another width than the layer rotates";
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

/* Floats of a token that a projection wants to know, at the most. */
static size_t most_prepared(const Attention *layer) {
    const Projection *all[] = {&layer->query, &layer->key, &layer->value, &layer->output, &layer->query_first, &layer->key_up};
    size_t most = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->matrix.rows) most = larger(most, matrix_prepared(&all[i]->matrix));
    return most;
}

/* The parts of the workspace, each on a line of its own. */
static size_t lay_out(Job *job, size_t threads, char *start) {
    const Attention *layer = job->layer;
    const size_t tokens = job->step->tokens, width = hidden(layer), latent = layer->latent_columns;
    char *end = start;
    job->works = job->blocks = 0;
    for (size_t t = 0, some; t < tokens; t += some ? some : 1) {
        some = in_blocks(layer, job->step, t);
        job->blocks += prompt_blocks(some, layer->heads, job->slabs);
        if (!some) job->works += last_tile(job->step, t) - first_tile(layer, job->step, t) + 1;
    }
    job->panels_each = job->blocks ? rows_workspace(layer->key_columns, layer->value_columns) : 0;
    job->prepared_each = (tokens * most_prepared(layer) + 15) / 16 * 16; /* so that each begins at a cache line */
    job->normed_each = tokens * larger(width, layer->query_first.matrix.rows);
    job->one_head_each = latent ? tokens * larger(latent, layer->key_columns) : 0;
    const size_t group = layer->heads / layer->kv_heads, parts = (group + MOST_QUERIES - 1) / MOST_QUERIES;
    job->heads_each = (group + parts - 1) / parts;
#define PART(field, count)    \
    job->field = (void *)end; \
    end += ((count) * sizeof *job->field + 63) / 64 * 64;
    PART(work, job->works)
    PART(prompts, job->blocks)
    PART(places, tokens + 1)
    PART(panels, threads * job->panels_each)
    PART(normed, threads * job->normed_each)
    PART(prepared, threads * PROJECTIONS * job->prepared_each)
    PART(one_head, threads * job->one_head_each)
    PART(first, tokens * layer->query_first.matrix.rows)
    PART(projected_query, tokens * layer->query.matrix.rows)
    PART(projected_key, tokens * layer->key.matrix.rows)
    PART(projected_value, latent ? 0 : tokens * layer->value.matrix.rows)
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
        some = in_blocks(job->layer, job->step, t);
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

/* Where a thread keeps what is known for projection `which`. */
static float *prepared_for(const Job *job, size_t which, size_t thread) {
    return job->prepared + (thread * PROJECTIONS + which) * job->prepared_each;
}

/* Prepares x (tokens, columns) for this thread's products with up to PROJECTIONS matrices. */
static void prepare(const Job *job, const Projection *const *projections, size_t count, const bf16 *x, size_t thread) {
    for (size_t i = 0; i < count; i++) {
        const Matrix *matrix = &projections[i]->matrix;
        const size_t bytes = job->step->tokens * matrix_prepared(matrix) * sizeof(float);
        if (i && matrices_alike(matrix, &projections[i - 1]->matrix))
            memcpy(prepared_for(job, i, thread), prepared_for(job, i - 1, thread), bytes);
        else
            matrix_prepare(matrix, x, job->step->tokens, prepared_for(job, i, thread));
    }
}

/* out[t * stride + i] = row BLOCK * block + i of the projection of x[t], for each token. x: as projection `which` of `prepare`. */
static void multiply(const Job *job, const Projection *projection, size_t which, size_t block, const bf16 *x,
                        size_t thread, bf16 *out, size_t stride) {
    const size_t tokens = job->step->tokens;
    matrix_block(&projection->matrix, block, x, prepared_for(job, which, thread), tokens, out, stride);
    for (size_t t = 0; projection->bias && t < tokens; t++)
        kernels->add(out + t * stride, 1, projection->bias + block * BLOCK, BLOCK);
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

static void latent_begin_queries(void *data, size_t thread) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t width = layer->query_first.matrix.rows;
    bf16 *normed = job->normed + thread * job->normed_each;
    for (size_t t = 0; t < job->step->tokens; t++) norm_row(&layer->query_norm, job->first + t * width, normed + t * width);
    const Projection *query = &layer->query;
    prepare(job, &query, 1, normed, thread);
}

static void latent_queries(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Projection *query = &job->layer->query;
    multiply(job, query, 0, block, job->normed + thread * job->normed_each, thread, job->projected_query + block * BLOCK, query->matrix.rows);
}

/* out[t] = head `head`'s rows of the projection times this thread's one_head[t]. */
static void multiply_head(const Job *job, const Projection *projection, size_t head, size_t thread, const bf16 *one_head,
                          bf16 *out, size_t stride) {
    const size_t blocks = projection->matrix.rows / job->layer->heads / BLOCK;
    prepare(job, &projection, 1, one_head, thread);
    for (size_t b = 0; b < blocks; b++)
        multiply(job, projection, 0, head * blocks + b, one_head, thread, out + b * BLOCK, stride);
}

/* A head's queries: those without a position become latents, the others are rotated. */
static void place_queries(const Job *job, size_t head, size_t thread) {
    const Attention *layer = job->layer;
    const size_t tokens = job->step->tokens, plain = layer->key_columns, rotary = layer->rotary_columns;
    const size_t width = key_width(layer), stride = layer->heads * width;
    bf16 *one_head = job->one_head + thread * job->one_head_each, *query = job->query + head * width;
    for (size_t t = 0; t < tokens; t++) {
        const bf16 *projected = job->projected_query + (t * layer->heads + head) * (plain + rotary);
        bf16 *rotated = query + t * stride + layer->latent_columns;
        memcpy(one_head + t * plain, projected, plain * sizeof *one_head);
        temper(job->step, t, one_head + t * plain, plain);
        rotate(projected + plain, job->step->cos + t * rotary, job->step->sin + t * rotary, rotary, rotary,
               layer->interleaved, rotated);
        temper(job->step, t, rotated, rotary);
    }
    multiply_head(job, &layer->key_up, head, thread, one_head, query, stride);
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

static void latent_place(void *data, size_t thread, size_t task) {
    const Job *job = data;
    if (task < job->layer->heads)
        place_queries(job, task, thread);
    else
        place_key(job, task - job->layer->heads);
}

static void latent_merge(void *data, size_t thread, size_t head) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t latent = layer->latent_columns, each = tile_result(latent), stride = layer->heads * layer->value_columns;
    bf16 *one_head = job->one_head + thread * job->one_head_each;
    for (size_t t = 0; t < job->step->tokens; t++)
        kernels->merge_tiles(job->results + (job->places[t] * layer->heads + head) * each, job->places[t + 1] - job->places[t],
                    layer->heads * each, latent, layer->sinks ? layer->sinks + head : NULL, one_head + t * latent);
    multiply_head(job, &layer->value, head, thread, one_head, job->attended + head * layer->value_columns, stride);
}

/* What is computed of the hidden states; returns how many. */
static size_t projections_of(const Job *job, const Projection **projections, bf16 **out) {
    const Attention *layer = job->layer;
    const int two_steps = layer->query_first.matrix.rows != 0;
    projections[0] = two_steps ? &layer->query_first : &layer->query;
    projections[1] = &layer->key, projections[2] = &layer->value;
    out[0] = two_steps ? job->first : job->projected_query;
    out[1] = job->projected_key, out[2] = job->projected_value;
    return layer->latent_columns ? 2 : 3;
}

/* What is small every thread computes for itself: that costs less than waiting for another. */
static void begin_projections(void *data, size_t thread) {
    const Job *job = data;
    const size_t width = hidden(job->layer), tokens = job->step->tokens;
    bf16 *normed = job->normed + thread * job->normed_each;
    for (size_t t = 0; t < tokens; t++) norm_row(&job->layer->before, job->x + t * width, normed + t * width);
    const Projection *projections[PROJECTIONS];
    bf16 *out[PROJECTIONS];
    const size_t count = projections_of(job, projections, out);
    prepare(job, projections, count, normed, thread);
}

static void project(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Projection *projections[PROJECTIONS];
    bf16 *out[PROJECTIONS];
    size_t which = 0;
    projections_of(job, projections, out);
    for (; block >= blocks(projections[which]); which++) block -= blocks(projections[which]);
    multiply(job, projections[which], which, block, job->normed + thread * job->normed_each, thread,
                       out[which] + block * BLOCK, projections[which]->matrix.rows);
}

/* A block of queries. */
static void attend_prompt(const Job *job, size_t thread, size_t task) {
    const Attention *layer = job->layer;
    const PromptWork *work = &job->prompts[task % job->blocks];
    const size_t first = (size_t)job->step->positions[work->token], query = work->token * layer->heads;
    const Prompt prompt = {
        .query = job->query + query * layer->key_columns,
        .out = job->attended + query * layer->value_columns,
        .sinks = layer->sinks,
        .tokens = work->tokens,
        .heads = layer->heads,
        .slab = (size_t)job->step->slabs[work->token],
        .first = first,
        .window = layer->window,
        .chunked = layer->chunked,
        .scale = layer->scale,
        .end = first + work->tokens,
    };
    prompt_block(&prompt, job->slabs, task / job->blocks, work->block, job->panels + thread * job->panels_each);
}

/* Some heads of a group over a tile, or a block of queries: these take longer, and come first. */
static void attend(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const Slabs *slabs = job->slabs;
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
    Positions positions = slab_positions(slabs, (size_t)job->step->slabs[token], kv_head);
    if (layer->latent_columns)
        positions.values = positions.keys, positions.value_columns = layer->latent_columns, positions.value_stride = width;
    if (job->step->chosen) positions.chosen = job->step->chosen + token * job->step->most;
    const size_t tile = work->tile * TILE, position = last_of(job->step, token);
    (void)thread;
    kernels->attend_tile(&positions, job->query + (token * layer->heads + head) * width, count,
                         larger(tile, begin_of(layer, job->step, token)),
                         position < tile + TILE ? position + 1 : tile + TILE, layer->scale,
                         job->results + (work->place * layer->heads + head) * tile_result(positions.value_columns));
}

static void begin_outputs(void *data, size_t thread) {
    const Job *job = data;
    const Projection *output = &job->layer->output;
    prepare(job, &output, 1, job->attended, thread);
}

static void add_output(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t width = hidden(layer);
    multiply(job, &layer->output, 0, block, job->attended, thread, job->out + block * BLOCK, width);
    for (size_t t = 0; t < job->step->tokens; t++) {
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
    const Projection *projections[PROJECTIONS];
    bf16 *outs[PROJECTIONS];
    size_t projected = 0;
    for (size_t i = projections_of(&job, projections, outs); i--;) projected += blocks(projections[i]);
    const Phase phases[] = {
        {begin_projections, project, projected},
        {latent_begin_queries, latent_queries, two_steps ? blocks(&layer->query) : 0},
        {NULL, latent ? latent_place : grouped_place,
         latent ? layer->heads + step->tokens : step->tokens * layer->kv_heads},
        {NULL, attend, layer->kv_heads * (job.blocks + parts * job.works)},
        {NULL, latent ? latent_merge : grouped_merge, latent ? layer->heads : step->tokens * layer->heads},
        {begin_outputs, add_output, blocks(&layer->output)},
        {NULL, norm_output, step->tokens},
    };
    team_run(phases, sizeof phases / sizeof *phases, &job, threads, OWN);
}
