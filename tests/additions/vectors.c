/* An instruction set: its table, compiled from the same headers as every other. */
#define SIMD_VECTORS
#include "../kernels.h"

static int runs(void) { return 1; }

#include "table.h"

KERNELS_TABLE(kernels_vectors, "vectors", runs);
