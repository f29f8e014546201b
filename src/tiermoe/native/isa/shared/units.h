/* What a step of the sums of prompt_rows.h takes of one factor: a float32 number. */
typedef float Unit;
typedef Vector Units; /* of LANES rows */
enum { IN_UNIT = 1, ROW_VECTORS = 1 }; /* numbers in a unit; vectors of rows whose sums are in registers at a time */

static inline Units units_from(const Unit *from) { return load(from); }
static inline Units unit_all(Unit unit) { return all(unit); }
static inline Vector units_times_plus(Units a, Units b, Vector sum) { return times_plus(a, b, sum); }

/* The units of a row: where they lie, or in `room`. */
static inline const Unit *units_of(const bf16 *row, size_t columns, Unit *room) {
    for (size_t c = 0; c < columns; c++) room[c] = from_bf16(row[c]);
    return room;
}

/* out[c] = the unit of column c of IN_UNIT rows. */
static inline void units_across(const bf16 *const *rows, size_t columns, Unit *out) {
    for (size_t c = 0; c < columns; c++) out[c] = from_bf16(rows[0][c]);
}

/* The units of IN_UNIT vectors of numbers that are bfloat16. */
static inline void store_units(Unit *to, const Vector *numbers) { store(to, numbers[0]); }
