/* Packing a block: 64 rows into codes, and half-quadratic quantization. Every operation rounds as torch's does, in its order;
 * plain C without fused sums, so that a store has the same bits on every machine. */
#ifndef TIERMOE_ISA_ENCODE_H
#define TIERMOE_ISA_ENCODE_H

#include <math.h>
#include <string.h>

#include "../encode.h"


/* To the nearest integer, halves to the even one; for |x| < 2^22. */
INLINE float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }

/* Into low..high; low where x is undefined. */
INLINE float clamped(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

/* Codes. */

enum {
    WIDTH = 16,     /* numbers at a time */
    REACH = 256,     /* columns at a time, at most */
};

#define EACH(i, count) for (size_t i = 0; i < (count); i++)

/* Sums in double precision, of which the order does not matter to the digits that a store keeps. */
typedef struct {
    double error[WIDTH], size[WIDTH];
} Squares;

/* Columns first .. first + count of a row; count a multiple of 16. */
INLINE void row_of(const Codes *job, size_t row, size_t first, size_t count, float *into) {
    const size_t start = row * job->weights.columns + first;
    if (job->weights.wide)
        memcpy(into, (const float *)job->weights.values + start, count * sizeof *into);
    else
        EACH(i, count) into[i] = from_bf16(((const bf16 *)job->weights.values)[start + i]);
}

/* As a tensor of bfloat16 would hold it; no NaN. */
INLINE float through_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Adds up the squares of a row's weights, and of their differences to code * scale + zero. */
INLINE void compare(Squares *squares, const float *weights, const float *codes, size_t count, float scale, float zero, int exact) {
    double error[WIDTH], size[WIDTH];
    memcpy(error, squares->error, sizeof error), memcpy(size, squares->size, sizeof size);
    for (size_t first = 0; first < count; first += WIDTH) EACH(i, WIDTH) {
            const float weight = weights[first + i], value = codes[first + i] * scale + zero;
            const float apart = weight - (exact ? value : through_bf16(value));
            error[i] += (double)(apart * apart);
            size[i] += (double)(weight * weight);
        }
    memcpy(squares->error, error, sizeof error), memcpy(squares->size, size, sizeof size);
}

INLINE void report(const Codes *job, size_t block, const Squares *squares) {
    double *into = job->squares + 2 * block;
    into[0] = into[1] = 0;
    EACH(i, WIDTH) into[0] += squares->error[i], into[1] += squares->size[i];
}

/* The integers low .. high for which integer * scale + zero is nearest; 0 where the scale is. */
INLINE void nearest(const float *weights, size_t count, float scale, float zero, float low, float high, float *codes) {
    const float divisor = scale == 0 ? INFINITY : scale;
    EACH(i, count) codes[i] = rounded(clamped((weights[i] - zero) / divisor, low, high));
}

/* Nibbles of some rows (rows, REACH), of which `columns` are taken, in the order of INT4: those of 64 rows as quants.h says;
 * of fewer, two after each other share a byte. Changes the nibbles. */
INLINE void pack_nibbles(uint8_t (*nibbles)[REACH], size_t rows, size_t columns, uint8_t *into) {
    const size_t half = rows / 2;
    EACH(j, half) {
        uint8_t *both = nibbles[j];
        const uint8_t *low = nibbles[rows == BLOCK ? j : 2 * j], *high = nibbles[rows == BLOCK ? half + j : 2 * j + 1];
        EACH(c, columns) both[c] = (uint8_t)(low[c] | high[c] << 4);
    }
    if (rows == BLOCK)
        EACH(c, columns) EACH(j, BLOCK / 2) into[c * (BLOCK / 2) + j] = nibbles[j][c];
    else
        EACH(c, columns) EACH(j, half) into[c * half + j] = nibbles[j][c];
}

/* INT4 and INT2; in INT2 two columns share a nibble. */
INLINE void encode_even(Coding coding, const Codes *job, size_t begin, size_t rows, Squares *squares) {
    const size_t columns = job->weights.columns, group = job->group, groups = columns / group;
    const size_t bits = code_bits(coding), each = 4 / bits; /* codes of a nibble */
    const int middle = middle_code(coding);
    uint8_t nibbles[BLOCK][REACH];
    float weights[REACH], codes[REACH];
    EACH(g, groups) {
        EACH(r, rows) {
            const float scale = job->scales[(begin + r) * groups + g], zero = job->zeros[(begin + r) * groups + g];
            row_of(job, begin + r, g * group, group, weights);
            nearest(weights, group, scale, zero, (float)-middle, (float)(middle - 1), codes);
            compare(squares, weights, codes, group, scale, zero, job->exact);
            EACH(i, group / each) {
                const int low = (int)codes[each * i] + middle, high = bits == 2 ? (int)codes[each * i + 1] + middle : 0;
                nibbles[r][i] = (uint8_t)(low | high << 2);
            }
        }
        pack_nibbles(nibbles, rows, group / each, job->codes + (begin * columns + g * group * rows) * bits / 8);
    }
}

static void encode_eight(const Codes *job, size_t begin, size_t rows, Squares *squares) {
    const size_t columns = job->weights.columns;
    float weights[REACH], codes[REACH];
    EACH(r, rows) for (size_t first = 0; first < columns; first += REACH) {
        const size_t count = columns - first < REACH ? columns - first : REACH;
        const float scale = job->scales[begin + r];
        int8_t *into = (int8_t *)job->codes + (begin + r) * columns + first;
        row_of(job, begin + r, first, count, weights);
        nearest(weights, count, scale, 0, -128, 127, codes);
        compare(squares, weights, codes, count, scale, 0, job->exact);
        EACH(i, count) into[i] = (int8_t)(int)codes[i];
    }
}

/* The sum of squared errors of a group under a scale, in torch's order, and its codes -32 .. 31. */
INLINE float six_under(const float *weights, size_t group, float scale, float *codes) {
    enum { PARTS = 4, PART_SIZE = 8 };
    float sums[PARTS][PART_SIZE] = {{0}}, sum = 0;
    nearest(weights, group, scale, 0, -32, 31, codes);
    for (size_t first = 0; first < group; first += PARTS * PART_SIZE) EACH(p, PARTS) EACH(i, PART_SIZE) {
                const size_t at = first + p * PART_SIZE + i;
                const float apart = codes[at] * scale - weights[at];
                sums[p][i] += apart * apart;
            }
    for (size_t p = 1; p < PARTS; p++) EACH(i, PART_SIZE) sums[0][i] += sums[p][i];
    EACH(i, PART_SIZE) sum += sums[0][i];
    return sum;
}

/* Codes and the scale of a group: its largest magnitude becomes the code 0 or 63. */
INLINE float nearest_six(const float *weights, size_t group, int exact, float *codes) {
    float other[REACH], low = weights[0], high = weights[0];
    EACH(i, group) {
        low = weights[i] < low || weights[i] != weights[i] ? weights[i] : low; /* a NaN stays */
        high = weights[i] > high || weights[i] != weights[i] ? weights[i] : high;
    }
    const float largest = -low > high ? low : high;
    float scale = largest / -32, second = largest / 31;
    if (largest != largest) return largest;
    if (!exact) scale = through_bf16(scale), second = through_bf16(second);
    const float error = six_under(weights, group, scale, codes), others = six_under(weights, group, second, other);
    if (!(others < error)) return scale;
    memcpy(codes, other, group * sizeof *codes);
    return second;
}

/* As quants.h says of INT6. */
INLINE void pack_sixes(uint8_t (*codes)[REACH], size_t columns, uint8_t *into) {
    enum { HALF = BLOCK / 2 };
    for (size_t c = 0; c < columns; c += 4, into += 3 * BLOCK) {
        EACH(k, 4) EACH(j, HALF) into[k * HALF + j] = (uint8_t)((codes[j][c + k] & 15) | (codes[HALF + j][c + k] & 15) << 4);
        EACH(p, 2) EACH(j, HALF) {
            const uint8_t *low = codes[j] + c + 2 * p, *high = codes[HALF + j] + c + 2 * p;
            into[(4 + p) * HALF + j] = (uint8_t)(high[0] >> 4 | low[0] >> 4 << 2 | high[1] >> 4 << 4 | low[1] >> 4 << 6);
        }
    }
}

static void encode_six(const Codes *job, size_t begin, size_t rows, Squares *squares) {
    const size_t columns = job->weights.columns, group = job->group, groups = columns / group;
    uint8_t sixes[BLOCK][REACH];
    float weights[REACH], codes[REACH] = {0};
    EACH(g, groups) {
        EACH(r, rows) {
            row_of(job, begin + r, g * group, group, weights);
            const float scale = nearest_six(weights, group, job->exact, codes);
            job->scales[(begin + r) * groups + g] = scale;
            compare(squares, weights, codes, group, scale, 0, job->exact);
            EACH(i, group) sixes[r][i] = (uint8_t)(int)(codes[i] + 32);
        }
        pack_sixes(sixes, group, job->codes + begin * columns * 3 / 4 + g * group * BLOCK * 3 / 4);
    }
}

static void encode_block(const Codes *job, size_t block) {
    const size_t begin = block * BLOCK, rows = job->weights.rows - begin < BLOCK ? job->weights.rows - begin : BLOCK;
    Squares squares = {{0}, {0}};
    switch (job->coding) {
        case INT8: encode_eight(job, begin, rows, &squares); break;
        case INT6: encode_six(job, begin, rows, &squares); break;
        case INT4: encode_even(INT4, job, begin, rows, &squares); break;
        default: encode_even(INT2, job, begin, rows, &squares);
    }
    report(job, block, &squares);
}

/* Half-quadratic quantization. */

enum {
    ABREAST = 16,
    CHUNK = 16,
    INTERLEAVED = 4,
    SIDE_BY_SIDE = 32, /* groups that torch sums at a time; those that are left it sums in another order */
};

/* Up to 16 groups side by side, small enough for the fastest cache through all steps. */
typedef struct {
    float scaled[MOST_GROUP][ABREAST];                  /* weights in units of their group's scale */
    float scale[ABREAST], unit[ABREAST], low[ABREAST];  /* unit: the scale, or 1 where that is 0 */
    float zero[ABREAST], best[ABREAST], least[ABREAST]; /* zero points, and the least error of any */
} Tile;

/* Of each step: whether a group's errors were smaller than ever before, and the largest error in units of a weight. */
typedef struct {
    uint32_t better;
    float most[MOST_STEPS];
} Steps;

typedef struct {
    float mean, size; /* of a group's errors, and of their magnitudes */
} Errors;

INLINE float error_of(float scaled, float zero, float largest) {
    const float x = scaled + zero;
    return x - rounded(clamped(x, 0, largest));
}

/* Whether a group's errors are smaller than they ever were; moves its zero point on. */
INLINE int judge(Tile *tile, size_t i, Errors errors) {
    const int better = errors.size < tile->least[i];
    tile->best[i] = better ? tile->zero[i] : tile->best[i];
    tile->least[i] = better ? errors.size : tile->least[i];
    tile->zero[i] = tile->zero[i] - errors.mean;
    return better;
}

/* One step for 16 groups. Sums go as torch's do: chunks of 16, then their sums. */
INLINE int step_tile(Tile *tile, size_t group, float largest, float *most) {
    float sums[ABREAST] = {0}, sizes[ABREAST] = {0}, peaks[ABREAST] = {0};
    for (size_t chunk = 0; chunk < group; chunk += CHUNK) {
        float sum[ABREAST] = {0}, size[ABREAST] = {0};
        for (size_t row = chunk; row < chunk + CHUNK; row++)
            for (size_t i = 0; i < ABREAST; i++) {
                const float error = error_of(tile->scaled[row][i], tile->zero[i], largest), magnitude = fabsf(error);
                sum[i] += error;
                size[i] += magnitude;
                peaks[i] = magnitude > peaks[i] ? magnitude : peaks[i];
            }
        for (size_t i = 0; i < ABREAST; i++) sums[i] += sum[i], sizes[i] += size[i];
    }
    int better = 0;
    for (size_t i = 0; i < ABREAST; i++) {
        const float peak = peaks[i] * tile->unit[i], count = (float)group;
        *most = peak > *most ? peak : *most;
        better |= judge(tile, i, (Errors){sums[i] / count, sizes[i] / count});
    }
    return better;
}

/* One step for one of the groups that are left: every fourth number is summed by itself. */
INLINE int step_one(Tile *tile, size_t group, float largest, float *most) {
    float sum = 0, size = 0, peak = 0;
    for (size_t first = 0; first < INTERLEAVED; first++) {
        float sums = 0, sizes = 0;
        for (size_t chunk = first; chunk < group; chunk += INTERLEAVED * CHUNK) {
            float part = 0, part_size = 0;
            for (size_t row = chunk; row < group && row < chunk + INTERLEAVED * CHUNK; row += INTERLEAVED) {
                const float error = error_of(tile->scaled[row][0], tile->zero[0], largest), magnitude = fabsf(error);
                part += error, part_size += magnitude;
                peak = magnitude > peak ? magnitude : peak;
            }
            sums += part, sizes += part_size;
        }
        sum = first ? sum + sums : sums, size = first ? size + sizes : sizes;
    }
    peak *= tile->unit[0];
    *most = peak > *most ? peak : *most;
    return judge(tile, 0, (Errors){sum / (float)group, size / (float)group});
}

/* `width` groups from weight `start` on, and zero points to begin with. */
INLINE void begin_tile(Tile *tile, const Weights *weights, size_t start, size_t width, size_t group, float largest) {
    float high[ABREAST];
    for (size_t i = 0; i < width; i++) {
        tile->low[i] = high[i] = weight_at(weights, start + i * group);
        for (size_t row = 0; row < group; row++) tile->scaled[row][i] = weight_at(weights, start + i * group + row);
    }
    for (size_t row = 0; row < group; row++)
        for (size_t i = 0; i < width; i++) {
            const float weight = tile->scaled[row][i];
            tile->low[i] = weight < tile->low[i] || weight != weight ? weight : tile->low[i]; /* a NaN stays */
            high[i] = weight > high[i] || weight != weight ? weight : high[i];
        }
    for (size_t i = 0; i < width; i++) {
        const float scale = (high[i] - tile->low[i]) / largest;
        tile->scale[i] = scale;
        tile->unit[i] = scale == 0 ? 1 : scale;
        tile->zero[i] = tile->best[i] = -tile->low[i] / tile->unit[i];
        tile->least[i] = INFINITY;
    }
    for (size_t row = 0; row < group; row++)
        for (size_t i = 0; i < width; i++) tile->scaled[row][i] /= tile->unit[i];
}

INLINE void end_tile(const Hqq *job, const Tile *tile, size_t first, size_t width) {
    for (size_t i = 0; i < width; i++) {
        job->scale[first + i] = tile->scale[i];
        /* in a group of equal weights every code is the same one: the offset takes its place */
        job->offset[first + i] = tile->scale[i] == 0 ? tile->low[i] : -tile->best[i] * tile->scale[i];
    }
    if (!job->codes) return;
    for (size_t row = 0; row < job->group; row++)
        for (size_t i = 0; i < width; i++) {
            const float code = rounded(clamped(tile->scaled[row][i] + tile->best[i], 0, job->largest));
            job->codes[(first + i) * job->group + row] = (uint8_t)code;
        }
}

/* So many steps for `width` groups from group `first` of the matrix on: 16, or one of those that are left. */
INLINE void solve_tile(const Hqq *job, size_t first, size_t width, size_t steps, Steps *found) {
    Tile tile;
    const Weights *weights = &job->weights;
    if (weights->wide)
        begin_tile(&tile, &(Weights){weights->values, weights->rows, weights->columns, 1}, first * job->group, width,
                   job->group, job->largest);
    else
        begin_tile(&tile, &(Weights){weights->values, weights->rows, weights->columns, 0}, first * job->group, width,
                   job->group, job->largest);
    for (size_t step = 0; step < steps; step++) {
        const int better = width == ABREAST ? step_tile(&tile, job->group, job->largest, &found->most[step])
                                         : step_one(&tile, job->group, job->largest, &found->most[step]);
        found->better |= (uint32_t)better << step;
    }
    end_tile(job, &tile, first, width);
}

static void solve_groups(const Hqq *job, size_t begin, size_t end, size_t steps, Steps *found) {
    const size_t usual = end - (end - begin) % SIDE_BY_SIDE;
    for (size_t i = begin; i < usual; i += ABREAST) solve_tile(job, i, ABREAST, steps, found);
    for (size_t i = usual; i < end; i++) solve_tile(job, i, 1, steps, found);
}

static int hqq_block(const Hqq *job, size_t number) {
    const size_t per_row = job->weights.columns / job->group, first = number * job->block;
    const size_t last = job->weights.rows - first < job->block ? job->weights.rows : first + job->block;
    Steps found = {0}, again = {0};
    solve_groups(job, first * per_row, last * per_row, job->steps, &found);
    size_t stop = 0; /* all groups of the block stop at the first step at which none got better */
    while (stop < job->steps && found.better >> stop & 1) {
        if (!(found.most[stop] <= job->thresholds[stop])) return 0;
        stop++;
    }
    if (stop < job->steps && found.better >> stop) solve_groups(job, first * per_row, last * per_row, stop, &again);
    return 1;
}

#endif
