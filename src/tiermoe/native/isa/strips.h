/* Strips of a row: the codes of GGUF's blocks and of published codes, every type, and what their groups are scaled by. A strip
 * is 256 columns or, at the end of a row, fewer, in whole blocks. A column is scale * code + offset of its group.
 *
 * A type's scales and codes stand together: types of 32 columns to a block, of 256, those whose codes are places in a grid
 * (../gguf_grids.h), and published codes. strip_scales and strip_codes choose among them. */
#ifndef TIERMOE_ISA_STRIPS_H
#define TIERMOE_ISA_STRIPS_H

#include <string.h>

#include "../gguf_grids.h"
#include "../matrix.h"
#include "simd.h"

enum {
    STRIP = 256,       /* columns: a block of the types that have the K in their name */
    STRIP_GROUPS = 16, /* the most in a strip */
    STRIP_ROWS = 8,    /* that are unpacked at a time by strip_products.h */
};

typedef struct {
    float scales[STRIP_GROUPS], offsets[STRIP_GROUPS];
} StripScales;

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

/* The nibbles of `count` bytes, less the middle one. */
static inline void nibbles_of(const uint8_t *restrict from, size_t count, int middle, int8_t *restrict low,
                              int8_t *restrict high) {
    for (size_t i = 0; i < count; i++)
        low[i] = (int8_t)((from[i] & 15) - middle), high[i] = (int8_t)((from[i] >> 4) - middle);
}

/* Types of 32 columns to a block: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL and MXFP4. Their scales are d, their offsets m. */

/* Q5_0 and Q5_1: 32 fifth bits, and as many nibbles behind them. */
static inline void five_bits(const uint8_t *restrict at, int middle, int8_t *restrict codes) {
    uint32_t fifth;
    memcpy(&fifth, at, sizeof fifth);
    nibbles_of(at + sizeof fifth, 16, middle, codes, codes + 16);
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] + (int)(fifth >> i & 1) * 16);
}

static const int8_t IQ4_CODES[16] __attribute__((aligned(16))) = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                                  1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t FP4_CODES[16] __attribute__((aligned(16))) = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 2^(exponent - 128), halved: the codes of MXFP4 are doubled. */
static inline float mxfp4_scale(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* Q2_K: sixteen scales and minima of 4 bits, codes of 2. */

static inline void q2_k_scales(const block_q2_k *restrict block, float *restrict scales, float *restrict offsets) {
    const float scale = from_half(block->d), least = -from_half(block->m);
    for (int g = 0; g < 16; g++) scales[g] = scale * (block->scales[g] & 15), offsets[g] = least * (block->scales[g] >> 4);
}

static inline void q2_k_codes(const block_q2_k *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++)
                codes[half * 128 + quarter * 32 + i] = (int8_t)(block->codes[half * 32 + i] >> 2 * quarter & 3);
}

/* Q3_K: sixteen scales of 6 bits, codes of 2 bits and, apart, a third one. */

static inline void q3_k_scales(const block_q3_k *restrict block, float *restrict scales) {
    const uint8_t *low = block->scales, *high = block->scales + 8;
    const float scale = from_half(block->d);
    for (int g = 0; g < 16; g++) {
        const int nibble = low[g % 8] >> g / 8 * 4 & 15, two = high[g % 4] >> g / 4 * 2 & 3;
        scales[g] = scale * (nibble + two * 16 - 32);
    }
}

static inline void q3_k_codes(const block_q3_k *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++) {
                const int low = block->codes[half * 32 + i] >> 2 * quarter & 3, high = block->high[i] >> (4 * half + quarter) & 1;
                codes[half * 128 + quarter * 32 + i] = (int8_t)(low + 4 * high - 4);
            }
}

/* Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes; in Q5_K the fifth bits lie apart. */

static inline void k_scales(const block_q4_k *restrict block, float *restrict scales, float *restrict offsets) {
    uint64_t low;
    uint32_t last;
    memcpy(&low, block->scales, sizeof low), memcpy(&last, block->scales + 8, sizeof last);
    const uint64_t high = ((last | (uint64_t)last << 28) & 0x0F0F0F0F0F0F0F0F) | (low >> 2 & 0x3030303030303030);
    low &= 0x3F3F3F3F3F3F3F3F; /* the first four scales before the first four minima, as in `high` the last ones */
    uint64_t both[2] = {(uint32_t)low | high << 32, low >> 32 | (high >> 32 << 32)};
    __asm__("" : "+m"(both)); /* else the compiler takes the words apart byte by byte */
    const float scale = from_half(block->d), least = -from_half(block->m);
    const uint8_t *bytes = (const uint8_t *)both;
    for (int g = 0; g < 8; g++) scales[g] = scale * bytes[g];
    for (int g = 0; g < 8; g++) offsets[g] = least * bytes[8 + g];
}

static inline void q4_k_codes(const block_q4_k *restrict block, int8_t *restrict codes) {
    for (int pair = 0; pair < 4; pair++) nibbles_of(block->codes + 32 * pair, 32, 0, codes + 64 * pair, codes + 64 * pair + 32);
}

static inline void q5_k_codes(const block_q5_k *restrict block, int8_t *restrict codes) {
    for (int pair = 0; pair < 4; pair++)
        for (int i = 0; i < 32; i++) {
            const int both = block->codes[32 * pair + i], fifth = block->fifth[i] >> 2 * pair;
            codes[64 * pair + i] = (int8_t)((both & 15) + (fifth & 1) * 16);
            codes[64 * pair + 32 + i] = (int8_t)((both >> 4) + (fifth >> 1 & 1) * 16);
        }
}

/* Q6_K: sixteen scales of 8 bits, codes of 4 bits and, apart, two more. */

static inline void q6_k_scales(const block_q6_k *restrict block, float *restrict scales) {
    const float scale = from_half(block->d);
    for (int g = 0; g < 16; g++) scales[g] = scale * (int8_t)block->scales[g];
}

static inline void q6_k_codes(const block_q6_k *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
            const int one = block->codes[64 * half + i], other = block->codes[64 * half + 32 + i], two = block->high[32 * half + i];
            int8_t *to = codes + 128 * half + i;
            to[0] = (int8_t)((one & 15) + (two & 3) * 16 - 32), to[32] = (int8_t)((other & 15) + (two >> 2 & 3) * 16 - 32);
            to[64] = (int8_t)((one >> 4) + (two >> 4 & 3) * 16 - 32), to[96] = (int8_t)((other >> 4) + (two >> 6) * 16 - 32);
        }
}

/* IQ4_XS: eight scales of 6 bits, codes that stand for IQ4_CODES. */

static inline void iq4_xs_scales(const block_iq4_xs *restrict block, float *restrict scales) {
    const float scale = from_half(block->d);
    for (int g = 0; g < 8; g++) {
        const int nibble = block->scales_low[g / 2] >> g % 2 * 4 & 15, two = block->scales_high[g / 4] >> g % 4 * 2 & 3;
        scales[g] = scale * (nibble + two * 16 - 32);
    }
}

static inline void iq4_xs_codes(const block_iq4_xs *restrict block, int8_t *restrict codes) {
    for (size_t g = 0; g < 8; g++) look_up(IQ4_CODES, block->codes + 16 * g, codes + 32 * g, codes + 32 * g + 16);
}

/* TQ1_0 and TQ2_0: a scale, codes -1, 0 and 1. */

static inline void tq_scales(const uint8_t *d, float *restrict scales) {
    for (int g = 0; g < 8; g++) scales[g] = from_half(d);
}

/* Five powers of 3 to a byte, as a fraction of 256: the byte times 3^n, but for its whole part, has digit n first. */
static inline int8_t tq1_0_code(uint8_t byte, int power) { return (int8_t)(((uint8_t)(byte * power) * 3 >> 8) - 1); }

static inline void tq1_0_codes(const block_tq1_0 *restrict block, int8_t *restrict codes) {
    static const int POWERS[] = {1, 3, 9, 27, 81};
    for (int n = 0; n < 5; n++) {
        for (int i = 0; i < 32; i++) codes[32 * n + i] = tq1_0_code(block->codes[i], POWERS[n]);
        for (int i = 0; i < 16; i++) codes[160 + 16 * n + i] = tq1_0_code(block->codes[32 + i], POWERS[n]);
        for (int i = 0; i < 4 && n < 4; i++) codes[240 + 4 * n + i] = tq1_0_code(block->last[i], POWERS[n]);
    }
}

static inline void tq2_0_codes(const block_tq2_0 *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++)
                codes[half * 128 + quarter * 32 + i] = (int8_t)((block->codes[half * 32 + i] >> 2 * quarter & 3) - 1);
}

/* Types whose codes are places in a grid, 32 columns of a block at a time, its part p. Of each type:
 *   signs     bit c: whether column c is negative; in IQ1 whether it is less, and not more, than in the grid by 1
 *   eight     columns 8 i .. of the part, without their signs
 *   integers  the scales of a block's groups, odd integers: all of them, 8 or 16
 *   factor    what they are multiplied by; the types that are not named begin with d, and have an eighth of it */

static inline int is_grid(Coding coding) { return coding >= IQ1_S && coding <= IQ3_S; }

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

/* IQ1_S */

static inline uint32_t iq1_s_signs(const block_iq1_s *block, size_t p) { return block->high[2 * p + 1] >> 7 ? ~0u : 0; }

static inline uint64_t iq1_s_eight(const block_iq1_s *block, size_t p, size_t i) {
    return IQ1_GRID[block->codes[4 * p + i] | (two_bytes(block->high + 2 * p) >> 3 * i & 7) << 8];
}

static inline void iq1_s_integers(const block_iq1_s *block, uint8_t *integers) {
    for (size_t g = 0; g < 8; g++) integers[g] = (uint8_t)((block->high[2 * g + 1] >> 3 & 14) + 1);
}

/* IQ1_M: d is in the highest four bits of each word of scales. */

static inline uint32_t iq1_m_signs(const block_iq1_m *block, size_t p) {
    const uint32_t bits = two_bytes(block->high + 2 * p);
    return ((bits >> 3 & 1) | (bits << 1 & 1u << 8) | (bits << 5 & 1u << 16) | (bits << 9 & 1u << 24)) * 0xFF;
}

static inline uint64_t iq1_m_eight(const block_iq1_m *block, size_t p, size_t i) {
    const size_t n = 4 * p + i;
    return IQ1_GRID[block->codes[n] | (block->high[n / 2] >> n % 2 * 4 & 7) << 8];
}

static inline void iq1_m_integers(const block_iq1_m *block, uint8_t *integers) {
    for (size_t g = 0; g < 8; g++) {
        const uint32_t both = two_bytes(block->scales + g / 2 * 2) >> g % 2 * 6;
        integers[2 * g] = (uint8_t)((both << 1 & 14) + 1), integers[2 * g + 1] = (uint8_t)((both >> 2 & 14) + 1);
    }
}

static inline float iq1_m_factor(const block_iq1_m *block) {
    const uint64_t all = eight_bytes(block->scales);
    const uint16_t half = (uint16_t)((all >> 12 & 0xF) | (all >> 24 & 0xF0) | (all >> 36 & 0xF00) | (all >> 48 & 0xF000));
    return from_half((const uint8_t *)&half) / 8;
}

/* IQ2_XXS */

static inline uint32_t iq2_xxs_signs(const block_iq2_xxs *block, size_t p) {
    return even_signs(four_sevens(four_bytes(block->codes + 8 * p + 4)));
}

static inline uint64_t iq2_xxs_eight(const block_iq2_xxs *block, size_t p, size_t i) {
    return IQ2_XXS_GRID[block->codes[8 * p + i]];
}

static inline void iq2_xxs_integers(const block_iq2_xxs *block, uint8_t *integers) {
    for (size_t g = 0; g < 8; g++) integers[g] = (uint8_t)((block->codes[8 * g + 7] >> 3 & 30) + 1);
}

/* IQ2_XS and IQ2_S have scales alike. */

static inline void iq2_integers(const uint8_t *scales, uint8_t *integers) {
    for (size_t g = 0; g < 8; g++)
        integers[2 * g] = (uint8_t)((scales[g] << 1 & 30) + 1), integers[2 * g + 1] = (uint8_t)((scales[g] >> 3 & 30) + 1);
}

static inline uint32_t iq2_xs_signs(const block_iq2_xs *block, size_t p) {
    const uint64_t all = eight_bytes(block->codes + 8 * p) >> 9;
    return even_signs((uint32_t)((all & 0x7F) | (all >> 8 & 0x7F00) | (all >> 16 & 0x7F0000) | (all >> 24 & 0x7F000000)));
}

static inline uint64_t iq2_xs_eight(const block_iq2_xs *block, size_t p, size_t i) {
    return IQ2_XS_GRID[two_bytes(block->codes + 2 * (4 * p + i)) & 511];
}

static inline uint32_t iq2_s_signs(const block_iq2_s *block, size_t p) { return four_bytes(block->signs + 4 * p); }

static inline uint64_t iq2_s_eight(const block_iq2_s *block, size_t p, size_t i) {
    return IQ2_S_GRID[block->codes[4 * p + i] | (block->high[p] >> 2 * i & 3) << 8];
}

/* IQ3_XXS */

static inline uint32_t iq3_xxs_signs(const block_iq3_xxs *block, size_t p) {
    return even_signs(four_sevens(four_bytes(block->signs + 4 * p)));
}

static inline uint64_t iq3_xxs_eight(const block_iq3_xxs *block, size_t p, size_t i) {
    const uint8_t *codes = block->codes + 2 * (4 * p + i);
    return IQ3_XXS_GRID[codes[0]] | (uint64_t)IQ3_XXS_GRID[codes[1]] << 32;
}

static inline void iq3_xxs_integers(const block_iq3_xxs *block, uint8_t *integers) {
    for (size_t g = 0; g < 8; g++) integers[g] = (uint8_t)((block->signs[4 * g + 3] >> 3 & 30) + 1);
}

/* IQ3_S */

static inline uint32_t iq3_s_signs(const block_iq3_s *block, size_t p) { return four_bytes(block->signs + 4 * p); }

static inline uint64_t iq3_s_eight(const block_iq3_s *block, size_t p, size_t i) {
    const uint8_t *codes = block->codes + 2 * (4 * p + i);
    const uint32_t high = block->high[p] >> 2 * i;
    return IQ3_S_GRID[codes[0] | (high & 1) << 8] | (uint64_t)IQ3_S_GRID[codes[1] | (high & 2) << 7] << 32;
}

static inline void iq3_s_integers(const block_iq3_s *block, uint8_t *integers) {
    for (size_t g = 0; g < 8; g++) integers[g] = (uint8_t)((block->scales[g / 2] >> g % 2 * 4 << 1 & 30) + 1);
}

/* All of them. */

INLINE uint32_t grid_signs(Coding coding, const uint8_t *at, size_t p) {
    switch (coding) {
        case IQ1_S: return iq1_s_signs(AT(iq1_s, at), p);
        case IQ1_M: return iq1_m_signs(AT(iq1_m, at), p);
        case IQ2_XXS: return iq2_xxs_signs(AT(iq2_xxs, at), p);
        case IQ2_XS: return iq2_xs_signs(AT(iq2_xs, at), p);
        case IQ2_S: return iq2_s_signs(AT(iq2_s, at), p);
        case IQ3_XXS: return iq3_xxs_signs(AT(iq3_xxs, at), p);
        default: return iq3_s_signs(AT(iq3_s, at), p);
    }
}

INLINE uint64_t grid_eight(Coding coding, const uint8_t *at, size_t p, size_t i) {
    switch (coding) {
        case IQ1_S: return iq1_s_eight(AT(iq1_s, at), p, i);
        case IQ1_M: return iq1_m_eight(AT(iq1_m, at), p, i);
        case IQ2_XXS: return iq2_xxs_eight(AT(iq2_xxs, at), p, i);
        case IQ2_XS: return iq2_xs_eight(AT(iq2_xs, at), p, i);
        case IQ2_S: return iq2_s_eight(AT(iq2_s, at), p, i);
        case IQ3_XXS: return iq3_xxs_eight(AT(iq3_xxs, at), p, i);
        default: return iq3_s_eight(AT(iq3_s, at), p, i);
    }
}

INLINE void grid_integers(Coding coding, const uint8_t *at, uint8_t integers[16]) {
    switch (coding) {
        case IQ1_S: iq1_s_integers(AT(iq1_s, at), integers); return;
        case IQ1_M: iq1_m_integers(AT(iq1_m, at), integers); return;
        case IQ2_XXS: iq2_xxs_integers(AT(iq2_xxs, at), integers); return;
        case IQ2_XS: iq2_integers(AT(iq2_xs, at)->scales, integers); return;
        case IQ2_S: iq2_integers(AT(iq2_s, at)->scales, integers); return;
        case IQ3_XXS: iq3_xxs_integers(AT(iq3_xxs, at), integers); return;
        default: iq3_s_integers(AT(iq3_s, at), integers);
    }
}

INLINE float grid_factor(Coding coding, const uint8_t *at) {
    switch (coding) {
        case IQ1_M: return iq1_m_factor(AT(iq1_m, at));
        case IQ3_XXS: return from_half(AT(iq3_xxs, at)->d) / 4;
        case IQ3_S: return from_half(AT(iq3_s, at)->d);
        default: return from_half(AT(iq2_xs, at)->d) / 8;
    }
}

/* a + b, byte by byte. */
static inline uint64_t bytes_plus(uint64_t a, uint64_t b) {
    const uint64_t high = 0x8080808080808080;
    return ((a & ~high) + (b & ~high)) ^ ((a ^ b) & high);
}

static inline void grid_codes(Coding coding, const uint8_t *at, size_t p, int8_t *restrict codes) {
    const uint32_t signs = grid_signs(coding, at, p);
    const uint64_t ones = 0x0101010101010101;
    for (size_t i = 0; i < 4; i++) {
        const uint64_t eight = grid_eight(coding, at, p, i), bits = (signs >> 8 * i & 0xFF) * ones & 0x8040201008040201;
        const uint64_t negative = (bits + 0x7F * ones) >> 7 & ones; /* 1 in each such byte */
        const uint64_t its = coding <= IQ1_M ? bytes_plus(eight, ones ^ 0xFE * negative) : bytes_plus(eight ^ 0xFF * negative, negative);
        memcpy(codes + 8 * i, &its, sizeof its);
    }
}

/* 0 where a block has fewer than sixteen. */
static inline void grid_scales(Coding coding, const uint8_t *at, float scales[16]) {
    uint8_t integers[16] = {0};
    const float factor = grid_factor(coding, at);
    grid_integers(coding, at, integers);
    for (size_t g = 0; g < 16; g++) scales[g] = factor * integers[g];
}

/* Published codes: E2M1, S4, U4 and E4M3, whose scales lie in an array of their own. Codes of E2M1 stand for twice their
 * values, as those of GGUF's MXFP4, and their scales are halved. */

static const int8_t S4_CODES[16] __attribute__((aligned(16))) = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const int8_t U4_CODES[16] __attribute__((aligned(16))) = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* 32 codes of 16 bytes, from a table. */
static inline void pairs_of(const int8_t table[16], const uint8_t *restrict from, int8_t *restrict codes) {
    int8_t low[16], high[16];
    look_up(table, from, low, high);
    for (int i = 0; i < 16; i++) codes[2 * i] = low[i], codes[2 * i + 1] = high[i];
}

static inline float e4m3_at(const uint8_t *at) {
    const uint16_t half = (uint16_t)((*at & 0x80) << 8 | (*at & 0x7F) << 7); /* of 2^-8 times as much */
    return 256 * from_half((const uint8_t *)&half);
}

static inline int has_factors(const Matrix *matrix) { return matrix->scale_kind >= SCALE_E4M3_TIMES; }

/* What the scales of a row have in common; of E2M1 a half. */
static inline float published_factor(const Matrix *matrix, size_t row) {
    const float half = matrix->coding == E2M1 ? 0.5f : 1;
    return has_factors(matrix) ? half * ((const float *)matrix->zeros_or_factors)[row / matrix->factor_rows] : half;
}

/* Number `at` of a matrix's scales, of a row with that factor. */
static inline float published_scale(const Matrix *matrix, size_t at, float factor) {
    const uint8_t *scales = matrix->scales;
    float scale;
    switch (matrix->scale_kind) {
        case SCALE_E8M0: return mxfp4_scale(scales[at]) * (2 * factor);
        case SCALE_BF16: return from_bf16(((const bf16 *)scales)[at]) * factor;
        case SCALE_HALF: return from_half(scales + 2 * at) * factor;
        case SCALE_E4M3_TIMES: return e4m3_at(scales + at) * factor;
        case SCALE_E4M3_OVER: return e4m3_at(scales + at) / (matrix->coding == E2M1 ? 4 * factor : factor);
        default: memcpy(&scale, scales + 4 * at, sizeof scale); return scale * factor;
    }
}

/* a / b, which is a shift for most matrices: a strip has no time for divisions. */
static inline size_t quotient(size_t a, size_t b) { return b & (b - 1) ? a / b : a >> __builtin_ctzll(b); }

/* Where the scales of a row begin. */
static inline size_t published_row(const Matrix *matrix, size_t row) {
    const size_t across = quotient(matrix->columns + matrix->scale_columns - 1, matrix->scale_columns);
    return quotient(row, matrix->scale_rows) * across;
}

/* Of the groups of a strip of a row that begins at a column; offsets only where has_offsets(coding). */
static inline void published_scales(const Matrix *matrix, size_t row, size_t begin, size_t width, StripScales *to) {
    const size_t shared = matrix->scale_columns;
    const float factor = published_factor(matrix, row);
    const uint8_t *zeros = matrix->coding == U4 ? matrix->zeros_or_factors : NULL;
    const size_t before = quotient(begin, shared);
    size_t at = published_row(matrix, row) + before, left = (before + 1) * shared - begin;
    float scale = published_scale(matrix, at, factor);
    for (size_t g = 0; g < width / matrix->group; g++) {
        if (left == 0) scale = published_scale(matrix, ++at, factor), left = shared;
        if (zeros) to->offsets[g] = -scale * zeros[at];
        to->scales[g] = scale, left -= matrix->group;
    }
}

/* All types. */

/* Writes as many as the strip has groups; offsets only where has_offsets(coding). */
INLINE void strip_scales(Coding coding, const uint8_t *at, size_t width, StripScales *to) {
    switch (coding) {
        case Q4_K: case Q5_K: k_scales(AT(q4_k, at), to->scales, to->offsets); return; /* both begin alike */
        case Q2_K: q2_k_scales(AT(q2_k, at), to->scales, to->offsets); return;
        case Q3_K: q3_k_scales(AT(q3_k, at), to->scales); return;
        case Q6_K: q6_k_scales(AT(q6_k, at), to->scales); return;
        case IQ4_XS: iq4_xs_scales(AT(iq4_xs, at), to->scales); return;
        case TQ1_0: tq_scales(AT(tq1_0, at)->d, to->scales); return;
        case TQ2_0: tq_scales(AT(tq2_0, at)->d, to->scales); return;
        default: break;
    }
    if (is_grid(coding)) {
        grid_scales(coding, at, to->scales);
        return;
    }
    for (size_t g = 0; g < width / 32; g++, at += block_bytes(coding)) {
        to->scales[g] = coding == MXFP4 ? mxfp4_scale(AT(mxfp4, at)->exponent) : from_half(AT(q4_0, at)->d);
        if (has_offsets(coding)) to->offsets[g] = from_half(AT(q4_1, at)->m);
    }
}

/* The codes of a strip, in the order of its columns. */
static inline void strip_codes(Coding coding, const uint8_t *at, size_t width, int8_t *codes) {
    const size_t columns = block_columns(coding), bytes = block_bytes(coding);
    for (const int8_t *end = codes + width; codes < end; at += bytes, codes += columns) switch (coding) {
            case Q8_0: memcpy(codes, AT(q8_0, at)->codes, 32); break;
            case Q4_0: nibbles_of(AT(q4_0, at)->codes, 16, 8, codes, codes + 16); break;
            case Q4_1: nibbles_of(AT(q4_1, at)->codes, 16, 0, codes, codes + 16); break;
            case Q5_0: five_bits(AT(q5_0, at)->fifth, 16, codes); break;
            case Q5_1: five_bits(AT(q5_1, at)->fifth, 0, codes); break;
            case Q2_K: q2_k_codes(AT(q2_k, at), codes); break;
            case Q3_K: q3_k_codes(AT(q3_k, at), codes); break;
            case Q4_K: q4_k_codes(AT(q4_k, at), codes); break;
            case Q5_K: q5_k_codes(AT(q5_k, at), codes); break;
            case Q6_K: q6_k_codes(AT(q6_k, at), codes); break;
            case IQ4_NL: look_up(IQ4_CODES, AT(iq4_nl, at)->codes, codes, codes + 16); break;
            case IQ4_XS: iq4_xs_codes(AT(iq4_xs, at), codes); break;
            case IQ1_S: case IQ1_M: case IQ2_XXS: case IQ2_XS: case IQ2_S: case IQ3_XXS: case IQ3_S:
                for (size_t p = 0; p < 8; p++) grid_codes(coding, at, p, codes + 32 * p);
                break;
            case TQ1_0: tq1_0_codes(AT(tq1_0, at), codes); break;
            case TQ2_0: tq2_0_codes(AT(tq2_0, at), codes); break;
            case E2M1: pairs_of(FP4_CODES, at, codes); break;
            case S4: pairs_of(S4_CODES, at, codes); break;
            case U4: pairs_of(U4_CODES, at, codes); break;
            default: look_up(FP4_CODES, AT(mxfp4, at)->codes, codes, codes + 16);
        }
}

#endif
