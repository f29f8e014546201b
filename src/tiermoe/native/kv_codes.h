/* A row of keys or values, a head's of one position, as codes of 8 bits and a scale: what the cache holds at 8 bits. */
#ifndef TIERMOE_KV_CODES_H
#define TIERMOE_KV_CODES_H

#include "matrix.h"

/* codes[i] = row[i] / scale, rounded to the nearest, halves to the even one; the scale maps the largest to 127. */
void kv_encode(const bf16 *row, size_t columns, int8_t *codes, bf16 *scale);

#endif
