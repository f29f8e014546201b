/* Products with matrices that are kept row by row: INT8 and BF16. */
#ifndef TIERMOE_ISA_AVX512_ROWS_H
#define TIERMOE_ISA_AVX512_ROWS_H

#include "../../matrix.h"
#include "../simd.h"
#include "row_blocks.h"

enum {
    ROWS = 4,      /* whose sums are in registers at a time */
    ROWS_TILE = 6, /* tokens, likewise */
    ROWS_AHEAD = 512, /* bytes of a row that are asked for ahead of their use */
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

/* INT8, whose codes become bytes 128 above themselves. */

static inline __m512i above_codes(__m512i codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80)); }

/* Of four registers of four lanes each quarter: the sums of quarters, one after the other. */
static inline __m512i sums_of_quarters(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* One token: 64 columns of sixteen rows at a time, whose products' lanes are added to two parts' sums. */
static void coded_rows_of_one(const int8_t *codes, size_t rows, const float *prepared, size_t columns, float *totals) {
    const XIntegers x = integers_at(prepared, columns);
    for (size_t first = 0; first < rows; first += 16) {
        const int8_t *row[16];
        __m512 total = _mm512_setzero_ps();
        for (size_t r = 0; r < 16; r++) row[r] = codes + (first + r < rows ? first + r : rows - 1) * columns;
        for (size_t c = 0; c < columns; c += 64) {
            const __m512i its = _mm512_loadu_si512(x.codes + c);
            const size_t p = c / X_PART;
            __m512i fours[4]; /* of four rows: sums of columns 0 .. 15 of 64, 16 .. 31, and so on */
            for (size_t k = 0; k < 4; k++) {
                __m512i sums[4];
                for (size_t r = 0; r < 4; r++) {
                    _mm_prefetch((const char *)(row[4 * k + r] + c + ROWS_AHEAD), _MM_HINT_T0);
                    sums[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), above_codes(_mm512_loadu_si512(row[4 * k + r] + c)), its);
                }
                fours[k] = sums_of_quarters(sums[0], sums[1], sums[2], sums[3]);
            }
            /* quarters of the first part, and of the second, of all sixteen rows */
            const __m512i a = _mm512_shuffle_i32x4(fours[0], fours[1], 0x88), b = _mm512_shuffle_i32x4(fours[0], fours[1], 0xDD);
            const __m512i d = _mm512_shuffle_i32x4(fours[2], fours[3], 0x88), e = _mm512_shuffle_i32x4(fours[2], fours[3], 0xDD);
            const __m512i low = _mm512_add_epi32(a, b), high = _mm512_add_epi32(d, e); /* (part, rows): 0 of 0, 1 of 0, 0 of 1, 1 of 1 */
            const __m512i parts[] = {_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xDD)};
            for (size_t k = 0; k < 2; k++) {
                const __m512i sum = _mm512_sub_epi32(parts[k], _mm512_set1_epi32(128 * x.sums[p + k]));
                total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x.scales[p + k]), total);
            }
        }
        _mm512_storeu_ps(totals + first, total);
    }
}

/* A part of 64 rows by lanes: four columns of sixteen rows to a register, four registers at a time. */
static void part_by_lanes(const int8_t *const row[BLOCK], size_t at, __m512i fours[FOURS][REGISTERS]) {
    for (size_t r = 0; r < REGISTERS; r++)
        for (size_t c = 0; c < X_PART; c += 16) {
            __m512i v[4];
            for (size_t i = 0; i < 4; i++) {
                const int8_t *const *its = row + 16 * r + i; /* rows i, 4 + i, 8 + i and 12 + i */
                v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(its[0] + at + c)));
                v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(its[4] + at + c)), 1);
                v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(its[8] + at + c)), 2);
                v[i] = above_codes(_mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(its[12] + at + c)), 3));
            }
            const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
            const __m512i d = _mm512_unpacklo_epi32(v[2], v[3]), e = _mm512_unpackhi_epi32(v[2], v[3]);
            fours[c / 4][r] = _mm512_unpacklo_epi64(a, d), fours[c / 4 + 1][r] = _mm512_unpackhi_epi64(a, d);
            fours[c / 4 + 2][r] = _mm512_unpacklo_epi64(b, e), fours[c / 4 + 3][r] = _mm512_unpackhi_epi64(b, e);
        }
}

/* At most PANEL_TOKENS tokens. */
static void coded_rows_of_many(const int8_t *codes, size_t rows, const float *prepared, size_t columns, size_t tokens, float *totals) {
    const int8_t *row[BLOCK];
    BlockPanel panel;
    for (size_t r = 0; r < BLOCK; r++) row[r] = codes + (r < rows ? r : rows - 1) * columns;
    for (size_t p = 0; p < PANEL_PARTS; p++)
        for (int r = 0; r < REGISTERS; r++) panel.scales[p][r] = _mm512_set1_ps(1); /* a row's is its total's */
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t first = 0, parts; first < columns / X_PART; first += parts) {
        parts = columns / X_PART - first < PANEL_PARTS ? columns / X_PART - first : PANEL_PARTS;
        for (size_t p = 0; p < parts; p++) part_by_lanes(row, (first + p) * X_PART, panel.rows[p]);
        parts_times(INT8, &panel, first, parts, prepared, tokens, columns, totals);
    }
}

static void rows_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns;
    const size_t rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    if (matrix->coding == BF16) {
        plain_rows((const bf16 *)matrix->weights + begin * columns, rows, x, columns, tokens, out, stride);
        return;
    }
    const int8_t *codes = (const int8_t *)matrix->weights + begin * columns;
    const bf16 *scales = (const bf16 *)matrix->scales + begin;
    float totals[PANEL_TOKENS * BLOCK] __attribute__((aligned(64)));
    for (size_t calls = (tokens + PANEL_TOKENS - 1) / PANEL_TOKENS; calls; calls--) {
        const size_t some = (tokens + calls - 1) / calls;
        if (some == 1)
            coded_rows_of_one(codes, rows, prepared, columns, totals);
        else
            coded_rows_of_many(codes, rows, prepared, columns, some, totals);
        for (size_t m = 0; m < some; m++) store_rows_of(totals + m * BLOCK, scales, rows, out + m * stride);
        prepared += some * integer_floats(columns), out += some * stride, tokens -= some;
    }
}

#endif
