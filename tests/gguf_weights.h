/* Single weights of the blocks of GGUF files, by GGML's definitions: the reference of the kernels. */
#include <math.h>

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
    return (coding >= Q2_K && coding <= Q6_K) || coding == IQ4_XS ? 256 : 32;
}

static size_t gguf_bytes(Coding coding) {
    static const size_t BYTES[] = {34, 18, 20, 22, 24, 84, 110, 144, 176, 210, 18, 136, 17};
    return BYTES[coding - Q8_0];
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
        default: /* IQ4_XS */
            scale = nibble_at(b + 4 + g / 2, g % 2) | (b[2 + g / 4] >> g % 4 * 2 & 3) << 4;
            return half_at(b) * (scale - 32) * IQ4[nibble_at(b + 8 + g * 16 + narrow, upper)];
    }
}

/* Writes scales and minima that are numbers of a usual size into a block of random bytes. */
static void gguf_scales(Coding coding, uint8_t *b, uint32_t random) {
    static const int AT[][2] = {{0, -1}, {0, -1}, {0, 2},   {0, -1}, {0, 2},   {80, 82}, {108, -1},
                                {0, 2},  {0, 2},  {208, -1}, {0, -1}, {0, -1}, {-1, -1}};
    for (int i = 0; i < 2; i++, random >>= 11) {
        const int at = AT[coding - Q8_0][i];
        if (at >= 0) b[at] = (uint8_t)random, b[at + 1] = (uint8_t)((random >> 8 & 0x80) | 0x14 | (random >> 8 & 3));
    }
    if (coding == MXFP4) b[0] = (uint8_t)(110 + random % 8);
}
