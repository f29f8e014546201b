/* A MoE block for a few tokens, all in one: router, the chosen experts, their weighted sums, the residual. */
#ifndef TIERMOE_MOE_BLOCK_H
#define TIERMOE_MOE_BLOCK_H

#include "expert.h"
#include "route.h"

typedef struct {
    Router router;
    const Expert *experts; /* one for each of the router's, of one shape; without weights where an expert is not here */
} MoeBlock;

/* Bytes of workspace. */
size_t moe_block_workspace(const MoeBlock *block, size_t tokens, size_t threads);

/* out (tokens, H) = residual (NULL: none) + the block of x, in ascending order of the experts, rounded where the separate operations
 * round. Returns how many experts computed; 0, which leaves `out` alone, where a chosen one is not here. */
size_t moe_block_run(const MoeBlock *block, const bf16 *x, const bf16 *residual, size_t tokens, void *workspace, bf16 *out,
                     size_t threads);

#endif
