#include "kv_codes.h"

#include <math.h>

#include "attention_tiles.h"

static const float WHOLE = 12582912.0f; /* 1.5 * 2^23: adding it rounds |x| < 2^22 to a whole number */

/* A row of keys or values as codes of 8 bits: codes[i] = x[i] / scale, rounded to the nearest, halves to the even one; the
 * scale maps the largest to 127. */
static void encode_8(const float *x, size_t columns, int8_t *codes, bf16 *scale) {
    float largest = 0;
    for (size_t i = 0; i < columns; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    *scale = to_bf16(largest / 127);
    const float step = from_bf16(*scale);
    for (size_t i = 0; i < columns; i++) {
        const float code = step > 0 ? x[i] / step : 0;
        const float least = code >= -127 ? code : -127; /* also where it is undefined */
        codes[i] = (int8_t)((least <= 127 ? least : 127) + WHOLE - WHOLE);
    }
}

/* The index of the code of 4 bits that is nearest. */
static uint8_t nearest_of_4(float code) {
    uint8_t found = 0;
    for (int i = 0; i < 15; i++) found += code > (from_bf16(CODES_OF_4[i]) + from_bf16(CODES_OF_4[i + 1])) / 2;
    return found;
}

/* Of 4 bits: the codes nearest to x[i] / scale, which maps the largest, whatever its sign, to -127. */
static void encode_4(const float *x, size_t columns, uint8_t *codes, bf16 *scale) {
    float low = 0, high = 0;
    for (size_t i = 0; i < columns; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    *scale = to_bf16((high > -low ? high : low) / -127);
    const float step = from_bf16(*scale);
    for (size_t i = 0; i < columns; i++) {
        const uint8_t code = nearest_of_4(step != 0 ? x[i] / step : 0);
        uint8_t *byte = &codes[i / 32 * 16 + i % 16];
        *byte = i & 16 ? (uint8_t)(*byte | code << 4) : code;
    }
}

/* The Hadamard transform, without its factor, of blocks as long as the largest power of two that divides the columns; returns
 * that length: the transform of the transform is x times the length. */
static size_t hadamard(float *x, size_t columns) {
    const size_t length = columns & -columns;
    for (size_t half = 1; half < length; half *= 2)
        for (size_t at = 0; at < columns; at += 2 * half)
            for (size_t i = at; i < at + half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b, x[i + half] = a - b;
            }
    return length;
}

void hadamard_inverse(const bf16 *row, size_t columns, bf16 *out) {
    float x[MOST_CODED];
    for (size_t i = 0; i < columns; i++) x[i] = from_bf16(row[i]);
    const float length = (float)hadamard(x, columns);
    for (size_t i = 0; i < columns; i++) out[i] = to_bf16(x[i] / length);
}

void kv_encode(const bf16 *row, size_t columns, size_t bits, void *rows, size_t at, bf16 *scales) {
    float x[MOST_CODED];
    for (size_t i = 0; i < columns; i++) x[i] = from_bf16(row[i]);
    if (bits == 8) {
        encode_8(x, columns, (int8_t *)rows + at * columns, scales + at);
    } else {
        hadamard(x, columns);
        encode_4(x, columns, (uint8_t *)rows + at * columns / 2, scales + at);
    }
}
