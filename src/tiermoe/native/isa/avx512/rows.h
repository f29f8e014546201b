/* Products with matrices that are kept row by row: BF16. */
#ifndef TIERMOE_ISA_AVX512_ROWS_H
#define TIERMOE_ISA_AVX512_ROWS_H

#include "../../matrix.h"
#include "../simd.h"

enum {
    ROWS = 4,      /* whose sums are in registers at a time */
    ROWS_TILE = 6, /* tokens, likewise */
};

static inline __m512 row_dot(__m512 sum, __m512i weights, const bf16 *x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x));
}

/* sums[m * BLOCK + r] = row r times x[m], for 4 rows and a number of tokens known when compiling. The last row comes
 * again where there are fewer. */
INLINE void four_rows(size_t tokens, const bf16 *weights, size_t rows, const bf16 *x, size_t columns, float *sums) {
    const bf16 *row[ROWS];
    __m512 totals[ROWS_TILE][ROWS];
    for (size_t r = 0; r < ROWS; r++) {
        row[r] = weights + (r < rows ? r : rows - 1) * columns;
        for (size_t m = 0; m < tokens; m++) totals[m][r] = _mm512_setzero_ps();
    }
    for (size_t c = 0; c < columns; c += DOT)
        for (size_t r = 0; r < ROWS; r++) {
            const __m512i values = _mm512_loadu_si512(row[r] + c);
            _mm_prefetch((const char *)(row[r] + ROWS * columns + c), _MM_HINT_T1); /* of the next four */
            for (size_t m = 0; m < tokens; m++) totals[m][r] = row_dot(totals[m][r], values, x + m * columns + c);
        }
    for (size_t m = 0; m < tokens; m++)
        _mm_storeu_ps(sums + m * BLOCK, four_sums(totals[m][0], totals[m][1], totals[m][2], totals[m][3]));
}

#define TOKENS_OF(n)                                                                         \
    case n:                                                                                  \
        for (size_t r = 0; r < rows; r += ROWS)                                              \
            four_rows(n, weights + r * columns, rows - r, x, columns, sums + r);             \
        break;

/* out = scales * sums, rounded; scales: NULL where there are none. */
static void store_rows_of(const float *sums, const bf16 *scales, size_t rows, bf16 *out) {
    for (size_t r = 0; r < rows; r += 16) {
        __m512 values = _mm512_loadu_ps(sums + r);
        if (scales) values = _mm512_mul_ps(values, load_some(scales + r, rows - r));
        store_some(out + r, rows - r, values);
    }
}

/* `rows` rows of bfloat16 times the tokens. */
static void plain_rows(const bf16 *weights, size_t rows, const bf16 *x, size_t columns, size_t tokens, bf16 *out, size_t stride) {
    float sums[ROWS_TILE * BLOCK];
    for (size_t left = (tokens + ROWS_TILE - 1) / ROWS_TILE; left; left--) {
        const size_t some = (tokens + left - 1) / left;
        switch (some) { TOKENS_OF(1) TOKENS_OF(2) TOKENS_OF(3) TOKENS_OF(4) TOKENS_OF(5) TOKENS_OF(6) }
        for (size_t m = 0; m < some; m++) store_rows_of(sums + m * BLOCK, NULL, rows, out + m * stride);
        x += some * columns, out += some * stride, tokens -= some;
    }
}

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, size_t tokens, bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns;
    const size_t rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    plain_rows((const bf16 *)matrix->weights + begin * columns, rows, x, columns, tokens, out, stride);
}

#endif
