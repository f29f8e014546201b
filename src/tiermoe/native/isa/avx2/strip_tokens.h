/* Tokens for products with the blocks of GGUF files and with published codes of 4 bits, on integers.
 *
 * The columns of a token's strip become integers of 15 bits and a sign times a power of two: what is at least about 1/128 of
 * the largest stays as it is, the others are rounded by at most about 2^-15 of it. Products of 32 columns are summed in 8 lanes
 * of 32 bits, exactly: so the order is of no account. Types whose blocks have 256 columns have integers for scales, too, and
 * 128 columns are summed before they become floats, of Q4_K and Q5_K all 256. Strips are added up lane by lane, then the
 * lanes: for one token as for many. */
#ifndef TIERMOE_ISA_AVX2_STRIP_TOKENS_H
#define TIERMOE_ISA_AVX2_STRIP_TOKENS_H

#include <string.h>

#include "../gguf_products.h"
#include "strips.h"

enum {
    PARTS_SUMMED = 4,  /* times their scales, as integers: at most 128 * 32 * 32512 * 16 in a lane; all
                        * PARTS where lanes_keep(coding), at most 63 * 31 * 32512 * 32, or lanes are groups, 127 * 32512 * 32 */
    ALONE_AHEAD = 4096, /* bytes that are asked for ahead of their use */
};

/* A strip of a token: integers times `scale`, beside the sums of its groups over the scale. */
typedef struct {
    Part parts[PARTS];
    union {
        float sums[STRIP_GROUPS];
        __m256i above[2]; /* of Q6_K: 32 times the sums of the lanes of each half */
    };
    float scale;
} Whole;
enum { WHOLE_FLOATS = sizeof(Whole) / sizeof(float) };

INLINE Eight add_lanes(__m256i sums, Eight scale, Eight lanes) {
    return eight_times_plus(_mm256_cvtepi32_ps(sums), scale, lanes);
}

/* sums: of the strip's groups, of which there are so many. */
static void to_whole(const bf16 *x, size_t width, const float *sums, size_t groups, Whole *to) {
    const Place place = place_of(x, width);
    const Eight factor = eight_all(place.place);
    for (size_t p = 0; p < width / PART; p++, x += PART) {
        const Columns of = load_columns(x);
        to->parts[p] = (Part){in_order(to_words(of.even.low, of.even.high, factor)), in_order(to_words(of.odd.low, of.odd.high, factor))};
    }
    to->scale = place.unit;
    for (size_t g = 0; g < STRIP_GROUPS; g++) to->sums[g] = g < groups ? sums[g] * place.place : 0;
}

/* Words of 16 bits as bytes: signed ones times 256, and what is left of them, signed. */
static inline Part to_bytes(Part words) {
    const __m256i half = _mm256_set1_epi16(128), low = _mm256_set1_epi16(0xFF);
    const __m256i even = _mm256_add_epi16(words.even, half), odd = _mm256_add_epi16(words.odd, half);
    return (Part){_mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_andnot_si256(low, odd)),
                  _mm256_or_si256(_mm256_and_si256(words.even, low), _mm256_slli_epi16(words.odd, 8))};
}

static inline size_t strips_of(size_t columns) { return (columns + STRIP - 1) / STRIP; }

/* Brings columns to where they are when lanes_keep(coding), and in Q6_K. */
static void keep_lanes(int q6_k, Whole *x) {
    __m256i even[2][4], odd[2][4]; /* of even groups, and of odd ones; in Q6_K of the halves */
    for (int p = 0; p < PARTS; p++) {
        const int set = q6_k ? p / 4 : p % 2, at = q6_k ? p % 4 : p / 2;
        even[set][at] = x->parts[p].even, odd[set][at] = x->parts[p].odd;
    }
    for (int g = 0; g < 2; g++) {
        const __m256i all = _mm256_set1_epi16(32);
        transpose(even[g]), transpose(odd[g]);
        __m256i above = _mm256_setzero_si256();
        for (int t = 0; t < 4; t++) {
            const Part words = {even[g][t], odd[g][t]};
            x->parts[4 * g + t] = words;
            above = plus_products(plus_products(above, words.even, all), words.odd, all);
        }
        if (q6_k) x->above[g] = above;
    }
}

/* Eight registers of dwords: that l of register g to lane g of the l-th. */
static inline void transpose_eight(__m256i v[PARTS]) {
    transpose(v), transpose(v + 4);
    for (int t = 0; t < 4; t++) {
        const __m256i first = v[t], last = v[4 + t];
        v[t] = _mm256_permute2x128_si256(first, last, 0x20), v[4 + t] = _mm256_permute2x128_si256(first, last, 0x31);
    }
}

/* Brings columns to where they are when lanes are groups; those of groups that the strip does not have are zeros. */
static void groups_to_lanes(int adjoin, size_t groups, Whole *x) {
    __m256i even[PARTS], odd[PARTS];
    for (size_t g = 0; g < PARTS; g++) {
        const Part part = g < groups ? x->parts[g] : (Part){_mm256_setzero_si256(), _mm256_setzero_si256()};
        even[g] = adjoin ? _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(part.even, 0xD8), 0xD8) : part.even;
        odd[g] = adjoin ? _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(part.odd, 0xD8), 0xD8) : part.odd;
    }
    transpose_eight(even), transpose_eight(odd);
    for (int t = 0; t < 4; t++) { /* low nibbles are of even columns where nibbles adjoin, of the first 16 elsewhere */
        x->parts[t] = adjoin ? (Part){even[2 * t], even[2 * t + 1]} : (Part){even[t], odd[t]};
        x->parts[4 + t] = adjoin ? (Part){odd[2 * t], odd[2 * t + 1]} : (Part){even[4 + t], odd[4 + t]};
    }
}

/* Brings the columns of a strip of so many groups to where they are multiplied. */
static void move_columns(Coding coding, size_t group, size_t groups, Whole *x) {
    if (lanes_keep(coding) || coding == Q6_K) keep_lanes(coding == Q6_K, x);
    if (lanes_are_groups(coding, group)) groups_to_lanes(nibbles_adjoin(coding), groups, x);
}

/* Where a strip of a row of the block lies: the last row's again where there are fewer. */
static inline size_t row_or_last(const Rows *block, size_t r) { return r < block->rows ? r : block->rows - 1; }

#endif
