#include "attention.h"

#include <string.h>

#include "attention_job.h"
#include "kernels.h"
#include "team.h"

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
    return layer->window && position + 1 > layer->window ? larger(first, position + 1 - layer->window) : first;
}

static size_t first_tile(const Attention *layer, const Step *step, size_t token) {
    return begin_of(layer, step, token) / TILE;
}

static size_t last_tile(const Step *step, size_t token) { return last_of(step, token) / TILE; }

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
    if (slabs->key_scales && layer->latent_columns) return "codes of 8 bits for latents";
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

Positions slab_positions(const Slabs *slabs, size_t slab, size_t kv_head) {
    const size_t row = (slab * slabs->kv_heads + kv_head) * slabs->room, each = slabs->key_scales ? 1 : sizeof(bf16);
    return (Positions){
        .keys = (const char *)slabs->keys + row * slabs->key_columns * each,
        .values = slabs->values ? (const char *)slabs->values + row * slabs->value_columns * each : NULL,
        .key_scales = slabs->key_scales ? slabs->key_scales + row : NULL,
        .value_scales = slabs->value_scales ? slabs->value_scales + row : NULL,
        .key_columns = slabs->key_columns,
        .value_columns = slabs->value_columns,
        .key_stride = slabs->key_columns,
        .value_stride = slabs->value_columns,
        .room = slabs->room,
    };
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
    job->works = 0;
    for (size_t t = 0; t < tokens; t++) job->works += last_tile(job->step, t) - first_tile(layer, job->step, t) + 1;
    job->prepared_each = (tokens * most_prepared(layer) + 15) / 16 * 16; /* so that each begins at a cache line */
    job->normed_each = tokens * larger(width, layer->query_first.matrix.rows);
    job->one_head_each = latent ? tokens * larger(latent, layer->key_columns) : 0;
    const size_t group = layer->heads / layer->kv_heads, parts = (group + MOST_QUERIES - 1) / MOST_QUERIES;
    job->heads_each = (group + parts - 1) / parts;
#define PART(field, count)    \
    job->field = (void *)end; \
    end += ((count) * sizeof *job->field + 63) / 64 * 64;
    PART(work, job->works)
    PART(places, tokens + 1)
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

size_t attention_workspace(const Attention *layer, const Step *step, size_t threads) {
    Job job = {.layer = layer, .step = step};
    return lay_out(&job, threads, NULL);
}

/* Tile by tile, so that tokens of one sequence find the keys and values of a tile where the one before has left them. */
static void list_work(Job *job) {
    const size_t tokens = job->step->tokens;
    size_t lowest = SIZE_MAX, highest = 0, count = 0;
    job->places[0] = 0;
    for (size_t t = 0; t < tokens; t++) {
        const size_t from = first_tile(job->layer, job->step, t), to = last_tile(job->step, t);
        job->places[t + 1] = job->places[t] + to - from + 1;
        if (from < lowest) lowest = from;
        if (to > highest) highest = to;
    }
    for (size_t tile = lowest; tokens && tile <= highest; tile++)
        for (size_t t = 0; t < tokens; t++) {
            const size_t from = first_tile(job->layer, job->step, t);
            if (tile < from || tile > last_tile(job->step, t)) continue;
            job->work[count++] = (Work){t, tile, job->places[t] + tile - from};
        }
}

/* Where a thread keeps what is known for projection `which`. */
static float *prepared_of(const Job *job, size_t which, size_t thread) {
    return job->prepared + (thread * PROJECTIONS + which) * job->prepared_each;
}

void attention_prepare(const Job *job, const Projection *const *projections, size_t count, const bf16 *x, size_t thread) {
    for (size_t i = 0; i < count; i++) {
        const Matrix *matrix = &projections[i]->matrix;
        const size_t bytes = job->step->tokens * matrix_prepared(matrix) * sizeof(float);
        if (i && matrices_alike(matrix, &projections[i - 1]->matrix))
            memcpy(prepared_of(job, i, thread), prepared_of(job, i - 1, thread), bytes);
        else
            matrix_prepare(matrix, x, job->step->tokens, prepared_of(job, i, thread));
    }
}

void attention_multiply(const Job *job, const Projection *projection, size_t which, size_t block, const bf16 *x,
                        size_t thread, bf16 *out, size_t stride) {
    const size_t tokens = job->step->tokens;
    matrix_block(&projection->matrix, block, x, prepared_of(job, which, thread), tokens, out, stride);
    for (size_t t = 0; projection->bias && t < tokens; t++)
        kernels->add(out + t * stride, 1, projection->bias + block * BLOCK, BLOCK);
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
    attention_prepare(job, projections, count, normed, thread);
}

static void project(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Projection *projections[PROJECTIONS];
    bf16 *out[PROJECTIONS];
    size_t which = 0;
    projections_of(job, projections, out);
    for (; block >= blocks(projections[which]); which++) block -= blocks(projections[which]);
    attention_multiply(job, projections[which], which, block, job->normed + thread * job->normed_each, thread,
                       out[which] + block * BLOCK, projections[which]->matrix.rows);
}

/* Some heads of a group over a tile. */
static void attend(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const Slabs *slabs = job->slabs;
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
    attention_prepare(job, &output, 1, job->attended, thread);
}

static void add_output(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t width = hidden(layer);
    attention_multiply(job, &layer->output, 0, block, job->attended, thread, job->out + block * BLOCK, width);
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
        {NULL, attend, layer->kv_heads * parts * job.works},
        {NULL, latent ? latent_merge : grouped_merge, latent ? layer->heads : step->tokens * layer->heads},
        {begin_outputs, add_output, blocks(&layer->output)},
        {NULL, norm_output, step->tokens},
    };
    team_run(phases, sizeof phases / sizeof *phases, &job, threads, OWN);
}
