/* Quants: the codings in which a matrix of N outputs (rows) and K inputs (columns) is kept.
 *
 * INT4: 4-bit codes in the order of torch's CPU int4 operator (AVX-512), in blocks of 64 rows; N is a multiple of 64.
 *   Within a block the column is the outer index: 32 bytes a column, byte j holds row j (low nibble) and row 32 + j (high
 *   nibble). Every `group` columns of a row share a scale and a zero, bfloat16 pairs (K / group, N, 2):
 *   w = (code - 8) * scale + zero. K is a multiple of the group, the group of 32.
 * INT2: 2-bit codes in blocks of 64 rows, as INT4 with two columns in the place of one, the second in the high half of the
 *   nibbles: w = (code - 2) * scale + zero. Scales and zeros, N, K and the group are as in INT4.
 * INT6: 6-bit codes in blocks of 64 rows; N is a multiple of 64. Within a block four columns after each other fill 192
 *   bytes. First their low four bits, as in INT4. Then the high two: 32 bytes for the first two columns, 32 for the other
 *   two. Byte j holds in bits 0 and 1 those of row 32 + j in the first of the two columns, in bits 2 and 3 those of row j
 *   in it, in bits 4 to 7 those of the same rows in the second. Every `group` columns of a row share a bfloat16 scale, in
 *   each block (K / group, 64): w = (code - 32) * scale. K is a multiple of the group, the group of 32.
 * NL4, NL3, NL2: codes of 4, 3 and 2 bits in blocks of 64 rows; N is a multiple of 64. A block is one run: for each group of
 *   columns 64 bfloat16 scales and the codes. Those of four columns after each other are bytes of two nibbles, byte j with
 *   row j in its low and row 32 + j in its high one: in NL4 32 bytes for each column, as in INT4; in NL3 for each of the first
 *   three, and the highest bits of their nibbles are the code of the fourth column, its lowest bit in the first; in NL2 for
 *   two columns, the second in the high half of the nibbles. w = level of the code * scale. K is a multiple of the group,
 *   which is 32 or 64.
 * TCQ2: 2-bit codes in blocks of 64 rows, 64 bytes for four columns after each other, that stand for 32 levels (trellis.h). Every
 *   `group` columns of a row share a scale, in the order of INT6's: w = level * scale. N, K and the group are as in INT6.
 * INT8: signed bytes (N, K) and a bfloat16 scale for each row (N): w = code * scale. K is a multiple of 64.
 * BF16: bfloat16 weights (N, K). K is a multiple of 32.
 * Q8_0 to MXFP4: rows of the blocks of GGUF files (block_q8_0 to block_mxfp4): scales lie within the blocks, of 32 or 256
 *   columns, which begin at any byte. K is a multiple of a block's columns.
 * E2M1, S4, U4, E4M3: rows of the codes of safetensors checkpoints: two of 4 bits to a byte, the first in its low half, or one
 *   of 8 bits. scale_rows by scale_columns of them share a scale, in an array of its own (ceil(N / scale_rows),
 *   ceil(K / scale_columns)): w = code * scale, in U4 (code - zero) * scale. K is a multiple of 32, scale_columns of the group
 *   unless it is K.
 *
 * Codes are exact, and their products are summed before a scale is applied: no weight is rounded. */
#ifndef TIERMOE_QUANTS_H
#define TIERMOE_QUANTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline)) /* what is known when compiling is so in the function, too */

enum { BLOCK = 64 }; /* rows of a block: what one task computes */

typedef uint16_t bf16;

static inline float from_bf16(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Rounded to the nearest, halves to the even one. */
static inline bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (bf16)(bits >> 16 | 0x40); /* stays undefined */
    return (bf16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* X(coding, name, columns, bytes, group, offsets), in the order of Python's native.Coding:
 *   columns, bytes   of the smallest piece: of a block of 64 rows four columns; of rows a column, or a block of 32 or 256
 *   group            columns that share a scale; 0: a matrix says how many
 *   offsets          whether a group's columns have something added to them once they are scaled: what takes sums of x's codes */
#define EACH_QUANT(X)          \
    X(INT4, int4, 4, 128, 0, 1) \
    X(INT8, int8, 1, 1, 0, 0)   \
    X(BF16, bf16, 1, 2, 0, 0)   \
    X(INT6, int6, 4, 192, 0, 0) \
    X(INT2, int2, 4, 64, 0, 1)  \
    X(NL4, nl4, 4, 128, 0, 0)   \
    X(NL3, nl3, 4, 96, 0, 0)    \
    X(NL2, nl2, 4, 64, 0, 0)    \
    X(TCQ2, tcq2, 4, 64, 0, 0)  \
    EACH_GGUF_QUANT(X)         \
    EACH_PUBLISHED_QUANT(X)

#define EACH_GGUF_QUANT(X)              \
    X(Q8_0, q8_0, 32, 34, 32, 0)        \
    X(Q4_0, q4_0, 32, 18, 32, 0)        \
    X(Q4_1, q4_1, 32, 20, 32, 1)        \
    X(Q5_0, q5_0, 32, 22, 32, 0)        \
    X(Q5_1, q5_1, 32, 24, 32, 1)        \
    X(Q2_K, q2_k, 256, 84, 16, 1)       \
    X(Q3_K, q3_k, 256, 110, 16, 0)      \
    X(Q4_K, q4_k, 256, 144, 32, 1)      \
    X(Q5_K, q5_k, 256, 176, 32, 1)      \
    X(Q6_K, q6_k, 256, 210, 16, 0)      \
    X(IQ1_S, iq1_s, 256, 50, 32, 0)     \
    X(IQ1_M, iq1_m, 256, 56, 16, 0)     \
    X(IQ2_XXS, iq2_xxs, 256, 66, 32, 0) \
    X(IQ2_XS, iq2_xs, 256, 74, 16, 0)   \
    X(IQ2_S, iq2_s, 256, 82, 16, 0)     \
    X(IQ3_XXS, iq3_xxs, 256, 98, 32, 0) \
    X(IQ3_S, iq3_s, 256, 110, 32, 0)    \
    X(IQ4_NL, iq4_nl, 32, 18, 32, 0)    \
    X(IQ4_XS, iq4_xs, 256, 136, 32, 0)  \
    X(TQ1_0, tq1_0, 256, 54, 32, 0)     \
    X(TQ2_0, tq2_0, 256, 66, 32, 0)     \
    X(MXFP4, mxfp4, 32, 17, 32, 0)

#define EACH_PUBLISHED_QUANT(X)    \
    X(E2M1, e2m1, 32, 16, 0, 0)    \
    X(S4, s4, 32, 16, 32, 0)       \
    X(U4, u4, 32, 16, 32, 1)       \
    X(E4M3, e4m3, 32, 32, 32, 0)

/* Those that are taken apart strip by strip (isa/strips.h). */
#define EACH_STRIP_QUANT(X) EACH_GGUF_QUANT(X) EACH_PUBLISHED_QUANT(X)

#define QUANT_CODING(coding, name, columns, bytes, group, offsets) coding,
typedef enum {
    EACH_QUANT(QUANT_CODING) CODINGS,
    FIRST_GGUF = Q8_0,
    LAST_GGUF = MXFP4,
    FIRST_PUBLISHED = E2M1,
    LAST_PUBLISHED = E4M3
} Coding;

#define QUANT_COLUMNS(coding, name, columns, bytes, group, offsets) \
    case coding: return columns;
static inline size_t block_columns(Coding coding) {
    switch (coding) { EACH_QUANT(QUANT_COLUMNS) default: return 0; }
}

#define QUANT_BYTES(coding, name, columns, bytes, group, offsets) \
    case coding: return bytes;
static inline size_t block_bytes(Coding coding) {
    switch (coding) { EACH_QUANT(QUANT_BYTES) default: return 0; }
}

#define QUANT_OFFSETS(coding, name, columns, bytes, group, offsets) \
    case coding: return offsets;
static inline int has_offsets(Coding coding) {
    switch (coding) { EACH_QUANT(QUANT_OFFSETS) default: return 0; }
}

/* Bytes of so many columns of a row of GGUF's blocks or published codes, whole blocks. */
static inline size_t row_bytes_of(Coding coding, size_t columns) {
    return columns / block_columns(coding) * block_bytes(coding);
}

/* Blocks of GGUF files, byte by byte: they begin at any address. d: the scale, or what scales are multiplied by; m: likewise of
 * minima; both float16. */
typedef struct { uint8_t d[2], codes[32]; } block_q8_0; /* codes are signed */
typedef struct { uint8_t d[2], codes[16]; } block_q4_0;
typedef struct { uint8_t d[2], m[2], codes[16]; } block_q4_1;
typedef struct { uint8_t d[2], fifth[4], codes[16]; } block_q5_0;
typedef struct { uint8_t d[2], m[2], fifth[4], codes[16]; } block_q5_1;
typedef struct { uint8_t scales[16], codes[64], d[2], m[2]; } block_q2_k;
typedef struct { uint8_t high[32], codes[64], scales[12], d[2]; } block_q3_k;
typedef struct { uint8_t d[2], m[2], scales[12], codes[128]; } block_q4_k;
typedef struct { uint8_t d[2], m[2], scales[12], fifth[32], codes[128]; } block_q5_k;
typedef struct { uint8_t codes[128], high[64], scales[16], d[2]; } block_q6_k; /* scales are signed */
typedef struct { uint8_t d[2], codes[32], high[16]; } block_iq1_s; /* high: with scales, too */
typedef struct { uint8_t codes[32], high[16], scales[8]; } block_iq1_m; /* scales: with d, too */
typedef struct { uint8_t d[2], codes[64]; } block_iq2_xxs; /* codes: with signs and scales, too */
typedef struct { uint8_t d[2], codes[64], scales[8]; } block_iq2_xs; /* codes: with signs, too */
typedef struct { uint8_t d[2], codes[32], signs[32], high[8], scales[8]; } block_iq2_s;
typedef struct { uint8_t d[2], codes[64], signs[32]; } block_iq3_xxs; /* signs: with scales, too */
typedef struct { uint8_t d[2], codes[64], high[8], signs[32], scales[4]; } block_iq3_s;
typedef struct { uint8_t d[2], codes[16]; } block_iq4_nl;
typedef struct { uint8_t d[2], scales_high[2], scales_low[4], codes[128]; } block_iq4_xs;
typedef struct { uint8_t codes[48], last[4], d[2]; } block_tq1_0;
typedef struct { uint8_t codes[64], d[2]; } block_tq2_0;
typedef struct { uint8_t exponent, codes[16]; } block_mxfp4;

#define QUANT_SIZE(coding, name, columns, bytes, group, offsets) \
    _Static_assert(sizeof(block_##name) == bytes, #coding " blocks of " #bytes " bytes");
EACH_GGUF_QUANT(QUANT_SIZE)

/* The block of a type at an address, as AT(q4_k, at)->codes. */
#define AT(name, address) ((const block_##name *)(const void *)(address))

/* What the nibbles of NL4, NL3 and NL2 stand for, whatever bits lie above their codes (formats/nonuniform.py). */
static const int8_t UNEVEN_LEVELS[3][16] __attribute__((aligned(16), unused)) = {
    {-125, -93, -71, -54, -40, -27, -15, -3, 9, 21, 33, 46, 62, 79, 101, 127},
    {-103, -62, -33, -7, 18, 45, 77, 127, -103, -62, -33, -7, 18, 45, 77, 127},
    {-97, -21, 44, 127, -97, -21, 44, 127, -97, -21, 44, 127, -97, -21, 44, 127},
};

static inline int is_uneven(Coding coding) { return coding >= NL4 && coding <= NL2; }
static inline const int8_t *uneven_levels(Coding coding) { return UNEVEN_LEVELS[coding - NL4]; }

/* Codings with pairs of a scale and a zero. */
static inline int has_pairs(Coding coding) { return coding == INT4 || coding == INT2; }

/* Bits of a code in a block of 64 rows. */
static inline size_t code_bits(Coding coding) { return block_bytes(coding) / (BLOCK / 2); }

/* Bytes of the codes of so many columns of such a block, a multiple of four. */
static inline size_t code_bytes(Coding coding, size_t columns) { return columns * BLOCK / 8 * code_bits(coding); }

/* The code of INT4, INT6 and INT2 that stands for 0, before a zero is added; of TCQ2 what its levels are kept above themselves. */
static inline int middle_code(Coding coding) { return coding == TCQ2 ? 32 : 1 << (code_bits(coding) - 1); }

enum { UNEVEN_SCALES = BLOCK * 2 }; /* bytes of a group's scales in a block */

/* Bytes of a group in a block of NL4, NL3 or NL2. */
static inline size_t uneven_group_bytes(Coding coding, size_t group) { return UNEVEN_SCALES + code_bytes(coding, group); }

/* What scales of E2M1, S4, U4 and E4M3 are: E8M0 is 2^(byte - 127); E4M3 is a float of 8 bits, times a factor, or divided by
 * it. */
typedef enum { SCALE_FLOAT, SCALE_BF16, SCALE_HALF, SCALE_E8M0, SCALE_E4M3_TIMES, SCALE_E4M3_OVER, SCALE_KINDS } ScaleKind;

#endif
