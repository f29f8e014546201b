/* Products with matrices that are kept row by row: INT8 and BF16. */
#ifndef TIERMOE_ISA_AVX512_ROWS_H
#define TIERMOE_ISA_AVX512_ROWS_H

#include "../../matrix.h"
#include "../simd.h"

enum {
    ROWS = 4,   /* whose sums are in registers at a time */
    ROWS_TILE = 6, /* tokens, likewise; for more, codes are decoded once for all of them */
    PANEL = 16, /* rows that are then decoded at a time */
};

/* A code c is decoded to c + 0.5 exactly, which has the same magnitude for c and -1 - c: the low and high bytes of the
 * bfloat16 u + 0.5 for u = 0 .. 127. A product takes half the sum of x away again. */
static const uint8_t LOW[128] __attribute__((aligned(64))) = {
    0x00, 0xC0, 0x20, 0x60, 0x90, 0xB0, 0xD0, 0xF0, 0x08, 0x18, 0x28, 0x38, 0x48, 0x58, 0x68, 0x78, 0x84, 0x8C, 0x94, 0x9C,
    0xA4, 0xAC, 0xB4, 0xBC, 0xC4, 0xCC, 0xD4, 0xDC, 0xE4, 0xEC, 0xF4, 0xFC, 0x02, 0x06, 0x0A, 0x0E, 0x12, 0x16, 0x1A, 0x1E,
    0x22, 0x26, 0x2A, 0x2E, 0x32, 0x36, 0x3A, 0x3E, 0x42, 0x46, 0x4A, 0x4E, 0x52, 0x56, 0x5A, 0x5E, 0x62, 0x66, 0x6A, 0x6E,
    0x72, 0x76, 0x7A, 0x7E, 0x81, 0x83, 0x85, 0x87, 0x89, 0x8B, 0x8D, 0x8F, 0x91, 0x93, 0x95, 0x97, 0x99, 0x9B, 0x9D, 0x9F,
    0xA1, 0xA3, 0xA5, 0xA7, 0xA9, 0xAB, 0xAD, 0xAF, 0xB1, 0xB3, 0xB5, 0xB7, 0xB9, 0xBB, 0xBD, 0xBF, 0xC1, 0xC3, 0xC5, 0xC7,
    0xC9, 0xCB, 0xCD, 0xCF, 0xD1, 0xD3, 0xD5, 0xD7, 0xD9, 0xDB, 0xDD, 0xDF, 0xE1, 0xE3, 0xE5, 0xE7, 0xE9, 0xEB, 0xED, 0xEF,
    0xF1, 0xF3, 0xF5, 0xF7, 0xF9, 0xFB, 0xFD, 0xFF,
};
static const uint8_t HIGH[128] __attribute__((aligned(64))) = {
    0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
};

/* All bits set, unknown to the compiler: it would write ~x with an instruction that waits for its old result. */
static inline __m512i ones(void) {
    __m512i ones = _mm512_set1_epi8(-1);
    __asm__("" : "+v"(ones));
    return ones;
}

/* 64 codes as bfloat16, plus 0.5. */
static inline void decode(const int8_t *codes, __m512i values[2]) {
    /* unpacking interleaves within 128 bits: the halves that belong together go there first */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    const __m512i index = _mm512_min_epu8(bytes, _mm512_xor_si512(bytes, ones()));
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(LOW), index, _mm512_load_si512(LOW + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(HIGH), index, _mm512_load_si512(HIGH + 64));
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i high = _mm512_ternarylogic_epi64(magnitude, bytes, sign, 0xF8); /* magnitude | (bytes & sign) */
    values[0] = _mm512_unpacklo_epi8(low, high);
    values[1] = _mm512_unpackhi_epi8(low, high);
}

static inline __m512 row_dot(__m512 sum, __m512i weights, const bf16 *x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x));
}

/* sums[m * BLOCK + r] = row r times x[m], for 4 rows and a number of tokens known when compiling. The last row comes
 * again where there are fewer. */
INLINE void four_rows(int coded, size_t tokens, const void *weights, size_t rows, const bf16 *x, size_t columns, float *sums) {
    const size_t bytes = coded ? 1 : sizeof(bf16);
    const uint8_t *row[ROWS];
    __m512 totals[ROWS_TILE][ROWS];
    for (size_t r = 0; r < ROWS; r++) {
        row[r] = (const uint8_t *)weights + (r < rows ? r : rows - 1) * columns * bytes;
        for (size_t m = 0; m < tokens; m++) totals[m][r] = _mm512_setzero_ps();
    }
    for (size_t c = 0; c < columns; c += coded ? 64 : 32)
        for (size_t r = 0; r < ROWS; r++) {
            __m512i values[2];
            _mm_prefetch((const char *)row[r] + (ROWS * columns + c) * bytes, _MM_HINT_T1); /* of the next four */
            if (coded)
                decode((const int8_t *)row[r] + c, values);
            else
                values[0] = _mm512_loadu_si512(row[r] + c * bytes);
            for (size_t m = 0; m < tokens; m++) {
                totals[m][r] = row_dot(totals[m][r], values[0], x + m * columns + c);
                if (coded) totals[m][r] = row_dot(totals[m][r], values[1], x + m * columns + c + 32);
            }
        }
    for (size_t m = 0; m < tokens; m++)
        _mm_storeu_ps(sums + m * BLOCK, four_sums(totals[m][0], totals[m][1], totals[m][2], totals[m][3]));
}

#define TOKENS_OF(coded, n)                                                              \
    case n:                                                                              \
        for (size_t r = 0; r < rows; r += ROWS)                                          \
            four_rows(coded, n, weights + r * row_bytes, rows - r, x, columns, sums + r); \
        break;

/* sums[m * BLOCK + r] = row r times x[m], for at most ROWS_TILE tokens. */
static void rows_tile(int coded, size_t tokens, const uint8_t *weights, size_t rows, const bf16 *x, size_t columns,
                        float *sums) {
    const size_t row_bytes = columns * (coded ? 1 : sizeof(bf16));
    if (coded)
        switch (tokens) { TOKENS_OF(1, 1) TOKENS_OF(1, 2) TOKENS_OF(1, 3) TOKENS_OF(1, 4) TOKENS_OF(1, 5) TOKENS_OF(1, 6) }
    else
        switch (tokens) { TOKENS_OF(0, 1) TOKENS_OF(0, 2) TOKENS_OF(0, 3) TOKENS_OF(0, 4) TOKENS_OF(0, 5) TOKENS_OF(0, 6) }
}

/* out = scales * (sums - x_sum / 2) for codes, else sums. */
static void store_rows_of(const float *sums, const bf16 *scales, float x_sum, size_t rows, bf16 *out) {
    for (size_t r = 0; r < rows; r += 16) {
        const __mmask16 there = rows - r < 16 ? (__mmask16)((1u << (rows - r)) - 1) : 0xFFFF;
        __m512 values = _mm512_loadu_ps(sums + r);
        if (scales) {
            const __m512i scale = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, scales + r));
            values = _mm512_sub_ps(values, _mm512_set1_ps(0.5f * x_sum));
            values = _mm512_mul_ps(values, _mm512_castsi512_ps(_mm512_slli_epi32(scale, 16)));
        }
        _mm256_mask_storeu_epi16(out + r, there, (__m256i)_mm512_cvtneps_pbh(values));
    }
}

/* `rows` rows times the tokens, a tile at a time. x_sums, scales: NULL where the weights are no codes. */
static void tiles(int coded, const void *weights, size_t rows, const bf16 *x, size_t columns, const float *x_sums,
                         const bf16 *scales, size_t tokens, bf16 *out, size_t stride) {
    float sums[ROWS_TILE * BLOCK];
    for (size_t left = (tokens + ROWS_TILE - 1) / ROWS_TILE; left; left--) {
        const size_t some = (tokens + left - 1) / left;
        rows_tile(coded, some, weights, rows, x, columns, sums);
        for (size_t m = 0; m < some; m++)
            store_rows_of(sums + m * BLOCK, scales, scales ? x_sums[m] : 0, rows, out + m * stride);
        x += some * columns, out += some * stride, tokens -= some;
        if (scales) x_sums += some;
    }
}

static void decoded_panels(const int8_t *codes, size_t rows, const bf16 *x, size_t columns, const float *x_sums,
                                  const bf16 *scales, size_t tokens, bf16 *out, size_t stride) {
    bf16 panel[PANEL * columns] __attribute__((aligned(64)));
    for (size_t r = 0; r < rows; r += PANEL) {
        const size_t some = rows - r < PANEL ? rows - r : PANEL;
        for (size_t i = 0; i < some * columns; i += 64) {
            __m512i values[2];
            decode(codes + r * columns + i, values);
            _mm512_store_si512(panel + i, values[0]);
            _mm512_store_si512(panel + i + 32, values[1]);
        }
        tiles(0, panel, some, x, columns, x_sums, scales + r, tokens, out + r, stride);
    }
}

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns;
    const size_t rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    if (matrix->coding == BF16) {
        tiles(0, (const bf16 *)matrix->weights + begin * columns, rows, x, columns, NULL, NULL, tokens, out, stride);
        return;
    }
    const int8_t *codes = (const int8_t *)matrix->weights + begin * columns;
    const bf16 *scales = (const bf16 *)matrix->scales + begin;
    if (tokens <= ROWS_TILE)
        tiles(1, codes, rows, x, columns, sums, scales, tokens, out, stride);
    else
        decoded_panels(codes, rows, x, columns, sums, scales, tokens, out, stride);
}

#endif
