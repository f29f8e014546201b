/* Products with the blocks of GGUF files and with published codes, over Eight.
 *
 * A group's codes are summed in 8 lanes before its scale is applied, the lanes are added up after a strip, then the strips:
 * for one token as for many. */
#ifndef TIERMOE_ISA_GGUF_PRODUCTS_H
#define TIERMOE_ISA_GGUF_PRODUCTS_H

#include "../matrix.h"
#include "simd.h"
#include "strips.h"

enum {
    STRIP_ROWS = 4,    /* that are unpacked at a time */
    STRIP_FEW = 3,     /* tokens whose sums are in registers at a time */
    STRIP_TOKENS = 18, /* that share what is unpacked of a strip */
};

/* What is unpacked of four rows. */
typedef struct {
    int8_t codes[STRIP_ROWS][STRIP] __attribute__((aligned(32)));
    float values[STRIP_ROWS][STRIP] __attribute__((aligned(32))); /* the codes, where many tokens share them */
    StripScales of[STRIP_ROWS];
} Strips;

/* totals[m * BLOCK + r] += a strip of row r times that of token m, for a number of tokens known when compiling, x lying
 * `stride` apart. sums: those of x's groups, `all_groups` to a token, 0 where none are needed. */
INLINE void strips_times(int shared, size_t tokens, const Strips *strips, size_t group, size_t width, const float *x,
                         size_t stride, const float *sums, size_t all_groups, float *totals) {
    Eight lanes[STRIP_FEW][STRIP_ROWS];
    for (size_t m = 0; m < tokens; m++) {
        float of_groups[STRIP_GROUPS] = {0};
        if (all_groups) memcpy(of_groups, sums + m * all_groups, width / group * sizeof *sums);
        for (size_t r = 0; r < STRIP_ROWS; r++) {
            lanes[m][r] = eight_zeros();
            for (size_t g = 0; all_groups && g < STRIP / group; g += 8)
                lanes[m][r] = eight_times_plus(eight_from(strips->of[r].offsets + g), eight_from(of_groups + g), lanes[m][r]);
        }
    }
    for (size_t g = 0; g < width / group; g++) {
        Eight part[STRIP_FEW][STRIP_ROWS];
        for (size_t m = 0; m < tokens; m++)
            for (size_t r = 0; r < STRIP_ROWS; r++) part[m][r] = eight_zeros();
        for (size_t begin = g * group; begin < (g + 1) * group; begin += 16)
            for (size_t c = begin; c < begin + 16; c += 8)
                for (size_t r = 0; r < STRIP_ROWS; r++) {
                    const Eight codes = shared ? eight_from(strips->values[r] + c)
                                               : eight_of_int8((const uint8_t *)strips->codes[r] + c);
                    for (size_t m = 0; m < tokens; m++)
                        part[m][r] = eight_times_plus(codes, eight_from(x + m * stride + c), part[m][r]);
                }
        for (size_t r = 0; r < STRIP_ROWS; r++) {
            const Eight scale = eight_all(strips->of[r].scales[g]);
            for (size_t m = 0; m < tokens; m++) lanes[m][r] = eight_times_plus(scale, part[m][r], lanes[m][r]);
        }
    }
    for (size_t m = 0; m < tokens; m++) add_four_sums(totals + m * BLOCK, lanes[m]);
}

#define STRIPS_OF(n)                                                                                  \
    case n:                                                                                           \
        strips_times(shared, n, strips, matrix->group, width, x, stride, sums, all_groups, totals); \
        break;

/* The same for at most STRIP_FEW tokens of a strip that begins at column `begin`. sums: from the tokens' first column on. */
INLINE void strips_some(int shared, const Matrix *matrix, size_t tokens, const Strips *strips, size_t begin, size_t width,
                        const float *x, size_t stride, const float *sums, float *totals) {
    const size_t all_groups = matrix_groups(matrix);
    if (all_groups) sums += begin / matrix->group;
    switch (tokens) { STRIPS_OF(1) STRIPS_OF(2) STRIPS_OF(3) }
}

/* A block: rows `first` .. of a matrix, whose codes begin at `weights`. */
typedef struct {
    const uint8_t *weights;
    size_t first, rows;
} Rows;

/* The strip from column `begin` on of four of a block's rows, from r on; the last one again where there are fewer. Of E4M3 the
 * values, which are no bytes, of all others the codes. */
static void strips_unpack(const Matrix *matrix, const Rows *block, size_t r, size_t begin, size_t width, Strips *strips) {
    const Coding coding = matrix->coding;
    const size_t row_bytes = row_bytes_of(coding, matrix->columns);
    const size_t before = row_bytes_of(coding, begin), bytes = row_bytes_of(coding, width);
    for (size_t i = 0; i < STRIP_ROWS; i++) {
        const size_t row = r + i < block->rows ? r + i : block->rows - 1;
        const uint8_t *at = block->weights + row * row_bytes + before;
        for (size_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(at + STRIP_ROWS * row_bytes + ahead, 0, 2);
        if (coding >= FIRST_PUBLISHED)
            published_scales(matrix, block->first + row, begin, width, &strips->of[i]);
        else
            strip_scales(coding, at, width, &strips->of[i]);
        if (coding != E4M3) {
            strip_codes(coding, at, width, strips->codes[i]);
            continue;
        }
        for (size_t c = 0; c < width; c += 8) eight_to(strips->values[i] + c, eight_of_e4m3(at + c));
    }
}

static inline void floats_of(const bf16 *x, size_t columns, float *values) {
    for (size_t c = 0; c < columns; c += 8) eight_to(values + c, eight_of_bf16(x + c));
}

/* Few tokens: four rows at a time from their first column to their last. */
static void strips_few(const Matrix *matrix, const Rows *block, const bf16 *x, const float *sums, size_t tokens, Strips *strips,
                       float *totals) {
    const size_t columns = matrix->columns;
    float values[tokens * columns];
    floats_of(x, tokens * columns, values);
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS)
        for (size_t begin = 0; begin < columns; begin += STRIP) {
            const size_t width = columns - begin < STRIP ? columns - begin : STRIP;
            strips_unpack(matrix, block, r, begin, width, strips);
            if (matrix->coding == E4M3)
                strips_some(1, matrix, tokens, strips, begin, width, values + begin, columns, sums, totals + r);
            else
                strips_some(0, matrix, tokens, strips, begin, width, values + begin, columns, sums, totals + r);
        }
}

/* At most STRIP_TOKENS tokens: a strip of four rows is unpacked for all of them. */
static void strips_many(const Matrix *matrix, const Rows *block, const bf16 *x, const float *sums, size_t tokens,
                        Strips *strips, float *totals) {
    const size_t columns = matrix->columns, groups = matrix_groups(matrix);
    float values[STRIP_TOKENS * STRIP];
    for (size_t begin = 0; begin < columns; begin += STRIP) {
        const size_t width = columns - begin < STRIP ? columns - begin : STRIP;
        for (size_t m = 0; m < tokens; m++) floats_of(x + m * columns + begin, width, values + m * STRIP);
        for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
            strips_unpack(matrix, block, r, begin, width, strips);
            for (size_t i = 0; i < STRIP_ROWS && matrix->coding != E4M3; i++)
                for (size_t c = 0; c < width; c += 8)
                    eight_to(strips->values[i] + c, eight_of_int8((const uint8_t *)strips->codes[i] + c));
            for (size_t m = 0; m < tokens; m += STRIP_FEW) {
                const size_t some = tokens - m < STRIP_FEW ? tokens - m : STRIP_FEW;
                strips_some(1, matrix, some, strips, begin, width, values + m * STRIP, STRIP, sums + m * groups,
                            totals + m * BLOCK + r);
            }
        }
    }
}

static void strips_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t begin = block * BLOCK, rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    const Rows here = {(const uint8_t *)matrix->weights + begin * row_bytes_of(matrix->coding, matrix->columns), begin, rows};
    float totals[STRIP_TOKENS * BLOCK];
    Strips strips;
    memset(strips.of, 0, sizeof strips.of);
    for (size_t parts = (tokens + STRIP_TOKENS - 1) / STRIP_TOKENS; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        memset(totals, 0, some * BLOCK * sizeof *totals);
        (some <= STRIP_FEW ? strips_few : strips_many)(matrix, &here, x, sums, some, &strips, totals);
        for (size_t m = 0; m < some; m++)
            for (size_t r = 0; r < rows; r++) out[m * stride + r] = to_bf16(totals[m * BLOCK + r]);
        x += some * matrix->columns, sums += some * matrix_groups(matrix), out += some * stride, tokens -= some;
    }
}

#endif
