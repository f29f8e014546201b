/* NEON with products of bytes summed by four (Arm's dotprod): Cortex-A75, Neoverse N1, Apple's A11 and M1, and later. */
#define SIMD_NEON
#define SIMD_NEON_DOT
#include "../kernels.h"

#if defined(HAS_NEONDOT)
#include <arm_neon.h>

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

static int runs(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
#else
    return 0;
#endif
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

KERNELS_TABLE(kernels_neondot, "neondot", runs);
#endif
