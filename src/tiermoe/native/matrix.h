/* Products of bfloat16 tokens with a matrix of N outputs (rows) and K inputs (columns), which is kept in one of these
 * codings:
 *
 * INT4: 4-bit codes in the order of torch's CPU int4 operator (AVX-512), in blocks of 64 rows; N is a multiple of 64.
 *   Within a block the column is the outer index: 32 bytes a column, byte j holds row j (low nibble) and row 32 + j (high
 *   nibble). Every `group` columns of a row share a scale and a zero, bfloat16 pairs (K / group, N, 2):
 *   w = (code - 8) * scale + zero. K is a multiple of the group, the group of 32.
 * INT2: 2-bit codes that each choose among four of the 16 levels of INT4, in blocks of 64 rows; N is a multiple of 64. Each
 *   group of a block has 4 runs of 4 * group bytes of codes, and beside them, in a second array, one run of ladders: from
 *   one run of ladders and these four, kernels.h widen makes the codes of INT4. Scales and zeros are those of INT4.
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
 * INT8: signed bytes (N, K) and a bfloat16 scale for each row (N): w = code * scale. K is a multiple of 64.
 * BF16: bfloat16 weights (N, K). K is a multiple of 32.
 * Q8_0 to MXFP4: rows of the blocks of GGUF files, as isa/shared/gguf.h takes them apart: scales lie within the blocks, of
 *   32 or 256 columns, which begin at any byte. K is a multiple of a block's columns.
 *
 * E2M1, S4, U4, E4M3: rows of the codes of safetensors checkpoints, as isa/shared/published.h takes them apart: two of 4 bits to a
 *   byte, the first in its low half, or one of 8 bits. scale_rows by scale_columns of them share a scale, in an array of its
 *   own (ceil(N / scale_rows), ceil(K / scale_columns)): w = code * scale, in U4
 *   (code - zero) * scale. K is a multiple of 32, scale_columns of the group unless it is K.
 *
 * Codes are exact in bfloat16 and their products are summed in float32 before a scale is applied: no weight is rounded.
 * Every output is summed in one order, whatever the number of tokens, threads or blocks.
 */
#ifndef TIERMOE_MATRIX_H
#define TIERMOE_MATRIX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

typedef enum {
    INT4, INT8, BF16, INT6, INT2, NL4, NL3, NL2,
    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
    E2M1, S4, U4, E4M3,
    CODINGS,
    FIRST_GGUF = Q8_0,
    LAST_GGUF = MXFP4,
    FIRST_PUBLISHED = E2M1,
    LAST_PUBLISHED = E4M3
} Coding;

/* What the nibbles of NL4, NL3 and NL2 stand for, whatever bits lie above their codes (quant/uneven.py). */
static const int8_t UNEVEN_LEVELS[3][16] __attribute__((aligned(16), unused)) = {
    {-125, -93, -71, -54, -40, -27, -15, -3, 9, 21, 33, 46, 62, 79, 101, 127},
    {-103, -62, -33, -7, 18, 45, 77, 127, -103, -62, -33, -7, 18, 45, 77, 127},
    {-97, -21, 44, 127, -97, -21, 44, 127, -97, -21, 44, 127, -97, -21, 44, 127},
};

static inline int is_uneven(Coding coding) { return coding >= NL4 && coding <= NL2; }
static inline const int8_t *uneven_levels(Coding coding) { return UNEVEN_LEVELS[coding - NL4]; }

/* Bits of a code that lies in blocks of rows. */
static inline size_t code_bits(Coding coding) {
    switch (coding) {
        case INT6: return 6;
        case NL3: return 3;
        case NL2: return 2;
        default: return 4;
    }
}

/* Bytes of the codes of so many columns of a block, a multiple of four. */
static inline size_t code_bytes(Coding coding, size_t columns) { return columns * BLOCK / 8 * code_bits(coding); }

enum { UNEVEN_SCALES = BLOCK * 2 }; /* bytes of a group's scales in a block */

/* Bytes of a group in a block of NL4, NL3 or NL2. */
static inline size_t uneven_group_bytes(Coding coding, size_t group) { return UNEVEN_SCALES + code_bytes(coding, group); }

/* What scales of E2M1, S4, U4 and E4M3 are: E8M0 is 2^(byte - 127); E4M3 is a float of 8 bits, times a factor, or divided by
 * it. */
typedef enum { SCALE_FLOAT, SCALE_BF16, SCALE_HALF, SCALE_E8M0, SCALE_E4M3_TIMES, SCALE_E4M3_OVER, SCALE_KINDS } ScaleKind;

/* Whether something is added to codes, or taken away, once they are scaled: what takes the sums of x's columns. */
static inline int has_offsets(Coding coding) {
    switch (coding) {
        case BF16: case Q8_0: case Q4_0: case Q5_0: case Q3_K: case Q6_K: case IQ4_NL: case IQ4_XS: case MXFP4:
        case E2M1: case S4: case E4M3: return 0;
        default: return 1;
    }
}

typedef struct {
    Coding coding;
    const void *weights; /* codes or weights */
    const void *scales;  /* INT4, INT2: pairs of scale and zero; INT6, INT8: scales; others: unused */
    size_t rows, columns;
    size_t group; /* columns that share a scale: K in INT8 and BF16; in blocks of GGUF files 32, or 16; in E2M1, S4, U4 and E4M3 32, or 16 */
    const void *ladders; /* INT2: see there; U4: zeros, a byte beside each scale; E2M1: factors of scales, one for each
                          * factor_rows rows */
    ScaleKind scale_kind; /* E2M1, S4, U4, E4M3, as what follows */
    size_t scale_rows, scale_columns, factor_rows;
} Matrix;

/* How many sums of groups of x's columns a product takes for each token. */
static inline size_t matrix_groups(const Matrix *matrix) {
    return has_offsets(matrix->coding) ? matrix->columns / matrix->group : 0;
}

/* Blocks of rows; the last one may have fewer than 64 in all but INT4, INT6 and INT2. */
size_t matrix_blocks(const Matrix *matrix);

/* What products with a matrix want to know of x beforehand, x (tokens, columns): so many floats for each token, which the
 * instruction set in use lays out as it likes, from a multiple of 32 bytes on. It is the same for all matrices alike. */
size_t matrix_prepared(const Matrix *matrix);
void matrix_prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared);
int matrices_alike(const Matrix *a, const Matrix *b);

/* out[m * stride + i] = row 64 * block + i of the matrix times x[m], rounded to bfloat16. */
void matrix_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                  size_t stride);

#endif
