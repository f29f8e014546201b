/* The vector vocabulary: what kernels are written in, whatever the instruction set. The C file of a set defines SIMD_AVX2,
 * SIMD_AVX512 or SIMD_NEON before it includes anything, that of AVX-VNNI SIMD_AVX2 and DPBUSD (avx2/bytes.h), that of Arm's dot
 * products SIMD_NEON and SIMD_NEON_DOT; without one of them it is plain C. A set's own <set>/simd.h defines
 *
 *   LANES, Vector    16 floats: all, zeros, load, store, load_bf16, store_bf16, load_pairs, as_bf16, plus, minus, times, over,
 *                    smaller, larger_of, times_plus, minus_times, to_integers, times_two_to, sum_of, largest_of, first_of
 *   DOT, four_dots   columns of a dot product of bfloat16 at a time; the sums of four. AVX-512 has Dot, Columns, load_columns,
 *                    no_dot, dot and sum_of_dot of its own
 *   QUERIES, KEYS, WIDEST  how many queries share what attention loads, and how many columns of values have sums in registers
 *   Eight            8 floats (AVX2): eight_all, eight_zeros, eight_from, eight_to, eight_times_plus
 *   Words            8 words of 32 bits (AVX2), 4 (NEON): words_from, words_and, words_or, WORDS_RIGHT; AVX2: WORDS_LEFT
 *   from_half        the float16 at an address; look_up: the 16 codes of a table that nibbles stand for; look_up_32: likewise
 *                    numbers of 16 bits, those of the low halves of 16 bytes before those of the high halves */
#ifndef TIERMOE_ISA_SIMD_H
#define TIERMOE_ISA_SIMD_H

#include <string.h>

#include "../quants.h"

#if defined(SIMD_AVX512)
#include "avx512/simd.h"
#define SIMD avx512bf16
#elif defined(SIMD_AVX2)
#include "avx2/simd.h"
#if defined(DPBUSD)
#define SIMD avxvnni
#else
#define SIMD avx2
#endif
#elif defined(SIMD_NEON)
#include "neon/simd.h"
#if defined(SIMD_NEON_DOT)
#define SIMD neondot
#else
#define SIMD neon
#endif
#else
#include "generic/simd.h"
#define SIMD generic
#endif

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

#if !defined(OWN_SOME)
/* The first `count` of them, at most LANES; 0 behind them. */
static inline Vector load_some(const bf16 *from, size_t count) {
    if (count >= LANES) return load_bf16(from);
    bf16 some[LANES] = {0};
    memcpy(some, from, count * sizeof *some);
    return load_bf16(some);
}
static inline void store_some(bf16 *to, size_t count, Vector v) {
    bf16 some[LANES];
    store_bf16(some, v);
    memcpy(to, some, (count < LANES ? count : LANES) * sizeof *some);
}
#endif

#if !defined(OWN_DOT)
typedef Vector Dot; /* lanes whose sum is a dot product, of a pair of columns each: the second product is added first */
typedef struct {
    Vector even, odd;
} Columns; /* of one factor */

static inline Dot no_dot(void) { return zeros(); }
static inline Columns load_columns(const bf16 *from) {
    Columns columns;
    load_pairs(from, LANES, &columns.even, &columns.odd);
    return columns;
}
static inline Dot dot(Dot sum, Columns a, Columns b) { return times_plus(a.even, b.even, times_plus(a.odd, b.odd, sum)); }
static inline float sum_of_dot(Dot a) { return sum_of(a); }
#endif

/* The first `count` floats, at most LANES; 0 behind them. */
static inline Vector load_floats(const float *from, size_t count) {
    if (count >= LANES) return load(from);
    float some[LANES] = {0};
    memcpy(some, from, count * sizeof *some);
    return load(some);
}

/* The first `count`, at most LANES. */
static inline void store_floats(float *to, size_t count, Vector v) {
    float some[LANES];
    store(some, v);
    memcpy(to, some, (count < LANES ? count : LANES) * sizeof *some);
}

/* e^x within 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2, a Taylor polynomial of degree 7. */
static inline Vector exponential(Vector x) {
    x = larger_of(all(-104), smaller(all(104), x)); /* beyond: 0 and infinity */
    const Vector n = to_integers(times(x, all(1.44269504f)));
    Vector r = minus_times(x, n, all(0.693359375f));
    r = minus_times(r, n, all(-2.12194440e-4f));
    Vector sum = all(1.0f / 5040);
    static const float REST[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) sum = times_plus(sum, r, all(REST[i]));
    return times_two_to(sum, n);
}

/* What is made of 1 / (1 + e^-x). */
static inline Vector one_and_exponential(Vector x) { return plus(all(1), exponential(minus(zeros(), x))); }

/* log(1 + e^x) = max(x, 0) + log(1 + z) with z = e^-|x|, and log(1 + z) = 2 artanh(s) with s = z / (2 + z), at most 1/3: its
 * series up to s^13. */
static inline Vector softplus(Vector x) {
    const Vector z = exponential(minus(zeros(), larger_of(minus(zeros(), x), x))), s = over(z, plus(all(2), z));
    const Vector square = times(s, s);
    Vector sum = all(2.0f / 13);
    static const float REST[] = {2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2};
    for (int i = 0; i < 6; i++) sum = times_plus(sum, square, all(REST[i]));
    return times_plus(s, sum, larger_of(zeros(), x));
}

/* x * sigmoid(x) */
static inline Vector silu_of(Vector x) { return over(x, one_and_exponential(x)); }

/* What is read next is fetched into the second cache while this core computes: a tile is too short for the processor to
 * notice by itself in time. */
typedef struct {
    const char *from;
    size_t each; /* bytes of a position */
} Ahead;

/* Rows from `row` on, as they lie in memory. */
static inline Ahead ahead_of(const void *rows, size_t stride, size_t bits, size_t row) {
    const size_t each = stride * bits / 8;
    return (Ahead){(const char *)rows + row * each, each};
}

/* Of positions i .. i + count - 1. */
static inline void fetch(const Ahead *ahead, size_t i, size_t count) {
    for (size_t at = i * ahead->each; at < (i + count) * ahead->each; at += 64) __builtin_prefetch(ahead->from + at, 0, 2);
}

/* Products by name: product_<quant>_<set>, such as product_q4_k_avx2, whose twin in plain C is product_q4_k_generic. Each set
 * has one for every line of EACH_QUANT (quants.h); table.h lists them. */
#define NAMED_BY_SET(name, set) product_##name##_##set
#define NAMED_IN(name, set) NAMED_BY_SET(name, set)
#define PRODUCT_NAME(name) NAMED_IN(name, SIMD)

/* The head of a product: out[m * stride + i] = row 64 * block + i of the matrix times x[m], rounded to bfloat16. prepared: of
 * matrix_prepare. */
#define PRODUCT(name)                                                                                                      \
    static void PRODUCT_NAME(name)(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, \
                                   bf16 *out, size_t stride)

#endif
