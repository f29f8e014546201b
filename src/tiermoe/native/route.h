/* Routers that are a matrix and nothing else, for one token. */
#ifndef TIERMOE_ROUTE_H
#define TIERMOE_ROUTE_H

#include "matrix.h"

/* logits (experts) = weight (experts, columns) times x (columns), rounded to bfloat16; columns a multiple of 32. */
void route_logits(const bf16 *weight, const bf16 *x, size_t experts, size_t columns, bf16 *logits);

/* The `k` largest of the softmax of `logits`, in float32, the largest first, of equal ones the first first; `normalise`:
 * scaled to a sum of 1. `chosen` and `weights` take k values. */
void route_choose(const bf16 *logits, size_t experts, size_t k, int normalise, int64_t *chosen, float *weights);

#endif
