/* Tokens times one packed matrix, by a team of threads. */
#ifndef TIERMOE_PRODUCT_H
#define TIERMOE_PRODUCT_H

#include "int4.h"

/* out (tokens, rows) = x (tokens, columns) times the matrix. sums: room for sums_room(...) floats. */
void product_run(const Int4 *matrix, const bf16 *x, size_t tokens, float *sums, bf16 *out, unsigned threads);

/* Floats that product_sums needs for `tokens` tokens of a team of `threads`. */
size_t sums_room(const Int4 *matrix, size_t tokens, size_t threads);

/* The sums of all tokens' groups, for every thread of a running team. A few tokens: each thread makes its own, which
 * costs less than waiting for the others; many: the threads share them. */
const float *product_sums(const Int4 *matrix, const bf16 *x, size_t tokens, float *sums);

#endif
