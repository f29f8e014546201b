/* The vocabulary of the set: here that of plain C. */
#ifndef TIERMOE_ISA_VECTORS_SIMD_H
#define TIERMOE_ISA_VECTORS_SIMD_H

#include "../generic/simd.h"

#endif
