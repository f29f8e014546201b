/* What blocks of GGUF files ask of an x86-64 processor with AVX2 or more. */
#ifndef TIERMOE_ISA_X86_H
#define TIERMOE_ISA_X86_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "../quants.h"

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

#define OWN_LARGEST_BITS
/* The bits of the largest of some numbers, a multiple of 16, without their signs. */
static inline unsigned largest_bits(const bf16 *x, size_t width) {
    __m256i largest = _mm256_setzero_si256();
    for (size_t c = 0; c < width; c += 16) {
        const __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const void *)(x + c)), _mm256_set1_epi16(0x7FFF));
        largest = _mm256_max_epu16(largest, bits);
    }
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    return 0xFFFFu & ~(unsigned)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
}

#endif
