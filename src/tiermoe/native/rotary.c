#include "rotary.h"

#include <string.h>

#include "vector.h"

enum { LANES = 16 };

TARGET static inline __m512 load_some(const bf16 *from, __mmask16 which) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16));
}

TARGET static inline void store_some(bf16 *to, __mmask16 which, __m512 values) {
    _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(values));
}

/* bfloat16(bfloat16(a * b) + bfloat16(c * d)) is what is stored of this. */
TARGET static inline __m512 sum_of_products(__m512 a, __m512 b, __m512 c, __m512 d) {
    return _mm512_add_ps(as_bf16(_mm512_mul_ps(a, b)), as_bf16(_mm512_mul_ps(c, d)));
}

TARGET void rotate(const bf16 *head, const bf16 *cos, const bf16 *sin, size_t rotary, size_t columns, int interleaved,
                   bf16 *out) {
    const size_t half = rotary / 2;
    for (size_t i = 0; i < half; i += LANES) {
        const __mmask16 which = half - i < LANES ? (__mmask16)((1u << (half - i)) - 1) : 0xFFFF;
        __m512 first, second;
        if (interleaved) {
            const __m512i pairs = _mm512_maskz_loadu_epi32(which, head + 2 * i);
            first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)));
        } else {
            first = load_some(head + i, which), second = load_some(head + half + i, which);
        }
        const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), second);
        store_some(out + i, which, sum_of_products(first, load_some(cos + i, which), minus, load_some(sin + i, which)));
        store_some(out + half + i, which,
                   sum_of_products(second, load_some(cos + half + i, which), first, load_some(sin + half + i, which)));
    }
    if (out != head) memcpy(out + rotary, head + rotary, (columns - rotary) * sizeof *out);
}
