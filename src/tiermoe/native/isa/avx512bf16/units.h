/* What a step of the sums of prompt_rows.h takes of one factor: two bfloat16 numbers. */
#include "vector.h"

typedef uint32_t __attribute__((may_alias)) Unit;
typedef __m512i Units; /* of LANES rows */
enum { IN_UNIT = 2, ROW_VECTORS = 4 }; /* numbers in a unit; vectors of rows whose sums are in registers at a time */

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
