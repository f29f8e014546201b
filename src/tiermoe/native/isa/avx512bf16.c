/* AVX-512 with BF16 and VBMI: Zen 4, Sapphire Rapids and later. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"

static int runs(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,fma,f16c")
#endif

#include "avx512bf16/blocks.h"
#include "shared/coded_blocks.h"
#include "avx512bf16/rows.h"
#include "shared/x86_blocks.h"
#include "avx512bf16/gguf.h"
#include "avx512bf16/vector.h"
#include "shared/ahead.h"
#include "shared/kv_codes.h"

#include "avx512bf16/units.h"
#include "avx512bf16/weigh.h"
#include "avx512bf16/widen.h"
#include "shared/codes.h"
#include "shared/exponential.h"
#include "shared/sigmoids.h"
#include "shared/delta.h"
#include "shared/hqq.h"
#include "shared/ladders.h"
#include "shared/neurons.h"
#include "shared/norm.h"
#include "shared/rotary.h"
#include "shared/rows.h"
#include "shared/sums.h"
#include "shared/prepare.h"
#include "shared/prompt_rows.h"
#include "shared/tiles.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#define KERNELS kernels_avx512bf16
#define NAME "avx512bf16"
#include "shared/table.h"
#endif
