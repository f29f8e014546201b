/* From 2 bits to 4: see quant/ladders.py. */
#ifndef TIERMOE_WIDEN_H
#define TIERMOE_WIDEN_H

#include <stddef.h>
#include <stdint.h>

/* pairs (count, 4, run) and ladders (count, run) become codes (count, 8, run), all bytes of two nibbles. */
void widen(const uint8_t *pairs, const uint8_t *ladders, size_t count, size_t run, uint8_t *codes);

#endif
