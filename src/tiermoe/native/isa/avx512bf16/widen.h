/* From 2 bits to 4: see quant/ladders.py. */
#include "vector.h"

/* The level that a 2-bit code c stands for on a packed ladder: at code + 4 * ladder, (step * c + (5 - step) * place),
 * where the ladder's low two bits are step - 2 and its high two bits place. */
static void fill(uint8_t levels[64]) {
    for (int ladder = 0; ladder < 16; ladder++)
        for (int code = 0; code < 4; code++) {
            const int step = (ladder & 3) + 2, place = ladder >> 2;
            levels[code + 4 * ladder] = (uint8_t)(step * code + (5 - step) * place);
        }
}

static inline __m512i nibbles(__m512i pair, __m512i low_ladder, __m512i high_ladder, __m512i levels) {
    const __m512i code = _mm512_set1_epi8(3);
    const __m512i low = _mm512_or_si512(_mm512_and_si512(pair, code), low_ladder);
    const __m512i high = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(pair, 4), code), high_ladder);
    const __m512i above = _mm512_slli_epi16(_mm512_permutexvar_epi8(high, levels), 4); /* levels fit a nibble */
    return _mm512_or_si512(_mm512_permutexvar_epi8(low, levels), above);
}

static void widen_codes(const uint8_t *pairs, const uint8_t *ladders, size_t count, size_t run, uint8_t *codes) {
    uint8_t table[64] __attribute__((aligned(64)));
    fill(table);
    const __m512i levels = _mm512_load_si512(table);
    for (size_t n = 0; n < count; n++, pairs += 4 * run, ladders += run, codes += 8 * run)
        for (size_t r = 0; r < run; r += 64) {
            const __mmask64 there = run - r < 64 ? ((__mmask64)1 << (run - r)) - 1 : ~(__mmask64)0;
            const __m512i chosen = _mm512_maskz_loadu_epi8(there, ladders + r);
            const __m512i low = _mm512_slli_epi16(_mm512_and_si512(chosen, _mm512_set1_epi8(15)), 2);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(chosen, 2), _mm512_set1_epi8(60));
            for (size_t i = 0; i < 4; i++) {
                const __m512i pair = _mm512_maskz_loadu_epi8(there, pairs + i * run + r);
                const __m512i other = _mm512_srli_epi16(pair, 2);
                _mm512_mask_storeu_epi8(codes + i * run + r, there, nibbles(pair, low, high, levels));
                _mm512_mask_storeu_epi8(codes + (i + 4) * run + r, there, nibbles(other, low, high, levels));
            }
        }
}
