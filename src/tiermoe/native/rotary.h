/* The rotary embedding of one head, rounded to bfloat16 where the separate operations round. */
#ifndef TIERMOE_ROTARY_H
#define TIERMOE_ROTARY_H

#include "matrix.h"

/* out (columns) = head (columns) with its first `rotary` columns rotated; cos and sin (rotary). The pairs that rotate are
 * columns i and rotary / 2 + i, or, interleaved, columns 2 i and 2 i + 1; out has them as i and rotary / 2 + i in both
 * cases. head and out may be the same unless interleaved. */
void rotate(const bf16 *head, const bf16 *cos, const bf16 *sin, size_t rotary, size_t columns, int interleaved, bf16 *out);

#endif
