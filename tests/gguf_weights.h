/* Single weights of the blocks of GGUF files, by GGML's definitions: the reference of the kernels. */
#include <math.h>

#include "gguf_grids.h"
#include "matrix.h"

static double half_at(const uint8_t *at) {
    const int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31, rest = bits & 1023;
    const double size = exponent ? ldexp(1024 + rest, exponent - 25) : ldexp(rest, -24);
    return bits >> 15 ? -size : size;
}

static int nibble_at(const uint8_t *at, size_t high) { return high ? *at >> 4 : *at & 15; }

/* The 6 bits of scale g (min: minimum g) of Q4_K and Q5_K. */
static int k_scale(const uint8_t *scales, size_t g, int min) {
    const uint8_t *own = scales + (min ? 4 : 0);
    if (g < 4) return own[g] & 63;
    return nibble_at(scales + 8 + g - 4, (size_t)min) | own[g - 4] >> 6 << 4;
}

static const int IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const double FP4[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

static size_t gguf_columns(Coding coding) {
    return coding < Q2_K || coding == IQ4_NL || coding == MXFP4 ? 32 : 256;
}

static size_t gguf_bytes(Coding coding) {
    static const size_t BYTES[] = {34, 18, 20, 22, 24, 84, 110, 144, 176, 210, 50, 56, 66, 74, 82, 98, 110, 18, 136, 54, 66, 17};
    return BYTES[coding - Q8_0];
}

static int bits_at(const uint8_t *at, size_t first, int count) {
    int bits = 0;
    for (int i = count; i--;) bits = bits << 1 | (at[(first + (size_t)i) / 8] >> (first + (size_t)i) % 8 & 1);
    return bits;
}

/* Whether column c of eight is negative: seven have a bit, the number of negative ones is even. */
static int is_negative(int sevens, size_t c) { return (c < 7 ? sevens >> c : __builtin_popcount((unsigned)sevens)) & 1; }

/* Column c of the block at b of a type whose codes are places in a grid. */
static double grid_weight(Coding coding, const uint8_t *b, size_t c) {
    const size_t eight = c / 8, in = c % 8, g = c / 32, part = eight % 4;
    const double d = half_at(b);
    uint8_t whole[2];
    int place, scale, negative;
    switch (coding) {
        case IQ1_S:
            place = b[2 + eight] | bits_at(b + 34 + 2 * g, 3 * part, 3) << 8, negative = b[35 + 2 * g] >> 7;
            return d * (2 * bits_at(b + 34 + 2 * g, 12, 3) + 1) * ((int8_t)(IQ1_GRID[place] >> 8 * in) / 8 + (negative ? -0.125 : 0.125));
        case IQ1_M:
            for (size_t i = 0; i < 2; i++) whole[i] = (uint8_t)(b[49 + 4 * i] >> 4 | (b[51 + 4 * i] >> 4) << 4);
            place = b[eight] | bits_at(b + 32, 4 * eight, 3) << 8, negative = bits_at(b + 32, 4 * eight + 3, 1);
            scale = bits_at(b + 48 + c / 64 * 2, 3 * (c / 16 % 4), 3);
            return half_at(whole) * (2 * scale + 1) * ((int8_t)(IQ1_GRID[place] >> 8 * in) / 8 + (negative ? -0.125 : 0.125));
        case IQ2_XXS:
            negative = is_negative(bits_at(b + 6 + 8 * g, 7 * part, 7), in), scale = b[9 + 8 * g] >> 4;
            return d / 8 * (2 * scale + 1) * (double)(IQ2_XXS_GRID[b[2 + 8 * g + part]] >> 8 * in & 255) * (negative ? -1 : 1);
        case IQ2_XS:
            negative = is_negative(bits_at(b + 2, 16 * eight + 9, 7), in), scale = bits_at(b + 66, c / 16 * 4, 4);
            return d / 8 * (2 * scale + 1) * (double)(IQ2_XS_GRID[bits_at(b + 2, 16 * eight, 9)] >> 8 * in & 255) * (negative ? -1 : 1);
        case IQ2_S:
            place = b[2 + eight] | bits_at(b + 66, 2 * eight, 2) << 8, scale = bits_at(b + 74, c / 16 * 4, 4);
            return d / 8 * (2 * scale + 1) * (double)(IQ2_S_GRID[place] >> 8 * in & 255) * (bits_at(b + 34, c, 1) ? -1 : 1);
        case IQ3_XXS:
            negative = is_negative(bits_at(b + 66 + 4 * g, 7 * part, 7), in), scale = b[69 + 4 * g] >> 4;
            return d / 4 * (2 * scale + 1) * (double)(IQ3_XXS_GRID[b[2 + c / 4]] >> 8 * (c % 4) & 255) * (negative ? -1 : 1);
        default: /* IQ3_S */
            place = b[2 + c / 4] | bits_at(b + 66, c / 4, 1) << 8, scale = bits_at(b + 106, 4 * g, 4);
            return d * (2 * scale + 1) * (double)(IQ3_S_GRID[place] >> 8 * (c % 4) & 255) * (bits_at(b + 74, c, 1) ? -1 : 1);
    }
}

/* Digit n of five to the base 3. */
static int digit_of(uint8_t byte, size_t n) {
    unsigned rest = byte;
    while (n--) rest = rest * 3 & 255;
    return (int)(rest * 3 >> 8);
}

/* Column c of the block at b. */
static double gguf_weight(Coding coding, const uint8_t *b, size_t c) {
    const size_t in = c % 32, g = c / 32, half = c / 128, quarter = g % 4, narrow = c % 16, upper = in / 16;
    int code, scale;
    switch (coding) {
        case Q8_0: return half_at(b) * (int8_t)b[2 + c];
        case Q4_0: return half_at(b) * (nibble_at(b + 2 + narrow, upper) - 8);
        case Q4_1: return half_at(b) * nibble_at(b + 4 + narrow, upper) + half_at(b + 2);
        case Q5_0: return half_at(b) * (nibble_at(b + 6 + narrow, upper) + 16 * (b[2 + c / 8] >> c % 8 & 1) - 16);
        case Q5_1: return half_at(b) * (nibble_at(b + 8 + narrow, upper) + 16 * (b[4 + c / 8] >> c % 8 & 1)) + half_at(b + 2);
        case IQ4_NL: return half_at(b) * IQ4[nibble_at(b + 2 + narrow, upper)];
        case MXFP4: return ldexp(FP4[nibble_at(b + 1 + narrow, upper)], b[0] - 127);
        case Q2_K:
            code = b[16 + half * 32 + in] >> 2 * quarter & 3;
            return half_at(b + 80) * (b[c / 16] & 15) * code - half_at(b + 82) * (b[c / 16] >> 4);
        case Q3_K:
            code = (b[32 + half * 32 + in] >> 2 * quarter & 3) - (b[in] >> g & 1 ? 0 : 4);
            scale = nibble_at(b + 96 + c / 16 % 8, c / 128) | (b[104 + c / 16 % 4] >> c / 64 * 2 & 3) << 4;
            return half_at(b + 108) * (scale - 32) * code;
        case Q4_K:
            return half_at(b) * k_scale(b + 4, g, 0) * nibble_at(b + 16 + g / 2 * 32 + in, g % 2) -
                   half_at(b + 2) * k_scale(b + 4, g, 1);
        case Q5_K:
            code = nibble_at(b + 48 + g / 2 * 32 + in, g % 2) + 16 * (b[16 + in] >> g & 1);
            return half_at(b) * k_scale(b + 4, g, 0) * code - half_at(b + 2) * k_scale(b + 4, g, 1);
        case Q6_K:
            code = nibble_at(b + half * 64 + c % 64, quarter / 2) + 16 * (b[128 + half * 32 + in] >> 2 * quarter & 3);
            return half_at(b + 208) * (int8_t)b[192 + c / 16] * (code - 32);
        case TQ1_0:
            if (c < 160) return half_at(b + 52) * (digit_of(b[in], g) - 1);
            if (c < 240) return half_at(b + 52) * (digit_of(b[32 + narrow], (c - 160) / 16) - 1);
            return half_at(b + 52) * (digit_of(b[48 + c % 4], (c - 240) / 4) - 1);
        case TQ2_0: return half_at(b + 64) * ((b[half * 32 + in] >> 2 * quarter & 3) - 1);
        case IQ4_XS:
            scale = nibble_at(b + 4 + g / 2, g % 2) | (b[2 + g / 4] >> g % 4 * 2 & 3) << 4;
            return half_at(b) * (scale - 32) * IQ4[nibble_at(b + 8 + g * 16 + narrow, upper)];
        default: return grid_weight(coding, b, c);
    }
}

/* Writes scales and minima that are numbers of a usual size into a block of random bytes. */
static void gguf_scales(Coding coding, uint8_t *b, uint32_t random) {
    static const int AT[][2] = {{0, -1}, {0, -1}, {0, 2},   {0, -1}, {0, 2},   {80, 82}, {108, -1},
                                {0, 2},  {0, 2},  {208, -1}, {0, -1}, {-1, -1}, {0, -1}, {0, -1}, {0, -1},
                                {0, -1}, {0, -1}, {0, -1},   {0, -1}, {52, -1}, {64, -1}, {-1, -1}};
    for (int i = 0; i < 2; i++, random >>= 11) {
        const int at = AT[coding - Q8_0][i];
        if (at >= 0) b[at] = (uint8_t)random, b[at + 1] = (uint8_t)((random >> 8 & 0x80) | 0x14 | (random >> 8 & 3));
    }
    if (coding == IQ1_M) b[53] = (b[53] & 15) | 0x40, b[55] = (b[55] & 15) | 0x10;
    if (coding == MXFP4) b[0] = (uint8_t)(110 + random % 8);
}
