/* Products with matrices that are kept in blocks of rows, over Eight: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2.
 *
 * The 32 bytes of a column in INT4 are read as 8 words. Nibble n of the words, kept in its place, is the code times 16^n: it
 * becomes a float without being shifted. x is multiplied by 16^-6, so that nothing overflows, and the scale by 16^(6 - n).
 * So the sums of a block lie in 8 registers: lane l of register 2 b + h has row 32 h + 4 l + b. INT2 is read likewise. In INT6 the high bits join
 * the nibbles first, those of rows 32 + j apart: byte b of the words of either half, kept in its place, is the code times
 * 256^b. In NL4, NL3 and NL2 the nibbles (nibbles.h), a byte each as there, are looked up: a byte is the
 * level plus 128.
 *
 * Codes are summed as they are, from 0 on: the 8, 32 or 2 that is to be taken away joins the zero; in NL4, NL3 and NL2, whose group is no
 * longer than a span, 128 times the sum of x is taken away before the first of them. Sums are scaled after at most SPAN
 * columns, for one token as for many. */
#ifndef TIERMOE_ISA_NEON_ROW_BLOCKS_H
#define TIERMOE_ISA_NEON_ROW_BLOCKS_H

#include <string.h>

#include "../../matrix.h"
#include "../../trellis.h"
#include "../nibbles.h"
#include "../simd.h"

enum {
    BOTH = 2,                /* halves of the rows */
    SPAN = 64,               /* columns */
    SUMS = 8,                /* registers of a block */
    SPAN_UNPACKED = 8,       /* more tokens share a span that is unpacked into memory */
    BLOCK_TOKENS = 24,       /* that share what is unpacked of a span */
    BLOCK_FEW = 2,           /* of them, whose sums are in registers while codes are unpacked */
    BLOCK_TILE = 6,          /* of them, whose sums are in registers when codes have been unpacked */
    BLOCK_PAIR = 2,          /* registers of each of those */
    COLUMNS_AHEAD = 64,      /* whose codes are asked for ahead of their use */
};

/* A group's, of the rows of a block. */
typedef struct {
    Eight scale[SUMS], zero[SUMS];
} Scales;

#define SIXTEEN_TO_6 16777216.0f

/* What register n of INT4 and INT2 is multiplied by: 16^(6 - n). The last nibble is shifted to the right end: in its place it would
 * be a sign. */
static const float INT4_PLACES[SUMS] = {SIXTEEN_TO_6, 1 << 20, 1 << 16, 1 << 12, 256, 16, 1, SIXTEEN_TO_6};
static const float INT6_PLACES[SUMS] = {SIXTEEN_TO_6, SIXTEEN_TO_6, 1 << 16, 1 << 16, 256, 256, 1, 1};
/* A level has all bits of its byte: the last byte is shifted, as the last nibble of INT4. */
static const float UNEVEN_PLACES[SUMS] = {SIXTEEN_TO_6, SIXTEEN_TO_6, 1 << 16, 1 << 16, 256, 256, SIXTEEN_TO_6, SIXTEEN_TO_6};

/* 128 times 1 over the place of register n and that of x: what a level is too large by. */
static const float UNEVEN_ABOVE[SUMS] = {
    128 / SIXTEEN_TO_6, 128 / SIXTEEN_TO_6, 1.0f / (1 << 9), 1.0f / (1 << 9), 0.5f, 0.5f, 128 / SIXTEEN_TO_6, 128 / SIXTEEN_TO_6,
};

/* pairs: of a scale (low half) and a zero (high half), of 64 rows. */
INLINE void paired_scales(Coding coding, const uint32_t *pairs, Scales *scales) {
    for (int h = 0; h < 2; h++) {
        Words v[4];
        words_by_lane(pairs + h * BLOCK / 2, v);
        for (int b = 0; b < 4; b++) {
            const Eight scale = eight_bits(WORDS_LEFT(v[b], 16)), zero = eight_bits(words_and(v[b], 0xFFFF0000));
            scales->scale[2 * b + h] = eight_times(scale, eight_all(INT4_PLACES[2 * b + h]));
            scales->zero[2 * b + h] = eight_minus_times(zero, eight_all((float)middle_code(coding)), scale);
        }
    }
}

/* from: of 64 rows. Levels need no zero. */
INLINE void scales_of(Coding coding, const bf16 *from, Scales *scales) {
    const float *places = is_uneven(coding) ? UNEVEN_PLACES : INT6_PLACES;
    for (int h = 0; h < 2; h++) {
        Words v[4];
        halves_by_lane(from + h * BLOCK / 2, v);
        for (int b = 0; b < 4; b++) {
            const Eight scale = eight_bits(WORDS_LEFT(v[b], 16));
            scales->scale[2 * b + h] = eight_times(scale, eight_all(places[2 * b + h]));
            if (coding == INT6) scales->zero[2 * b + h] = eight_times(scale, eight_all(-32));
        }
    }
}

/* Columns whose place among the codes is found at once. */
static inline size_t together_in(Coding coding) { return coding == INT4 || coding == NL4 ? 1 : 4; }

/* The words of column c + next, c a multiple of together_in(coding). In INT4 and INT2 they hold all registers of the column, else
 * those of one half of the rows, a code or level in each byte. */
INLINE Words words_of(Coding coding, int half, const uint8_t *codes, size_t c, size_t next) {
    if (coding != INT6) {
        const Words nibbles = column_nibbles(coding, codes + code_bytes(coding, c), next);
        if (has_pairs(coding)) return nibbles;
        return words_looked_up(uneven_levels(coding), words_and(half ? WORDS_RIGHT(nibbles, 4) : nibbles, 0x0F0F0F0F));
    }
    const uint8_t *four = codes + c / 4 * 3 * BLOCK;
    Words words = words_from(four + next * BLOCK / 2), high = words_from(four + 2 * BLOCK + next / 2 * BLOCK / 2);
    if (half) words = WORDS_RIGHT(words, 4);
    if (next % 2 == 0 && half) high = WORDS_LEFT(high, 4);
    if (next % 2 == 0 && !half) high = WORDS_LEFT(high, 2);
    if (next % 2 == 1 && !half) high = WORDS_RIGHT(high, 2);
    return words_or(words_and(words, 0x0F0F0F0F), words_and(high, 0x30303030));
}

/* Asks for the codes of some columns in time. */
INLINE void ask_ahead(Coding coding, const uint8_t *codes, size_t c) {
    if (c % 2) return;
    const uint8_t *ahead = codes + code_bytes(coding, COLUMNS_AHEAD) + code_bytes(coding, c);
    for (size_t at = 0; at < code_bytes(coding, together_in(coding)); at += 64) __builtin_prefetch(ahead + at, 0, 2);
}

/* Register n of a column, times 1 over its place. */
INLINE Eight values_of(Coding coding, Words words, int n) {
    if (is_uneven(coding) && n / 2 == 3) return eight_of_words(WORDS_RIGHT(words, 24));
    if (!has_pairs(coding)) return eight_of_words(words_and(words, 255u << n / 2 * 8));
    const unsigned code = coding == INT2 ? 3 : 15;
    return eight_of_words(n == SUMS - 1 ? words_and(WORDS_RIGHT(words, 28), code) : words_and(words, code << 4 * n));
}

/* What the sums of register n begin with; x_sum: of the group. */
INLINE Eight sum_begin(Coding coding, int n, const float *x_sum) {
    return is_uneven(coding) ? eight_all(-UNEVEN_ABOVE[n] * *x_sum) : eight_zeros();
}

/* values = x * 16^-6 */
static inline void factors_of(const bf16 *x, size_t columns, float *values) {
    const Eight place = eight_all(1 / SIXTEEN_TO_6);
    for (size_t c = 0; c < columns; c += 8) eight_to(values + c, eight_times(place, eight_of_bf16(x + c)));
}

/* out (64) = the totals of a block, rounded. */
static inline void store_block(const float *totals, bf16 *out) {
    for (int h = 0; h < 2; h++) {
        Eight eights[4];
        for (int b = 0; b < 4; b++) eights[b] = eight_from(totals + 8 * (2 * b + h));
        store_by_row(out + h * BLOCK / 2, eights);
    }
}

/* Registers `first`, first + step, ... of what span_times adds. half: which words hold them, or BOTH. */
INLINE void span_part(Coding coding, int half, int first, int step, int count, size_t tokens, const uint8_t *codes, size_t span,
                      const float *x, const float *sums, size_t groups, const Scales *scales, float *totals) {
    Eight part[BLOCK_FEW][SUMS];
    for (size_t m = 0; m < tokens; m++)
        for (int i = 0; i < count; i++) part[m][i] = sum_begin(coding, first + i * step, sums + m * groups);
    for (size_t c = 0; c < span; c += together_in(coding)) {
        ask_ahead(coding, codes, c);
        for (size_t next = 0; next < together_in(coding); next++) {
            const Words words[] = {words_of(coding, half % BOTH, codes, c, next), words_of(coding, half != 0, codes, c, next)};
            for (int i = 0; i < count; i++) {
                const int n = first + i * step;
                const Eight values = values_of(coding, words[half == BOTH ? n % 2 : 0], n);
                for (size_t m = 0; m < tokens; m++)
                    part[m][i] = eight_times_plus(values, eight_all(x[m * SPAN + c + next]), part[m][i]);
            }
        }
    }
    for (size_t m = 0; m < tokens; m++)
        for (int i = 0; i < count; i++) {
            float *total = totals + m * BLOCK + 8 * (first + i * step);
            eight_to(total, eight_times_plus(scales->scale[first + i * step], part[m][i], eight_from(total)));
        }
}

/* totals (tokens, 64) += a span of a block's codes times x (tokens, SPAN), scaled: few tokens, a number known when
 * compiling. Codes are unpacked into registers, some sums of a block after the others where not all fit; what comes next
 * is asked for in time. */
INLINE void span_times(Coding coding, size_t tokens, const uint8_t *codes, size_t span, const float *x, const float *sums,
                       size_t groups, const Scales *scales, float *totals) {
    if (coding != INT6 && tokens == 1) {
        span_part(coding, is_uneven(coding) ? BOTH : 0, 0, 1, SUMS, tokens, codes, span, x, sums, groups, scales, totals);
    } else if (!has_pairs(coding)) {
        span_part(coding, 0, 0, 2, SUMS / 2, tokens, codes, span, x, sums, groups, scales, totals);
        span_part(coding, 1, 1, 2, SUMS / 2, tokens, codes, span, x, sums, groups, scales, totals);
    } else {
        span_part(coding, 0, 0, 1, SUMS / 2, tokens, codes, span, x, sums, groups, scales, totals);
        span_part(coding, 0, SUMS / 2, 1, SUMS / 2, tokens, codes, span, x, sums, groups, scales, totals);
    }
}

#define SPAN_OF(n)                                                           \
    case n:                                                                  \
        span_times(coding, n, codes, span, x, sums, groups, scales, totals); \
        break;

INLINE void few_spans(Coding coding, size_t tokens, const uint8_t *codes, size_t span, const float *x, const float *sums,
                      size_t groups, const Scales *scales, float *totals) {
    for (size_t tiles = (tokens + BLOCK_FEW - 1) / BLOCK_FEW; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) { SPAN_OF(1) SPAN_OF(2) }
        x += some * SPAN, sums += some * groups, totals += some * BLOCK, tokens -= some;
    }
}

INLINE void span_unpack(Coding coding, const uint8_t *codes, size_t span, float *panel) {
    for (size_t c = 0; c < span; c += together_in(coding))
        for (size_t next = 0; next < together_in(coding); next++, panel += BLOCK) {
            const Words halves[] = {words_of(coding, 0, codes, c, next), words_of(coding, 1, codes, c, next)};
            for (int n = 0; n < SUMS; n++) eight_to(panel + 8 * n, values_of(coding, halves[n % 2], n));
        }
}

/* The same of a span that has been unpacked. */
INLINE void panel_tile(Coding coding, size_t tokens, const float *panel, size_t span, const float *x, const float *sums,
                       size_t groups, const Scales *scales, float *totals) {
    for (int n = 0; n < SUMS; n += BLOCK_PAIR) {
        Eight part[BLOCK_TILE][BLOCK_PAIR];
        for (size_t m = 0; m < tokens; m++)
            for (int i = 0; i < BLOCK_PAIR; i++) part[m][i] = sum_begin(coding, n + i, sums + m * groups);
        for (size_t c = 0; c < span; c++) {
            Eight values[BLOCK_PAIR];
            for (int i = 0; i < BLOCK_PAIR; i++) values[i] = eight_from(panel + c * BLOCK + 8 * (n + i));
            for (size_t m = 0; m < tokens; m++) {
                const Eight factor = eight_all(x[m * SPAN + c]);
                for (int i = 0; i < BLOCK_PAIR; i++) part[m][i] = eight_times_plus(values[i], factor, part[m][i]);
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (int i = 0; i < BLOCK_PAIR; i++) {
                float *total = totals + m * BLOCK + 8 * (n + i);
                eight_to(total, eight_times_plus(scales->scale[n + i], part[m][i], eight_from(total)));
            }
    }
}

#define PANEL_TILE_OF(n)                                                      \
    case n:                                                                   \
        panel_tile(coding, n, panel, span, x, sums, groups, scales, totals); \
        break;

INLINE void panel_tiles(Coding coding, size_t tokens, const float *panel, size_t span, const float *x, const float *sums,
                        size_t groups, const Scales *scales, float *totals) {
    for (size_t tiles = (tokens + BLOCK_TILE - 1) / BLOCK_TILE; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) {
            PANEL_TILE_OF(1) PANEL_TILE_OF(2) PANEL_TILE_OF(3) PANEL_TILE_OF(4) PANEL_TILE_OF(5) PANEL_TILE_OF(6)
        }
        x += some * SPAN, sums += some * groups, totals += some * BLOCK, tokens -= some;
    }
}

/* totals (64) += zeros * sum */
static inline void add_scaled(const Eight zeros[SUMS], float sum, float *totals) {
    for (int n = 0; n < SUMS; n++)
        eight_to(totals + 8 * n, eight_times_plus(zeros[n], eight_all(sum), eight_from(totals + 8 * n)));
}

/* totals (tokens, 64) += a span of a block's codes times x, whose tokens lie `columns` apart, scaled. */
INLINE void add_span(Coding coding, const uint8_t *codes, size_t span, const bf16 *x, size_t columns, size_t tokens,
                     const float *sums, size_t groups, const Scales *scales, float *totals) {
    float values[BLOCK_TOKENS * SPAN], panel[SPAN * BLOCK] __attribute__((aligned(32)));
    for (size_t m = 0; m < tokens; m++) factors_of(x + m * columns, span, values + m * SPAN);
    if (tokens <= SPAN_UNPACKED) {
        few_spans(coding, tokens, codes, span, values, sums, groups, scales, totals);
        return;
    }
    span_unpack(coding, codes, span, panel);
    panel_tiles(coding, tokens, panel, span, values, sums, groups, scales, totals);
}

/* A block times at most BLOCK_TOKENS tokens. */
INLINE void block_some(Coding coding, const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens,
                       bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, span = group < SPAN ? group : SPAN;
    const size_t groups = columns / group, row = has_pairs(coding) ? 2 : 1; /* numbers of a row in a group */
    const size_t gap = is_uneven(coding) ? UNEVEN_SCALES : 0; /* bytes from one group's codes to the next one's */
    const size_t apart = has_pairs(coding) ? 2 * matrix->rows : taken_as(coding) == INT6 ? BLOCK : uneven_group_bytes(coding, group) / sizeof(bf16);
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * (code_bytes(coding, columns) + groups * gap);
    const bf16 *pairs = is_uneven(coding) ? (const bf16 *)codes
                                      : (const bf16 *)matrix->scales + block * BLOCK * (has_pairs(coding) ? 2 : groups);
    float totals[BLOCK_TOKENS * BLOCK] __attribute__((aligned(32)));
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t g = 0; g < groups; g++, pairs += apart) {
        Scales scales;
        if (has_pairs(coding))
            paired_scales(coding, (const uint32_t *)pairs, &scales);
        else
            scales_of(taken_as(coding), pairs, &scales);
        for (size_t r = 0; r < row * BLOCK; r += 32) __builtin_prefetch(pairs + 2 * apart + r, 0, 3);
        codes += gap;
        for (size_t s = 0; s < group; s += span, x += span, codes += code_bytes(coding, span)) {
            uint8_t room[coding == TCQ2 ? SPAN * BLOCK * 3 / 4 : 1];
            const uint8_t *taken = codes_as_taken(coding, codes, span, room);
            add_span(taken_as(coding), taken, span, x, columns, tokens, sums + g, groups, &scales, totals);
        }
        for (size_t m = 0; !is_uneven(coding) && m < tokens; m++) add_scaled(scales.zero, sums[m * groups + g], totals + m * BLOCK);
    }
    for (size_t m = 0; m < tokens; m++) store_block(totals + m * BLOCK, out + m * stride);
}

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens,
                        bf16 *out, size_t stride) {
    for (size_t parts = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        block_some(coding, matrix, block, x, sums, some, out, stride);
        x += some * matrix->columns, sums += some * (matrix->columns / matrix->group), out += some * stride, tokens -= some;
    }
}

#endif
