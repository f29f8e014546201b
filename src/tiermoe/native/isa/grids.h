/* The types of GGUF's blocks whose codes are places in a grid (../gguf_grids.h): 32 columns of a block at a time, its part p. */
#ifndef TIERMOE_ISA_GRIDS_H
#define TIERMOE_ISA_GRIDS_H

#include <string.h>

#include "../gguf_grids.h"
#include "../quants.h"
#include "simd.h"

static inline int is_grid(Coding coding) { return coding >= IQ1_S && coding <= IQ3_S; }

static inline uint32_t two_bytes(const uint8_t *at) { return at[0] | (uint32_t)at[1] << 8; }

static inline uint32_t four_bytes(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t eight_bytes(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Four bytes of 7 signs; the eighth makes the number of negative ones even. */
static inline uint32_t even_signs(uint32_t sevens) {
    uint32_t odd = sevens ^ sevens >> 4;
    odd ^= odd >> 2, odd ^= odd >> 1;
    return sevens | (odd & 0x01010101) << 7;
}

/* Four times 7 bits as bytes. */
static inline uint32_t four_sevens(uint32_t bits) {
    return (bits & 0x7F) | (bits << 1 & 0x7F00) | (bits << 2 & 0x7F0000) | (bits << 3 & 0x7F000000);
}

/* Bit c: whether column c is negative; in IQ1 whether it is less, and not more, than in the grid by 1. */
INLINE uint32_t grid_signs(Coding coding, const uint8_t *at, size_t p) {
    switch (coding) {
        case IQ1_S: return AT(iq1_s, at)->high[2 * p + 1] >> 7 ? ~0u : 0;
        case IQ1_M: {
            const uint32_t bits = two_bytes(AT(iq1_m, at)->high + 2 * p);
            return ((bits >> 3 & 1) | (bits << 1 & 1u << 8) | (bits << 5 & 1u << 16) | (bits << 9 & 1u << 24)) * 0xFF;
        }
        case IQ2_XXS: return even_signs(four_sevens(four_bytes(AT(iq2_xxs, at)->codes + 8 * p + 4)));
        case IQ2_XS: {
            const uint64_t all = eight_bytes(AT(iq2_xs, at)->codes + 8 * p) >> 9;
            return even_signs((uint32_t)((all & 0x7F) | (all >> 8 & 0x7F00) | (all >> 16 & 0x7F0000) | (all >> 24 & 0x7F000000)));
        }
        case IQ2_S: return four_bytes(AT(iq2_s, at)->signs + 4 * p);
        case IQ3_XXS: return even_signs(four_sevens(four_bytes(AT(iq3_xxs, at)->signs + 4 * p)));
        default: return four_bytes(AT(iq3_s, at)->signs + 4 * p);
    }
}

/* Columns 8 i .. of the part, without their signs. */
INLINE uint64_t grid_eight(Coding coding, const uint8_t *at, size_t p, size_t i) {
    const size_t n = 4 * p + i;
    switch (coding) {
        case IQ1_S: return IQ1_GRID[AT(iq1_s, at)->codes[n] | (two_bytes(AT(iq1_s, at)->high + 2 * p) >> 3 * i & 7) << 8];
        case IQ1_M: return IQ1_GRID[AT(iq1_m, at)->codes[n] | (AT(iq1_m, at)->high[n / 2] >> n % 2 * 4 & 7) << 8];
        case IQ2_XXS: return IQ2_XXS_GRID[AT(iq2_xxs, at)->codes[8 * p + i]];
        case IQ2_XS: return IQ2_XS_GRID[two_bytes(AT(iq2_xs, at)->codes + 2 * n) & 511];
        case IQ2_S: return IQ2_S_GRID[AT(iq2_s, at)->codes[n] | (AT(iq2_s, at)->high[p] >> 2 * i & 3) << 8];
        case IQ3_XXS: {
            const uint8_t *codes = AT(iq3_xxs, at)->codes + 2 * n;
            return IQ3_XXS_GRID[codes[0]] | (uint64_t)IQ3_XXS_GRID[codes[1]] << 32;
        }
        default: {
            const uint8_t *codes = AT(iq3_s, at)->codes + 2 * n;
            const uint32_t high = AT(iq3_s, at)->high[p] >> 2 * i;
            return IQ3_S_GRID[codes[0] | (high & 1) << 8] | (uint64_t)IQ3_S_GRID[codes[1] | (high & 2) << 7] << 32;
        }
    }
}

static inline void grid_codes(Coding coding, const uint8_t *at, size_t p, int8_t *restrict codes) {
    const uint32_t signs = grid_signs(coding, at, p);
    for (size_t i = 0; i < 4; i++) {
        const uint64_t eight = grid_eight(coding, at, p, i);
        for (size_t c = 0; c < 8; c++) {
            const int size = (int8_t)(eight >> 8 * c), negative = signs >> (8 * i + c) & 1;
            codes[8 * i + c] = (int8_t)(coding <= IQ1_M ? size + 1 - 2 * negative : negative ? -size : size);
        }
    }
}

/* What the scales of a block are multiplied by. */
INLINE float grid_factor(Coding coding, const uint8_t *at) {
    switch (coding) {
        case IQ1_M: { /* four bits in each word of scales */
            const uint64_t all = eight_bytes(AT(iq1_m, at)->scales);
            const uint16_t half = (uint16_t)((all >> 12 & 0xF) | (all >> 24 & 0xF0) | (all >> 36 & 0xF00) | (all >> 48 & 0xF000));
            return from_half((const uint8_t *)&half) / 8;
        }
        case IQ3_XXS: return from_half(AT(iq3_xxs, at)->d) / 4;
        case IQ3_S: return from_half(AT(iq3_s, at)->d);
        default: return from_half(AT(iq2_xs, at)->d) / 8; /* the others begin alike */
    }
}

/* The scales of a block's groups, odd integers. */
INLINE void grid_integers(Coding coding, const uint8_t *at, uint8_t integers[16]) {
    for (size_t g = 0; g < 8; g++) switch (coding) {
            case IQ1_S: integers[g] = (uint8_t)((AT(iq1_s, at)->high[2 * g + 1] >> 3 & 14) + 1); break;
            case IQ1_M: {
                const uint32_t both = two_bytes(AT(iq1_m, at)->scales + g / 2 * 2) >> g % 2 * 6;
                integers[2 * g] = (uint8_t)((both << 1 & 14) + 1), integers[2 * g + 1] = (uint8_t)((both >> 2 & 14) + 1);
                break;
            }
            case IQ2_XXS: integers[g] = (uint8_t)((AT(iq2_xxs, at)->codes[8 * g + 7] >> 3 & 30) + 1); break;
            case IQ2_XS: case IQ2_S: {
                const uint8_t both = coding == IQ2_XS ? AT(iq2_xs, at)->scales[g] : AT(iq2_s, at)->scales[g];
                integers[2 * g] = (uint8_t)((both << 1 & 30) + 1), integers[2 * g + 1] = (uint8_t)((both >> 3 & 30) + 1);
                break;
            }
            case IQ3_XXS: integers[g] = (uint8_t)((AT(iq3_xxs, at)->signs[4 * g + 3] >> 3 & 30) + 1); break;
            default: integers[g] = (uint8_t)((AT(iq3_s, at)->scales[g / 2] >> g % 2 * 4 << 1 & 30) + 1); break;
        }
}

/* 0 where a block has fewer than sixteen. */
static inline void grid_scales(Coding coding, const uint8_t *at, float scales[16]) {
    uint8_t integers[16] = {0};
    const float factor = grid_factor(coding, at);
    grid_integers(coding, at, integers);
    for (size_t g = 0; g < 16; g++) scales[g] = factor * integers[g];
}

#endif
