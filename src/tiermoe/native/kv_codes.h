/* Rows of keys and values as codes of 8 or 4 bits with a scale each (attention_tiles.h says how they lie in memory).
 *
 * 8 bits stand for the row. 4 bits stand for its Hadamard transform, in which each column has a part of every other: no
 * column is much larger than the rest, as columns of keys are. */
#ifndef TIERMOE_KV_CODES_H
#define TIERMOE_KV_CODES_H

#include "quants.h"

/* Writes row (columns, at most MOST_CODED) as row `at` of rows and scales. */
void kv_encode(const bf16 *row, size_t columns, size_t bits, void *rows, size_t at, bf16 *scales);

/* out (columns) = the inverse of the Hadamard transform of row (columns), which may be the same: what a query meets keys of 4
 * bits with, and what attended values become. */
void hadamard_inverse(const bf16 *row, size_t columns, bf16 *out);

#endif
