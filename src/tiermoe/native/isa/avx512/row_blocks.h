/* Products with matrices that are kept in blocks of rows: INT4, INT6, INT2, NL4, NL3, NL2 and TCQ2. Four columns of a block
 * become the bytes of four registers: a lane has a row's four. */
#ifndef TIERMOE_ISA_AVX512_ROW_BLOCKS_H
#define TIERMOE_ISA_AVX512_ROW_BLOCKS_H

#include "../../matrix.h"
#include "../../trellis.h"
#include "../integers.h"
#include "../simd.h"

enum {
    REGISTERS = 4,      /* of 16 rows: a block */
    FOURS = X_PART / 4,   /* of a part */
    BLOCK_TILE = 3,     /* tokens whose sums and totals fit the registers */
    PANEL_PARTS = 8,    /* unpacked at a time where there are more tokens */
    PANEL_TOKENS = 96,  /* that share them */
    GROUPS_AHEAD = 3,   /* whose scales are asked for ahead of their use */
    BYTES_AHEAD = 4096, /* of codes asked for ahead of their use */
};

/* What a code's byte is above the number that it stands for. */
static inline int above_zero(Coding coding) {
    switch (coding) {
        case Q4_0: case S4: return 8;
        case Q5_0: return 16;
        case Q3_K: return 4;
        case Q6_K: return 32;
        case TQ2_0: return 1;
        case Q4_1: case Q5_1: case Q2_K: case Q4_K: case Q5_K: case U4: return 0;
        default: return coding >= FIRST_GGUF || is_uneven(coding) || coding == INT8 ? 128 : middle_code(coding);
    }
}

/* Byte j of four rows' columns: from columns of 32 bytes each, one after the other. */
static inline __m512i four_by_lanes(int first) {
    const __m512i lanes = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(0x01010101));
    return _mm512_add_epi8(lanes, _mm512_set1_epi32(0x60402000 + first * 0x01010101));
}

/* Nibbles of rows 0 .. 15 and 32 .. 47 (low and high halves of `both[0]`), 16 .. 31 and 48 .. 63 (`both[1]`). */
static inline void nibbles_by_lanes(Coding coding, const uint8_t *four, __m512i both[2]) {
    const __m512i first = _mm512_loadu_si512(four);
    __m512i second;
    if (coding == NL3) {
        const __m256i a = _mm256_loadu_si256((const void *)four), b = _mm256_loadu_si256((const void *)(four + 32));
        const __m256i third = _mm256_loadu_si256((const void *)(four + 64));
        const __m256i low = _mm256_and_si256(_mm256_srli_epi16(a, 3), _mm256_set1_epi8(0x11));
        const __m256i middle = _mm256_and_si256(_mm256_srli_epi16(b, 2), _mm256_set1_epi8(0x22));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(third, 1), _mm256_set1_epi8(0x44));
        second = _mm512_inserti64x4(_mm512_castsi256_si512(third), _mm256_or_si256(_mm256_or_si256(low, middle), high), 1);
    } else {
        second = _mm512_loadu_si512(four + 64);
    }
    both[0] = _mm512_permutex2var_epi8(first, four_by_lanes(0), second);
    both[1] = _mm512_permutex2var_epi8(first, four_by_lanes(16), second);
}

/* Bits from `shift` on of each lane's four bytes, two bits further in the second and the fourth. */
static inline __m512i bits_by_columns(__m512i bytes, int shift) {
    const __m512i places = _mm512_set1_epi64(0x3A302A201A100A00);
    return _mm512_multishift_epi64_epi8(_mm512_add_epi8(places, _mm512_set1_epi8((char)shift)), bytes);
}

/* Columns of two to a byte: bytes j, j, 32 + j, 32 + j. */
static inline __m512i twos_by_lanes(__m512i bytes, int first) {
    const __m512i lanes = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(0x01010101));
    return _mm512_permutexvar_epi8(_mm512_add_epi8(lanes, _mm512_set1_epi32(0x20200000 + first * 0x01010101)), bytes);
}

static inline __m512i low_bits(__m512i bytes, int mask) { return _mm512_and_si512(bytes, _mm512_set1_epi8((char)mask)); }

/* The same of two columns' nibbles in a byte's place, as TCQ2 has them. */
static inline void trellis_four(const uint8_t *four, __m512i rows[REGISTERS]) {
    const __m512i bytes = _mm512_loadu_si512(four), before = _mm512_alignr_epi32(bytes, bytes, 15);
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)TRELLIS_CODES));
    const __m512i own[] = {_mm512_slli_epi16(bytes, 8), _mm512_and_si512(bytes, _mm512_set1_epi16((short)0xFF00))};
    const __m512i others[] = {before, _mm512_srli_epi16(before, 8)};
    for (int r = 0; r < REGISTERS; r++) {
        const __m512i kept = _mm512_set1_epi16((short)(TRELLIS_KEPT[r] & 0xFF)), factor = _mm512_set1_epi16((short)TRELLIS_FACTORS[r]);
        __m512i levels[2];
        for (int p = 0; p < 2; p++)
            levels[p] = _mm512_mulhi_epu16(_mm512_ternarylogic_epi64(kept, others[p], own[p], 0xEA), factor); /* kept & others | own */
        /* bytes of columns 0, 2, 1, 3 */
        const __m512i mixed = _mm512_ternarylogic_epi64(_mm512_set1_epi16(0xFF), levels[0], _mm512_slli_epi16(levels[1], 8), 0xCA);
        const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
        rows[r] = _mm512_shuffle_epi8(_mm512_permutexvar_epi8(mixed, table), order);
    }
}

/* Four columns of a block: register r has rows 16 r .. 16 r + 15, above_zero above what they stand for. table: of uneven ones. */
INLINE void unpack_four(Coding coding, const uint8_t *four, __m512i table, __m512i rows[REGISTERS]) {
    if (coding == TCQ2) {
        trellis_four(four, rows);
        return;
    }
    if (code_bits(coding) == 2) {
        const __m512i bytes = _mm512_loadu_si512(four);
        for (int r = 0; r < 2; r++) {
            const __m512i twos = twos_by_lanes(bytes, 16 * r);
            rows[r] = low_bits(bits_by_columns(twos, 0), 3), rows[r + 2] = low_bits(bits_by_columns(twos, 4), 3);
        }
    } else {
        __m512i both[2];
        nibbles_by_lanes(coding, four, both);
        for (int r = 0; r < 2; r++)
            rows[r] = low_bits(both[r], 15), rows[r + 2] = low_bits(_mm512_srli_epi16(both[r], 4), 15);
    }
    if (coding == INT6) {
        const __m512i high = _mm512_loadu_si512(four + 128);
        for (int r = 0; r < 2; r++) {
            const __m512i fours = twos_by_lanes(high, 16 * r);
            /* bits 4 and 5 of each byte: of the first and third column from bit 2 or 0 on, of the others four bits further */
            const __m512i low = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x3A2E2A1E1A0E0A3E), fours);
            const __m512i second = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x382C281C180C083C), fours);
            rows[r] = _mm512_ternarylogic_epi64(_mm512_set1_epi8(0x30), low, rows[r], 0xEA); /* mask & low | row */
            rows[r + 2] = _mm512_ternarylogic_epi64(_mm512_set1_epi8(0x30), second, rows[r + 2], 0xEA);
        }
    }
    for (int r = 0; is_uneven(coding) && r < REGISTERS; r++) rows[r] = _mm512_shuffle_epi8(table, rows[r]);
}

/* Levels of uneven codings, 128 above themselves. */
static inline __m512i levels_of(Coding coding) {
    if (!is_uneven(coding)) return _mm512_setzero_si512();
    const __m512i levels = _mm512_broadcast_i32x4(_mm_load_si128((const void *)uneven_levels(coding)));
    return _mm512_xor_si512(levels, _mm512_set1_epi8((char)0x80));
}

/* Where a block's codes and scales lie, and how far a group's scales are from the next one's, in bytes. */
typedef struct {
    const uint8_t *codes, *scales;
    size_t group;
} Place;

static inline Place place_of(const Matrix *matrix, size_t block) {
    const uint8_t *codes = matrix->weights, *scales = matrix->scales;
    const size_t columns = matrix->columns, groups = columns / matrix->group;
    if (is_uneven(matrix->coding)) {
        const size_t group = uneven_group_bytes(matrix->coding, matrix->group);
        return (Place){codes + block * groups * group + UNEVEN_SCALES, codes + block * groups * group, group};
    }
    codes += block * code_bytes(matrix->coding, columns);
    if (has_pairs(matrix->coding))
        return (Place){codes, scales + block * BLOCK * 2 * sizeof(bf16), matrix->rows * 2 * sizeof(bf16)};
    return (Place){codes, scales + block * BLOCK * groups * sizeof(bf16), BLOCK * sizeof(bf16)};
}

/* Scales of a group's rows, and zeros of INT4 and INT2: pairs of both, the scale in the low half of a word. */
INLINE void scales_at(Coding coding, const uint8_t *at, __m512 scales[REGISTERS], __m512 zeros[REGISTERS]) {
    for (int r = 0; r < REGISTERS; r++) {
        if (has_pairs(coding)) {
            const __m512i both = _mm512_loadu_si512(at + 64 * r);
            scales[r] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            zeros[r] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000)));
        } else {
            scales[r] = load_bf16((const bf16 *)at + 16 * r), zeros[r] = _mm512_setzero_ps();
        }
    }
}

/* total + a group's sum within a part, scaled. */
INLINE __m512 plus_part(Coding coding, __m512 total, __m512i sum, __m512 scale, __m512 zero, float x_scale, int32_t x_sum) {
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(x_scale)), total);
    return has_offsets(coding) ? _mm512_fmadd_ps(zero, _mm512_set1_ps((float)x_sum * x_scale), total) : total;
}

/* Keeps the compiler from loading it again for each token. */
static inline __m512i in_register(__m512i bytes) {
    __asm__("" : "+v"(bytes));
    return bytes;
}

static inline __m512i four_codes(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, sizeof four);
    return _mm512_set1_epi32(four);
}

static inline void store_rows(const __m512 totals[REGISTERS], bf16 *out) {
    for (int r = 0; r < REGISTERS; r += 2)
        _mm512_storeu_si512(out + 16 * r, (__m512i)_mm512_cvtne2ps_pbh(totals[r + 1], totals[r]));
}

/* Few tokens, a number known when compiling: what is unpacked stays in registers. What comes next is asked for in time: one
 * token is bound by memory. */
INLINE void block_tile(Coding coding, size_t tokens, const Matrix *matrix, Place at, const float *prepared, bf16 *out,
                       size_t stride) {
    const size_t columns = matrix->columns, in_group = matrix->group / X_PART, four = code_bytes(coding, 4);
    const size_t row = has_pairs(coding) ? 2 * sizeof(bf16) : sizeof(bf16); /* bytes of its scales in a group */
    const size_t ahead_of_scales = is_uneven(coding) ? BYTES_AHEAD : GROUPS_AHEAD * at.group;
    const __m512i table = levels_of(coding);
    XIntegers x[BLOCK_TILE];
    __m512 totals[BLOCK_TILE][REGISTERS];
    for (size_t m = 0; m < tokens; m++) {
        x[m] = integers_at(prepared + m * integer_floats(columns), columns);
        for (int r = 0; r < REGISTERS; r++) totals[m][r] = _mm512_setzero_ps();
    }
    for (size_t p = 0; p < columns / X_PART;) {
        __m512 scales[REGISTERS], zeros[REGISTERS];
        scales_at(coding, at.scales, scales, zeros);
        for (int r = 0; r < REGISTERS; r++) _mm_prefetch((const char *)(at.scales + ahead_of_scales + 16 * r * row), _MM_HINT_T0);
        for (size_t k = 0; k < in_group; k++, p++) {
            __m512i sums[BLOCK_TILE][REGISTERS];
            for (size_t m = 0; m < tokens; m++)
                for (int r = 0; r < REGISTERS; r++) sums[m][r] = _mm512_set1_epi32(-above_zero(coding) * x[m].sums[p]);
            for (size_t i = 0; i < FOURS; i++, at.codes += four) {
                __m512i rows[REGISTERS];
                for (size_t ahead = 0; ahead < four; ahead += 64)
                    _mm_prefetch((const char *)(at.codes + BYTES_AHEAD + ahead), _MM_HINT_T1);
                unpack_four(coding, at.codes, table, rows);
                for (size_t m = 0; m < tokens; m++) {
                    const __m512i codes = four_codes(x[m].codes + p * X_PART + 4 * i);
                    for (int r = 0; r < REGISTERS; r++) sums[m][r] = _mm512_dpbusd_epi32(sums[m][r], rows[r], codes);
                }
            }
            for (size_t m = 0; m < tokens; m++)
                for (int r = 0; r < REGISTERS; r++)
                    totals[m][r] = plus_part(coding, totals[m][r], sums[m][r], scales[r], zeros[r], x[m].scales[p], x[m].sums[p]);
        }
        at.scales += at.group;
        if (is_uneven(coding)) at.codes += UNEVEN_SCALES; /* of the next group */
    }
    for (size_t m = 0; m < tokens; m++) store_rows(totals[m], out + m * stride);
}

/* What many tokens share: parts of a block, unpacked, and the scales and zeros of the parts, or of their halves. */
typedef struct {
    __m512i rows[PANEL_PARTS][FOURS][REGISTERS];
    __m512 scales[2 * PANEL_PARTS][REGISTERS], zeros[2 * PANEL_PARTS][REGISTERS];
} BlockPanel;

/* totals (tokens, 64) += the parts of a panel from part `first` on, for a number of tokens known when compiling. The `bytes` from
 * `next` on are prefetched meanwhile, a few lines for each part: of a burst most prefetches are dropped. */
INLINE void panel_tile(Coding coding, size_t halves, size_t tokens, const BlockPanel *panel, size_t first, size_t parts,
                       const float *prepared, size_t columns, const uint8_t *next, size_t bytes, float *totals) {
    XIntegers x[BLOCK_TILE];
    __m512 sums_so_far[BLOCK_TILE][REGISTERS];
    size_t asked = 0;
    for (size_t m = 0; m < tokens; m++) {
        x[m] = integers_at(prepared + m * integer_floats(columns), columns);
        for (int r = 0; r < REGISTERS; r++) sums_so_far[m][r] = _mm512_loadu_ps(totals + m * BLOCK + 16 * r);
    }
    for (size_t n = 0; n < parts * halves; n++) {
        __m512i sums[BLOCK_TILE][REGISTERS];
        const size_t p = n / halves, at = first + p;
        for (; asked < bytes * (n + 1) / (parts * halves); asked += 64) _mm_prefetch((const char *)(next + asked), _MM_HINT_T1);
        for (size_t m = 0; m < tokens; m++)
            for (int r = 0; r < REGISTERS; r++)
                sums[m][r] = _mm512_set1_epi32(-above_zero(coding) * sum_of_codes(&x[m], at, n % halves, halves));
        for (size_t i = n % halves * FOURS / halves, end = i + FOURS / halves; i < end; i++) {
            __m512i rows[REGISTERS];
            for (int r = 0; r < REGISTERS; r++) rows[r] = in_register(panel->rows[p][i][r]);
            for (size_t m = 0; m < tokens; m++) {
                const __m512i codes = four_codes(x[m].codes + at * X_PART + 4 * i);
                for (int r = 0; r < REGISTERS; r++) sums[m][r] = _mm512_dpbusd_epi32(sums[m][r], rows[r], codes);
            }
        }
        for (size_t m = 0; m < tokens; m++)
            for (int r = 0; r < REGISTERS; r++)
                sums_so_far[m][r] = plus_part(coding, sums_so_far[m][r], sums[m][r], panel->scales[n][r], panel->zeros[n][r],
                                              x[m].scales[at], sum_of_codes(&x[m], at, n % halves, halves));
    }
    for (size_t m = 0; m < tokens; m++)
        for (int r = 0; r < REGISTERS; r++) _mm512_storeu_ps(totals + m * BLOCK + 16 * r, sums_so_far[m][r]);
}

/* totals (tokens, 64) += the same, for any number of tokens. */
INLINE void parts_times(Coding coding, size_t halves, const BlockPanel *panel, size_t first, size_t parts, const float *prepared,
                        size_t tokens, size_t columns, const uint8_t *next, size_t bytes, float *totals) {
    for (size_t tiles = (tokens + BLOCK_TILE - 1) / BLOCK_TILE, some; tiles; tiles--, tokens -= some) {
        some = (tokens + tiles - 1) / tiles;
        const size_t share = bytes / tiles;
        switch (some) {
            case 1: panel_tile(coding, halves, 1, panel, first, parts, prepared, columns, next, share, totals); break;
            case 2: panel_tile(coding, halves, 2, panel, first, parts, prepared, columns, next, share, totals); break;
            case 3: panel_tile(coding, halves, 3, panel, first, parts, prepared, columns, next, share, totals); break;
        }
        prepared += some * integer_floats(columns), totals += some * BLOCK, next += share, bytes -= share;
    }
}

/* At most PANEL_TOKENS tokens. */
INLINE void block_panels(Coding coding, const Matrix *matrix, Place at, const float *prepared, size_t tokens, bf16 *out,
                         size_t stride) {
    const size_t columns = matrix->columns, in_group = matrix->group / X_PART;
    const __m512i table = levels_of(coding);
    float totals[PANEL_TOKENS * BLOCK] __attribute__((aligned(64)));
    BlockPanel panel;
    memset(totals, 0, tokens * BLOCK * sizeof *totals);
    for (size_t first = 0, parts; first < columns / X_PART; first += parts) {
        parts = columns / X_PART - first < PANEL_PARTS ? columns / X_PART - first : PANEL_PARTS;
        for (size_t p = 0; p < parts; p++) {
            for (size_t i = 0; i < FOURS; i++, at.codes += code_bytes(coding, 4)) unpack_four(coding, at.codes, table, panel.rows[p][i]);
            scales_at(coding, at.scales, panel.scales[p], panel.zeros[p]);
            if ((first + p + 1) % in_group) continue;
            at.scales += at.group;
            if (is_uneven(coding)) at.codes += UNEVEN_SCALES;
        }
        parts_times(coding, 1, &panel, first, parts, prepared, tokens, columns, at.codes, parts * code_bytes(coding, X_PART), totals);
    }
    for (size_t m = 0; m < tokens; m++) store_rows((const __m512 *)(totals + m * BLOCK), out + m * stride);
}

/* Up to how many tokens it costs less to unpack a block again for each few of them than to put it away. */
INLINE size_t tiled_tokens(Coding coding) {
    return coding == INT4 ? 24 : coding == INT2 || coding == INT6 || coding == NL4 ? 8 : BLOCK_TILE;
}

INLINE void block_times(Coding coding, const Matrix *matrix, size_t block, const float *prepared,
                        size_t tokens, bf16 *out, size_t stride) {
    const Place at = place_of(matrix, block);
    if (tokens <= tiled_tokens(coding)) {
        for (size_t tiles = (tokens + BLOCK_TILE - 1) / BLOCK_TILE, some; tiles; tiles--, tokens -= some) {
            some = (tokens + tiles - 1) / tiles;
            switch (some) {
                case 1: block_tile(coding, 1, matrix, at, prepared, out, stride); break;
                case 2: block_tile(coding, 2, matrix, at, prepared, out, stride); break;
                case 3: block_tile(coding, 3, matrix, at, prepared, out, stride); break;
            }
            prepared += some * integer_floats(matrix->columns), out += some * stride;
        }
        return;
    }
    for (size_t calls = (tokens + PANEL_TOKENS - 1) / PANEL_TOKENS; calls; calls--) {
        const size_t some = (tokens + calls - 1) / calls;
        block_panels(coding, matrix, at, prepared, some, out, stride);
        prepared += some * integer_floats(matrix->columns), out += some * stride, tokens -= some;
    }
}

#endif
