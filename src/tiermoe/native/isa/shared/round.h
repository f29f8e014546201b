/* What the quantisers round with. Plain C without fused sums: the same bits on every machine. */
#ifndef TIERMOE_ROUND_H
#define TIERMOE_ROUND_H

#define INLINE static inline __attribute__((always_inline))

/* To the nearest integer, halves to the even one; for |x| < 2^22. */
INLINE float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }

/* Into low..high; low where x is undefined. */
INLINE float clamped(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

#endif
