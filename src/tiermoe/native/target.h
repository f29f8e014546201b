/* Functions marked TARGET use AVX-512 with BF16 and VBMI, whatever the compiler's own target; `supported` of module.c
 * tells whether this machine has them. */
#ifndef TIERMOE_TARGET_H
#define TIERMOE_TARGET_H

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,fma")))

#endif
