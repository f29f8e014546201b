/* Attention over latents (DeepSeek-V2): what a head's keys and values are computed from lies in the cache, and their
 * matrices are applied to the query before and to the result after, so that nothing is computed for each position. */
#include <string.h>

#include "attention_job.h"
#include "kernels.h"
#include "rotary.h"

void latent_begin_queries(void *data, size_t thread) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t width = layer->query_first.matrix.rows;
    bf16 *normed = job->normed + thread * job->normed_each;
    for (size_t t = 0; t < job->step->tokens; t++) norm_row(&layer->query_norm, job->first + t * width, normed + t * width);
    const Projection *query = &layer->query;
    attention_prepare(job, &query, 1, normed, thread);
}

void latent_queries(void *data, size_t thread, size_t block) {
    const Job *job = data;
    const Projection *query = &job->layer->query;
    attention_multiply(job, query, 0, block, job->normed + thread * job->normed_each, thread, job->projected_query + block * BLOCK, query->matrix.rows);
}

/* out[t] = head `head`'s rows of the projection times this thread's one_head[t]. */
static void multiply_head(const Job *job, const Projection *projection, size_t head, size_t thread, const bf16 *one_head,
                          bf16 *out, size_t stride) {
    const size_t blocks = projection->matrix.rows / job->layer->heads / BLOCK;
    attention_prepare(job, &projection, 1, one_head, thread);
    for (size_t b = 0; b < blocks; b++)
        attention_multiply(job, projection, 0, head * blocks + b, one_head, thread, out + b * BLOCK, stride);
}

/* A head's queries: those without a position become latents, the others are rotated. */
static void place_queries(const Job *job, size_t head, size_t thread) {
    const Attention *layer = job->layer;
    const size_t tokens = job->step->tokens, plain = layer->key_columns, rotary = layer->rotary_columns;
    const size_t width = key_width(layer), stride = layer->heads * width;
    bf16 *one_head = job->one_head + thread * job->one_head_each, *query = job->query + head * width;
    for (size_t t = 0; t < tokens; t++) {
        const bf16 *projected = job->projected_query + (t * layer->heads + head) * (plain + rotary);
        memcpy(one_head + t * plain, projected, plain * sizeof *one_head);
        rotate(projected + plain, job->step->cos + t * rotary, job->step->sin + t * rotary, rotary, rotary,
               layer->interleaved, query + t * stride + layer->latent_columns);
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

void latent_place(void *data, size_t thread, size_t task) {
    const Job *job = data;
    if (task < job->layer->heads)
        place_queries(job, task, thread);
    else
        place_key(job, task - job->layer->heads);
}

void latent_merge(void *data, size_t thread, size_t head) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t latent = layer->latent_columns, each = tile_result(latent), stride = layer->heads * layer->value_columns;
    bf16 *one_head = job->one_head + thread * job->one_head_each;
    for (size_t t = 0; t < job->step->tokens; t++)
        kernels->merge_tiles(job->results + (job->places[t] * layer->heads + head) * each, job->places[t + 1] - job->places[t],
                    layer->heads * each, latent, layer->sinks ? layer->sinks + head : NULL, one_head + t * latent);
    multiply_head(job, &layer->value, head, thread, one_head, job->attended + head * layer->value_columns, stride);
}
