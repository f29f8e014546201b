/* Plain C, for any machine: the reference of the others. */
#include "../kernels.h"

static int runs(void) { return 1; }

#include "table.h"

KERNELS_TABLE(kernels_generic, "generic", runs);
