/* Attention's own ways with pairs of bfloat16 (../attention.h): what a step of a chain takes, and values weighted by the softened
 * scores. */
#ifndef TIERMOE_ISA_AVX512_ATTENTION_H
#define TIERMOE_ISA_AVX512_ATTENTION_H

#include "../../attention_tiles.h"
#include "../simd.h"

/* Columns 0 .. 15 and 16 .. 31 of two registers that hold four columns of each eight. */
static inline void store_columns(__m512 low, __m512 high, float *out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(out + LANES, _mm512_permutex2var_ps(low, second, high));
}

/* results[q * stride + c] = the sum of weights[q][i] times column c of value i, for `width` columns from `begin`
 * on: two positions at a time, whose columns become pairs. `keys`: of the next tile, to be fetched; NULL: are. */
INLINE void weigh(size_t count, size_t width, const bf16 *const *values, size_t positions, const bf16 (*weights)[TILE],
                  size_t begin, float *results, size_t stride, const Ahead *keys) {
    __m512 sums[QUERIES][128 / LANES];
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r++) sums[q][r] = _mm512_setzero_ps();
    for (size_t i = 0; i < positions; i += 2) {
        if (keys) fetch(keys, i, 2);
        const bf16 *even = values[i] + begin, *odd = values[i + 1] + begin;
        __m512i pairs[128 / LANES];
        for (size_t r = 0; r < width / LANES; r += 2) {
            const __m512i a = _mm512_loadu_si512(even + LANES * r), b = _mm512_loadu_si512(odd + LANES * r);
            pairs[r] = _mm512_unpacklo_epi16(a, b), pairs[r + 1] = _mm512_unpackhi_epi16(a, b);
        }
        for (size_t q = 0; q < count; q++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(weights[q] + i));
            for (size_t r = 0; r < width / LANES; r++)
                sums[q][r] = _mm512_dpbf16_ps(sums[q][r], both, (__m512bh)pairs[r]);
        }
    }
    for (size_t q = 0; q < count; q++)
        for (size_t r = 0; r < width / LANES; r += 2)
            store_columns(sums[q][r], sums[q][r + 1], results + q * stride + begin + LANES * r);
}

/* What a step of a chain takes of one factor: two bfloat16 numbers, of which the instruction adds the second product first. */
typedef uint32_t __attribute__((may_alias)) Unit;
typedef __m512i Units; /* of LANES rows */
enum { IN_UNIT = 2, ROW_VECTORS = 4 }; /* numbers in a unit; vectors of rows whose sums are in registers at a time */

static inline size_t step_of(size_t number) { return number / 2; }
static inline Units units_from(const Unit *from) { return _mm512_loadu_si512(from); }
static inline Units unit_all(Unit unit) { return _mm512_set1_epi32((int)unit); }
static inline Vector units_times_plus(Units a, Units b, Vector sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* The units of a row: where they lie. */
static inline const Unit *units_of(const bf16 *row, size_t columns, Unit *room) {
    (void)columns, (void)room;
    return (const Unit *)row;
}

/* out[c] = the unit of column c of IN_UNIT rows. */
static inline void units_across(const bf16 *const *rows, size_t columns, Unit *out) {
    const bf16 *first = rows[0], *second = rows[1];
    for (size_t c = 0; c < columns; c++) out[c] = first[c] | (uint32_t)second[c] << 16;
}

/* The units of IN_UNIT vectors of numbers that are bfloat16. */
static inline void store_units(Unit *to, const Vector *numbers) {
    const __m512i first = _mm512_srli_epi32(_mm512_castps_si512(numbers[0]), 16);
    _mm512_storeu_si512(to, _mm512_or_si512(first, _mm512_castps_si512(numbers[1])));
}

#endif
