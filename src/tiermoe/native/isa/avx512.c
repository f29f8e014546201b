/* AVX-512 with BF16, VBMI and VNNI: Zen 4, Sapphire Rapids and later. */
#if defined(__x86_64__)
#define SIMD_AVX512
#include <immintrin.h>

#include "../kernels.h"

static int runs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16,fma,f16c")
#endif

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

KERNELS_TABLE(kernels_avx512bf16, "avx512bf16", runs);
#endif
