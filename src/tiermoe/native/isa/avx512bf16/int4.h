/* Products with matrices in INT4. A pair of a scale (low half) and a zero (high half) is read as one word. */
#include "vector.h"

enum {
    INT4_TILE = 6,           /* tokens whose sums fit the registers */
    REGISTERS = 4,      /* of 16 rows: a block */
    PAIR_BYTES = 64,    /* of two columns of a block */
    GROUPS_AHEAD = 3,   /* whose scales are asked for ahead of their use */
    BYTES_AHEAD = 2048, /* of codes asked for ahead of their use */
};

/* bfloat16 of code - 8, twice: the table is indexed by 5 bits, of which the highest belongs to the next nibble. */
static const bf16 VALUES[32] __attribute__((aligned(64))) = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
};

/* From two columns of a block (64 bytes): byte i of both, each twice, to the 32 bits of lane i. */
static const uint8_t FIRST_HALF[64] __attribute__((aligned(64))) = {
    0, 0, 32, 32, 1, 1, 33, 33, 2,  2,  34, 34, 3,  3,  35, 35, 4,  4,  36, 36, 5,  5,  37, 37, 6,  6,  38, 38, 7,  7,  39, 39,
    8, 8, 40, 40, 9, 9, 41, 41, 10, 10, 42, 42, 11, 11, 43, 43, 12, 12, 44, 44, 13, 13, 45, 45, 14, 14, 46, 46, 15, 15, 47, 47,
};

/* The values of two columns: register r holds rows 16 r .. 16 r + 15, a lane both columns of its row. */
static inline void unpack_pair(const uint8_t *pair, __m512i values[REGISTERS]) {
    const __m512i table = _mm512_load_si512(VALUES), first = _mm512_load_si512(FIRST_HALF);
    const __m512i bytes = _mm512_loadu_si512(pair);
    const __m512i low = _mm512_permutexvar_epi8(first, bytes);
    const __m512i high = _mm512_permutexvar_epi8(_mm512_add_epi8(first, _mm512_set1_epi8(16)), bytes);
    values[0] = _mm512_permutexvar_epi16(low, table);
    values[1] = _mm512_permutexvar_epi16(high, table);
    values[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 4), table);
    values[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 4), table);
}

static inline __m512 int4_dot(__m512 sum, __m512i pairs, const bf16 *x) {
    const __m512i both = _mm512_set1_epi32(*(const int32_t *)x);
    return _mm512_dpbf16_ps(sum, (__m512bh)both, (__m512bh)pairs);
}

/* total + scale * sum + zero * x_sum: what a group adds to 16 rows. */
static inline __m512 add_group(__m512 total, __m512 sum, float x_sum, const uint32_t *scales) {
    const __m512i both = _mm512_loadu_si512(scales);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)));
    total = _mm512_fmadd_ps(scale, sum, total);
    return _mm512_fmadd_ps(zero, _mm512_set1_ps(x_sum), total);
}

static inline void store_rows(const __m512 totals[REGISTERS], bf16 *out) {
    for (int r = 0; r < REGISTERS; r += 2)
        _mm512_storeu_si512(out + 16 * r, (__m512i)_mm512_cvtne2ps_pbh(totals[r + 1], totals[r]));
}

/* Few tokens, a number known when compiling: each pair of columns is unpacked into registers and multiplied with all of
 * them, which hides the unpacking. What comes next is asked for in time: one token is bound by memory. */
static inline __attribute__((always_inline)) void int4_tile(size_t tokens, const Matrix *matrix, const uint8_t *codes,
                                                              const uint32_t *scales, const bf16 *x,
                                                              const float *sums, bf16 *out, size_t stride) {
    const size_t groups = matrix->columns / matrix->group, pairs = matrix->group / 2;
    __m512 totals[INT4_TILE][REGISTERS];
    for (size_t m = 0; m < tokens; m++)
        for (int r = 0; r < REGISTERS; r++) totals[m][r] = _mm512_setzero_ps();
    for (size_t g = 0; g < groups; g++, scales += matrix->rows) {
        __m512 group[INT4_TILE][REGISTERS];
        for (int r = 0; r < REGISTERS; r++) {
            _mm_prefetch((const char *)(scales + GROUPS_AHEAD * matrix->rows + 16 * r), _MM_HINT_T0);
            for (size_t m = 0; m < tokens; m++) group[m][r] = _mm512_setzero_ps();
        }
        for (size_t p = 0; p < pairs; p++, codes += PAIR_BYTES, x += 2) {
            __m512i values[REGISTERS];
            _mm_prefetch((const char *)(codes + BYTES_AHEAD), _MM_HINT_T1);
            unpack_pair(codes, values);
            for (size_t m = 0; m < tokens; m++)
                for (int r = 0; r < REGISTERS; r++)
                    group[m][r] = int4_dot(group[m][r], values[r], x + m * matrix->columns);
        }
        for (size_t m = 0; m < tokens; m++)
            for (int r = 0; r < REGISTERS; r++)
                totals[m][r] = add_group(totals[m][r], group[m][r], sums[m * groups + g], scales + 16 * r);
    }
    for (size_t m = 0; m < tokens; m++) store_rows(totals[m], out + m * stride);
}

#define INT4_TILE_OF(n) \
    case n: \
        int4_tile(n, matrix, codes, scales, x, sums, out, stride); \
        break;

static void int4_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * BLOCK / 2 * matrix->columns;
    const uint32_t *scales = (const uint32_t *)matrix->scales + block * BLOCK;
    const size_t groups = matrix->columns / matrix->group;
    for (size_t tiles = (tokens + INT4_TILE - 1) / INT4_TILE; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) { INT4_TILE_OF(1) INT4_TILE_OF(2) INT4_TILE_OF(3) INT4_TILE_OF(4) INT4_TILE_OF(5) INT4_TILE_OF(6) }
        x += some * matrix->columns, sums += some * groups, out += some * stride, tokens -= some;
    }
}
