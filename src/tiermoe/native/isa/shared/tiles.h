/* attention_tiles.h over Vector, but for `weigh`, which comes before. */
#include <float.h>

enum { KEYS = 4 }; /* scored at a time */

/* scores[q][i] = scale * query q times key i. */
static inline __attribute__((always_inline)) void score(size_t count, const Positions *positions, const TileRows *rows,
                                                        const bf16 *queries, float scale, float (*scores)[TILE]) {
    const size_t columns = positions->key_columns;
    for (size_t i = 0; i < rows->count; i += KEYS) {
        const bf16 *keys[KEYS];
        Dot sums[QUERIES][KEYS];
        for (size_t j = 0; j < KEYS; j++) {
            keys[j] = positions->keys + tile_row(rows, i + j) * positions->key_stride;
            for (size_t q = 0; q < count; q++) sums[q][j] = no_dot();
        }
        for (size_t c = 0; c < columns; c += DOT)
            for (size_t j = 0; j < KEYS; j++) {
                const Columns key = load_columns(keys[j] + c);
                for (size_t q = 0; q < count; q++) sums[q][j] = dot(sums[q][j], load_columns(queries + q * columns + c), key);
            }
        for (size_t q = 0; q < count; q++) four_dots(sums[q], scale, scores[q] + i);
    }
}

/* weights[i] = e^(scores[i] - largest), rounded, 0 from `count` on to the end of the lanes; header: largest and sum. */
static void soften(float *scores, size_t count, bf16 *weights, float *header) {
    const size_t lanes = (count + LANES - 1) / LANES * LANES;
    Vector largest = all(-FLT_MAX), sum = zeros();
    for (size_t i = count; i < lanes; i++) scores[i] = -FLT_MAX;
    for (size_t i = 0; i < lanes; i += LANES) largest = larger_of(largest, load(scores + i));
    header[0] = largest_of(largest);
    largest = all(header[0]);
    for (size_t i = 0; i < lanes; i += LANES) {
        const Vector rounded = keep(as_bf16(exponential(minus(load(scores + i), largest))), count - i);
        store_bf16(weights + i, rounded);
        sum = plus(sum, rounded);
    }
    header[1] = sum_of(sum);
}

static inline __attribute__((always_inline)) void attend_some(size_t count, const Positions *positions,
                                                              const TileRows *rows, const bf16 *queries, float scale,
                                                              float *results) {
    const size_t columns = positions->value_columns, stride = tile_result(columns);
    float scores[QUERIES][TILE] __attribute__((aligned(64)));
    bf16 weights[QUERIES][TILE] __attribute__((aligned(64)));
    float *sums = results + TILE_HEADER;
    score(count, positions, rows, queries, scale, scores);
    for (size_t q = 0; q < count; q++) soften(scores[q], rows->count, weights[q], results + q * stride);
    size_t c = 0; /* as many columns at a time as have sums in the registers */
    for (; WIDEST(count) >= 128 && c + 128 <= columns; c += 128) weigh(count, 128, positions, rows, weights, c, sums, stride);
    for (; WIDEST(count) >= 64 && c + 64 <= columns; c += 64) weigh(count, 64, positions, rows, weights, c, sums, stride);
    for (; c < columns; c += 32) weigh(count, 32, positions, rows, weights, c, sums, stride);
}

#define ATTEND_SOME(n)                                             \
    case n:                                                        \
        attend_some(n, positions, &rows, queries, scale, results); \
        break;

static void attend(const Positions *positions, const bf16 *queries, size_t count, size_t begin, size_t end, float scale,
                   float *results) {
    const TileRows rows = {begin % positions->room, positions->room, end - begin};
    for (size_t some; count; count -= some) {
        some = count < QUERIES ? count : QUERIES;
        switch (some) {
            ATTEND_SOME(1)
            ATTEND_SOME(2)
#if QUERIES > 2
            ATTEND_SOME(3)
            ATTEND_SOME(4)
#endif
        }
        queries += some * positions->key_columns, results += some * tile_result(positions->value_columns);
    }
}

static inline float power(float exponent) { return first_of(exponential(all(exponent))); }

static void merge(const float *results, size_t tiles, size_t stride, size_t value_columns, const bf16 *sink, bf16 *out) {
    float largest = sink ? from_bf16(*sink) : -FLT_MAX, sum = 0;
    for (size_t t = 0; t < tiles; t++)
        if (results[t * stride] > largest) largest = results[t * stride];
    for (size_t t = 0; t < tiles; t++) {
        const Vector weight = all(power(results[t * stride] - largest));
        sum = first_of(times_plus(all(results[t * stride + 1]), weight, all(sum)));
    }
    if (sink) sum += power(from_bf16(*sink) - largest);
    for (size_t c = 0; c < value_columns; c += 4 * LANES) {
        const size_t registers = value_columns - c < 4 * LANES ? 2 : 4;
        Vector sums[4];
        for (size_t r = 0; r < 4; r++) sums[r] = zeros();
        for (size_t t = 0; t < tiles; t++) {
            const float *tile = results + t * stride;
            const Vector weight = all(power(tile[0] - largest) / sum);
            for (size_t r = 0; r < registers; r++)
                sums[r] = times_plus(load(tile + TILE_HEADER + c + LANES * r), weight, sums[r]);
        }
        for (size_t r = 0; r < registers; r++) store_bf16(out + c + LANES * r, sums[r]);
    }
}
