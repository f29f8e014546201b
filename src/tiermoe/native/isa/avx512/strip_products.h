/* Products with rows of INT8, of the blocks of GGUF files and of published codes, strip by strip. One to four tokens: products
 * with the pieces of sixteen rows, whose lanes are added up to sums of sixteen columns. More: four columns of a row become a lane
 * (BlockPanel). In both a lane is a row then. */
#ifndef TIERMOE_ISA_AVX512_STRIP_PRODUCTS_H
#define TIERMOE_ISA_AVX512_STRIP_PRODUCTS_H

#include "../lane_groups.h"
#include "row_blocks.h"
#include "rows.h"
#include "strips.h"

enum {
    FEW_TOKENS = 4,   /* at most, whose products are added up lane by lane */
    ROW_GROUP = 4,    /* rows whose products are in registers at a time */
    ROWS_AHEAD = 6,   /* how far a row is asked for ahead of its use */
    SPAN_STRIPS = 8,  /* that are unpacked of a row before the next one: sixteen rows side by side are too many streams of memory */
    IN_PLACE_TOKENS = 32,
    SIXTEENS = STRIP / 16,
};

/* What the scales of a strip's groups come from, of sixteen rows: by_bytes(coding) sixteen bytes of a row, of rows i, 4 + i, 8 + i
 * and 12 + i in the i-th register, and factors; of other types a row's floats, of groups of 32 columns all in `scales`. */
typedef struct {
    __m512i bytes[4];
    LaneFactors factors;
    __m512 scales[LANE_ROWS], offsets[LANE_ROWS];
} RowGroups;

/* Of row r of them. */
INLINE void note_groups(Coding coding, size_t group, const Matrix *matrix, size_t row, size_t column, const uint8_t *at, size_t width,
                        size_t r, RowGroups *to) {
    StripGroups of;
    if (coding == INT8) return;
    if (by_bytes(coding)) {
        ((__m128i *)&to->bytes[r % 4])[r / 4] = group_bytes(coding, at, r, &to->factors);
        return;
    }
    strip_groups(coding, group, matrix, row, column, at, width, &of);
    to->scales[r] = _mm512_castps256_ps512(of.scales[0]);
    if (group == 16 || has_offsets(coding))
        to->scales[r] = _mm512_insertf32x8(to->scales[r], group == 16 ? of.scales[1] : of.offsets[0], 1);
    if (group == 16 && has_offsets(coding))
        to->offsets[r] = _mm512_insertf32x8(_mm512_castps256_ps512(of.offsets[0]), of.offsets[1], 1);
}

/* The strip at a column of a row, pieces and what row r's scales come from. */
INLINE void take_strip(Coding coding, size_t group, const Matrix *matrix, size_t row, size_t column, size_t width,
                       __m512i pieces[PIECES], size_t r, RowGroups *groups) {
    const uint8_t *at = (const uint8_t *)matrix->weights + row * row_bytes_of(coding, matrix->columns) + row_bytes_of(coding, column);
    strip_pieces(coding, at, width, pieces);
    note_groups(coding, group, matrix, row, column, at, width, r, groups);
}

/* Of each quarter of 128 bits, one after the other: those of four registers. */
INLINE void quarters_of(const __m512i from[4], __m512i to[4]) {
    const __m512i a = _mm512_shuffle_i32x4(from[0], from[1], 0x88), b = _mm512_shuffle_i32x4(from[0], from[1], 0xDD);
    const __m512i c = _mm512_shuffle_i32x4(from[2], from[3], 0x88), d = _mm512_shuffle_i32x4(from[2], from[3], 0xDD);
    to[0] = _mm512_shuffle_i32x4(a, c, 0x88), to[1] = _mm512_shuffle_i32x4(b, d, 0x88);
    to[2] = _mm512_shuffle_i32x4(a, c, 0xDD), to[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

/* Sixteen registers of sixteen floats, transposed. */
INLINE void transpose_sixteen(const __m512 from[16], __m512 to[16]) {
    __m512i quarters[4][4]; /* (column of four, rows of four): a quarter's four rows */
    for (int n = 0; n < 4; n++) {
        const __m512 *v = from + 4 * n;
        const __m512i a = _mm512_castps_si512(_mm512_unpacklo_ps(v[0], v[1])), b = _mm512_castps_si512(_mm512_unpackhi_ps(v[0], v[1]));
        const __m512i c = _mm512_castps_si512(_mm512_unpacklo_ps(v[2], v[3])), d = _mm512_castps_si512(_mm512_unpackhi_ps(v[2], v[3]));
        quarters[0][n] = _mm512_unpacklo_epi64(a, c), quarters[1][n] = _mm512_unpackhi_epi64(a, c);
        quarters[2][n] = _mm512_unpacklo_epi64(b, d), quarters[3][n] = _mm512_unpackhi_epi64(b, d);
    }
    for (int i = 0; i < 4; i++) {
        __m512i four[4];
        quarters_of(quarters[i], four);
        for (int q = 0; q < 4; q++) to[4 * q + i] = _mm512_castsi512_ps(four[q]);
    }
}

/* Of sixteen bytes of each of sixteen rows, of rows i, 4 + i, 8 + i and 12 + i in the i-th register: four to a lane. */
INLINE void fours_by_lanes(const __m512i v[4], __m512i to[4]) {
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    to[0] = _mm512_unpacklo_epi64(a, c), to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d), to[3] = _mm512_unpackhi_epi64(b, d);
}

INLINE void groups_by_lanes(Coding coding, size_t group, const RowGroups *rows, LaneGroups *to) {
    __m512i fours[4];
    if (coding == INT8) return;
    if (by_bytes(coding)) {
        fours_by_lanes(rows->bytes, fours);
        groups_of_bytes(coding, group, (const LaneWords *)fours, &rows->factors, to);
        return;
    }
    transpose_sixteen(rows->scales, to->scales);
    if (!has_offsets(coding)) return;
    if (group == 16)
        transpose_sixteen(rows->offsets, to->offsets);
    else
        for (int g = 0; g < 8; g++) to->offsets[g] = to->scales[8 + g];
}

/* Of four registers: the sums of the lanes of each quarter, one after the other. */
static inline __m512i sums_of_quarters(const __m512i v[4]) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* What is known of a strip of sixteen rows: of a token's pieces the sums of four rows' columns 0 .. 15, 16 .. 31 and so on, of four
 * rows after each other; scales of rows. */
typedef struct {
    __m512i fours[FEW_TOKENS][PIECES][ROW_GROUP];
    RowGroups groups;
} FewStrip;

/* Four rows of it, rows 4 n .. of those from `first` on, the last one before `end` again where there are fewer, for a number of
 * tokens known when compiling. */
INLINE void four_rows_of_few(Coding coding, size_t group, size_t tokens, const Matrix *matrix, size_t first, size_t end, size_t n,
                             size_t column, size_t width, const XIntegers *x, FewStrip *to) {
    __m512i pieces[ROW_GROUP][PIECES];
    for (size_t i = 0; i < ROW_GROUP; i++) {
        const size_t r = ROW_GROUP * n + i, row = least(first + r, end - 1);
        const uint8_t *later = (const uint8_t *)matrix->weights + (row + ROWS_AHEAD) * row_bytes_of(coding, matrix->columns) + row_bytes_of(coding, column);
        for (size_t ahead = 0; ahead < row_bytes_of(coding, width); ahead += 64) _mm_prefetch((const char *)(later + ahead), _MM_HINT_T1);
        take_strip(coding, group, matrix, row, column, width, pieces[i], r, &to->groups);
    }
    for (size_t m = 0; m < tokens; m++)
        for (size_t k = 0; k < PIECES; k++) {
            const size_t left = width > k * PIECE ? width - k * PIECE : 0;
            const __mmask64 there = left < PIECE ? ((uint64_t)1 << left) - 1 : ~(uint64_t)0;
            const __m512i its = _mm512_maskz_loadu_epi8(there, x[m].codes + column + k * PIECE);
            __m512i sums[ROW_GROUP];
            for (size_t i = 0; i < ROW_GROUP; i++) sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), pieces[i][k], its);
            to->fours[m][k][n] = sums_of_quarters(sums);
        }
}

/* totals[m] (sixteen rows) += such a strip's sums, scaled. */
INLINE void add_strip(Coding coding, size_t group, size_t tokens, const FewStrip *strip, size_t column, size_t width, const XIntegers *x,
                      __m512 *totals) {
    const size_t halves = group == 16 ? 2 : 1;
    LaneGroups groups;
    groups_by_lanes(coding, group, &strip->groups, &groups);
    for (size_t m = 0; m < tokens; m++)
        for (size_t k = 0; k * PIECE < width; k++) {
            __m512i sixteens[4];
            quarters_of(strip->fours[m][k], sixteens);
            for (size_t h = 0; h < 2 * halves && k * PIECE + h * group < width; h++) {
                const size_t part = column / X_PART + 2 * k + h / halves, g = 2 * halves * k + h;
                const int32_t x_sum = sum_of_codes(&x[m], part, h % halves, halves);
                const __m512i sum = halves == 2 ? sixteens[h] : _mm512_add_epi32(sixteens[2 * h], sixteens[2 * h + 1]);
                totals[m] = plus_part(coding, totals[m], _mm512_sub_epi32(sum, _mm512_set1_epi32(above_zero(coding) * x_sum)),
                                      coding == INT8 ? _mm512_set1_ps(1) : (__m512)groups.scales[g], groups.offsets[g], x[m].scales[part], x_sum);
            }
        }
}

INLINE void strips_of_few(Coding coding, size_t group, size_t tokens, const Matrix *matrix, size_t begin, size_t end,
                          const float *prepared, float *totals) {
    const size_t columns = matrix->columns, whole = block_columns(coding) == STRIP ? columns : columns / STRIP * STRIP;
    XIntegers x[FEW_TOKENS];
    FewStrip strips[SPAN_STRIPS];
    for (size_t m = 0; m < tokens; m++) x[m] = integers_at(prepared + m * integer_floats(columns), columns);
    for (size_t first = begin; first < end; first += LANE_ROWS, totals += LANE_ROWS) {
        __m512 sums[FEW_TOKENS];
        for (size_t m = 0; m < tokens; m++) sums[m] = _mm512_setzero_ps();
        for (size_t c = 0, stop; c < whole; c = stop) {
            stop = whole - c < SPAN_STRIPS * STRIP ? whole : c + SPAN_STRIPS * STRIP;
            for (size_t n = 0; n < LANE_ROWS / ROW_GROUP; n++)
                for (size_t at = c; at < stop; at += STRIP)
                    four_rows_of_few(coding, group, tokens, matrix, first, end, n, at, STRIP, x, &strips[(at - c) / STRIP]);
            for (size_t at = c; at < stop; at += STRIP) add_strip(coding, group, tokens, &strips[(at - c) / STRIP], at, STRIP, x, sums);
        }
        if (whole < columns) {
            for (size_t n = 0; n < LANE_ROWS / ROW_GROUP; n++)
                four_rows_of_few(coding, group, tokens, matrix, first, end, n, whole, columns - whole, x, strips);
            add_strip(coding, group, tokens, strips, whole, columns - whole, x, sums);
        }
        for (size_t m = 0; m < tokens; m++) _mm512_storeu_ps(totals + m * BLOCK, sums[m]);
    }
}

/* Strips of a block, unpacked row by row. */
typedef struct {
    uint8_t codes[BLOCK][SPAN_STRIPS * STRIP + 64] __attribute__((aligned(64))); /* rows of 2 KiB would push each other out of the first cache */
    RowGroups groups[SPAN_STRIPS][REGISTERS];
} Span;

INLINE void unpack_rows(Coding coding, size_t group, const Matrix *matrix, size_t begin, size_t end, size_t column, size_t columns,
                        Span *to) {
    for (size_t r = 0; r < BLOCK; r++)
        for (size_t c = 0; c < columns; c += STRIP) {
            const size_t row = least(begin + r, end - 1), n = c / STRIP;
            __m512i pieces[PIECES];
            if (block_columns(coding) == STRIP || columns - c >= STRIP)
                take_strip(coding, group, matrix, row, column + c, STRIP, pieces, r % LANE_ROWS, &to->groups[n][r / LANE_ROWS]);
            else
                take_strip(coding, group, matrix, row, column + c, columns - c, pieces, r % LANE_ROWS, &to->groups[n][r / LANE_ROWS]);
            if (is_grid(coding)) __asm__("" ::: "memory"); /* else the compiler mixes strips, whose grids want all registers */
            for (size_t k = 0; k < PIECES; k++) _mm512_store_si512(to->codes[r] + c + k * PIECE, pieces[k]);
        }
}

/* The strip at a column of rows that are bytes: of sixteen rows four columns to a register, four registers of sixteen columns at a
 * time. toggled: what is to be changed in the bytes. */
INLINE void panel_strip(Coding coding, size_t group, const RowGroups *of, const uint8_t *const row[BLOCK], int toggled,
                        size_t column, size_t width, BlockPanel *panel) {
    for (size_t r = 0; r < REGISTERS; r++) {
        const uint8_t *const *rows = row + r * LANE_ROWS;
        LaneGroups groups;
        for (size_t c = 0; c < width; c += 16) {
            __m512i v[4], fours[4];
            for (size_t i = 0; i < 4; i++) { /* rows i, 4 + i, 8 + i and 12 + i */
                v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(rows[i] + column + c)));
                v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(rows[4 + i] + column + c)), 1);
                v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(rows[8 + i] + column + c)), 2);
                v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const void *)(rows[12 + i] + column + c)), 3);
                if (toggled) v[i] = _mm512_xor_si512(v[i], _mm512_set1_epi8((char)toggled));
            }
            fours_by_lanes(v, fours);
            for (size_t i = 0; i < 4; i++) panel->rows[c / X_PART][c % X_PART / 4 + i][r] = fours[i];
        }
        groups_by_lanes(coding, group, &of[r], &groups);
        for (size_t g = 0; g < STRIP / (group == 16 ? 16 : 32); g++) {
            panel->scales[g][r] = coding == INT8 ? _mm512_set1_ps(1) : (__m512)groups.scales[g];
            if (has_offsets(coding)) panel->zeros[g][r] = groups.offsets[g];
        }
    }
}

/* At most PANEL_TOKENS tokens. The codes of INT8 are bytes as they lie: where there are many tokens, unpacking them costs more than
 * streams of memory do. */
INLINE void strips_of_many(Coding coding, size_t group, const Matrix *matrix, size_t begin, size_t end, const float *prepared,
                           size_t tokens, float *totals) {
    const size_t columns = matrix->columns, in_place = coding == INT8 && tokens >= IN_PLACE_TOKENS;
    const uint8_t *row[BLOCK], *next = (const uint8_t *)matrix->weights + (begin + BLOCK) * row_bytes_of(coding, columns);
    Span span;
    BlockPanel panel;
    for (size_t r = 0; r < BLOCK; r++)
        row[r] = in_place ? (const uint8_t *)matrix->weights + least(begin + r, end - 1) * columns : span.codes[r];
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t c = 0, width; c < columns; c += STRIP) {
        const size_t of_span = c % (SPAN_STRIPS * STRIP), left = columns - c;
        width = least(left, STRIP);
        if (of_span == 0 && !in_place)
            unpack_rows(coding, group, matrix, begin, end, c, least(left, SPAN_STRIPS * STRIP), &span);
        panel_strip(coding, group, span.groups[of_span / STRIP], row, in_place ? above_zero(coding) : 0, in_place ? c : of_span,
                    in_place ? width : STRIP, &panel);
        parts_times(coding, group == 16 ? 2 : 1, &panel, c / X_PART, width / X_PART, prepared, tokens, columns,
                    next + BLOCK * row_bytes_of(coding, c), BLOCK * row_bytes_of(coding, width), totals);
    }
}

INLINE void strips_block(Coding coding, size_t group, const Matrix *matrix, size_t block, const float *prepared, size_t tokens,
                         bf16 *out, size_t stride) {
    const size_t begin = block * BLOCK, end = least(matrix->rows, begin + BLOCK);
    const bf16 *scales = coding == INT8 ? (const bf16 *)matrix->scales + begin : NULL;
    float totals[PANEL_TOKENS * BLOCK] __attribute__((aligned(64)));
    for (size_t calls = (tokens + PANEL_TOKENS - 1) / PANEL_TOKENS; calls; calls--) {
        const size_t some = (tokens + calls - 1) / calls;
        switch (some) {
            case 1: strips_of_few(coding, group, 1, matrix, begin, end, prepared, totals); break;
            case 2: strips_of_few(coding, group, 2, matrix, begin, end, prepared, totals); break;
            case 3: strips_of_few(coding, group, 3, matrix, begin, end, prepared, totals); break;
            case 4: strips_of_few(coding, group, 4, matrix, begin, end, prepared, totals); break;
            default: strips_of_many(coding, group, matrix, begin, end, prepared, some, totals);
        }
        for (size_t m = 0; m < some; m++) store_rows_of(totals + m * BLOCK, scales, end - begin, out + m * stride);
        prepared += some * integer_floats(matrix->columns), out += some * stride, tokens -= some;
    }
}

#endif
