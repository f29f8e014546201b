#include "encode.h"

#include <math.h>

#include "clones.h"
#include "kernels.h"
#include "team.h"

static void encode_block(void *data, size_t thread, size_t block) {
    (void)thread;
    kernels->encode(data, block);
}

void codes_run(const Codes *job, size_t threads) {
    const Phase phase = {NULL, encode_block, (job->weights.rows + BLOCK - 1) / BLOCK};
    team_run(&phase, 1, (void *)job, threads, TORCHS);
}

static void solve_block(void *data, size_t thread, size_t number) {
    const Hqq *job = data;
    (void)thread;
    job->shrunk[number] = !kernels->hqq(job, number);
}

void hqq_run(const Hqq *job, size_t threads) {
    const Phase phase = {NULL, solve_block, (job->weights.rows + job->block - 1) / job->block};
    team_run(&phase, 1, (void *)job, threads, TORCHS);
}

/* NL4, NL3 and NL2: plain C. */

enum { ABREAST = 16 }; /* rows at a time; their groups lie side by side */
#define EACH for (size_t i = 0; i < ABREAST; i++)

/* Groups of some rows, and the scales that fit them best so far. */
typedef struct {
    const float (*weights)[ABREAST]; /* (group, ABREAST) */
    size_t group;
    float best[ABREAST], least[ABREAST]; /* scales, and their sums of squared errors */
} Groups;

/* Rounded to bfloat16; finite. */
INLINE float rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE float inverse_of(float scale) { return scale == 0 ? 0 : 1 / scale; }

/* The middle between level n and the one before. */
INLINE float middle(const int8_t *levels, size_t n) { return (levels[n - 1] + levels[n]) * 0.5f; }

/* The level nearest to a weight in units of the scale, the lower one of two. */
INLINE float level_of(Coding coding, float x) {
    const int8_t *levels = uneven_levels(coding);
    float level = levels[0];
    for (size_t n = 1; n < (size_t)1 << code_bits(coding); n++)
        level += x > middle(levels, n) ? (float)(levels[n] - levels[n - 1]) : 0.0f;
    return level;
}

INLINE uint8_t code_of(Coding coding, float x) {
    int code = 0;
    for (size_t n = 1; n < (size_t)1 << code_bits(coding); n++) code += x > middle(uneven_levels(coding), n);
    return (uint8_t)code;
}

/* Keeps the scales, once they are rounded, where they fit better. */
INLINE void judge(Coding coding, Groups *groups, const float scales[ABREAST]) {
    float scale[ABREAST], inverse[ABREAST], error[ABREAST] = {0};
    EACH scale[i] = rounded(scales[i]), inverse[i] = inverse_of(scale[i]);
    for (size_t c = 0; c < groups->group; c++) {
        const float *weights = groups->weights[c];
        EACH {
            const float difference = level_of(coding, weights[i] * inverse[i]) * scale[i] - weights[i];
            error[i] += difference * difference;
        }
    }
    EACH {
        const int better = error[i] < groups->least[i];
        groups->best[i] = better ? scale[i] : groups->best[i];
        groups->least[i] = better ? error[i] : groups->least[i];
    }
}

/* scales: those of least squares for the levels that are nearest under the best ones. */
INLINE void solve(Coding coding, const Groups *groups, float scales[ABREAST]) {
    float inverse[ABREAST], product[ABREAST] = {0}, square[ABREAST] = {0};
    EACH inverse[i] = inverse_of(groups->best[i]);
    for (size_t c = 0; c < groups->group; c++) {
        const float *weights = groups->weights[c];
        EACH {
            const float level = level_of(coding, weights[i] * inverse[i]);
            product[i] += level * weights[i];
            square[i] += level * level;
        }
    }
    EACH scales[i] = product[i] / square[i];
}

/* best: the scales of 16 groups. */
INLINE void search_of(Coding coding, const Uneven *job, const float (*weights)[ABREAST], float best[ABREAST]) {
    Groups groups = {.weights = weights, .group = job->group};
    float largest[ABREAST] = {0}, scales[ABREAST];
    for (size_t c = 0; c < job->group; c++) EACH largest[i] = fabsf(weights[c][i]) > largest[i] ? fabsf(weights[c][i]) : largest[i];
    EACH groups.least[i] = INFINITY;
    for (size_t n = 0; n < job->count; n++) {
        EACH scales[i] = largest[i] * job->candidates[n];
        judge(coding, &groups, scales);
    }
    for (size_t n = 0; n < job->steps; n++) {
        solve(coding, &groups, scales);
        judge(coding, &groups, scales);
    }
    EACH best[i] = groups.best[i];
}

/* codes: of 16 rows' groups, column by column. */
INLINE void encode_of(Coding coding, size_t group, const float (*weights)[ABREAST], const float scales[ABREAST], uint8_t (*codes)[ABREAST]) {
    float inverse[ABREAST];
    EACH inverse[i] = inverse_of(scales[i]);
    for (size_t c = 0; c < group; c++) EACH codes[c][i] = code_of(coding, weights[c][i] * inverse[i]);
}

/* Both for each coding: its levels are known when compiling. */
typedef struct {
    void (*search)(const Uneven *, const float (*)[ABREAST], float[ABREAST]);
    void (*encode)(size_t, const float (*)[ABREAST], const float[ABREAST], uint8_t (*)[ABREAST]);
} Steps;

#define STEPS_OF(CODING)                                                                                            \
    CLONES static void search_##CODING(const Uneven *job, const float(*weights)[ABREAST], float best[ABREAST]) {          \
        search_of(CODING, job, weights, best);                                                                      \
    }                                                                                                               \
    CLONES static void encode_##CODING(size_t group, const float(*weights)[ABREAST], const float scales[ABREAST],         \
                                       uint8_t(*codes)[ABREAST]) {                                                     \
        encode_of(CODING, group, weights, scales, codes);                                                           \
    }

STEPS_OF(NL4)
STEPS_OF(NL3)
STEPS_OF(NL2)

static const Steps STEPS[] = {{search_NL4, encode_NL4}, {search_NL3, encode_NL3}, {search_NL2, encode_NL2}};

/* Four columns (4, 64) in the order of quants.h. */
static void pack(Coding coding, uint8_t (*columns)[BLOCK], uint8_t *into) {
    enum { HALF = BLOCK / 2 };
    uint8_t both[4][HALF];
    for (size_t c = 0; c < 4; c++)
        for (size_t j = 0; j < HALF; j++) both[c][j] = (uint8_t)(columns[c][j] | columns[c][HALF + j] << 4);
    for (size_t c = 0; c < code_bits(coding); c++)
        for (size_t j = 0; j < HALF; j++) {
            uint8_t *byte = into + c * HALF + j;
            if (coding == NL2) *byte = (uint8_t)(both[2 * c][j] | both[2 * c + 1][j] << 2);
            if (coding == NL3) *byte = (uint8_t)(both[c][j] | (both[3][j] >> c & 0x11) << 3);
            if (coding == NL4) *byte = both[c][j];
        }
}

/* A group of columns of a block of rows, in four parts of 16 rows. */
static void fill(const Uneven *job, const float *from, uint8_t *run) {
    float weights[job->group][ABREAST], scales[ABREAST];
    uint8_t codes[job->group][ABREAST], columns[job->group][BLOCK];
    const Steps *steps = STEPS + (job->coding - NL4);
    for (size_t part = 0; part < BLOCK / ABREAST; part++) {
        for (size_t c = 0; c < job->group; c++) EACH weights[c][i] = from[(part * ABREAST + i) * job->columns + c];
        steps->search(job, (const float(*)[ABREAST])weights, scales);
        steps->encode(job->group, (const float(*)[ABREAST])weights, scales, codes);
        for (size_t c = 0; c < job->group; c++) memcpy(columns[c] + part * ABREAST, codes[c], ABREAST);
        for (size_t i = 0; i < ABREAST; i++) {
            const bf16 scale = to_bf16(scales[i]);
            memcpy(run + (part * ABREAST + i) * sizeof scale, &scale, sizeof scale);
        }
    }
    for (size_t c = 0; c < job->group; c += 4) pack(job->coding, columns + c, run + UNEVEN_SCALES + code_bytes(job->coding, c));
}

static void fill_block(void *data, size_t thread, size_t block) {
    const Uneven *job = data;
    const size_t groups = job->columns / job->group, bytes = uneven_group_bytes(job->coding, job->group);
    (void)thread;
    for (size_t g = 0; g < groups; g++)
        fill(job, job->weights + block * BLOCK * job->columns + g * job->group, job->blocks + (block * groups + g) * bytes);
}

void uneven_run(const Uneven *job, size_t threads) {
    const Phase phase = {NULL, fill_block, job->rows / BLOCK};
    team_run(&phase, 1, (void *)job, threads, TORCHS);
}
