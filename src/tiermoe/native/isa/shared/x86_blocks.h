/* What blocks of GGUF files ask of an x86-64 processor with AVX2 or more. */
#ifndef TIERMOE_X86_BLOCKS_H
#define TIERMOE_X86_BLOCKS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* The float16 at an address. Every processor with these instructions has those of F16C. */
static inline float from_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

/* What the nibbles of 16 bytes stand for. */
static inline void look_up(const int8_t codes[16], const uint8_t *from, int8_t *low, int8_t *high) {
    const __m128i table = _mm_load_si128((const void *)codes), bytes = _mm_loadu_si128((const void *)from);
    const __m128i nibble = _mm_set1_epi8(15);
    _mm_storeu_si128((void *)low, _mm_shuffle_epi8(table, _mm_and_si128(bytes, nibble)));
    _mm_storeu_si128((void *)high, _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble)));
}

#endif
