/* The types whose codes are places in a grid (grids.h), in registers of x86-64 processors with AVX2 or more. */
#ifndef TIERMOE_ISA_X86_GRIDS_H
#define TIERMOE_ISA_X86_GRIDS_H

#include "grids.h"

/* Part p of a block, without its signs. */
INLINE __m256i grid_sizes(Coding coding, const uint8_t *at, size_t p) {
    return _mm256_set_epi64x((int64_t)grid_eight(coding, at, p, 3), (int64_t)grid_eight(coding, at, p, 2),
                             (int64_t)grid_eight(coding, at, p, 1), (int64_t)grid_eight(coding, at, p, 0));
}

/* The scales of a block's groups, as grid_integers finds them. */
INLINE __m128i grid_scale_bytes(Coding coding, const uint8_t *at) {
    uint8_t integers[16] = {0};
    grid_integers(coding, at, integers);
    return _mm_loadu_si128((const void *)integers);
}

#endif
