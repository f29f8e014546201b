/* NEON, which every 64-bit Arm has. */
#if defined(__aarch64__)
#define SIMD_NEON
#include "../kernels.h"

static int runs(void) { return 1; }

#include "table.h"

KERNELS_TABLE(kernels_neon, "neon", runs);
#endif
