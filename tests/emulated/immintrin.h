/* AVX-512 on a processor that has AVX2 alone: SIMDe's C stands for the instructions (Debian's libsimde-dev), and what its
 * version 0.7.4 lacks is here. Found before the compiler's header of this name, it makes of isa/avx512bf16.c a unit that runs
 * here and that TIERMOE_ISA calls avx512bf16; every other unit is compiled without it. Slow, and for tests alone.
 *
 * What each function does is in Intel's Intrinsics Guide under its name, without `emulated`. */
#ifndef TIERMOE_EMULATED
#define TIERMOE_EMULATED

#include_next <immintrin.h> /* AVX2's own, which SIMDe builds upon */

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <float.h> /* what the unit includes: the last lines below are not for them */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

/* ---- numbers of another width */

#define EMULATED_WIDER(name, From, count, bytes, To)                              \
    static inline __m512i emulated_##name(__m##count##i values) {                 \
        typedef From Narrow __attribute__((vector_size(bytes)));                  \
        typedef To Wide __attribute__((vector_size(64)));                         \
        return (__m512i)__builtin_convertvector((Narrow)values, Wide);            \
    }

EMULATED_WIDER(cvtepi8_epi32, int8_t, 128, 16, int32_t)
EMULATED_WIDER(cvtepu8_epi32, uint8_t, 128, 16, int32_t)
EMULATED_WIDER(cvtepu16_epi32, uint16_t, 256, 32, int32_t)
EMULATED_WIDER(cvtepu8_epi16, uint8_t, 256, 32, int16_t)

static inline __m512 emulated_cvtepi32_ps(__m512i values) { return (__m512)__builtin_convertvector((Words)values, Floats); }
static inline float emulated_cvtss_f32(__m512 values) { return values[0]; }
static inline __m256 emulated_half(__m512 values, int half) {
    __m256 out;
    memcpy(&out, (const char *)&values + 32 * half, sizeof out);
    return out;
}
static inline __m512 emulated_zextps256_ps512(__m256 values) {
    __m512 out = {0};
    memcpy(&out, &values, sizeof values);
    return out;
}
static inline __m512 emulated_cvtph_ps(__m256i halves) {
    const __m256 both[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    __m512 out;
    memcpy(&out, both, sizeof out);
    return out;
}

/* ---- bfloat16: subnormal numbers are 0 of their sign, before and after, and rounding is to the nearest, to even */

static inline Floats emulated_normal(Floats values) {
    const Bits bits = (Bits)values;
    return (Floats)(bits & (Bits)(((bits & 0x7F800000) != 0) | 0x80000000));
}

static inline __m256i emulated_cvtneps_pbh(__m512 values) {
    const Bits bits = (Bits)emulated_normal((Floats)values);
    const Bits quiet = bits >> 16 | 0x40, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const Bits undefined = (Bits)((bits & 0x7FFFFFFF) > 0x7F800000);
    return (__m256i)__builtin_convertvector((quiet & undefined) | (rounded & ~undefined), Halves);
}
static inline __m512i emulated_cvtne2ps_pbh(__m512 upper, __m512 lower) {
    const __m256i both[] = {emulated_cvtneps_pbh(lower), emulated_cvtneps_pbh(upper)};
    __m512i out;
    memcpy(&out, both, sizeof out);
    return out;
}
static inline __m128i emulated_cvtneps_pbh_128(__m128 values) {
    __m512 wide = {0};
    memcpy(&wide, &values, sizeof values);
    return _mm256_castsi256_si128(emulated_cvtneps_pbh(wide));
}

/* The odd numbers' product is added first, each product and sum rounded once. */
static inline __m512 emulated_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const Bits x = (Bits)a, y = (Bits)b;
    const Bits from_a[] = {x & 0xFFFF0000, x << 16}, from_b[] = {y & 0xFFFF0000, y << 16};
    sum = (__m512)emulated_normal((Floats)sum);
    for (int i = 0; i < 2; i++) {
        const Floats one = emulated_normal((Floats)from_a[i]), other = emulated_normal((Floats)from_b[i]);
        sum = (__m512)emulated_normal((Floats)_mm512_fmadd_ps((__m512)one, (__m512)other, sum));
    }
    return sum;
}

/* ---- parts of memory: what is not there is not touched */

#define EMULATED_LOAD(name, Vector, Element)                                                     \
    static inline Vector emulated_##name(uint64_t there, const void *from) {                     \
        Vector out = {0};                                                                        \
        for (size_t i = 0; i < sizeof out / sizeof(Element); i++)                                \
            if (there >> i & 1)                                                                  \
                memcpy((Element *)&out + i, (const Element *)from + i, sizeof(Element));         \
        return out;                                                                              \
    }
#define EMULATED_STORE(name, Vector, Element)                                                    \
    static inline void emulated_##name(void *to, uint64_t there, Vector values) {                \
        for (size_t i = 0; i < sizeof values / sizeof(Element); i++)                             \
            if (there >> i & 1)                                                                  \
                memcpy((Element *)to + i, (const Element *)&values + i, sizeof(Element));        \
    }

EMULATED_LOAD(load_8_of_128, __m128i, uint8_t)
EMULATED_LOAD(load_16_of_256, __m256i, uint16_t)
EMULATED_LOAD(load_8_of_512, __m512i, uint8_t)
EMULATED_LOAD(load_32_of_512, __m512i, uint32_t)
EMULATED_LOAD(load_floats, __m512, float)
EMULATED_STORE(store_16_of_256, __m256i, uint16_t)
EMULATED_STORE(store_8_of_512, __m512i, uint8_t)

/* ---- lanes */

/* In each quarter: its words by two bits of `order` each. */
static inline __m512i emulated_shuffle_epi32(__m512i values, unsigned order) {
    const Words from = (Words)values;
    Words out;
    for (unsigned i = 0; i < 16; i++) out[i] = from[(i & ~3u) + (order >> 2 * (i & 3) & 3)];
    return (__m512i)out;
}
/* Two quarters of `a`, then two of `b`, by two bits of `order` each. */
static inline __m512i emulated_quarters(__m512i a, __m512i b, unsigned order) {
    const Words from_a = (Words)a, from_b = (Words)b;
    Words out;
    for (unsigned i = 0; i < 16; i++) out[i] = (i < 8 ? from_a : from_b)[4 * (order >> 2 * (i / 4) & 3) + i % 4];
    return (__m512i)out;
}
/* In each quarter: a number of `a` and one of `b`, by a bit of `order` each. */
static inline __m512d emulated_shuffle_pd(__m512d a, __m512d b, unsigned order) {
    __m512d out;
    for (unsigned i = 0; i < 8; i++) out[i] = (i & 1 ? b : a)[(i & ~1u) + (order >> i & 1)];
    return out;
}
static inline __mmask8 emulated_cmplt_epi32(__m256i a, __m256i b) {
    return (__mmask8)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)));
}
static inline __m256i emulated_mask_sllv_epi32(__m256i others, unsigned chosen, __m256i values, __m256i counts) {
    typedef int32_t Eight __attribute__((vector_size(32)));
    Eight out = (Eight)_mm256_sllv_epi32(values, counts);
    for (unsigned i = 0; i < 8; i++)
        if (!(chosen >> i & 1)) out[i] = ((Eight)others)[i];
    return (__m256i)out;
}

/* In the order of the compilers: halves, quarters, and so on. */
static inline float emulated_reduce(__m512 values, int largest) {
    Floats left = (Floats)values;
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            left[i] = !largest ? left[i] + left[i + half] : left[i] > left[i + half] ? left[i] : left[i + half];
    return left[0];
}

#undef _mm_cvtneps_pbh
#undef _mm_maskz_loadu_epi8
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i64x2
#define _mm_cvtneps_pbh emulated_cvtneps_pbh_128
#define _mm_maskz_loadu_epi8 emulated_load_8_of_128
#define _mm256_cmplt_epi32_mask emulated_cmplt_epi32
#define _mm256_mask_sllv_epi32 emulated_mask_sllv_epi32
#define _mm256_mask_storeu_epi16 emulated_store_16_of_256
#define _mm256_maskz_loadu_epi16 emulated_load_16_of_256
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepu8_epi16 emulated_cvtepu8_epi16
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtss_f32 emulated_cvtss_f32
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_extractf32x8_ps emulated_half
#define _mm512_mask_storeu_epi8 emulated_store_8_of_512
#define _mm512_maskz_loadu_epi32 emulated_load_32_of_512
#define _mm512_maskz_loadu_epi8 emulated_load_8_of_512
#define _mm512_maskz_loadu_ps emulated_load_floats
#define _mm512_reduce_add_ps(values) emulated_reduce(values, 0)
#define _mm512_reduce_max_ps(values) emulated_reduce(values, 1)
#define _mm512_shuffle_epi32 emulated_shuffle_epi32
#define _mm512_shuffle_f32x4(a, b, order) ((__m512)emulated_quarters((__m512i)(a), (__m512i)(b), order))
#define _mm512_shuffle_i64x2 emulated_quarters
#define _mm512_shuffle_pd emulated_shuffle_pd
#define _mm512_zextps256_ps512 emulated_zextps256_ps512

/* The unit finds its instructions here, and the compiler is not told to use them: GCC does not know Clang's way to say so,
 * and what stands in assembler names their registers (nothing but such names: no instruction). */
#define __builtin_cpu_supports(name) 1
#define __clang__ 1
#define __asm__(...)

#endif
