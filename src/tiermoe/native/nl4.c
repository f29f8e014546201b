#include "nl4.h"

#include <math.h>

#include "matrix.h"
#include "team.h"

/* Plain C, compiled several times where the compiler and the system can choose among them at run time. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { TILE = 16, LEVELS = 16 }; /* rows at a time; their groups lie side by side */
#define EACH for (size_t i = 0; i < TILE; i++)

/* Groups of some rows, and the scales that fit them best so far. */
typedef struct {
    const float (*weights)[TILE]; /* (group, TILE) */
    size_t group;
    float best[TILE], least[TILE]; /* scales, and their sums of squared errors */
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

/* The level nearest to a weight in units of the scale, the lower one of two. */
INLINE float level_of(float x) {
    float level = NL4_LEVELS[0];
    for (size_t n = 1; n < LEVELS; n++)
        level += x > (NL4_LEVELS[n - 1] + NL4_LEVELS[n]) * 0.5f ? (float)(NL4_LEVELS[n] - NL4_LEVELS[n - 1]) : 0.0f;
    return level;
}

INLINE uint8_t code_of(float x) {
    int code = 0;
    for (size_t n = 1; n < LEVELS; n++) code += x > (NL4_LEVELS[n - 1] + NL4_LEVELS[n]) * 0.5f;
    return (uint8_t)code;
}

/* Keeps the scales, once they are rounded, where they fit better. */
INLINE void judge(Groups *groups, const float scales[TILE]) {
    float scale[TILE], inverse[TILE], error[TILE] = {0};
    EACH scale[i] = rounded(scales[i]), inverse[i] = inverse_of(scale[i]);
    for (size_t c = 0; c < groups->group; c++) {
        const float *weights = groups->weights[c];
        EACH {
            const float difference = level_of(weights[i] * inverse[i]) * scale[i] - weights[i];
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
INLINE void solve(const Groups *groups, float scales[TILE]) {
    float inverse[TILE], product[TILE] = {0}, square[TILE] = {0};
    EACH inverse[i] = inverse_of(groups->best[i]);
    for (size_t c = 0; c < groups->group; c++) {
        const float *weights = groups->weights[c];
        EACH {
            const float level = level_of(weights[i] * inverse[i]);
            product[i] += level * weights[i];
            square[i] += level * level;
        }
    }
    EACH scales[i] = product[i] / square[i];
}

/* best: the scales of 16 groups. */
CLONES static void search(const Nl4 *job, const float (*weights)[TILE], float best[TILE]) {
    Groups groups = {.weights = weights, .group = job->group};
    float largest[TILE] = {0}, scales[TILE];
    for (size_t c = 0; c < job->group; c++) EACH largest[i] = fabsf(weights[c][i]) > largest[i] ? fabsf(weights[c][i]) : largest[i];
    EACH groups.least[i] = INFINITY;
    for (size_t n = 0; n < job->count; n++) {
        EACH scales[i] = largest[i] * job->candidates[n];
        judge(&groups, scales);
    }
    for (size_t n = 0; n < job->steps; n++) {
        solve(&groups, scales);
        judge(&groups, scales);
    }
    EACH best[i] = groups.best[i];
}

/* codes: of 16 rows' groups, column by column. */
CLONES static void encode(size_t group, const float (*weights)[TILE], const float scales[TILE], uint8_t (*codes)[TILE]) {
    float inverse[TILE];
    EACH inverse[i] = inverse_of(scales[i]);
    for (size_t c = 0; c < group; c++) EACH codes[c][i] = code_of(weights[c][i] * inverse[i]);
}

/* A group of columns of a block of rows, in four parts of 16 rows. */
static void fill(const Nl4 *job, const float *from, uint8_t *run) {
    float weights[job->group][TILE], scales[TILE];
    uint8_t codes[BLOCK / TILE][job->group][TILE];
    for (size_t part = 0; part < BLOCK / TILE; part++) {
        for (size_t c = 0; c < job->group; c++) EACH weights[c][i] = from[(part * TILE + i) * job->columns + c];
        search(job, (const float(*)[TILE])weights, scales);
        encode(job->group, (const float(*)[TILE])weights, scales, codes[part]);
        for (size_t i = 0; i < TILE; i++) {
            const bf16 scale = to_bf16(scales[i]);
            memcpy(run + (part * TILE + i) * sizeof scale, &scale, sizeof scale);
        }
    }
    for (size_t c = 0; c < job->group; c++)
        for (size_t j = 0; j < BLOCK / 2; j++)
            run[NL4_SCALES + c * BLOCK / 2 + j] =
                (uint8_t)(codes[j / TILE][c][j % TILE] | codes[BLOCK / 2 / TILE + j / TILE][c][j % TILE] << 4);
}

static void fill_block(void *data, size_t thread, size_t block) {
    const Nl4 *job = data;
    const size_t groups = job->columns / job->group, bytes = nl4_group_bytes(job->group);
    (void)thread;
    for (size_t g = 0; g < groups; g++)
        fill(job, job->weights + block * BLOCK * job->columns + g * job->group, job->blocks + (block * groups + g) * bytes);
}

void nl4_run(const Nl4 *job, size_t threads) {
    const Phase phase = {NULL, fill_block, job->rows / BLOCK};
    team_run(&phase, 1, (void *)job, threads, TORCHS);
}
