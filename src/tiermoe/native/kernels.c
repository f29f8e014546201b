#include "kernels.h"

#include <string.h>

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx512bf16, kernels_avx2;
#if __has_include(<avxvnniintrin.h>)
extern const Kernels kernels_avxvnni;
#endif
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#if defined(HAS_NEONDOT)
extern const Kernels kernels_neondot;
#endif
#endif

/* The fastest first. */
static const Kernels *const BUILT[] = {
#if defined(__x86_64__)
    &kernels_avx512bf16,
#if __has_include(<avxvnniintrin.h>)
    &kernels_avxvnni,
#endif
    &kernels_avx2,
#elif defined(__aarch64__)
#if defined(HAS_NEONDOT)
    &kernels_neondot,
#endif
    &kernels_neon,
#endif
    &kernels_generic,
};

enum { COUNT = sizeof BUILT / sizeof *BUILT };

const Kernels *kernels = &kernels_generic;

const Kernels *const *kernels_here(void) {
    static const Kernels *here[COUNT + 1];
    size_t count = 0;
    for (size_t i = 0; i < COUNT; i++)
        if (BUILT[i]->runs()) here[count++] = BUILT[i];
    return here;
}

int kernels_use(const char *name) {
    for (const Kernels *const *each = kernels_here(); *each; each++)
        if (!strcmp((*each)->name, name)) return kernels = *each, 1;
    return 0;
}
