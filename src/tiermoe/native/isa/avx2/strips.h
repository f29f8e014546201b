/* The blocks of GGUF files and published codes of 4 bits (../strips.h) as words, 32 columns at a time,
 * and the scales of their groups: integers where a block's 256 columns share a factor. */
#ifndef TIERMOE_ISA_AVX2_STRIPS_H
#define TIERMOE_ISA_AVX2_STRIPS_H

#include "../../matrix.h"
#include "../strips.h"
#include "../x86_grids.h"
#include "integers.h"
#include "../simd.h"

enum {
    PART = 32, /* columns unpacked at a time */
    PARTS = STRIP / PART,
};

/* Words of the columns at even places of a part, and of the others. A product's lane l is of columns 4 l .. 4 l + 3. */
typedef struct {
    __m256i even, odd;
} Part;

/* What the groups of a strip of a row are multiplied by, and what is added to them. */
typedef struct {
    __m256i integers[2];          /* where scales_whole(coding), to be multiplied by `whole`: eight groups each; where lanes_keep(coding)
                                   * words, twice each, of the even groups and of the odd ones */
    float whole;
    Eight lanes;    /* where lanes_are_groups(coding, group) */
    StripScales of; /* elsewhere */
    Eight offsets[2];
} Groups;

/* Whether scales are integers that a block's columns share a factor of. */
static inline int scales_whole(Coding coding) { return block_columns(coding) == STRIP; }

/* Whether each lane of a strip's sums is of one pair of groups: parts 0 .. 3 hold columns of the even groups, a group a lane,
 * 4 .. 7 of the odd ones. So scales come after sums. */
static inline int lanes_keep(Coding coding) { return coding == Q4_K || coding == Q5_K; }

/* Registers of offsets. */
static inline int offset_registers(Coding coding) { return has_offsets(coding) ? coding == Q2_K ? 2 : 1 : 0; }

static inline int is_signed(Coding coding) { return !has_offsets(coding); }

static inline __m256i bytes_from(const uint8_t *at) { return _mm256_loadu_si256((const void *)at); }
static inline __m256i masked(__m256i bytes, int mask) { return _mm256_and_si256(bytes, _mm256_set1_epi8((char)mask)); }
static inline __m256i less(__m256i bytes, int middle) { return _mm256_sub_epi8(bytes, _mm256_set1_epi8((char)middle)); }

/* The low nibbles of 16 bytes, then the high ones. */
static inline __m256i nibbles_at(const uint8_t *at) {
    const __m128i bytes = _mm_loadu_si128((const void *)at);
    return masked(_mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1), 15);
}

/* The two nibbles of each of 16 bytes after each other. */
static inline __m256i nibble_pairs(const uint8_t *at) {
    const __m128i bytes = _mm_loadu_si128((const void *)at), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, mask), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(low, high)), _mm_unpackhi_epi8(low, high), 1);
}

static inline __m256i looked_up(const int8_t table[16], __m256i nibbles) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const void *)table)), nibbles);
}

/* All bits of each byte whose bit of 32 is set. */
static inline __m256i bytes_of_bits(uint32_t bits) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}

/* A type's functions stand together. part: the codes of part p = 4 half + quarter of a strip, a byte each, in order. groups: where
 * a block's 256 columns share a factor, that factor, and the scales of the groups as integers. */

static inline __m256i high_half(__m128i bytes) { return _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)); }

/* Sixteen scales, bytes, times a factor. */
static inline void sixteen_groups(__m128i bytes, const uint8_t *factor, Groups *to) {
    to->whole = from_half(factor), to->integers[0] = _mm256_cvtepi8_epi32(bytes), to->integers[1] = high_half(bytes);
}

/* The 2 bits of each byte from bit `low` on, in bits 4 and 5. */
static inline __m256i two_above(__m256i bytes, int low) {
    return masked(low < 4 ? _mm256_slli_epi16(bytes, 4 - low) : _mm256_srli_epi16(bytes, low - 4), 0x30);
}

/* Two bits of each of 32 bytes. */
static inline __m256i twos_at(const uint8_t *at, int quarter) { return masked(_mm256_srli_epi16(bytes_from(at), 2 * quarter), 3); }

INLINE Part words_of_bytes(Coding coding, __m256i bytes) {
    if (is_signed(coding)) return (Part){_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
    return (Part){_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(bytes, 8)};
}

/* Q5_0 and Q5_1 */

/* 16 in each byte whose bit of 32 is set. */
static inline __m256i fifth_bits(const uint8_t *at) { return masked(bytes_of_bits(four_bytes(at)), 16); }

INLINE __m256i q5_0_part(const block_q5_0 *block) {
    return less(_mm256_or_si256(nibbles_at(block->codes), fifth_bits(block->fifth)), 16);
}

INLINE __m256i q5_1_part(const block_q5_1 *block) {
    return _mm256_or_si256(nibbles_at(block->codes), fifth_bits(block->fifth));
}

/* Q2_K */

INLINE __m256i q2_k_part(const block_q2_k *block, size_t half, int quarter) {
    return twos_at(block->codes + 32 * half, quarter);
}

static inline Eight minima(__m256i integers, const uint8_t *half) {
    return _mm256_mul_ps(_mm256_set1_ps(-from_half(half)), _mm256_cvtepi32_ps(integers));
}

static inline void q2_k_groups(const block_q2_k *block, Groups *to) {
    const __m128i least = q2_k_integers(block, 1);
    to->offsets[0] = minima(_mm256_cvtepi8_epi32(least), block->m), to->offsets[1] = minima(high_half(least), block->m);
    sixteen_groups(q2_k_integers(block, 0), block->d, to);
}

/* Q3_K */

INLINE __m256i q3_k_part(const block_q3_k *block, size_t half, int quarter) {
    const __m256i high = masked(_mm256_srli_epi16(bytes_from(block->high), (int)(4 * half) + quarter), 1);
    return less(_mm256_or_si256(twos_at(block->codes + 32 * half, quarter), _mm256_slli_epi16(high, 2)), 4);
}

static inline void q3_k_groups(const block_q3_k *block, Groups *to) { sixteen_groups(q3_k_integers(block), block->d, to); }

/* Q4_K and Q5_K: lanes_keep(coding). */

/* The codes of a strip where lanes_keep(coding). Bytes 4 t + b of half h of what holds groups 2 j and 2 j + 1, in their low and
 * high halves, come to byte b of lane 4 h + j of part t and of part 4 + t. */
INLINE void strip_bytes(Coding coding, const uint8_t *at, __m256i parts[PARTS]) {
    const uint8_t *nibbles = coding == Q5_K ? AT(q5_k, at)->codes : AT(q4_k, at)->codes;
    __m256i four[4], fifth = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) four[j] = bytes_from(nibbles + 32 * j);
    if (coding == Q5_K) fifth = bytes_from(AT(q5_k, at)->fifth);
    transpose(four);
    for (int t = 0; t < 4; t++) {
        parts[t] = masked(four[t], 15), parts[4 + t] = masked(_mm256_srli_epi16(four[t], 4), 15);
        if (coding == Q4_K) continue;
        const __m256i all = _mm256_shuffle_epi8(fifth, _mm256_set1_epi32(0x03020100 + 0x04040404 * t));
        const __m256i pairs = _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
        parts[t] = _mm256_or_si256(parts[t], masked(_mm256_slli_epi16(pairs, 4), 16));
        parts[4 + t] = _mm256_or_si256(parts[4 + t], masked(_mm256_slli_epi16(pairs, 3), 16));
    }
}

/* Scales 4 .. 7, then 0 .. 3, then the eight minima, bytes. */
static inline __m128i k_bytes(__m128i block) {
    const __m128i low = _mm_and_si128(block, _mm_setr_epi32(0, 0x3F3F3F3F, 0x3F3F3F3F, 0));
    const __m128i twos = _mm_srli_epi16(_mm_shuffle_epi32(block, 0x81), 2); /* scales of dword 1, minima of dword 2 */
    const __m128i nibbles = _mm_srlv_epi32(_mm_shuffle_epi32(block, 0xFF), _mm_setr_epi32(0, 0, 0, 4));
    const __m128i high = _mm_or_si128(_mm_and_si128(twos, _mm_setr_epi32(0x30303030, 0, 0, 0x30303030)),
                                      _mm_and_si128(nibbles, _mm_setr_epi32(0x0F0F0F0F, 0, 0, 0x0F0F0F0F)));
    return _mm_or_si128(low, high);
}

/* Of a block of Q4_K or Q5_K. */
INLINE void k_groups(const uint8_t *at, Groups *to) {
    const __m128i block = _mm_loadu_si128((const void *)at), bytes = k_bytes(block);
    const __m128i even = _mm_setr_epi8(4, -1, 4, -1, 6, -1, 6, -1, 0, -1, 0, -1, 2, -1, 2, -1);
    const __m128i odd = _mm_setr_epi8(5, -1, 5, -1, 7, -1, 7, -1, 1, -1, 1, -1, 3, -1, 3, -1);
    const __m128 halves = _mm_cvtph_ps(block);
    const Eight least = _mm256_broadcastss_ps(_mm_xor_ps(_mm_movehdup_ps(halves), _mm_set1_ps(-0.0f)));
    to->integers[0] = _mm256_broadcastsi128_si256(_mm_shuffle_epi8(bytes, even));
    to->integers[1] = _mm256_broadcastsi128_si256(_mm_shuffle_epi8(bytes, odd));
    to->whole = _mm_cvtss_f32(halves), to->offsets[0] = _mm256_mul_ps(least, _mm256_cvtepi32_ps(high_half(bytes)));
}

/* Q6_K: codes plus 32; of its scales the even groups of each half come before the odd ones. */

INLINE __m256i q6_k_part(const block_q6_k *block, size_t half, int quarter) {
    const __m256i low = masked(_mm256_srli_epi16(bytes_from(block->codes + 64 * half + quarter % 2 * 32), quarter / 2 * 4), 15);
    return _mm256_or_si256(low, two_above(bytes_from(block->high + 32 * half), 2 * quarter));
}

/* The codes, plus 32, of half a strip: group 2 q + h of them comes to lane 4 h + q. */
INLINE void half_bytes(const uint8_t *at, size_t half, __m256i parts[4]) {
    for (int q = 0; q < 4; q++) parts[q] = q6_k_part(AT(q6_k, at), half, q);
    transpose(parts);
}

static inline void q6_k_groups(const block_q6_k *block, Groups *to) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    sixteen_groups(_mm_shuffle_epi8(_mm_loadu_si128((const void *)block->scales), order), block->d, to);
}

/* IQ4_XS */

INLINE __m256i iq4_xs_part(const block_iq4_xs *block, size_t p) {
    return looked_up(IQ4_CODES, nibbles_at(block->codes + 16 * p));
}

static inline void iq4_xs_groups(const block_iq4_xs *block, Groups *to) {
    uint16_t high;
    int low;
    memcpy(&high, block->scales_high, sizeof high), memcpy(&low, block->scales_low, sizeof low);
    const __m256i twos = _mm256_srlv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i above = _mm256_slli_epi32(_mm256_and_si256(twos, _mm256_set1_epi32(3)), 4);
    const __m256i both = _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi32(15)), above);
    to->integers[0] = _mm256_sub_epi32(both, _mm256_set1_epi32(32)), to->whole = from_half(block->d);
}

/* TQ1_0 and TQ2_0 */

/* Bytes times 3^n, as tq1_0_code takes them apart. */
static inline __m256i tq1_0_digit(__m256i bytes) {
    const __m256i one = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8(86)), bytes);
    const __m256i two = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, _mm256_set1_epi8((char)171)), bytes);
    return _mm256_sub_epi8(_mm256_set1_epi8(-1), _mm256_add_epi8(one, two));
}

static inline __m256i thrice(__m256i bytes, int times) {
    for (int n = 0; n < times; n++) bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes));
    return bytes;
}

/* 32 columns of each of five digits of the first bytes, 16 of each of the next, then 4 of each of four. */
INLINE __m256i tq1_0_part(const block_tq1_0 *block, size_t number) {
    const int p = (int)number;
    const __m128i middle = _mm_loadu_si128((const void *)(block->codes + 32)), last = _mm_set1_epi32((int)four_bytes(block->last));
    const __m256i twice = _mm256_broadcastsi128_si256(middle), ones = _mm256_set_m128i(_mm_set1_epi8(-1), _mm_setzero_si128());
    if (p < 5) return tq1_0_digit(thrice(bytes_from(block->codes), p));
    if (p < 7) {
        const __m256i first = thrice(twice, 2 * (p - 5));
        return tq1_0_digit(_mm256_blendv_epi8(first, thrice(first, 1), ones));
    }
    const __m256i words = _mm256_broadcastsi128_si256(last), once = thrice(words, 1), two = thrice(words, 2);
    const __m256i low = _mm256_blend_epi32(words, once, 0x20), high = _mm256_blend_epi32(two, thrice(words, 3), 0x80);
    return tq1_0_digit(_mm256_blend_epi32(thrice(twice, 4), _mm256_blend_epi32(low, high, 0xC0), 0xF0));
}

INLINE __m256i tq2_0_part(const block_tq2_0 *block, size_t half, int quarter) {
    return less(twos_at(block->codes + 32 * half, quarter), 1);
}

static inline void tq_groups(const uint8_t *d, Groups *to) { sixteen_groups(_mm_set1_epi8(1), d, to); }

/* IQ1, IQ2 and IQ3, whose codes are places in a grid (../x86_grids.h). */

/* A strip whose codes are places in a grid, as bytes of `room`; of other types the strip itself. */
INLINE const uint8_t *looked_up_strip(Coding coding, const uint8_t *at, uint8_t room[STRIP]) {
    if (!is_grid(coding)) return at;
    GridStrip strip;
    grid_strip(coding, at, &strip);
    for (size_t p = 0; p < PARTS; p++) {
        const __m256i signs = bytes_of_bits(four_bytes(strip.signs + 4 * p)), sizes = grid_sizes(coding, at, &strip, p);
        const __m256i bytes = coding <= IQ1_M ? _mm256_add_epi8(sizes, _mm256_or_si256(signs, _mm256_set1_epi8(1)))
                                              : _mm256_sub_epi8(_mm256_xor_si256(sizes, signs), signs);
        _mm256_storeu_si256((void *)(room + PART * p), bytes);
    }
    return room;
}

INLINE void grid_groups(Coding coding, const uint8_t *at, Groups *to) {
    const __m128i bytes = grid_scale_bytes(coding, at);
    to->whole = grid_factor(coding, at), to->integers[0] = _mm256_cvtepi8_epi32(bytes), to->integers[1] = high_half(bytes);
}

/* All types. The codes of part 4 half + quarter of a strip that begins at `at`, or at its bytes, a byte each, in order. */
INLINE __m256i part_bytes(Coding coding, const uint8_t *at, size_t half, int quarter) {
    const size_t p = 4 * half + (size_t)quarter;
    const uint8_t *block = at + p * block_bytes(coding); /* where a block is a part */
    switch (coding) {
        case Q8_0: return bytes_from(AT(q8_0, block)->codes);
        case Q4_0: return less(nibbles_at(AT(q4_0, block)->codes), 8);
        case Q4_1: return nibbles_at(AT(q4_1, block)->codes);
        case Q5_0: return q5_0_part(AT(q5_0, block));
        case Q5_1: return q5_1_part(AT(q5_1, block));
        case IQ4_NL: return looked_up(IQ4_CODES, nibbles_at(AT(iq4_nl, block)->codes));
        case MXFP4: return looked_up(FP4_CODES, nibbles_at(AT(mxfp4, block)->codes));
        case E2M1: return looked_up(FP4_CODES, nibble_pairs(block));
        case S4: return less(nibble_pairs(block), 8);
        case U4: return nibble_pairs(block);
        case Q2_K: return q2_k_part(AT(q2_k, at), half, quarter);
        case Q3_K: return q3_k_part(AT(q3_k, at), half, quarter);
        case Q6_K: return q6_k_part(AT(q6_k, at), half, quarter);
        case IQ4_XS: return iq4_xs_part(AT(iq4_xs, at), p);
        case TQ1_0: return tq1_0_part(AT(tq1_0, at), p);
        case TQ2_0: return tq2_0_part(AT(tq2_0, at), half, quarter);
        default: return bytes_from(at + PART * p); /* of looked_up_strip */
    }
}

INLINE Part part_of(Coding coding, const uint8_t *at, size_t half, int quarter) {
    return words_of_bytes(coding, part_bytes(coding, at, half, quarter));
}

static inline __m256i part_times(const Part *a, const Part *b) {
    return plus_products(_mm256_madd_epi16(a->even, b->even), a->odd, b->odd);
}

/* Of types whose scales are integers. */
INLINE void whole_scales(Coding coding, const uint8_t *at, Groups *to) {
    switch (coding) {
        case Q4_K: case Q5_K: k_groups(at, to); return;
        case Q2_K: q2_k_groups(AT(q2_k, at), to); return;
        case Q3_K: q3_k_groups(AT(q3_k, at), to); return;
        case Q6_K: q6_k_groups(AT(q6_k, at), to); return;
        case TQ1_0: tq_groups(AT(tq1_0, at)->d, to); return;
        case TQ2_0: tq_groups(AT(tq2_0, at)->d, to); return;
        case IQ4_XS: iq4_xs_groups(AT(iq4_xs, at), to); return;
        default: grid_groups(coding, at, to);
    }
}

/* Of the strip that begins at `at`, and at a column of a row of the matrix. */
INLINE void groups_from(Coding coding, const Matrix *matrix, size_t row, size_t column, const uint8_t *at, size_t width,
                        Groups *to) {
    if (scales_whole(coding)) {
        whole_scales(coding, at, to);
        return;
    }
    if (has_offsets(coding) && width < STRIP) memset(to->of.offsets, 0, sizeof to->of.offsets);
    if (coding >= FIRST_PUBLISHED)
        published_scales(matrix, row, column, width, &to->of);
    else
        strip_scales(coding, at, width, &to->of);
    if (has_offsets(coding)) to->offsets[0] = eight_from(to->of.offsets);
}

/* The scale of each lane of a part, as an integer. */
static inline __m256i whole_lanes(size_t group, const Groups *groups, size_t half, int quarter) {
    if (group == 32) return _mm256_permutevar8x32_epi32(groups->integers[0], _mm256_set1_epi32((int)(4 * half) + quarter));
    const int first = 2 * quarter;
    return _mm256_permutevar8x32_epi32(groups->integers[half], _mm256_setr_epi32(first, first, first, first, first + 1, first + 1,
                                                                                 first + 1, first + 1));
}

static inline Eight lanes_of(size_t group, const Groups *groups, size_t part) {
    if (group == 32) return eight_all(groups->of.scales[part]);
    return _mm256_set_m128(_mm_set1_ps(groups->of.scales[2 * part + 1]), _mm_set1_ps(groups->of.scales[2 * part]));
}

/* What the lanes of a strip begin with. */
INLINE Eight lanes_begin(int registers, const Eight offsets[2], const float *sums) {
    if (!registers) return eight_zeros();
    const Eight first = eight_times(offsets[0], eight_from(sums));
    return registers == 1 ? first : eight_times_plus(offsets[1], eight_from(sums + 8), first);
}

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

INLINE __m128i group_nibbles(Coding coding, const uint8_t *at, size_t g, size_t groups) {
    const size_t each = block_bytes(coding), before = each - NIBBLES;
    return _mm_loadu_si128((const void *)(at + group_or_last(g, groups) * each + before));
}

/* Bytes 4 t .. 4 t + 3 of group g to lane g of the t-th. */
INLINE void lane_nibbles(Coding coding, const uint8_t *at, size_t groups, __m256i four[4]) {
    for (size_t j = 0; j < 4; j++)
        four[j] = _mm256_set_m128i(group_nibbles(coding, at, 4 + j, groups), group_nibbles(coding, at, j, groups));
    transpose(four);
}

/* What is less than each code is worth by FP4_LEAST or MIDDLE, or what it is worth: a byte that is not negative. */
INLINE __m256i unsigned_codes(Coding coding, __m256i nibbles) {
    if (coding != MXFP4 && coding != E2M1) return nibbles;
    const __m128i codes = _mm_load_si128((const void *)FP4_CODES), above = _mm_add_epi8(codes, _mm_set1_epi8(FP4_LEAST));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(above), nibbles);
}

static inline int code_above(Coding coding) {
    return coding == MXFP4 || coding == E2M1 ? FP4_LEAST : coding == Q4_0 || coding == S4 ? MIDDLE : 0;
}

INLINE __m256i signed_codes(Coding coding, __m256i nibbles) {
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
INLINE __m128i lane_bytes(const uint8_t *at, size_t each, size_t groups) {
    if (each == 1 && groups == PARTS) return _mm_loadl_epi64((const void *)at);
#define BYTE(g) (char)at[each * group_or_last(g, groups)]
    return _mm_setr_epi8(BYTE(0), BYTE(1), BYTE(2), BYTE(3), BYTE(4), BYTE(5), BYTE(6), BYTE(7), 0, 0, 0, 0, 0, 0, 0, 0);
#undef BYTE
}

/* float16 that lie `each` apart. */
INLINE Eight lane_halves(const uint8_t *at, size_t each, size_t groups) {
#define WORD(g) word_at(at + each * group_or_last(g, groups))
    return _mm256_cvtph_ps(_mm_setr_epi16(WORD(0), WORD(1), WORD(2), WORD(3), WORD(4), WORD(5), WORD(6), WORD(7)));
#undef WORD
}

INLINE void block_scales(Coding coding, const uint8_t *at, size_t groups, Groups *to) {
    const size_t each = block_bytes(coding);
    to->lanes = coding == MXFP4 ? mxfp4_scales(lane_bytes(at, each, groups)) : lane_halves(AT(q4_0, at)->d, each, groups);
    if (has_offsets(coding)) to->offsets[0] = lane_halves(AT(q4_1, at)->m, each, groups);
}

/* Scales that lie in an array of their own. */
INLINE void array_scales(Coding coding, const Matrix *matrix, size_t row, size_t column, size_t groups, Groups *to) {
    const size_t shared = matrix->scale_columns, first = published_row(matrix, row) + quotient(column, shared);
    const uint8_t *zeros = matrix->zeros_or_factors; /* of U4 */
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
INLINE void lane_groups(Coding coding, const Matrix *matrix, size_t row, size_t column, const uint8_t *at, size_t groups,
                        Groups *to) {
    if (coding >= FIRST_PUBLISHED)
        array_scales(coding, matrix, row, column, groups, to);
    else
        block_scales(coding, at, groups, to);
}

/* The codes of a strip, words. */
INLINE void lane_parts(Coding coding, const uint8_t *at, size_t groups, Part parts[PARTS]) {
    __m256i four[4];
    lane_nibbles(coding, at, groups, four);
    for (int t = 0; t < 4; t++) {
        parts[t] = words_of_bytes(coding, signed_codes(coding, masked(four[t], 15)));
        parts[4 + t] = words_of_bytes(coding, signed_codes(coding, masked(_mm256_srli_epi16(four[t], 4), 15)));
    }
}

#endif
