/* Products with matrices in INT4.
 *
 * The 32 bytes of a column are read as 8 words. Nibble n of the words, kept in its place, is the code times 16^n: it
 * becomes a float without being shifted. x is multiplied by 16^-6, so that nothing overflows, and the scale by 16^(6 - n).
 * So the sums of a block lie in 8 registers: lane l of register 2 b + h has row 32 h + 4 l + b.
 *
 * Codes are summed as they are, 0 to 15: the 8 that is to be taken away joins the zero. Sums are scaled after at most
 * SPAN columns, for one token as for many. */
#include "vector.h"

enum {
    SPAN = 64,               /* columns */
    NIBBLES = 8,             /* of a word: registers of a block */
    INT4_UNPACKED = 8,       /* more tokens share a span that is unpacked into memory */
    INT4_TOKENS = 24,        /* that share what is unpacked of a span */
    INT4_FEW = 2,            /* of them, whose sums are in registers while codes are unpacked */
    INT4_TILE = 6,           /* of them, whose sums are in registers when codes have been unpacked */
    INT4_PAIR = 2,           /* registers of each of those */
    INT4_BYTES_AHEAD = 2048, /* of codes asked for ahead of their use */
};

/* A group's, of the rows of a block. */
typedef struct {
    __m256 scale[NIBBLES], zero[NIBBLES];
} Scales;

/* The rows of four registers, (k, 4 of rows 4 k ..; 4 of rows 16 + 4 k ..), to lanes (row % 4, row / 4), and back. */
static inline void transpose(__m256i v[4]) {
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, c), v[1] = _mm256_unpackhi_epi64(a, c);
    v[2] = _mm256_unpacklo_epi64(b, d), v[3] = _mm256_unpackhi_epi64(b, d);
}

#define SIXTEEN_TO_6 16777216.0f

/* 16^(6 - n); the last nibble is shifted to the right end: in its place it would be a sign. */
static inline __m256 place_of(int nibble) {
    static const float PLACES[NIBBLES] = {SIXTEEN_TO_6, 1 << 20, 1 << 16, 1 << 12, 256, 16, 1, SIXTEEN_TO_6};
    return _mm256_set1_ps(PLACES[nibble]);
}

/* pairs: of a scale (low half) and a zero (high half), of 64 rows. */
static inline void load_scales(const uint32_t *pairs, Scales *scales) {
    for (int h = 0; h < 2; h++, pairs += BLOCK / 2) {
        __m256i v[4];
        for (int k = 0; k < 4; k++)
            v[k] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const void *)(pairs + 4 * k))),
                                           _mm_loadu_si128((const void *)(pairs + 16 + 4 * k)), 1);
        transpose(v);
        for (int b = 0; b < 4; b++) {
            const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(v[b], 16));
            const __m256 zero = _mm256_castsi256_ps(_mm256_and_si256(v[b], _mm256_set1_epi32((int)0xFFFF0000)));
            scales->scale[2 * b + h] = _mm256_mul_ps(scale, place_of(2 * b + h));
            scales->zero[2 * b + h] = _mm256_fnmadd_ps(_mm256_set1_ps(8), scale, zero);
        }
    }
}

static inline __m256 nibble_of(__m256i words, int n) {
    const __m256i code = n == NIBBLES - 1 ? _mm256_srli_epi32(words, 28) : _mm256_and_si256(words, _mm256_set1_epi32(15 << 4 * n));
    return _mm256_cvtepi32_ps(code);
}

/* values = x * 16^-6 */
static inline void int4_factors(const bf16 *x, size_t columns, float *values) {
    const __m256 place = _mm256_set1_ps(1 / SIXTEEN_TO_6);
    for (size_t c = 0; c < columns; c += 8)
        _mm256_storeu_ps(values + c, _mm256_mul_ps(place, eight_of(_mm_loadu_si128((const void *)(x + c)))));
}

/* out (64) = the totals of a block, rounded. */
static inline void store_block(const float *totals, bf16 *out) {
    for (int h = 0; h < 2; h++, out += BLOCK / 2) {
        __m256i v[4];
        for (int b = 0; b < 4; b++) v[b] = _mm256_loadu_si256((const void *)(totals + 8 * (2 * b + h)));
        transpose(v);
        const __m256i first[] = {_mm256_permute2x128_si256(v[0], v[1], 0x20), _mm256_permute2x128_si256(v[2], v[3], 0x20)};
        const __m256i last[] = {_mm256_permute2x128_si256(v[0], v[1], 0x31), _mm256_permute2x128_si256(v[2], v[3], 0x31)};
        store_bf16(out, (Vector){_mm256_castsi256_ps(first[0]), _mm256_castsi256_ps(first[1])});
        store_bf16(out + 16, (Vector){_mm256_castsi256_ps(last[0]), _mm256_castsi256_ps(last[1])});
    }
}

/* totals (tokens, 64) += a span of a block's codes times x (tokens, SPAN), scaled: few tokens, a number known when
 * compiling. Codes are unpacked into registers, `at_once` nibbles at a time, and what comes next is asked for in time. */
static inline __attribute__((always_inline)) void int4_span(size_t tokens, const uint8_t *codes, size_t span, const float *x,
                                                            const Scales *scales, float *totals) {
    const int at_once = tokens > 1 ? NIBBLES / 2 : NIBBLES;
    for (int first = 0; first < NIBBLES; first += at_once) {
        __m256 part[INT4_FEW][NIBBLES];
        for (size_t m = 0; m < tokens; m++)
            for (int n = 0; n < at_once; n++) part[m][n] = _mm256_setzero_ps();
        for (size_t c = 0; c < span; c++) {
            const __m256i words = _mm256_loadu_si256((const void *)(codes + c * BLOCK / 2));
            if (c % 2 == 0) _mm_prefetch((const char *)(codes + c * BLOCK / 2 + INT4_BYTES_AHEAD), _MM_HINT_T1);
            for (int n = 0; n < at_once; n++) {
                const __m256 values = nibble_of(words, first + n);
                for (size_t m = 0; m < tokens; m++)
                    part[m][n] = _mm256_fmadd_ps(values, _mm256_broadcast_ss(x + m * SPAN + c), part[m][n]);
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (int n = 0; n < at_once; n++) {
                float *total = totals + m * BLOCK + 8 * (first + n);
                _mm256_store_ps(total, _mm256_fmadd_ps(scales->scale[first + n], part[m][n], _mm256_load_ps(total)));
            }
    }
}

#define INT4_SPAN_OF(n)                               \
    case n:                                           \
        int4_span(n, codes, span, x, scales, totals); \
        break;

static void int4_spans(size_t tokens, const uint8_t *codes, size_t span, const float *x, const Scales *scales, float *totals) {
    for (size_t tiles = (tokens + INT4_FEW - 1) / INT4_FEW; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) { INT4_SPAN_OF(1) INT4_SPAN_OF(2) }
        x += some * SPAN, totals += some * BLOCK, tokens -= some;
    }
}

static void int4_unpack(const uint8_t *codes, size_t span, float *panel) {
    for (size_t c = 0; c < span; c++) {
        const __m256i words = _mm256_loadu_si256((const void *)(codes + c * BLOCK / 2));
        for (int n = 0; n < NIBBLES; n++) _mm256_store_ps(panel + c * BLOCK + 8 * n, nibble_of(words, n));
    }
}

/* The same of a span that has been unpacked. */
static inline __attribute__((always_inline)) void int4_tile(size_t tokens, const float *panel, size_t span, const float *x,
                                                            const Scales *scales, float *totals) {
    for (int n = 0; n < NIBBLES; n += INT4_PAIR) {
        __m256 part[INT4_TILE][INT4_PAIR];
        for (size_t m = 0; m < tokens; m++)
            for (int i = 0; i < INT4_PAIR; i++) part[m][i] = _mm256_setzero_ps();
        for (size_t c = 0; c < span; c++) {
            __m256 values[INT4_PAIR];
            for (int i = 0; i < INT4_PAIR; i++) values[i] = _mm256_load_ps(panel + c * BLOCK + 8 * (n + i));
            for (size_t m = 0; m < tokens; m++) {
                const __m256 factor = _mm256_broadcast_ss(x + m * SPAN + c);
                for (int i = 0; i < INT4_PAIR; i++) part[m][i] = _mm256_fmadd_ps(values[i], factor, part[m][i]);
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (int i = 0; i < INT4_PAIR; i++) {
                float *total = totals + m * BLOCK + 8 * (n + i);
                _mm256_store_ps(total, _mm256_fmadd_ps(scales->scale[n + i], part[m][i], _mm256_load_ps(total)));
            }
    }
}

#define INT4_TILE_OF(n)                                \
    case n:                                            \
        int4_tile(n, panel, span, x, scales, totals); \
        break;

static void int4_tiles(size_t tokens, const float *panel, size_t span, const float *x, const Scales *scales, float *totals) {
    for (size_t tiles = (tokens + INT4_TILE - 1) / INT4_TILE; tiles; tiles--) {
        const size_t some = (tokens + tiles - 1) / tiles;
        switch (some) {
            INT4_TILE_OF(1) INT4_TILE_OF(2) INT4_TILE_OF(3) INT4_TILE_OF(4) INT4_TILE_OF(5) INT4_TILE_OF(6)
        }
        x += some * SPAN, totals += some * BLOCK, tokens -= some;
    }
}

/* totals (64) += zeros * sum */
static inline void add_scaled(const __m256 zeros[NIBBLES], float sum, float *totals) {
    for (int n = 0; n < NIBBLES; n++)
        _mm256_store_ps(totals + 8 * n, _mm256_fmadd_ps(zeros[n], _mm256_set1_ps(sum), _mm256_load_ps(totals + 8 * n)));
}

/* totals (tokens, 64) += a span of a block's codes times x, whose tokens lie `columns` apart, scaled. */
static void int4_add_span(const uint8_t *codes, size_t span, const bf16 *x, size_t columns, size_t tokens,
                          const Scales *scales, float *totals) {
    float values[INT4_TOKENS * SPAN], panel[SPAN * BLOCK] __attribute__((aligned(32)));
    for (size_t m = 0; m < tokens; m++) int4_factors(x + m * columns, span, values + m * SPAN);
    if (tokens <= INT4_UNPACKED) {
        int4_spans(tokens, codes, span, values, scales, totals);
        return;
    }
    int4_unpack(codes, span, panel);
    int4_tiles(tokens, panel, span, values, scales, totals);
}

/* A block times at most INT4_TOKENS tokens. */
static void int4_some(const Matrix *matrix, const uint8_t *codes, const uint32_t *pairs, const bf16 *x, const float *sums,
                      size_t tokens, bf16 *out, size_t stride) {
    const size_t columns = matrix->columns, group = matrix->group, span = group < SPAN ? group : SPAN;
    float totals[INT4_TOKENS * BLOCK] __attribute__((aligned(32)));
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t g = 0; g < columns / group; g++, pairs += matrix->rows) {
        Scales scales;
        load_scales(pairs, &scales);
        for (int r = 0; r < BLOCK; r += 16) _mm_prefetch((const char *)(pairs + 2 * matrix->rows + r), _MM_HINT_T0);
        for (size_t s = 0; s < group; s += span, x += span, codes += span * BLOCK / 2)
            int4_add_span(codes, span, x, columns, tokens, &scales, totals);
        for (size_t m = 0; m < tokens; m++)
            add_scaled(scales.zero, sums[m * (columns / group) + g], totals + m * BLOCK);
    }
    for (size_t m = 0; m < tokens; m++) store_block(totals + m * BLOCK, out + m * stride);
}

static void int4_block(const Matrix *matrix, size_t block, const bf16 *x, const float *sums, size_t tokens, bf16 *out,
                       size_t stride) {
    const uint8_t *codes = (const uint8_t *)matrix->weights + block * BLOCK / 2 * matrix->columns;
    const uint32_t *pairs = (const uint32_t *)matrix->scales + block * BLOCK;
    const size_t groups = matrix->columns / matrix->group;
    for (size_t parts = (tokens + INT4_TOKENS - 1) / INT4_TOKENS; parts; parts--) {
        const size_t some = (tokens + parts - 1) / parts;
        int4_some(matrix, codes, pairs, x, sums, some, out, stride);
        x += some * matrix->columns, sums += some * groups, out += some * stride, tokens -= some;
    }
}
