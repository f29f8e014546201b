/* Matrices as safetensors checkpoints have them: the codes of a row in the order of its columns, scales in an array of their
 * own. They are taken in strips, as the blocks of GGUF files (gguf.h). Codes of E2M1 stand for twice their values, as those of
 * GGUF's MXFP4, and their scales are halved.
 *
 * Over eight_of_e4m3 (8 bytes of E4M3, none of them undefined) of vector.h. */
static const int8_t S4_CODES[16] __attribute__((aligned(16))) = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const int8_t U4_CODES[16] __attribute__((aligned(16))) = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* 32 codes of 16 bytes, from a table. */
static inline void pairs_of(const int8_t table[16], const uint8_t *restrict from, int8_t *restrict codes) {
    int8_t low[16], high[16];
    look_up(table, from, low, high);
    for (int i = 0; i < 16; i++) codes[2 * i] = low[i], codes[2 * i + 1] = high[i];
}

static inline float e4m3_at(const uint8_t *at) {
    const uint16_t half = (uint16_t)((*at & 0x80) << 8 | (*at & 0x7F) << 7); /* of 2^-8 times as much */
    return 256 * from_half((const uint8_t *)&half);
}

static inline int has_factors(const Matrix *matrix) { return matrix->scale_kind >= SCALE_E4M3_TIMES; }

/* What the scales of a row have in common; of E2M1 a half. */
static inline float published_factor(const Matrix *matrix, size_t row) {
    const float half = matrix->coding == E2M1 ? 0.5f : 1;
    return has_factors(matrix) ? half * ((const float *)matrix->ladders)[row / matrix->factor_rows] : half;
}

/* Number `at` of a matrix's scales, of a row with that factor. */
static inline float published_scale(const Matrix *matrix, size_t at, float factor) {
    const uint8_t *scales = matrix->scales;
    float scale;
    switch (matrix->scale_kind) {
        case SCALE_E8M0: return mxfp4_scale(scales[at]) * (2 * factor);
        case SCALE_BF16: return from_bf16(((const bf16 *)scales)[at]) * factor;
        case SCALE_HALF: return from_half(scales + 2 * at) * factor;
        case SCALE_E4M3_TIMES: return e4m3_at(scales + at) * factor;
        case SCALE_E4M3_OVER: return e4m3_at(scales + at) / (matrix->coding == E2M1 ? 4 * factor : factor);
        default: memcpy(&scale, scales + 4 * at, sizeof scale); return scale * factor;
    }
}

/* a / b, which is a shift for most matrices: a strip has no time for divisions. */
static inline size_t quotient(size_t a, size_t b) { return b & (b - 1) ? a / b : a >> __builtin_ctzll(b); }

/* Where the scales of a row begin. */
static inline size_t published_row(const Matrix *matrix, size_t row) {
    const size_t across = quotient(matrix->columns + matrix->scale_columns - 1, matrix->scale_columns);
    return quotient(row, matrix->scale_rows) * across;
}

/* Of the groups of a strip of a row that begins at a column; offsets only where has_offsets(coding). */
static inline void published_scales(const Matrix *matrix, size_t row, size_t begin, size_t width, StripScales *to) {
    const size_t shared = matrix->scale_columns;
    const float factor = published_factor(matrix, row);
    const uint8_t *zeros = matrix->coding == U4 ? matrix->ladders : NULL;
    const size_t before = quotient(begin, shared);
    size_t at = published_row(matrix, row) + before, left = (before + 1) * shared - begin;
    float scale = published_scale(matrix, at, factor);
    for (size_t g = 0; g < width / matrix->group; g++) {
        if (left == 0) scale = published_scale(matrix, ++at, factor), left = shared;
        if (zeros) to->offsets[g] = -scale * zeros[at];
        to->scales[g] = scale, left -= matrix->group;
    }
}
