/* Products with the blocks of GGUF files and with published codes, a row at a time over its columns, which gguf_spread.h
 * unpacks in the order of the tokens that arrange() makes. A group's codes are summed in its lanes, scaled, and the lanes are
 * added up at the end of a row: for one token as for many. */
#include "gguf_spread.h"

enum {
    ROW_GROUP = 4,         /* rows whose sums are in registers at a time */
    SPREAD_TILE = 6,       /* tokens, likewise, of rows that have been unpacked */
    SPREAD_PANEL = 8,      /* rows that are unpacked for several tokens */
    SPREAD_TOKENS = 48,    /* that share them */
    SPREAD_ROOM = 1 << 18, /* columns of tokens that are arranged at a time, unless they are very wide */
};

/* to (tokens, columns rounded up to 64) = x (tokens, columns), even columns of each 64 before the odd ones; 0 behind them. */
static void arrange(const bf16 *x, size_t columns, size_t tokens, bf16 *to) {
    uint16_t places[32];
    for (int i = 0; i < 32; i++) places[i] = (uint16_t)(2 * i);
    const __m512i even = _mm512_loadu_si512(places), odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    for (size_t m = 0; m < tokens; m++, x += columns)
        for (size_t c = 0; c < columns; c += SPREAD, to += SPREAD) {
            const __m512i a = _mm512_loadu_si512(x + c);
            const __m512i b = columns - c > 32 ? _mm512_loadu_si512(x + c + 32) : _mm512_setzero_si512();
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, even, b));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, odd, b));
        }
}

/* total + scale * (values times 64 columns of x) */
static inline __m512 spread_dot(__m512 total, __m512 scale, const __m512i values[2], const bf16 *x) {
    const __m512 part = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)values[0], (__m512bh)_mm512_loadu_si512(x));
    return _mm512_fmadd_ps(scale, _mm512_dpbf16_ps(part, (__m512bh)values[1], (__m512bh)_mm512_loadu_si512(x + 32)), total);
}

/* totals[r] += a strip of four rows, which begin at row[r], times that of one token. sums: of x's groups, if asked for. */
static inline __attribute__((always_inline)) void spread_strip(Coding coding, size_t group, size_t width, size_t row_bytes,
                                                               const uint8_t *row[ROW_GROUP], const RowPlace places[ROW_GROUP],
                                                               const bf16 *x, const float *sums, __m512 totals[ROW_GROUP]) {
    const size_t bytes = row_bytes_of(coding, width);
    int8_t codes[ROW_GROUP][STRIP] __attribute__((aligned(64)));
    __m512 scales[ROW_GROUP], x_sums = _mm512_setzero_ps();
    if (has_offsets(coding)) x_sums = _mm512_maskz_loadu_ps(groups_of(width, group), sums);
    for (size_t r = 0; r < ROW_GROUP; r++) {
        __m512 of_groups;
        for (size_t ahead = 0; ahead < bytes; ahead += 64)
            _mm_prefetch((const char *)(row[r] + ROW_GROUP * row_bytes + ahead), _MM_HINT_T1);
        if (by_bytes(coding)) bytes_of_strip(coding, row[r], width, codes[r]);
        groups_from(coding, group, row[r], places[r], width, &scales[r], &of_groups);
        if (has_offsets(coding)) totals[r] = _mm512_fmadd_ps(of_groups, x_sums, totals[r]);
    }
    for (size_t p = 0; p * SPREAD < width; p++)
        for (size_t r = 0; r < ROW_GROUP; r++) {
            __m512i values[2];
            spread(coding, row[r], p, width - p * SPREAD > 32, codes[r], values);
            totals[r] = spread_dot(totals[r], lane_scales(group, scales[r], p), values, x + p * SPREAD);
        }
    for (size_t r = 0; r < ROW_GROUP; r++) row[r] += bytes;
}

/* results[r] = row r of those from `first` on, which lie at `weights`, times one token, arranged; the last row comes again
 * where there are fewer than four. */
static inline __attribute__((always_inline)) void spread_rows(Coding coding, size_t group, const Matrix *matrix,
                                                              const uint8_t *weights, size_t first, size_t rows,
                                                              const bf16 *x, const float *sums, float *results) {
    size_t columns = matrix->columns;
    const size_t row_bytes = row_bytes_of(coding, columns), all_groups = has_offsets(coding) ? STRIP / group : 0;
    const uint8_t *row[ROW_GROUP];
    RowPlace places[ROW_GROUP];
    __m512 totals[ROW_GROUP];
    for (size_t r = 0; r < ROW_GROUP; r++) {
        const size_t its = r < rows ? r : rows - 1;
        row[r] = weights + its * row_bytes, places[r] = (RowPlace){matrix, first + its, 0}, totals[r] = _mm512_setzero_ps();
    }
    for (; columns >= STRIP; columns -= STRIP, x += STRIP, sums += all_groups) {
        spread_strip(coding, group, STRIP, row_bytes, row, places, x, sums, totals);
        for (size_t r = 0; r < ROW_GROUP; r++) places[r].column += STRIP;
    }
    if (block_columns(coding) < STRIP && columns) spread_strip(coding, group, columns, row_bytes, row, places, x, sums, totals);
    _mm_storeu_ps(results, four_sums(totals[0], totals[1], totals[2], totals[3]));
}

/* What several tokens share of some rows: the values of each 64 columns beside the scales of their lanes, the offsets of each
 * strip. */
typedef struct {
    __m512i values[2];
    __m512 scale;
} Spread;

static inline __attribute__((always_inline)) void spread_panel(Coding coding, size_t group, const uint8_t *row, RowPlace place,
                                                               Spread *panel, __m512 *offsets) {
    const size_t columns = place.matrix->columns;
    int8_t codes[STRIP] __attribute__((aligned(64)));
    for (size_t begin = 0; begin < columns; begin += STRIP, offsets++) {
        const size_t width = columns - begin < STRIP ? columns - begin : STRIP;
        __m512 scales;
        if (by_bytes(coding)) bytes_of_strip(coding, row, width, codes);
        place.column = begin;
        groups_from(coding, group, row, place, width, &scales, offsets);
        for (size_t p = 0; p * SPREAD < width; p++, panel++) {
            spread(coding, row, p, width - p * SPREAD > 32, codes, panel->values);
            panel->scale = lane_scales(group, scales, p);
        }
        row += row_bytes_of(coding, width);
    }
}

/* results[m * BLOCK + r] = unpacked row r times token m, for four rows and a number of tokens known when compiling. */
static inline __attribute__((always_inline)) void panel_rows(size_t tokens, const Matrix *matrix, const Spread *panel,
                                                             const __m512 *offsets, const bf16 *x, const float *sums,
                                                             float *results) {
    const size_t columns = matrix->columns, group = matrix->group, spreads = (columns + SPREAD - 1) / SPREAD;
    const size_t strips = (columns + STRIP - 1) / STRIP, all_groups = matrix_groups(matrix);
    __m512 totals[SPREAD_TILE][ROW_GROUP];
    for (size_t m = 0; m < tokens; m++)
        for (size_t r = 0; r < ROW_GROUP; r++) totals[m][r] = _mm512_setzero_ps();
    for (size_t s = 0; s < strips; s++) {
        const size_t begin = s * STRIP, width = columns - begin < STRIP ? columns - begin : STRIP;
        for (size_t m = 0; all_groups && m < tokens; m++) {
            const __m512 of = _mm512_maskz_loadu_ps(groups_of(width, group), sums + m * all_groups + begin / group);
            for (size_t r = 0; r < ROW_GROUP; r++) totals[m][r] = _mm512_fmadd_ps(offsets[r * strips + s], of, totals[m][r]);
        }
        for (size_t c = begin; c < begin + width; c += SPREAD)
            for (size_t r = 0; r < ROW_GROUP; r++) {
                const Spread *at = panel + r * spreads + c / SPREAD;
                const __m512i values[] = {at->values[0], at->values[1]};
                for (size_t m = 0; m < tokens; m++)
                    totals[m][r] = spread_dot(totals[m][r], at->scale, values, x + m * spreads * SPREAD + c);
            }
    }
    for (size_t m = 0; m < tokens; m++)
        _mm_storeu_ps(results + m * BLOCK, four_sums(totals[m][0], totals[m][1], totals[m][2], totals[m][3]));
}

#define PANEL_ROWS_OF(n)                                                                                                     \
    case n:                                                                                                                  \
        for (size_t r = 0; r < rows; r += ROW_GROUP)                                                                         \
            panel_rows(n, matrix, panel + r * spreads, offsets + r * strips, x, sums, results + r);                          \
        break;

/* Some tokens, arranged, times at most SPREAD_PANEL unpacked rows. */
static void panel_times(const Matrix *matrix, const Spread *panel, const __m512 *offsets, size_t rows, const bf16 *x,
                        const float *sums, size_t tokens, bf16 *out, size_t stride) {
    const size_t spreads = (matrix->columns + SPREAD - 1) / SPREAD, strips = (matrix->columns + STRIP - 1) / STRIP;
    float results[SPREAD_TILE * BLOCK];
    for (size_t tiles = (tokens + SPREAD_TILE - 1) / SPREAD_TILE; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) {
            PANEL_ROWS_OF(1) PANEL_ROWS_OF(2) PANEL_ROWS_OF(3) PANEL_ROWS_OF(4) PANEL_ROWS_OF(5) PANEL_ROWS_OF(6)
        }
        for (size_t m = 0; m < some; m++) store_rows_of(results + m * BLOCK, NULL, 0, rows, out + m * stride);
        x += some * spreads * SPREAD, sums += some * matrix_groups(matrix), out += some * stride, tokens -= some;
    }
}

/* `rows` rows of the block that begins with row `begin` times the tokens. */
static inline __attribute__((always_inline)) void spread_block(Coding coding, size_t group, const Matrix *matrix, size_t begin,
                                                               size_t rows, const bf16 *x, const float *sums, size_t tokens,
                                                               bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, spreads = (columns + SPREAD - 1) / SPREAD, row_bytes = row_bytes_of(coding, columns);
    const size_t strips = (columns + STRIP - 1) / STRIP;
    const uint8_t *weights = (const uint8_t *)matrix->weights + begin * row_bytes;
    bf16 arranged[tokens * spreads * SPREAD] __attribute__((aligned(64)));
    arrange(x, columns, tokens, arranged);
    if (tokens == 1) {
        float results[BLOCK];
        for (size_t r = 0; r < rows; r += ROW_GROUP)
            spread_rows(coding, group, matrix, weights + r * row_bytes, begin + r, rows - r, arranged, sums, results + r);
        store_rows_of(results, NULL, 0, rows, out);
        return;
    }
    Spread panel[SPREAD_PANEL * spreads];
    __m512 offsets[SPREAD_PANEL * strips];
    for (size_t first = 0; first < rows; first += SPREAD_PANEL) {
        const size_t some = rows - first < SPREAD_PANEL ? rows - first : SPREAD_PANEL;
        for (size_t r = 0; r < (some + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP; r++) { /* the last one again */
            const size_t row = first + (r < some ? r : some - 1);
            spread_panel(coding, group, weights + row * row_bytes, (RowPlace){matrix, begin + row, 0}, panel + r * spreads,
                         offsets + r * strips);
        }
        panel_times(matrix, panel, offsets, some, arranged, sums, tokens, out + first, stride);
    }
}

#define SPREAD_CASE(coding, group)                                                                      \
    case coding:                                                                                        \
        spread_block(coding, group, matrix, begin, rows, x, sums, some, out, stride);                   \
        break;

static void gguf_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const size_t begin = block * BLOCK, columns = matrix->columns;
    const size_t rows = matrix->rows - begin < BLOCK ? matrix->rows - begin : BLOCK;
    size_t most = SPREAD_ROOM / columns;
    if (most < SPREAD_TILE) most = SPREAD_TILE;
    if (most > SPREAD_TOKENS) most = SPREAD_TOKENS;
    for (size_t parts = (tokens + most - 1) / most; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        switch (matrix->coding) {
            SPREAD_CASE(Q8_0, 32) SPREAD_CASE(Q4_0, 32) SPREAD_CASE(Q4_1, 32) SPREAD_CASE(Q5_0, 32) SPREAD_CASE(Q5_1, 32)
            SPREAD_CASE(Q2_K, 16) SPREAD_CASE(Q3_K, 16) SPREAD_CASE(Q4_K, 32) SPREAD_CASE(Q5_K, 32) SPREAD_CASE(Q6_K, 16)
            SPREAD_CASE(IQ4_NL, 32) SPREAD_CASE(IQ4_XS, 32) SPREAD_CASE(S4, 32) SPREAD_CASE(U4, 32) SPREAD_CASE(E4M3, 32)
            case E2M1:
                if (matrix->group == 16)
                    spread_block(E2M1, 16, matrix, begin, rows, x, sums, some, out, stride);
                else
                    spread_block(E2M1, 32, matrix, begin, rows, x, sums, some, out, stride);
                break;
            default: spread_block(MXFP4, 32, matrix, begin, rows, x, sums, some, out, stride);
        }
        x += some * columns, sums += some * matrix_groups(matrix), out += some * stride, tokens -= some;
    }
}
