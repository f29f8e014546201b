/* Neurons as records (../neurons.h), sixteen codes at a time, in the compiler's own vectors: each instruction set gets
 * its widest. */
#ifndef TIERMOE_ISA_NEURONS_H
#define TIERMOE_ISA_NEURONS_H

#include <string.h>

#include "../neurons.h"

typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

enum { CODES = 16 };

/* What one half of a record, W3's row (0) or W2's column (1), is decoded with: weight = code * scale + zero. */
typedef struct {
    const uint8_t *codes;
    const uint8_t *parameters;
    size_t groups;
    int bits, two_level;
} Half;

INLINE Half half_of(const Neurons *neurons, const uint8_t *record, size_t half, int bits, int two_level) {
    const size_t bytes = neurons->width * (size_t)bits / 8, groups = neurons->width / neurons->group;
    const size_t parameters = two_level ? sizeof(bf16) + 2 * groups : 2 * groups * sizeof(bf16);
    return (Half){record + half * bytes, record + 2 * bytes + half * parameters, groups, bits, two_level};
}

INLINE float scale_of(const Half *half, size_t group) {
    const bf16 *first = (const bf16 *)half->parameters;
    return half->two_level ? from_bf16(first[0]) * (float)half->parameters[sizeof(bf16) + group] : from_bf16(first[group]);
}

/* 4 bits count from -8 on. */
INLINE float zero_of(const Half *half, size_t group, float scale) {
    const bf16 *first = (const bf16 *)half->parameters;
    const float zero = half->two_level
                           ? from_bf16(first[0]) * (float)(int8_t)half->parameters[sizeof(bf16) + half->groups + group]
                           : from_bf16(first[half->groups + group]);
    return half->bits == 4 ? zero - 8 * scale : zero;
}

INLINE void codes_at(const uint8_t *from, int strip, int bits, Sixteen *to) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    bytes = bytes >> strip * bits & (uint8_t)((1 << bits) - 1);
    *to = __builtin_convertvector(__builtin_convertvector(bytes, Integers), Sixteen);
}

INLINE float up_of(const Neurons *neurons, const Half *half, int bits, const float *x, const float *sums) {
    const size_t bytes = neurons->width * (size_t)bits / 8, group = neurons->group;
    Sixteen total = {0};
    float rest = 0;
    for (int strip = 0; strip < 8 / bits; strip++)
        for (size_t b = 0; b < bytes; b += group) {
            const size_t g = ((size_t)strip * bytes + b) / group;
            const float scale = scale_of(half, g);
            Sixteen products = {0}, codes, values;
            for (size_t c = b; c < b + group; c += CODES) {
                codes_at(half->codes + c, strip, bits, &codes);
                memcpy(&values, x + (size_t)strip * bytes + c, sizeof values);
                products += codes * values;
            }
            total += products * scale;
            rest += zero_of(half, g, scale) * sums[g];
        }
    for (int width = CODES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) total[i] += total[i + width];
    return total[0] + rest;
}

INLINE void ups(const Neurons *neurons, int bits, int two_level, const float *x, const float *sums, size_t begin, size_t end,
                float *products) {
    for (size_t i = begin; i < end; i++) {
        const size_t neuron = (size_t)neurons->used[i];
        const Half row = half_of(neurons, neurons->records + neuron * neurons->record_bytes, 0, bits, two_level);
        products[i] = from_bf16(neurons->gates[neuron]) * up_of(neurons, &row, bits, x, sums);
    }
}

static void neurons_up(const Neurons *neurons, const float *x, const float *sums, size_t begin, size_t end, float *products) {
    if (neurons->bits == 2)
        ups(neurons, 2, 1, x, sums, begin, end, products);
    else if (neurons->two_level)
        ups(neurons, 4, 1, x, sums, begin, end, products);
    else
        ups(neurons, 4, 0, x, sums, begin, end, products);
}

INLINE void downs(const Neurons *neurons, int bits, int two_level, const float *products, size_t begin, size_t end,
                  bf16 *out) {
    const size_t bytes = neurons->width * (size_t)bits / 8, group = neurons->group;
    Sixteen total[8 / 2][BYTES_TASK / CODES];
    memset(total, 0, sizeof total);
    for (size_t i = 0; i < neurons->count; i++) {
        const uint8_t *record = neurons->records + (size_t)neurons->used[i] * neurons->record_bytes;
        const Half column = half_of(neurons, record, 1, bits, two_level);
        for (int strip = 0; strip < 8 / bits; strip++)
            for (size_t b = begin; b < end; b += group) {
                const size_t g = ((size_t)strip * bytes + b) / group;
                const float scale = scale_of(&column, g), zero = zero_of(&column, g, scale);
                Sixteen codes, *sums = total[strip] + (b - begin) / CODES;
                for (size_t c = 0; c < group; c += CODES) {
                    codes_at(column.codes + b + c, strip, bits, &codes);
                    *sums++ += codes * (products[i] * scale) + products[i] * zero;
                }
            }
    }
    for (int strip = 0; strip < 8 / bits; strip++)
        for (size_t b = begin; b < end; b++)
            out[(size_t)strip * bytes + b] = to_bf16(total[strip][(b - begin) / CODES][(b - begin) % CODES]);
}

static void neurons_down(const Neurons *neurons, const float *products, size_t begin, size_t end, bf16 *out) {
    if (neurons->bits == 2)
        downs(neurons, 2, 1, products, begin, end, out);
    else if (neurons->two_level)
        downs(neurons, 4, 1, products, begin, end, out);
    else
        downs(neurons, 4, 0, products, begin, end, out);
}

#endif
