/* Products with the blocks of GGUF files and with published codes, a row at a time over its columns, which strips.h and
 * wide_strips.h unpack in the order of the tokens that arrange() makes. A group's codes are summed in its lanes, scaled, and
 * the lanes are added up at the end of a row: for one token as for many. */
#ifndef TIERMOE_ISA_AVX512_GGUF_PRODUCTS_H
#define TIERMOE_ISA_AVX512_GGUF_PRODUCTS_H

#include "rows.h"
#include "wide_strips.h"

enum {
    ROW_GROUP = 4,         /* rows whose sums are in registers at a time */
    SPREAD_TILE = 6,       /* tokens, likewise, of rows that have been unpacked */
    WIDE_TILE = 3,         /* the same of wide ones, which have sums of a strip, too */
    SPREAD_TOKENS = 64,    /* that share them */
    SPREAD_ROOM = 1 << 18, /* columns of tokens that are arranged at a time, unless they are very wide */
};

/* Asks for the strip of the next four rows in time. */
INLINE void ask_below(Coding coding, const uint8_t *at, size_t width, size_t row_bytes) {
    for (size_t ahead = 0; ahead < row_bytes_of(coding, width); ahead += 64)
        _mm_prefetch((const char *)(at + ROW_GROUP * row_bytes + ahead), _MM_HINT_T1);
}

/* Registers of columns that share a scale of each lane, in a strip so wide. */
static inline size_t registers_of(Coding coding, size_t group, size_t width) {
    return is_wide(coding, group) && width == STRIP ? WIDE : 2;
}

/* to (columns rounded up to 64) = x (columns) in the order of the registers: in strips that are not wide, even columns of each
 * 64 before the odd ones, 0 behind them. */
INLINE void arrange(Coding coding, size_t group, const bf16 *x, size_t columns, bf16 *to) {
    const __m512i even = _mm512_load_si512(EVEN), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    size_t c = 0;
    for (; is_wide(coding, group) && c + STRIP <= columns; c += STRIP) arrange_strip(coding, x + c, to + c);
    for (; c < columns; c += SPREAD) {
        const __m512i a = _mm512_loadu_si512(x + c);
        const __m512i b = columns - c > 32 ? _mm512_loadu_si512(x + c + 32) : _mm512_setzero_si512();
        _mm512_storeu_si512(to + c, _mm512_permutex2var_epi16(a, even, b));
        _mm512_storeu_si512(to + c + 32, _mm512_permutex2var_epi16(a, odd, b));
    }
}

/* total + scale * (the values of some registers times as many columns of x) */
INLINE __m512 spread_dot(size_t registers, __m512 total, __m512 scale, const __m512i *values, const bf16 *x) {
    __m512 part = _mm512_setzero_ps();
    for (size_t k = 0; k < registers; k++)
        part = _mm512_dpbf16_ps(part, (__m512bh)values[k], (__m512bh)_mm512_loadu_si512(x + 32 * k));
    return _mm512_fmadd_ps(scale, part, total);
}

/* Part p of a strip, so many registers: what it is unpacked to, and the scales of its lanes. codes: by_bytes. */
INLINE void spread_part(Coding coding, size_t group, const uint8_t *at, size_t p, size_t width, const int8_t *codes,
                        __m512 scales, __m512i *values, __m512 *lanes) {
    if (registers_of(coding, group, width) == WIDE) {
        spread_wide(coding, at, values), *lanes = wide_scales(coding, group, scales);
    } else {
        spread(coding, at, p, width - p * SPREAD > 32, codes, values), *lanes = lane_scales(group, scales, p);
    }
}

/* Sixteen groups' offsets fill a register: those of a strip, or of two. The first lane of the strip at a column. */
static inline size_t halves_of(size_t group, size_t column) { return group == 32 ? column / STRIP % 2 * 8 : 0; }

/* totals[r] += a strip of four rows, which begin at row[r], times that of one token, and rests[r] += what its offsets add.
 * sums: of x's groups, if asked for. */
INLINE void spread_strip(Coding coding, size_t group, size_t width, size_t row_bytes, const uint8_t *row[ROW_GROUP],
                         const RowPlace places[ROW_GROUP], const bf16 *x, const float *sums, __m512 totals[ROW_GROUP],
                         __m512 rests[ROW_GROUP]) {
    const size_t bytes = row_bytes_of(coding, width), registers = registers_of(coding, group, width);
    int8_t codes[ROW_GROUP][STRIP] __attribute__((aligned(64)));
    __m512 scales[ROW_GROUP], x_sums = _mm512_setzero_ps();
    const size_t before = halves_of(group, places[0].column); /* lanes of the strip before, which are left alone */
    if (has_offsets(coding)) x_sums = _mm512_maskz_loadu_ps((__mmask16)(groups_of(width, group) << before), sums - before);
    for (size_t r = 0; r < ROW_GROUP; r++) {
        __m512 of_groups;
        ask_below(coding, row[r], width, row_bytes);
        if (by_bytes(coding)) bytes_of_strip(coding, row[r], width, codes[r]);
        groups_from(coding, group, row[r], places[r], width, &scales[r], &of_groups);
        if (has_offsets(coding) && group == 32) of_groups = _mm512_shuffle_f32x4(of_groups, of_groups, 0x44);
        if (has_offsets(coding)) rests[r] = _mm512_fmadd_ps(of_groups, x_sums, rests[r]);
    }
    for (size_t p = 0; p * registers * 32 < width; p++)
        for (size_t r = 0; r < ROW_GROUP; r += 2) {
            __m512i values[2][WIDE];
            __m512 lanes[2], parts[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (size_t i = 0; i < 2; i++)
                spread_part(coding, group, row[r + i], p, width, codes[r + i], scales[r + i], values[i], &lanes[i]);
            for (size_t k = 0; k < registers; k++) {
                const __m512i its = _mm512_loadu_si512(x + (p * registers + k) * 32);
                for (size_t i = 0; i < 2; i++) parts[i] = _mm512_dpbf16_ps(parts[i], (__m512bh)values[i][k], (__m512bh)its);
            }
            for (size_t i = 0; i < 2; i++) totals[r + i] = _mm512_fmadd_ps(lanes[i], parts[i], totals[r + i]);
        }
    for (size_t r = 0; r < ROW_GROUP; r++) row[r] += bytes;
}

/* results[r] = row r of those from `first` on, which lie at `weights`, times one token, arranged; the last row comes again
 * where there are fewer than four. */
INLINE void spread_rows(Coding coding, size_t group, const Matrix *matrix, const uint8_t *weights, size_t first, size_t rows,
                        const bf16 *x, const float *sums, float *results) {
    size_t columns = matrix->columns;
    const size_t row_bytes = row_bytes_of(coding, columns), all_groups = has_offsets(coding) ? STRIP / group : 0;
    const uint8_t *row[ROW_GROUP];
    RowPlace places[ROW_GROUP];
    __m512 totals[ROW_GROUP], rests[ROW_GROUP];
    for (size_t r = 0; r < ROW_GROUP; r++) {
        const size_t its = r < rows ? r : rows - 1;
        row[r] = weights + its * row_bytes, places[r] = row_place(coding, matrix, first + its);
        totals[r] = rests[r] = _mm512_setzero_ps();
    }
    for (; columns >= STRIP; columns -= STRIP, x += STRIP, sums += all_groups) {
        spread_strip(coding, group, STRIP, row_bytes, row, places, x, sums, totals, rests);
        for (size_t r = 0; r < ROW_GROUP; r++) places[r].column += STRIP;
    }
    if (block_columns(coding) < STRIP && columns)
        spread_strip(coding, group, columns, row_bytes, row, places, x, sums, totals, rests);
    for (size_t r = 0; has_offsets(coding) && r < ROW_GROUP; r++) totals[r] = _mm512_add_ps(totals[r], rests[r]);
    _mm_storeu_ps(results, four_sums(totals[0], totals[1], totals[2], totals[3]));
}

/* What several tokens share of four rows: registers of values, at every other one the scales of their lanes, the offsets of
 * 16 groups at a time; of one row after the other. Tokens' columns lie `apart` apart: rows of 4 KiB would push each other out
 * of the first cache. */
typedef struct {
    __m512i (*values)[ROW_GROUP];
    __m512 (*scales)[ROW_GROUP], (*offsets)[ROW_GROUP];
    size_t apart;
} Panel;

/* A strip of row r of the panel. */
INLINE void panel_strip(Coding coding, size_t group, size_t width, const uint8_t *at, RowPlace place, const Panel *panel,
                        size_t r) {
    const size_t registers = registers_of(coding, group, width), first = place.column / 32;
    int8_t codes[STRIP] __attribute__((aligned(64)));
    __m512 scales, offsets;
    ask_below(coding, at, width, row_bytes_of(coding, place.matrix->columns));
    if (by_bytes(coding)) bytes_of_strip(coding, at, width, codes);
    groups_from(coding, group, at, place, width, &scales, &offsets);
    if (has_offsets(coding)) {
        __m512 *to = &panel->offsets[place.column / group / 16][r];
        *to = halves_of(group, place.column) ? _mm512_insertf32x8(*to, _mm512_castps512_ps256(offsets), 1) : offsets;
    }
    for (size_t p = 0; p * registers * 32 < width; p++) {
        __m512i values[WIDE];
        spread_part(coding, group, at, p, width, codes, scales, values,
                    &panel->scales[(first + p * registers) / 2][r]);
        for (size_t k = 0; k < registers; k++) panel->values[first + p * registers + k][r] = values[k];
    }
}

INLINE void panel_row(Coding coding, size_t group, const uint8_t *row, RowPlace place, const Panel *panel, size_t r) {
    size_t left = place.matrix->columns;
    for (; left >= STRIP; left -= STRIP, place.column += STRIP, row += row_bytes_of(coding, STRIP))
        panel_strip(coding, group, STRIP, row, place, panel, r);
    if (block_columns(coding) < STRIP && left) panel_strip(coding, group, left, row, place, panel, r);
}

/* totals[m][r] += four unpacked rows, from a column on, times some tokens: one row after the other. */
INLINE void narrow_strips(size_t tokens, const Panel *panel, size_t begin, size_t columns, const bf16 *x,
                          __m512 totals[SPREAD_TILE][ROW_GROUP]) {
    for (size_t p = begin / SPREAD; p * SPREAD < columns; p++)
        for (size_t r = 0; r < ROW_GROUP; r++) {
            const __m512i values[] = {panel->values[2 * p][r], panel->values[2 * p + 1][r]};
            for (size_t m = 0; m < tokens; m++)
                totals[m][r] = spread_dot(2, totals[m][r], panel->scales[p][r], values, x + m * panel->apart + p * SPREAD);
        }
}

/* The same of a strip that has one scale for each lane: all rows together. */
INLINE void wide_strip(size_t tokens, const Panel *panel, size_t strip, const bf16 *x, __m512 totals[SPREAD_TILE][ROW_GROUP]) {
    __m512 sums[SPREAD_TILE][ROW_GROUP];
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < ROW_GROUP; r++) sums[m][r] = _mm512_setzero_ps();
    for (size_t k = WIDE * strip; k < WIDE * (strip + 1); k++)
        for (size_t m = 0; m < tokens; m++) {
            const __m512i its = _mm512_loadu_si512(x + m * panel->apart + 32 * k);
            for (size_t r = 0; r < ROW_GROUP; r++)
                sums[m][r] = _mm512_dpbf16_ps(sums[m][r], (__m512bh)panel->values[k][r], (__m512bh)its);
        }
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < ROW_GROUP; r++)
            totals[m][r] = _mm512_fmadd_ps(panel->scales[WIDE / 2 * strip][r], sums[m][r], totals[m][r]);
}

/* totals[m][r] += what the offsets of four unpacked rows add to some tokens. */
INLINE void add_rests(size_t tokens, const Matrix *matrix, const Panel *panel, const float *sums,
                      __m512 totals[SPREAD_TILE][ROW_GROUP]) {
    const size_t groups = matrix_groups(matrix);
    for (size_t m = 0; m < tokens; m++, sums += groups) {
        __m512 rests[ROW_GROUP];
        for (size_t r = 0; r < ROW_GROUP; r++) rests[r] = _mm512_setzero_ps();
        for (size_t g = 0; g < groups; g += 16) {
            const __m512 of = _mm512_maskz_loadu_ps(first_lanes(groups - g), sums + g);
            for (size_t r = 0; r < ROW_GROUP; r++) rests[r] = _mm512_fmadd_ps(panel->offsets[g / 16][r], of, rests[r]);
        }
        for (size_t r = 0; r < ROW_GROUP; r++) totals[m][r] = _mm512_add_ps(totals[m][r], rests[r]);
    }
}

/* results[m * BLOCK + r] = unpacked row r times token m, for four rows and a number of tokens known when compiling. */
INLINE void panel_rows(size_t registers, size_t tokens, const Matrix *matrix, const Panel *panel, const bf16 *x,
                       const float *sums, float *results) {
    const size_t columns = matrix->columns, wide = registers == WIDE ? columns / STRIP : 0;
    __m512 totals[SPREAD_TILE][ROW_GROUP];
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < ROW_GROUP; r++) totals[m][r] = _mm512_setzero_ps();
    for (size_t s = 0; s < wide; s++) wide_strip(tokens, panel, s, x, totals);
    narrow_strips(tokens, panel, wide * STRIP, columns, x, totals);
    if (matrix_groups(matrix)) add_rests(tokens, matrix, panel, sums, totals);
    for (size_t m = 0; m < tokens; m++)
        _mm_storeu_ps(results + m * BLOCK, four_sums(totals[m][0], totals[m][1], totals[m][2], totals[m][3]));
}

#define PANEL_ROWS_OF(n) \
    case n: panel_rows(registers, n, matrix, panel, x, sums, results); break;

/* results[m * BLOCK + r] = unpacked row r times token m, arranged, for four rows. */
INLINE void panel_times(size_t registers, const Matrix *matrix, const Panel *panel, const bf16 *x, const float *sums,
                        size_t tokens, float *results) {
    const size_t tile = registers == WIDE ? WIDE_TILE : SPREAD_TILE;
    for (size_t tiles = (tokens + tile - 1) / tile; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) {
            PANEL_ROWS_OF(1) PANEL_ROWS_OF(2) PANEL_ROWS_OF(3)
            default:
                if (registers == WIDE) break;
                switch (some) { PANEL_ROWS_OF(4) PANEL_ROWS_OF(5) PANEL_ROWS_OF(6) }
        }
        x += some * panel->apart, sums += some * matrix_groups(matrix), results += some * BLOCK, tokens -= some;
    }
}

static void narrow_times(const Matrix *matrix, const Panel *panel, const bf16 *x, const float *sums, size_t tokens,
                         float *results) {
    panel_times(2, matrix, panel, x, sums, tokens, results);
}

static void wide_times(const Matrix *matrix, const Panel *panel, const bf16 *x, const float *sums, size_t tokens,
                       float *results) {
    panel_times(WIDE, matrix, panel, x, sums, tokens, results);
}

/* `rows` rows of the block that begins with row `begin` times the tokens. */
INLINE void spread_block(Coding coding, size_t group, const Matrix *matrix, size_t begin, size_t rows, const bf16 *x,
                         const float *sums, size_t tokens, bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, row_bytes = row_bytes_of(coding, columns);
    const size_t registers = (columns + SPREAD - 1) / SPREAD * 2;
    const size_t sixteens = (columns / group + 15) / 16, apart = 32 * registers + SPREAD;
    const uint8_t *weights = (const uint8_t *)matrix->weights + begin * row_bytes;
    bf16 arranged[tokens * apart] __attribute__((aligned(64)));
    for (size_t m = 0; m < tokens; m++) arrange(coding, group, x + m * columns, columns, arranged + m * apart);
    float results[tokens * BLOCK];
    if (tokens == 1) {
        for (size_t r = 0; r < rows; r += ROW_GROUP)
            spread_rows(coding, group, matrix, weights + r * row_bytes, begin + r, rows - r, arranged, sums, results + r);
        store_rows_of(results, NULL, rows, out);
        return;
    }
    __m512i values[registers][ROW_GROUP];
    __m512 scales[registers / 2][ROW_GROUP], offsets[sixteens][ROW_GROUP];
    const Panel panel = {values, scales, offsets, apart};
    for (size_t first = 0; first < rows; first += ROW_GROUP) {
        for (size_t r = 0; r < ROW_GROUP; r++) { /* the last one again where there are fewer */
            const size_t row = first + r < rows ? first + r : rows - 1;
            panel_row(coding, group, weights + row * row_bytes, row_place(coding, matrix, begin + row), &panel, r);
        }
        (is_wide(coding, group) ? wide_times : narrow_times)(matrix, &panel, arranged, sums, tokens, results + first);
    }
    for (size_t m = 0; m < tokens; m++) store_rows_of(results + m * BLOCK, NULL, rows, out + m * stride);
}

/* A function for each quant: in one of all of them the compiler would no longer keep sums in registers. */
typedef void SpreadTimes(const Matrix *matrix, size_t begin, size_t rows, const bf16 *x, const float *sums, size_t tokens,
                         bf16 *out, size_t stride);

/* A block times the tokens, by the function of its quant. */
static void block_by(SpreadTimes *times, const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens,
                     bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns;
    const size_t rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    size_t most = SPREAD_ROOM / columns;
    if (most < SPREAD_TILE) most = SPREAD_TILE;
    if (most > SPREAD_TOKENS) most = SPREAD_TOKENS;
    for (size_t parts = (tokens + most - 1) / most; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        times(matrix, begin, rows, x, sums, some, out, stride);
        x += some * columns, sums += some * matrix_groups(matrix), out += some * stride, tokens -= some;
    }
}

#define SPREAD_TIMES(name, coding, group)                                                                                    \
    static __attribute__((noinline)) void name##_times_##group(const Matrix *matrix, size_t begin, size_t rows, const bf16 *x, \
                                                               const float *sums, size_t tokens, bf16 *out,                  \
                                                               size_t stride) {                                              \
        spread_block(coding, group, matrix, begin, rows, x, sums, tokens, out, stride);                                      \
    }
#define SPREAD_PRODUCT(name, coding, group) \
    SPREAD_TIMES(name, coding, group)       \
    PRODUCT(name) { block_by(name##_times_##group, matrix, block, x, prepared, tokens, out, stride); }

SPREAD_PRODUCT(q8_0, Q8_0, 32)
SPREAD_PRODUCT(q4_0, Q4_0, 32)
SPREAD_PRODUCT(q4_1, Q4_1, 32)
SPREAD_PRODUCT(q5_0, Q5_0, 32)
SPREAD_PRODUCT(q5_1, Q5_1, 32)
SPREAD_PRODUCT(q2_k, Q2_K, 16)
SPREAD_PRODUCT(q3_k, Q3_K, 16)
SPREAD_PRODUCT(q4_k, Q4_K, 32)
SPREAD_PRODUCT(q5_k, Q5_K, 32)
SPREAD_PRODUCT(q6_k, Q6_K, 16)
SPREAD_PRODUCT(iq1_s, IQ1_S, 32)
SPREAD_PRODUCT(iq1_m, IQ1_M, 16)
SPREAD_PRODUCT(iq2_xxs, IQ2_XXS, 32)
SPREAD_PRODUCT(iq2_xs, IQ2_XS, 16)
SPREAD_PRODUCT(iq2_s, IQ2_S, 16)
SPREAD_PRODUCT(iq3_xxs, IQ3_XXS, 32)
SPREAD_PRODUCT(iq3_s, IQ3_S, 32)
SPREAD_PRODUCT(iq4_nl, IQ4_NL, 32)
SPREAD_PRODUCT(iq4_xs, IQ4_XS, 32)
SPREAD_PRODUCT(tq1_0, TQ1_0, 32)
SPREAD_PRODUCT(tq2_0, TQ2_0, 32)
SPREAD_PRODUCT(mxfp4, MXFP4, 32)
SPREAD_PRODUCT(s4, S4, 32)
SPREAD_PRODUCT(u4, U4, 32)
SPREAD_PRODUCT(e4m3, E4M3, 32)
SPREAD_TIMES(e2m1, E2M1, 16)
SPREAD_TIMES(e2m1, E2M1, 32)
PRODUCT(e2m1) {
    block_by(matrix->group == 16 ? e2m1_times_16 : e2m1_times_32, matrix, block, x, prepared, tokens, out, stride);
}

#endif
