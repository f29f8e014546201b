/* AVX2 with FMA and F16C (which each processor with AVX2 has): Haswell, Zen and later. */
#if defined(__x86_64__)
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

#include "avx2/vector.h"
#include "shared/x86_blocks.h"

#include "avx2/integers.h"
#include "shared/nibbles.h"
#include "avx2/blocks.h"
#include "shared/coded_blocks.h"
#include "shared/eight_rows.h"
#include "shared/eight_gguf.h"
#include "avx2/gguf.h"
#include "avx2/widen.h"
#include "shared/ahead.h"
#include "shared/codes.h"
#include "shared/exponential.h"
#include "shared/sigmoids.h"
#include "shared/delta.h"
#include "shared/hqq.h"
#include "shared/kv_codes.h"
#include "shared/ladders.h"
#include "shared/neurons.h"
#include "shared/norm.h"
#include "shared/rotary.h"
#include "shared/rows.h"
#include "shared/sums.h"
#include "avx2/prepare.h"
#include "shared/units.h"
#include "shared/weigh.h"

#include "shared/prompt_rows.h"
#include "shared/tiles.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#define KERNELS kernels_avx2
#define NAME "avx2"
#include "shared/table.h"
#endif
