#include "hqq.h"

#include <math.h>
#include <string.h>

#include "team.h"

/* Plain C, compiled several times where the compiler and the system can choose among them at run time. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    TILE = 16,
    CHUNK = 16,
    INTERLEAVED = 4,
    SIDE_BY_SIDE = 32, /* groups that torch sums at a time; those that are left it sums in another order */
};

/* To the nearest integer, halves to the even one; for 0 <= x < 2^22. */
INLINE float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }

INLINE float clamped(float x, float largest) {
    x = x < 0 ? 0 : x;
    return x > largest ? largest : x;
}

INLINE float error_of(float scaled, float zero, float largest) {
    const float x = scaled + zero;
    return x - rounded(clamped(x, largest));
}

typedef struct {
    float *scaled; /* (group, groups): weights in units of their group's scale */
    float *scale, *unit, *low, *zero, *best, *least; /* (groups); unit: scale, or 1 where that is 0 */
    size_t groups;
} Block;

typedef struct {
    float mean, size; /* of a group's errors, and of their magnitudes */
} Errors;

/* Whether a group's errors are smaller than they ever were; moves its zero point on. */
INLINE int judge(const Block *block, size_t i, Errors errors) {
    const int better = errors.size < block->least[i];
    block->best[i] = better ? block->zero[i] : block->best[i];
    block->least[i] = better ? errors.size : block->least[i];
    block->zero[i] = block->zero[i] - errors.mean;
    return better;
}

/* One step for 16 groups from `first` on. Sums go as torch's do: chunks of 16, then their sums. */
INLINE int step_tile(const Block *block, size_t first, size_t group, float largest, float *most) {
    float sums[TILE] = {0}, sizes[TILE] = {0}, peaks[TILE] = {0};
    const float *zero = block->zero + first;
    for (size_t chunk = 0; chunk < group; chunk += CHUNK) {
        float sum[TILE] = {0}, size[TILE] = {0};
        for (size_t row = chunk; row < chunk + CHUNK; row++) {
            const float *scaled = block->scaled + row * block->groups + first;
            for (size_t i = 0; i < TILE; i++) {
                const float error = error_of(scaled[i], zero[i], largest), magnitude = fabsf(error);
                sum[i] += error;
                size[i] += magnitude;
                peaks[i] = magnitude > peaks[i] ? magnitude : peaks[i];
            }
        }
        for (size_t i = 0; i < TILE; i++) sums[i] += sum[i], sizes[i] += size[i];
    }
    int better = 0;
    for (size_t i = 0; i < TILE; i++) {
        const float peak = peaks[i] * block->unit[first + i], count = (float)group;
        *most = peak > *most ? peak : *most;
        better |= judge(block, first + i, (Errors){sums[i] / count, sizes[i] / count});
    }
    return better;
}

/* One step for one of the groups that are left: every fourth number is summed by itself. */
INLINE int step_one(const Block *block, size_t at, size_t group, float largest, float *most) {
    float sum = 0, size = 0, peak = 0;
    for (size_t first = 0; first < INTERLEAVED; first++) {
        float sums = 0, sizes = 0;
        for (size_t chunk = first; chunk < group; chunk += INTERLEAVED * CHUNK) {
            float part = 0, part_size = 0;
            for (size_t row = chunk; row < group && row < chunk + INTERLEAVED * CHUNK; row += INTERLEAVED) {
                const float error = error_of(block->scaled[row * block->groups + at], block->zero[at], largest);
                const float magnitude = fabsf(error);
                part += error, part_size += magnitude;
                peak = magnitude > peak ? magnitude : peak;
            }
            sums += part, sizes += part_size;
        }
        sum = first ? sum + sums : sums, size = first ? size + sizes : sizes;
    }
    peak *= block->unit[at];
    *most = peak > *most ? peak : *most;
    return judge(block, at, (Errors){sum / (float)group, size / (float)group});
}

INLINE void begin_tile(const Block *block, const float *weights, size_t first, size_t width, size_t group, float largest) {
    float low[TILE], high[TILE];
    for (size_t i = 0; i < width; i++) low[i] = high[i] = weights[(first + i) * group];
    for (size_t row = 0; row < group; row++) {
        float *scaled = block->scaled + row * block->groups + first;
        for (size_t i = 0; i < width; i++) {
            const float weight = weights[(first + i) * group + row];
            scaled[i] = weight;
            low[i] = weight < low[i] || weight != weight ? weight : low[i]; /* a NaN stays */
            high[i] = weight > high[i] || weight != weight ? weight : high[i];
        }
    }
    for (size_t i = 0; i < width; i++) {
        const float scale = (high[i] - low[i]) / largest;
        block->scale[first + i] = scale;
        block->unit[first + i] = scale == 0 ? 1 : scale;
        block->low[first + i] = low[i];
        block->zero[first + i] = block->best[first + i] = -low[i] / block->unit[first + i];
        block->least[first + i] = INFINITY;
    }
    for (size_t row = 0; row < group; row++) {
        float *scaled = block->scaled + row * block->groups + first;
        for (size_t i = 0; i < width; i++) scaled[i] /= block->unit[first + i];
    }
}

INLINE void end_tile(const Block *block, uint8_t *codes, size_t first, size_t width, size_t group, float largest) {
    for (size_t row = 0; row < group; row++) {
        const float *scaled = block->scaled + row * block->groups + first;
        for (size_t i = 0; i < width; i++)
            codes[(first + i) * group + row] = (uint8_t)rounded(clamped(scaled[i] + block->best[first + i], largest));
    }
}

/* Returns 0, and leaves the results unwritten, where an error is beyond the threshold of its step. */
CLONES static int solve(const Hqq *job, const Block *block, const float *weights, uint8_t *codes, float *scale, float *offset) {
    const size_t groups = block->groups, group = job->group, whole = groups - groups % TILE, usual = groups - groups % SIDE_BY_SIDE;
    for (size_t i = 0; i < whole; i += TILE) begin_tile(block, weights, i, TILE, group, job->largest);
    for (size_t i = whole; i < groups; i++) begin_tile(block, weights, i, 1, group, job->largest);
    for (size_t step = 0; step < job->steps; step++) {
        int better = 0;
        float most = 0;
        for (size_t i = 0; i < usual; i += TILE) better |= step_tile(block, i, group, job->largest, &most);
        for (size_t i = usual; i < groups; i++) better |= step_one(block, i, group, job->largest, &most);
        if (!better) break;
        if (!(most <= job->thresholds[step])) return 0;
    }
    for (size_t i = 0; i < whole; i += TILE) end_tile(block, codes, i, TILE, group, job->largest);
    for (size_t i = whole; i < groups; i++) end_tile(block, codes, i, 1, group, job->largest);
    for (size_t i = 0; i < groups; i++) {
        scale[i] = block->scale[i];
        /* in a group of equal weights every code is the same one: the offset takes its place */
        offset[i] = block->scale[i] == 0 ? block->low[i] : -block->best[i] * block->scale[i];
    }
    return 1;
}

static size_t block_floats(const Hqq *job) {
    const size_t groups = job->block * job->columns / job->group;
    return groups * (job->group + 6);
}

size_t hqq_workspace(const Hqq *job, size_t threads) { return block_floats(job) * threads; }

static void solve_block(void *data, size_t thread, size_t number) {
    const Hqq *job = data;
    const size_t first = number * job->block, per_row = job->columns / job->group;
    const size_t rows = job->rows - first < job->block ? job->rows - first : job->block;
    const size_t groups = rows * per_row;
    float *space = job->workspace + thread * block_floats(job);
    Block block = {.scaled = space, .groups = groups};
    float **parts[] = {&block.scale, &block.unit, &block.low, &block.zero, &block.best, &block.least};
    space += job->group * groups;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++, space += groups) *parts[i] = space;
    job->shrunk[number] = !solve(job, &block, job->weights + first * job->columns, job->codes + first * job->columns,
                                 job->scale + first * per_row, job->offset + first * per_row);
}

void hqq_run(const Hqq *job, size_t threads) {
    const Phase phase = {NULL, solve_block, (job->rows + job->block - 1) / job->block};
    team_run(&phase, 1, (void *)job, threads, TORCHS);
}
