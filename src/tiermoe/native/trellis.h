/* TCQ2: trellis-coded quantization (Marcellin and Fischer, 1990) at 2 bits a weight, as a bitshift trellis (Tseng and others,
 * QTIP, 2024): a weight's level follows from its own code and those before it in its run, so that a run of codes stands for
 * one of 4^64 points that lie much like normal weights.
 *
 * A run is a column of a block of 64 rows, in 16 bytes, and closes on itself: before the first byte stands the last one. Byte j
 * has the codes of rows j, 16 + j, 32 + j and 48 + j, from its lowest bits up. For row 16 i + j the byte before j (low half)
 * and byte j (high half) are a word, of which the lowest bits are cleared (TRELLIS_KEPT) and which is multiplied by
 * TRELLIS_FACTORS[i]; bits 16 to 20 of the product say which level. So a level depends on 4 or 5 codes. */
#ifndef TIERMOE_TRELLIS_H
#define TIERMOE_TRELLIS_H

#include "quants.h"

enum {
    RUN_BYTES = 16,
    RUN_CODES = 4,          /* of a byte */
    TRELLIS_LEVELS = 32,
};

static const uint16_t TRELLIS_FACTORS[RUN_CODES] __attribute__((unused)) = {17 << 11, 117 << 9, 145 << 7, 1115 << 5};
static const uint16_t TRELLIS_KEPT[RUN_CODES] __attribute__((unused)) = {0xFFFC, 0xFFFC, 0xFFC0, 0xFFC0};

/* The levels, plus 32: those of normal weights that are equally frequent. In formats/trellis.py, too. */
static const uint8_t TRELLIS_CODES[TRELLIS_LEVELS] __attribute__((unused)) = {
    1, 8, 12, 14, 16, 18, 20, 22, 23, 24, 26, 27, 28, 29, 30, 31, 33, 34, 35, 36, 37, 38, 40, 41, 42, 44, 46, 48, 50, 52, 56, 63,
};

/* Which level: of code i of a byte. */
static inline unsigned trellis_level(unsigned before, unsigned byte, size_t i) {
    const uint32_t word = (before | byte << 8) & TRELLIS_KEPT[i];
    return word * TRELLIS_FACTORS[i] >> 16 & (TRELLIS_LEVELS - 1);
}

/* Where byte j of column c of four columns is among their 64 bytes: the first two columns, byte by byte, in the even places. */
static inline size_t trellis_place(size_t c, size_t j) { return 4 * j + c % 2 * 2 + c / 2; }

/* Four columns of a block (64 bytes) in the order and codes of INT6 (192 bytes). */
static inline void trellis_to_int6(const uint8_t *four, uint8_t *six) {
    uint8_t codes[4][BLOCK];
    for (size_t c = 0; c < 4; c++) {
        uint8_t run[1 + RUN_BYTES]; /* with what stands before its first byte */
        for (size_t j = 0; j < RUN_BYTES; j++) run[1 + j] = four[trellis_place(c, j)];
        run[0] = run[RUN_BYTES];
        for (size_t i = 0; i < RUN_CODES; i++)
            for (size_t j = 0; j < RUN_BYTES; j++) codes[c][RUN_BYTES * i + j] = TRELLIS_CODES[trellis_level(run[j], run[1 + j], i)];
    }
    enum { HALF = BLOCK / 2 };
    for (size_t c = 0; c < 4; c++)
        for (size_t j = 0; j < HALF; j++) six[c * HALF + j] = (uint8_t)((codes[c][j] & 15) | codes[c][HALF + j] << 4);
    for (size_t p = 0; p < 2; p++)
        for (size_t j = 0; j < HALF; j++) {
            const uint8_t *first = codes[2 * p], *second = codes[2 * p + 1];
            six[(4 + p) * HALF + j] = (uint8_t)(first[HALF + j] >> 4 | (first[j] >> 4) << 2 | (second[HALF + j] >> 4) << 4 |
                                                (second[j] >> 4) << 6);
        }
}

/* The coding in which products of plain C take another. */
static inline Coding taken_as(Coding coding) { return coding == TCQ2 ? INT6 : coding; }

/* A group of TCQ2 as INT6 in `room`; other codes as they are. */
static inline const uint8_t *codes_as_taken(Coding coding, const uint8_t *codes, size_t columns, uint8_t *room) {
    if (coding != TCQ2) return codes;
    for (size_t c = 0; c < columns; c += 4) trellis_to_int6(codes + code_bytes(TCQ2, c), room + code_bytes(INT6, c));
    return room;
}

/* Runs of targets that codes are to come near to. */
typedef struct {
    const float *targets; /* (count, 64), in units of the scales */
    const float *weights; /* (count, 64) of the squared errors, some above 0 */
    size_t count;
    int exact;       /* whether the targets of weights above 0 are levels: then their codes are found, however rare */
    uint8_t *codes;  /* (count, 16) */
    float *levels;   /* (count, 64) what the codes stand for */
} Trellis;

/* The codes of least weighted squared error (Viterbi). Where a run closes is found first, from the codes around it: nearly
 * always the best place. */
void trellis_run(const Trellis *job);

#endif
