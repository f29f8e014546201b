/* AVX2 with FMA and F16C (which each processor with AVX2 has): Haswell, Zen and later. */
#if defined(__x86_64__)
#define SIMD_AVX2
#include <immintrin.h>

#include "../kernels.h"

static int runs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

KERNELS_TABLE(kernels_avx2, "avx2", runs);
#endif
