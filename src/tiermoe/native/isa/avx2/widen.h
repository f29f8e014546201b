/* From 2 bits to 4: the level that a code stands for is step * code + (5 - step) * place, where the low two bits of a
 * ladder are step - 2 and its high two bits place. Both products are looked up; a level fits a nibble. */
#include "vector.h"

/* [code + 4 (step - 2)]: step * code */
static const uint8_t RISES[16] __attribute__((aligned(16))) = {0, 2, 4, 6, 0, 3, 6, 9, 0, 4, 8, 12, 0, 5, 10, 15};
/* [ladder]: (5 - step) * place */
static const uint8_t BASES[16] __attribute__((aligned(16))) = {0, 0, 0, 0, 3, 2, 1, 0, 6, 4, 2, 0, 9, 6, 3, 0};

static inline __m256i lookup(const uint8_t table[16], __m256i index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const void *)table)), index);
}

/* What a run's ladders say of one of a byte's nibbles. */
typedef struct {
    __m256i step, base; /* 4 (step - 2) */
} Ladders;

static inline Ladders ladders_of(__m256i nibbles) {
    return (Ladders){_mm256_slli_epi16(_mm256_and_si256(nibbles, _mm256_set1_epi8(3)), 2), lookup(BASES, nibbles)};
}

static inline __m256i levels_of(__m256i codes, Ladders ladders) {
    const __m256i code = _mm256_and_si256(codes, _mm256_set1_epi8(3));
    return _mm256_add_epi8(lookup(RISES, _mm256_or_si256(code, ladders.step)), ladders.base);
}

static inline __m256i nibbles(__m256i pair, Ladders low, Ladders high) {
    const __m256i above = _mm256_slli_epi16(levels_of(_mm256_srli_epi16(pair, 4), high), 4);
    return _mm256_or_si256(levels_of(pair, low), above);
}

/* 32 bytes of each run, from `r` on. */
static inline void widen_some(const uint8_t *pairs, const uint8_t *ladders, size_t run, size_t r, uint8_t *codes) {
    const __m256i chosen = _mm256_loadu_si256((const void *)(ladders + r)), mask = _mm256_set1_epi8(15);
    const Ladders low = ladders_of(_mm256_and_si256(chosen, mask));
    const Ladders high = ladders_of(_mm256_and_si256(_mm256_srli_epi16(chosen, 4), mask));
    for (size_t i = 0; i < 4; i++) {
        const __m256i pair = _mm256_loadu_si256((const void *)(pairs + i * run + r));
        _mm256_storeu_si256((void *)(codes + i * run + r), nibbles(pair, low, high));
        _mm256_storeu_si256((void *)(codes + (i + 4) * run + r), nibbles(_mm256_srli_epi16(pair, 2), low, high));
    }
}

/* The last bytes of each run, fewer than 32. */
static void widen_rest(const uint8_t *pairs, const uint8_t *ladders, size_t run, size_t r, uint8_t *codes) {
    uint8_t some[4 * 32] = {0}, chosen[32] = {0}, found[8 * 32];
    memcpy(chosen, ladders + r, run - r);
    for (size_t i = 0; i < 4; i++) memcpy(some + 32 * i, pairs + i * run + r, run - r);
    widen_some(some, chosen, 32, 0, found);
    for (size_t i = 0; i < 8; i++) memcpy(codes + i * run + r, found + 32 * i, run - r);
}

static void widen_codes(const uint8_t *pairs, const uint8_t *ladders, size_t count, size_t run, uint8_t *codes) {
    for (size_t n = 0; n < count; n++, pairs += 4 * run, ladders += run, codes += 8 * run) {
        size_t r = 0;
        for (; r + 32 <= run; r += 32) widen_some(pairs, ladders, run, r, codes);
        if (r < run) widen_rest(pairs, ladders, run, r, codes);
    }
}
