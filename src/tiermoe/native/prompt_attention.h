/* Attention of a prompt's tokens over their sequence: blocks of queries by tiles of positions, on as many threads as there
 * are blocks, whatever the number of key/value heads. Scores exist for a block and a tile alone. A token's values depend
 * on its query and on its sequence's positions, bit for bit: neither on the other tokens of a call nor on the threads. */
#ifndef TIERMOE_PROMPT_ATTENTION_H
#define TIERMOE_PROMPT_ATTENTION_H

#include "slabs.h"

typedef struct {
    const bf16 *query; /* (tokens, heads, key_columns of the slabs): in position */
    bf16 *out;         /* (tokens, heads, value_columns), out_stride from head to head */
    size_t out_stride;
    const float *sinks; /* (heads): a score without a value that joins a head's softmax; NULL: none */
    size_t tokens, heads;
    size_t slab, first; /* whose cache, and the position of the first token; keys and values of all are there */
    size_t window;      /* positions that a token attends to, its own included; 0: all */
    int chunked;        /* a token attends from a multiple of the window on */
    float scale;        /* of scores */
} Prompt;

/* Blocks of queries of a key/value head. */
size_t prompt_blocks(size_t tokens, size_t heads, const Slabs *slabs);

/* NULL where the slabs can do the prompt, else what does not fit. */
const char *prompt_misfit(const Prompt *prompt, const Slabs *slabs);

/* Bytes of workspace. */
size_t prompt_workspace(const Slabs *slabs, size_t threads);

/* One block of a key/value head: queries of its group's heads, token by token. workspace: that of one thread. */
void prompt_block(const Prompt *prompt, const Positions *positions, size_t kv_head, size_t kv_heads, size_t block,
                  float *workspace);

void prompt_attend(const Prompt *prompt, const Slabs *slabs, void *workspace, size_t threads);

#endif
