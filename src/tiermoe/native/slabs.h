/* The key/value cache of a layer, which both kinds of attention read: of few tokens (attention.h) and of a prompt's
 * (prompt_attention.h). */
#ifndef TIERMOE_SLABS_H
#define TIERMOE_SLABS_H

#include "attention_tiles.h"

enum { MOST_HEAD_COLUMNS = 512 }; /* of a latent with its rotary key: MOST_KEY_COLUMNS (attention_tiles.h) */

/* Keys (slabs, kv_heads, room, key_columns), values (slabs, kv_heads, room, value_columns);
 * of latent attention keys (slabs, 1, room, latent_columns + rotary_columns) and no values. Position p lies in row p, or in
 * row p % room of a ring. Keys and values are bfloat16, or codes of 8 or 4 bits with a scale for each row (kv_codes.h):
 * key_scales and value_scales (slabs, kv_heads, room). */
typedef struct {
    void *keys, *values;
    bf16 *key_scales, *value_scales; /* NULL: bfloat16 */
    size_t bits;                     /* of a column: 16, or 8 or 4 of codes */
    size_t slabs, kv_heads, room, key_columns, value_columns;
    int ring;
} Slabs;

/* Keys and values of a sequence's head, for the kernels of attention_tiles.h. latent_columns: those of a key that are its value,
 * too; 0: values lie apart. */
static inline Positions slab_positions(const Slabs *slabs, size_t slab, size_t kv_head, size_t latent_columns) {
    const size_t row = (slab * slabs->kv_heads + kv_head) * slabs->room;
    return (Positions){
        .keys = (const char *)slabs->keys + row * slabs->key_columns * slabs->bits / 8,
        .values = latent_columns ? (const char *)slabs->keys + row * slabs->key_columns * slabs->bits / 8
                                 : (const char *)slabs->values + row * slabs->value_columns * slabs->bits / 8,
        .key_scales = slabs->key_scales ? slabs->key_scales + row : NULL,
        .value_scales = slabs->value_scales ? slabs->value_scales + row : NULL,
        .bits = slabs->bits,
        .key_columns = slabs->key_columns,
        .value_columns = latent_columns ? latent_columns : slabs->value_columns,
        .key_stride = slabs->key_columns,
        .value_stride = latent_columns ? slabs->key_columns : slabs->value_columns,
        .room = slabs->room,
    };
}

#endif
