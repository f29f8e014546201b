/* AVX2 with AVX-VNNI: Alder Lake and later, Zen 5. With EVEX the same kernels by AVX-512's encoding of its instruction, for a test
 * on a processor that has only that one. A compiler without AVX-VNNI builds no such set (kernels.c). */
#if defined(__x86_64__) && __has_include(<avxvnniintrin.h>)
#define SIMD_AVX2
#if defined(EVEX)
#define DPBUSD _mm256_dpbusd_epi32
#else
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif
#include <cpuid.h>
#include <immintrin.h>

#include "../kernels.h"

static int runs(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
#if defined(EVEX)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1; /* older compilers do not know its name */
#endif
}

#if defined(__clang__) && defined(EVEX)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512vl,avx512vnni"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#elif defined(EVEX)
#pragma GCC target("avx2,fma,f16c,avx512vl,avx512vnni")
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

KERNELS_TABLE(kernels_avxvnni, "avxvnni", runs);
#endif
