/* Stands in for kernels.c where kernels_check.c is to run the generic kernels and no others. */
#include "kernels.h"

extern const Kernels kernels_generic;
const Kernels *kernels = &kernels_generic;

const Kernels *const *kernels_here(void) {
    static const Kernels *const here[] = {&kernels_generic, NULL};
    return here;
}
