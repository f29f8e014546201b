/* Blocks of GGUF files, every type: the codes of a strip of a row, and what its groups are scaled by. A strip is 256 columns
 * or, at the end of a row, fewer, in whole blocks. A column is scale * code + offset of its group.
 *
 * Over from_half (a float16 at an address) and look_up (the 16 codes of each, from a table) of vector.h. */
enum {
    STRIP = 256,       /* columns: a block of the types that have the K in their name */
    STRIP_GROUPS = 16, /* the most in a strip */
};

typedef struct {
    float scales[STRIP_GROUPS], offsets[STRIP_GROUPS];
} StripScales;

static inline size_t block_columns(Coding coding) {
    switch (coding) {
        case Q2_K: case Q3_K: case Q4_K: case Q5_K: case Q6_K: case IQ4_XS: return STRIP;
        default: return 32;
    }
}

static inline size_t block_bytes(Coding coding) {
    switch (coding) {
        case Q8_0: return 34;
        case Q4_0: case IQ4_NL: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        case IQ4_XS: return 136;
        case E2M1: case S4: case U4: return 16;
        case E4M3: return 32;
        default: return 17; /* MXFP4 */
    }
}

static inline size_t row_bytes_of(Coding coding, size_t columns) {
    return columns / block_columns(coding) * block_bytes(coding);
}

/* 2^(exponent - 128), halved: the codes of MXFP4 are doubled. */
static inline float mxfp4_scale(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes. */
static inline void k_scales(const uint8_t *restrict block, float *restrict scales, float *restrict offsets) {
    uint64_t low;
    uint32_t last;
    memcpy(&low, block + 4, sizeof low), memcpy(&last, block + 12, sizeof last);
    const uint64_t high = ((last | (uint64_t)last << 28) & 0x0F0F0F0F0F0F0F0F) | (low >> 2 & 0x3030303030303030);
    low &= 0x3F3F3F3F3F3F3F3F; /* the first four scales before the first four minima, as in `high` the last ones */
    uint64_t both[2] = {(uint32_t)low | high << 32, low >> 32 | (high >> 32 << 32)};
    __asm__("" : "+m"(both)); /* else the compiler takes the words apart byte by byte */
    const float scale = from_half(block), least = -from_half(block + 2);
    const uint8_t *bytes = (const uint8_t *)both;
    for (int g = 0; g < 8; g++) scales[g] = scale * bytes[g];
    for (int g = 0; g < 8; g++) offsets[g] = least * bytes[8 + g];
}

static inline void q2_k_scales(const uint8_t *restrict block, float *restrict scales, float *restrict offsets) {
    const float scale = from_half(block + 80), least = -from_half(block + 82);
    for (int g = 0; g < 16; g++) scales[g] = scale * (block[g] & 15), offsets[g] = least * (block[g] >> 4);
}

static inline void q3_k_scales(const uint8_t *restrict block, float *restrict scales) {
    const uint8_t *low = block + 96, *high = block + 104;
    const float scale = from_half(block + 108);
    for (int g = 0; g < 16; g++) {
        const int nibble = low[g % 8] >> g / 8 * 4 & 15, two = high[g % 4] >> g / 4 * 2 & 3;
        scales[g] = scale * (nibble + two * 16 - 32);
    }
}

static inline void q6_k_scales(const uint8_t *restrict block, float *restrict scales) {
    const float scale = from_half(block + 208);
    for (int g = 0; g < 16; g++) scales[g] = scale * (int8_t)block[192 + g];
}

static inline void iq4_xs_scales(const uint8_t *restrict block, float *restrict scales) {
    const float scale = from_half(block);
    for (int g = 0; g < 8; g++) {
        const int nibble = block[4 + g / 2] >> g % 2 * 4 & 15, two = block[2 + g / 4] >> g % 4 * 2 & 3;
        scales[g] = scale * (nibble + two * 16 - 32);
    }
}

/* Writes as many as the strip has groups; offsets only where has_offsets(coding). */
static inline __attribute__((always_inline)) void strip_scales(Coding coding, const uint8_t *at, size_t width, StripScales *to) {
    switch (coding) {
        case Q4_K: case Q5_K: k_scales(at, to->scales, to->offsets); return;
        case Q2_K: q2_k_scales(at, to->scales, to->offsets); return;
        case Q3_K: q3_k_scales(at, to->scales); return;
        case Q6_K: q6_k_scales(at, to->scales); return;
        case IQ4_XS: iq4_xs_scales(at, to->scales); return;
        default: break;
    }
    for (size_t g = 0; g < width / 32; g++, at += block_bytes(coding)) {
        to->scales[g] = coding == MXFP4 ? mxfp4_scale(*at) : from_half(at);
        if (has_offsets(coding)) to->offsets[g] = from_half(at + 2);
    }
}

/* The nibbles of `count` bytes, less the middle one. */
static inline void nibbles_of(const uint8_t *restrict from, size_t count, int middle, int8_t *restrict low,
                              int8_t *restrict high) {
    for (size_t i = 0; i < count; i++)
        low[i] = (int8_t)((from[i] & 15) - middle), high[i] = (int8_t)((from[i] >> 4) - middle);
}

/* Q5_0 and Q5_1: 32 fifth bits, and as many nibbles behind them. */
static inline void five_bits(const uint8_t *restrict at, int middle, int8_t *restrict codes) {
    uint32_t fifth;
    memcpy(&fifth, at, sizeof fifth);
    nibbles_of(at + 4, 16, middle, codes, codes + 16);
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] + (int)(fifth >> i & 1) * 16);
}

static inline void q2_k_codes(const uint8_t *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++)
                codes[half * 128 + quarter * 32 + i] = (int8_t)(block[16 + half * 32 + i] >> 2 * quarter & 3);
}

static inline void q3_k_codes(const uint8_t *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int quarter = 0; quarter < 4; quarter++)
            for (int i = 0; i < 32; i++) {
                const int low = block[32 + half * 32 + i] >> 2 * quarter & 3, high = block[i] >> (4 * half + quarter) & 1;
                codes[half * 128 + quarter * 32 + i] = (int8_t)(low + 4 * high - 4);
            }
}

static inline void q4_k_codes(const uint8_t *restrict block, int8_t *restrict codes) {
    for (int pair = 0; pair < 4; pair++) nibbles_of(block + 16 + 32 * pair, 32, 0, codes + 64 * pair, codes + 64 * pair + 32);
}

static inline void q5_k_codes(const uint8_t *restrict block, int8_t *restrict codes) {
    for (int pair = 0; pair < 4; pair++)
        for (int i = 0; i < 32; i++) {
            const int both = block[48 + 32 * pair + i], fifth = block[16 + i] >> 2 * pair;
            codes[64 * pair + i] = (int8_t)((both & 15) + (fifth & 1) * 16);
            codes[64 * pair + 32 + i] = (int8_t)((both >> 4) + (fifth >> 1 & 1) * 16);
        }
}

static inline void q6_k_codes(const uint8_t *restrict block, int8_t *restrict codes) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
            const int one = block[64 * half + i], other = block[64 * half + 32 + i], two = block[128 + 32 * half + i];
            int8_t *to = codes + 128 * half + i;
            to[0] = (int8_t)((one & 15) + (two & 3) * 16 - 32), to[32] = (int8_t)((other & 15) + (two >> 2 & 3) * 16 - 32);
            to[64] = (int8_t)((one >> 4) + (two >> 4 & 3) * 16 - 32), to[96] = (int8_t)((other >> 4) + (two >> 6) * 16 - 32);
        }
}

static const int8_t IQ4_CODES[16] __attribute__((aligned(16))) = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                                  1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t FP4_CODES[16] __attribute__((aligned(16))) = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#include "published.h"

/* The codes of a strip, in the order of its columns. */
static void strip_codes(Coding coding, const uint8_t *at, size_t width, int8_t *codes) {
    const size_t columns = block_columns(coding), bytes = block_bytes(coding);
    for (const int8_t *end = codes + width; codes < end; at += bytes, codes += columns) switch (coding) {
            case Q8_0: memcpy(codes, at + 2, 32); break;
            case Q4_0: nibbles_of(at + 2, 16, 8, codes, codes + 16); break;
            case Q4_1: nibbles_of(at + 4, 16, 0, codes, codes + 16); break;
            case Q5_0: five_bits(at + 2, 16, codes); break;
            case Q5_1: five_bits(at + 4, 0, codes); break;
            case Q2_K: q2_k_codes(at, codes); break;
            case Q3_K: q3_k_codes(at, codes); break;
            case Q4_K: q4_k_codes(at, codes); break;
            case Q5_K: q5_k_codes(at, codes); break;
            case Q6_K: q6_k_codes(at, codes); break;
            case IQ4_NL: look_up(IQ4_CODES, at + 2, codes, codes + 16); break;
            case IQ4_XS:
                for (size_t g = 0; g < 8; g++) look_up(IQ4_CODES, at + 8 + 16 * g, codes + 32 * g, codes + 32 * g + 16);
                break;
            case E2M1: pairs_of(FP4_CODES, at, codes); break;
            case S4: pairs_of(S4_CODES, at, codes); break;
            case U4: pairs_of(U4_CODES, at, codes); break;
            default: look_up(FP4_CODES, at + 1, codes, codes + 16); /* MXFP4 */
        }
}
