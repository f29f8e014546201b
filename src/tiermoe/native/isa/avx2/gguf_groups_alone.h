/* One token times types whose lanes are groups (gguf_groups.h): codes as unsigned bytes. */

/* The bytes of x for the unsigned codes: signed ones times 256, and what is left of them; `above` is what codes are above their
 * worth, times the sums of groups. */
typedef struct {
    Part bytes[PARTS];
    __m256i above;
} GroupBytes;

/* x: as groups_to_lanes leaves it. */
static inline void to_group_bytes(Coding coding, const Whole *x, GroupBytes *to) {
    const __m256i above = _mm256_set1_epi16((short)code_above(coding));
    to->above = _mm256_setzero_si256();
    for (int p = 0; p < PARTS; p++) {
        to->bytes[p] = to_bytes(x->parts[p]);
        to->above = plus_products(plus_products(to->above, x->parts[p].even, above), x->parts[p].odd, above);
    }
}

/* What unsigned codes, at most 24, and bytes come to: sums of words, at most 24 * 128 * 2 * 4 in each. */
static inline __attribute__((always_inline)) __m256i group_products(Coding coding, const uint8_t *at, size_t groups, const GroupBytes *x) {
    __m256i four[4], sums = _mm256_setzero_si256();
    lane_nibbles(coding, at, groups, four);
    for (int half = 0; half < 2; half++) {
        __m256i high = _mm256_setzero_si256(), low = high;
        for (int t = 0; t < 4; t++) {
            const __m256i nibbles = masked(half ? _mm256_srli_epi16(four[t], 4) : four[t], 15);
            const __m256i codes = unsigned_codes(coding, nibbles);
            high = _mm256_add_epi16(high, _mm256_maddubs_epi16(codes, x->bytes[4 * half + t].even));
            low = _mm256_add_epi16(low, _mm256_maddubs_epi16(codes, x->bytes[4 * half + t].odd));
        }
        sums = plus_products(plus_products(sums, high, _mm256_set1_epi16(256)), low, _mm256_set1_epi16(1));
    }
    return _mm256_sub_epi32(sums, x->above);
}

/* A strip of a row times that of the token. */
static inline __attribute__((always_inline)) Eight strip_of_groups(Coding coding, const Matrix *matrix, size_t row, size_t column,
                                                                   const uint8_t *at, size_t count, const Whole *x,
                                                                   const GroupBytes *bytes) {
    Groups groups;
    __m256i sums;
    lane_groups(coding, matrix, row, column, at, count, &groups);
    if (coding == IQ4_NL) { /* whose codes are too large for bytes */
        Part parts[PARTS];
        lane_parts(coding, at, count, parts);
        sums = part_times(parts, x->parts);
        for (int p = 1; p < PARTS; p++) sums = _mm256_add_epi32(sums, part_times(parts + p, x->parts + p));
    } else {
        sums = group_products(coding, at, count, bytes);
    }
    return add_lanes(sums, groups.lanes, lanes_begin(offset_registers(coding), groups.offsets, x->sums));
}

/* A row from its first column to its last. */
static inline __attribute__((always_inline)) Eight row_of_groups(Coding coding, const Matrix *matrix, size_t row, const uint8_t *at,
                                                                 const Whole *x, const GroupBytes *bytes) {
    const size_t strip = row_bytes_of(coding, STRIP), whole = matrix->columns / STRIP * STRIP, left = matrix->columns - whole;
    Eight lanes = eight_zeros();
    size_t column = 0;
    for (; column < whole; column += STRIP, at += strip, x++, bytes++) {
        for (size_t ahead = 0; ahead < strip; ahead += 64) __builtin_prefetch(at + ALONE_AHEAD + ahead, 0, 2);
        const Eight sums = strip_of_groups(coding, matrix, row, column, at, PARTS, x, bytes);
        lanes = eight_times_plus(sums, eight_all(x->scale), lanes);
    }
    if (!left) return lanes;
    const Eight sums = strip_of_groups(coding, matrix, row, column, at, groups_of(left), x, bytes);
    return eight_times_plus(sums, eight_all(x->scale), lanes);
}

/* totals (64) = a block times one token: the bits are those among many tokens, since sums of a group are integers. */
static inline __attribute__((always_inline)) void groups_alone(Coding coding, const Matrix *matrix, const Rows *block,
                                                               const Whole *x, float *totals) {
    const size_t row_bytes = row_bytes_of(coding, matrix->columns), strips = strips_of(matrix->columns);
    GroupBytes bytes[strips];
    for (size_t s = 0; s < strips; s++) to_group_bytes(coding, x + s, bytes + s);
    for (size_t r = 0; r < block->rows; r += STRIP_ROWS) {
        Eight lanes[STRIP_ROWS];
        for (size_t i = 0; i < STRIP_ROWS; i++) {
            const size_t row = row_or_last(block, r + i);
            lanes[i] = row_of_groups(coding, matrix, block->first + row, block->weights + row * row_bytes, x, bytes);
        }
        _mm_storeu_ps(totals + r, four_sums(lanes[0], lanes[1], lanes[2], lanes[3]));
    }
}
