/* XXH3's 64-bit checksum (seed 0, default secret) of bytes that come in pieces, for more than XXH3_SHORT of them:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md */
#ifndef TIERMOE_XXH3_H
#define TIERMOE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { XXH3_SHORT = 240, XXH3_STRIPE = 64, XXH3_STRIPES = 16 /* of a block */ };

/* A stripe is taken in as soon as a byte comes behind it: the last one is taken in otherwise. */
typedef struct {
    uint64_t accumulators[8];
    uint64_t total;
    size_t stripes;               /* of the block that is begun */
    size_t waiting;               /* bytes of `bytes` behind the stripe before them */
    uint8_t bytes[2 * XXH3_STRIPE]; /* the stripe that was taken in last, then what waits */
} Xxh3;

void xxh3_begin(Xxh3 *state);
void xxh3_update(Xxh3 *state, const void *bytes, size_t count);
/* Of a total above XXH3_SHORT. */
uint64_t xxh3_digest(const Xxh3 *state);

#endif
