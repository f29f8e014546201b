/* From 2 bits to 4: the level that a code stands for is step * code + (5 - step) * place, where the low two bits of a
 * ladder are step - 2 and its high two bits place. A level fits a nibble. */

static inline uint8_t level(unsigned code, unsigned ladder) {
    const unsigned step = (ladder & 3) + 2, place = ladder >> 2;
    return (uint8_t)(step * code + (5 - step) * place);
}

static void widen_codes(const uint8_t *pairs, const uint8_t *ladders, size_t count, size_t run, uint8_t *codes) {
    for (size_t n = 0; n < count; n++, ladders += run, codes += 4 * run)
        for (size_t i = 0; i < 4; i++, pairs += run, codes += run)
            for (size_t r = 0; r < run; r++) {
                const unsigned low = ladders[r] & 15, high = ladders[r] >> 4, pair = pairs[r];
                codes[r] = (uint8_t)(level(pair & 3, low) | level(pair >> 4 & 3, high) << 4);
                codes[4 * run + r] = (uint8_t)(level(pair >> 2 & 3, low) | level(pair >> 6, high) << 4);
            }
}
