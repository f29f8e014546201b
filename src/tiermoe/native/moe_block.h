/* A MoE block for a few tokens, all in one: router, the chosen experts, their weighted sums, the residual. */
#ifndef TIERMOE_MOE_BLOCK_H
#define TIERMOE_MOE_BLOCK_H

#include "expert.h"
#include "route.h"

typedef struct {
    Router router;
    const Expert *experts; /* one for each of the router's, of one shape; without weights where an expert is not here */
    const Expert *forms;   /* what they may be, in one precision or several: without weights */
    size_t form_count;
} MoeBlock;

/* Bytes of workspace. */
size_t moe_block_workspace(const MoeBlock *block, size_t tokens, size_t threads);

/* Routes x (tokens, H). Returns how many experts were chosen. The workspace keeps what the functions below need, of the
 * same block, tokens and threads. */
size_t moe_block_route(const MoeBlock *block, const bf16 *x, size_t tokens, void *workspace, size_t threads);

/* What was chosen last, also by `moe_block_run`: (tokens, k), each token's experts in ascending order. */
const int64_t *moe_block_chosen(const MoeBlock *block, size_t tokens, void *workspace, size_t threads);

/* The same with a choice that is known: chosen and weights (tokens, k), in any order; router.experts or more: none. Of the
 * router k, experts and columns are read. */
void moe_block_routed(const MoeBlock *block, const int64_t *chosen, const float *weights, size_t tokens, void *workspace,
                      size_t threads);

/* Computes those of `experts` that tokens chose, which must be here. row: 0 at first, then what the call before returned. */
size_t moe_block_experts(const MoeBlock *block, const bf16 *x, size_t tokens, void *workspace, size_t threads,
                         const int64_t *experts, size_t count, size_t row);

/* out (tokens, H) = residual (NULL: none) + the weighted sums of what has been computed. */
void moe_block_sum(const MoeBlock *block, const bf16 *residual, size_t tokens, void *workspace, size_t threads, bf16 *out);

/* All three: out (tokens, H) = residual (NULL: none) + the block of x, in ascending order of the experts, rounded where the separate operations
 * round. Returns how many experts computed; 0, which leaves `out` alone, where a chosen one is not here: `moe_block_experts` and `moe_block_sum` go
 * on from there. */
size_t moe_block_run(const MoeBlock *block, const bf16 *x, const bf16 *residual, size_t tokens, void *workspace, bf16 *out,
                     size_t threads);

#endif
