/* A block of half-quadratic quantization. Every operation rounds as torch's does, in its order. */
#include <math.h>

#include "../../hqq.h"
#include "round.h"

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
