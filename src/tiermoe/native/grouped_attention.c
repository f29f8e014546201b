/* Queries, keys and values of heads that share keys and values in groups. */
#include <string.h>

#include "attention_job.h"
#include "kernels.h"
#include "kv_codes.h"
#include "rotary.h"

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

/* out = a head after its norm, in its position. */
static void place(const Job *job, size_t token, const Projected *from, size_t head, bf16 *out) {
    const Attention *layer = job->layer;
    const size_t columns = layer->key_columns, rotary = layer->rotary_columns;
    const bf16 *values = from->values + head * from->stride;
    bf16 normed[MOST_HEAD_COLUMNS];
    if (from->norm->weight) {
        const float scale = from->whole ? from->scale : norm_row_scale(from->norm, values);
        norm_part(from->norm, values, scale, from->whole ? head * columns : 0, columns, normed);
        values = normed;
    }
    rotate(values, job->step->cos + token * rotary, job->step->sin + token * rotary, rotary, columns, layer->interleaved,
           out);
}

void grouped_place(void *data, size_t thread, size_t task) {
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
        kv_encode(key, columns, (int8_t *)slabs->keys + row * columns, slabs->key_scales + row);
        kv_encode(values, width, (int8_t *)slabs->values + row * width, slabs->value_scales + row);
    } else {
        place(job, token, &keys, kv_head, (bf16 *)slabs->keys + row * columns);
        memcpy((bf16 *)slabs->values + row * width, values, width * sizeof(bf16));
    }
    for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        place(job, token, &queries, head, job->query + (token * layer->heads + head) * columns);
}

void grouped_merge(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Attention *layer = job->layer;
    const size_t token = task / layer->heads, head = task % layer->heads, width = layer->value_columns;
    const size_t each = tile_result(width), place = job->places[token];
    bf16 *out = job->attended + task * width;
    (void)thread;
    kernels->merge_tiles(job->results + (place * layer->heads + head) * each, job->places[token + 1] - place, layer->heads * each,
                width, layer->sinks ? layer->sinks + head : NULL, out);
    if (layer->gated)
        kernels->times_sigmoid(out, job->projected_query + task * query_columns(layer) + layer->key_columns, width);
}
