/* Scales of the groups of a strip of LANE_ROWS rows, a lane for each row, on x86-64 processors with AVX2 or more: of types of 256
 * columns to a block, whose sixteen bytes of scales are taken apart by lanes. */
#ifndef TIERMOE_ISA_LANE_GROUPS_H
#define TIERMOE_ISA_LANE_GROUPS_H

#include "x86_strips.h"

#if defined(SIMD_AVX512)
enum { LANE_ROWS = 16 };
#else
enum { LANE_ROWS = 8 };
#endif

typedef int32_t LaneWords __attribute__((vector_size(4 * LANE_ROWS), may_alias)); /* of registers, too */
typedef float LaneFloats __attribute__((vector_size(4 * LANE_ROWS)));

/* The float16 in the lower half of each lane. */
static inline LaneFloats lanes_of_halves(LaneWords lanes) {
#if defined(SIMD_AVX512)
    return (LaneFloats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)lanes));
#else
    const __m256i words = _mm256_packus_epi32((__m256i)(lanes & 0xFFFF), _mm256_setzero_si256());
    return (LaneFloats)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0xD8)));
#endif
}

/* A strip's groups: what they are multiplied by, and what is added to them. */
typedef struct {
    LaneFloats scales[STRIP_GROUPS], offsets[STRIP_GROUPS];
} LaneGroups;

/* What the bytes of rows are multiplied by. */
typedef struct {
    float scales[LANE_ROWS], offsets[LANE_ROWS];
} LaneFactors;

INLINE int by_bytes(Coding coding) { return coding < FIRST_PUBLISHED && block_columns(coding) == STRIP; }

/* Sixteen bytes of the strip of row r; and its factors, where they are not among them. */
INLINE __m128i group_bytes(Coding coding, const uint8_t *at, size_t r, LaneFactors *factors) {
    if (coding != Q4_K && coding != Q5_K) factors->scales[r] = scale_factor(coding, at);
    if (coding == Q2_K) factors->offsets[r] = -from_half(AT(q2_k, at)->m);
    return scale_bytes(coding, at);
}

/* to[g] = factors * signed byte g of each lane's */
INLINE void bytes_times(LaneFloats factors, const LaneWords *fours, size_t count, LaneFloats *to) {
    for (size_t g = 0; g < count; g++)
        to[g] = factors * __builtin_convertvector(fours[g / 4] << (24 - 8 * (int)(g % 4)) >> 24, LaneFloats);
}

/* fours: sixteen bytes of each lane. */
INLINE void groups_of_bytes(Coding coding, size_t group, const LaneWords fours[4], const LaneFactors *factors, LaneGroups *to) {
    LaneFloats scale, offset;
    if (coding == Q4_K || coding == Q5_K) {
        const LaneWords scales[] = {fours[1] & 0x3F3F3F3F, (fours[3] & 0x0F0F0F0F) | (fours[1] >> 2 & 0x30303030)};
        const LaneWords minima[] = {fours[2] & 0x3F3F3F3F, (fours[3] >> 4 & 0x0F0F0F0F) | (fours[2] >> 2 & 0x30303030)};
        bytes_times(lanes_of_halves(fours[0]), scales, 8, to->scales);
        bytes_times(-lanes_of_halves(fours[0] >> 16), minima, 8, to->offsets);
        return;
    }
    memcpy(&scale, factors->scales, sizeof scale), memcpy(&offset, factors->offsets, sizeof offset);
    if (coding == Q2_K) {
        LaneWords low[4], high[4];
        for (int i = 0; i < 4; i++) low[i] = fours[i] & 0x0F0F0F0F, high[i] = fours[i] >> 4 & 0x0F0F0F0F;
        bytes_times(scale, low, 16, to->scales), bytes_times(offset, high, 16, to->offsets);
    } else {
        bytes_times(scale, fours, STRIP / group, to->scales);
    }
}

#endif
