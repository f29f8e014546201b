/* Over Words: bytes of a column i of four, from the address on, that hold two codes each, a nibble each: INT4, INT2, NL4, NL3
 * and NL2 (quants.h). In INT2, NL3 and NL2 what lies above a code in its nibble belongs to other columns. */
#ifndef TIERMOE_ISA_NIBBLES_H
#define TIERMOE_ISA_NIBBLES_H

#include "../quants.h"
#include "simd.h"

INLINE Words column_nibbles(Coding coding, const uint8_t *four, size_t i) {
    if (code_bits(coding) == 2) return i % 2 ? WORDS_RIGHT(words_from(four + i / 2 * 32), 2) : words_from(four + i / 2 * 32);
    if (coding != NL3 || i < 3) return words_from(four + i * 32);
    const Words low = words_and(WORDS_RIGHT(words_from(four), 3), 0x11111111);
    const Words middle = words_and(WORDS_RIGHT(words_from(four + 32), 2), 0x22222222);
    const Words high = words_and(WORDS_RIGHT(words_from(four + 64), 1), 0x44444444);
    return words_or(words_or(low, middle), high);
}

#endif
