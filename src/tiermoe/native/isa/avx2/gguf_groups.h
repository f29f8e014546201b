/* Types of 4 bits whose groups of 32 columns have scales of their own: a lane of a strip's sums is a group, so that scales come
 * once a strip, after the sums. Part t holds four columns of each group, of the low nibbles of bytes 4 t .. 4 t + 3, part
 * 4 + t those of the high ones. Where a strip has fewer than eight groups, its last one stands for the others, times zeros. */
enum {
    NIBBLES = 16, /* bytes of a group */
    MIDDLE = 8,   /* of codes without a sign of their own */
    FP4_LEAST = 12,
};

static inline int lanes_are_groups(Coding coding, size_t group) {
    switch (coding) {
        case Q4_0: case Q4_1: case IQ4_NL: case MXFP4: case E2M1: case S4: case U4: return group == NIBBLES * 2;
        default: return 0;
    }
}

/* Whether the two nibbles of a byte are columns beside each other, and not 16 apart. */
static inline int nibbles_adjoin(Coding coding) { return coding >= FIRST_PUBLISHED; }

static inline size_t groups_of(size_t width) { return width / (2 * NIBBLES); }

static inline size_t group_or_last(size_t g, size_t groups) { return g < groups ? g : groups - 1; }

static inline __attribute__((always_inline)) __m128i group_nibbles(Coding coding, const uint8_t *at, size_t g, size_t groups) {
    const size_t each = block_bytes(coding), before = each - NIBBLES;
    return _mm_loadu_si128((const void *)(at + group_or_last(g, groups) * each + before));
}

/* Bytes 4 t .. 4 t + 3 of group g to lane g of the t-th. */
static inline __attribute__((always_inline)) void lane_nibbles(Coding coding, const uint8_t *at, size_t groups, __m256i four[4]) {
    for (size_t j = 0; j < 4; j++)
        four[j] = _mm256_set_m128i(group_nibbles(coding, at, 4 + j, groups), group_nibbles(coding, at, j, groups));
    transpose(four);
}

/* What is less than each code is worth by FP4_LEAST or MIDDLE, or what it is worth: a byte that is not negative. */
static inline __attribute__((always_inline)) __m256i unsigned_codes(Coding coding, __m256i nibbles) {
    if (coding != MXFP4 && coding != E2M1) return nibbles;
    const __m128i codes = _mm_load_si128((const void *)FP4_CODES), above = _mm_add_epi8(codes, _mm_set1_epi8(FP4_LEAST));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(above), nibbles);
}

static inline int code_above(Coding coding) {
    return coding == MXFP4 || coding == E2M1 ? FP4_LEAST : coding == Q4_0 || coding == S4 ? MIDDLE : 0;
}

static inline __attribute__((always_inline)) __m256i signed_codes(Coding coding, __m256i nibbles) {
    if (coding == IQ4_NL) return looked_up(IQ4_CODES, nibbles);
    if (coding == MXFP4 || coding == E2M1) return looked_up(FP4_CODES, nibbles);
    return code_above(coding) ? less(nibbles, MIDDLE) : nibbles;
}

/* 2^(exponent - 128) of eight bytes, as mxfp4_scale. */
static inline Eight mxfp4_scales(__m128i exponents) {
    const __m256i wide = _mm256_cvtepu8_epi32(exponents), normal = _mm256_slli_epi32(_mm256_sub_epi32(wide, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), wide);
    return eight_bits(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), wide)));
}

static inline int16_t word_at(const uint8_t *at) {
    int16_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Bytes that lie `each` apart, of eight groups. */
static inline __attribute__((always_inline)) __m128i lane_bytes(const uint8_t *at, size_t each, size_t groups) {
    if (each == 1 && groups == PARTS) return _mm_loadl_epi64((const void *)at);
#define BYTE(g) (char)at[each * group_or_last(g, groups)]
    return _mm_setr_epi8(BYTE(0), BYTE(1), BYTE(2), BYTE(3), BYTE(4), BYTE(5), BYTE(6), BYTE(7), 0, 0, 0, 0, 0, 0, 0, 0);
#undef BYTE
}

/* float16 that lie `each` apart. */
static inline __attribute__((always_inline)) Eight lane_halves(const uint8_t *at, size_t each, size_t groups) {
#define WORD(g) word_at(at + each * group_or_last(g, groups))
    return _mm256_cvtph_ps(_mm_setr_epi16(WORD(0), WORD(1), WORD(2), WORD(3), WORD(4), WORD(5), WORD(6), WORD(7)));
#undef WORD
}

static inline __attribute__((always_inline)) void block_scales(Coding coding, const uint8_t *at, size_t groups, Groups *to) {
    const size_t each = block_bytes(coding);
    to->lanes = coding == MXFP4 ? mxfp4_scales(lane_bytes(at, each, groups)) : lane_halves(at, each, groups);
    if (has_offsets(coding)) to->offsets[0] = lane_halves(at + 2, each, groups);
}

/* Scales that lie in an array of their own. */
static inline __attribute__((always_inline)) void array_scales(Coding coding, const Matrix *matrix, size_t row, size_t column,
                                                               size_t groups, Groups *to) {
    const size_t shared = matrix->scale_columns, first = published_row(matrix, row) + quotient(column, shared);
    const uint8_t *zeros = matrix->ladders; /* of U4 */
    if (coding == E2M1 && matrix->scale_kind == SCALE_E8M0 && shared == 2 * NIBBLES) {
        to->lanes = mxfp4_scales(lane_bytes((const uint8_t *)matrix->scales + first, 1, groups));
        return;
    }
    const float factor = published_factor(matrix, row);
    float scales[PARTS], offsets[PARTS];
    size_t before = first;
    for (size_t g = 0; g < PARTS; g++) {
        const size_t at = first - quotient(column, shared) + quotient(column + group_or_last(g, groups) * 2 * NIBBLES, shared);
        scales[g] = g && at == before ? scales[g - 1] : published_scale(matrix, at, factor);
        if (coding == U4) offsets[g] = -scales[g] * zeros[at];
        before = at;
    }
    to->lanes = eight_from(scales);
    if (coding == U4) to->offsets[0] = eight_from(offsets);
}

/* The scales of a strip's groups, and their offsets where has_offsets(coding): a group a lane. */
static inline __attribute__((always_inline)) void lane_groups(Coding coding, const Matrix *matrix, size_t row, size_t column,
                                                              const uint8_t *at, size_t groups, Groups *to) {
    if (coding >= FIRST_PUBLISHED)
        array_scales(coding, matrix, row, column, groups, to);
    else
        block_scales(coding, at, groups, to);
}

/* The codes of a strip, words. */
static inline __attribute__((always_inline)) void lane_parts(Coding coding, const uint8_t *at, size_t groups, Part parts[PARTS]) {
    __m256i four[4];
    lane_nibbles(coding, at, groups, four);
    for (int t = 0; t < 4; t++) {
        parts[t] = words_of_bytes(coding, signed_codes(coding, masked(four[t], 15)));
        parts[4 + t] = words_of_bytes(coding, signed_codes(coding, masked(_mm256_srli_epi16(four[t], 4), 15)));
    }
}
