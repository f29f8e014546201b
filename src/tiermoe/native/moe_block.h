/* A MoE block for a few tokens, all in one: router, the chosen experts, their weighted sums, the residual. */
#ifndef TIERMOE_MOE_BLOCK_H
#define TIERMOE_MOE_BLOCK_H

#include "expert.h"

typedef struct {
    const bf16 *router;    /* (count, H) */
    const Expert *experts; /* count, of one shape; without codes where an expert is not here */
    size_t count, k, columns;
    int normalise;     /* weights are scaled to a sum of 1 */
    int round_weights; /* to bfloat16 */
} MoeBlock;

/* Bytes of workspace. */
size_t moe_block_workspace(const Expert *expert, size_t count, size_t k, size_t tokens, size_t threads);

/* out (tokens, H) = residual + the block of x, in ascending order of the experts, rounded where the separate operations
 * round. Returns how many experts computed; 0, which leaves `out` alone, where a chosen one is not here. */
size_t moe_block_run(const MoeBlock *block, const bf16 *x, const bf16 *residual, size_t tokens, void *workspace, bf16 *out,
                     size_t threads);

#endif
