/* Root mean square norm, rounded where the separate operations round: weight * bfloat16(x / sqrt(mean(x^2) + eps)). */
#ifndef TIERMOE_NORM_H
#define TIERMOE_NORM_H

#include "matrix.h"
#include "team.h"

/* 1 / sqrt(mean(x^2) + epsilon); width a multiple of 16. */
float norm_scale(const bf16 *x, size_t width, float epsilon);

/* out (width) = weight * bfloat16(scale * x). x and out may be the same. */
void norm_apply(const bf16 *x, const bf16 *weight, float scale, size_t width, bf16 *out);

/* out (rows, width) = the norms of x (rows, width). */
void norm_run(const bf16 *x, const bf16 *weight, float epsilon, size_t rows, size_t width, bf16 *out, size_t threads,
              Pool pool);

#endif
