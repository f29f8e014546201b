#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math") /* else comparisons of costs are done one by one, seven times slower */
#endif

#include "trellis.h"

#include <math.h>
#include <string.h>

#include "clones.h"

enum {
    CODES = 4,                 /* that follow a state */
    HISTORIES = 256,           /* the last four codes, the newest in the lowest bits */
    STATES = CODES * HISTORIES,
    APART = HISTORIES / CODES, /* histories that go on alike */
    AROUND = 16,               /* codes before and behind the place where a run closes */
    ANY = -1,
};

/* The level of each state: of code i of a byte, (newest code, history before it). */
typedef float Table[RUN_CODES][CODES][HISTORIES];

static void fill_table(Table table) {
    for (size_t i = 0; i < RUN_CODES; i++)
        for (unsigned state = 0; state < STATES; state++) {
            unsigned word = 0; /* code k of the last five is at place 4 + i - k of the two bytes */
            for (unsigned k = 0; k < 5; k++) word |= (state >> 2 * k & 3) << 2 * (RUN_CODES + i - k);
            const unsigned level = trellis_level(word & 0xFF, word >> 8, i);
            table[i][state % CODES][state / CODES] = (float)TRELLIS_CODES[level] - 32;
        }
}

/* A stretch of a run: from position `first` on, row by row as in trellis.h. */
typedef struct {
    const float *targets, *weights; /* (64) of the run */
    size_t first, count;
} Stretch;

static inline size_t row_of(size_t position) { return position % RUN_CODES * RUN_BYTES + position / RUN_CODES % RUN_BYTES; }

/* states (count): the best ones, `history` standing before the first and at the end of the last, or any. */
INLINE void viterbi(const Table table, const Stretch *stretch, int history, uint16_t *states) {
    uint8_t from[BLOCK][HISTORIES];
    float costs[CODES][HISTORIES], least[HISTORIES];
    for (size_t t = 0; t < stretch->count; t++) {
        const size_t position = stretch->first + t;
        uint8_t *by = from[t];
        for (int h = 0; t == 0 && h < HISTORIES; h++) least[h] = history == ANY || h == history ? 0 : 1e30f, by[h] = 0;
        for (size_t q = 0; t && q < CODES; q++) {
            const float *c = costs[q];
            for (size_t u = 0; u < APART; u++) {
                const float a = c[u], b = c[u + APART], d = c[u + 2 * APART], e = c[u + 3 * APART];
                const float ab = b < a ? b : a, de = e < d ? e : d;
                const int first = b < a, second = 2 + (e < d);
                least[CODES * u + q] = de < ab ? de : ab;
                by[CODES * u + q] = (uint8_t)(de < ab ? second : first);
            }
        }
        const size_t row = row_of(position);
        const float target = stretch->targets[row], weight = stretch->weights[row];
        for (size_t q = 0; q < CODES; q++) {
            const float *level = table[position % RUN_CODES][q];
            for (size_t h = 0; h < HISTORIES; h++) {
                const float error = target - level[h];
                costs[q][h] = least[h] + weight * (error * error);
            }
        }
    }
    unsigned best = history == ANY ? 0 : (unsigned)history;
    for (unsigned state = best; state < STATES; state += history == ANY ? 1 : HISTORIES)
        if (costs[state % CODES][state / CODES] < costs[best % CODES][best / CODES]) best = state;
    for (size_t t = stretch->count; t-- > 0;) {
        states[t] = (uint16_t)best;
        best = best / CODES + from[t][best / CODES] * HISTORIES;
    }
}

static void write_run(const Table table, const uint16_t states[BLOCK], uint8_t *codes, float *levels) {
    memset(codes, 0, RUN_BYTES);
    for (size_t t = 0; t < BLOCK; t++) {
        codes[t / RUN_CODES] |= (uint8_t)(states[t] % CODES << 2 * (t % RUN_CODES));
        levels[row_of(t)] = table[t % RUN_CODES][states[t] % CODES][states[t] / CODES];
    }
}

static int is_exact(const float *targets, const float *weights, const float *levels) {
    for (size_t r = 0; r < BLOCK; r++)
        if (weights[r] > 0 && fabsf(targets[r] - levels[r]) > 0.25f) return 0;
    return 1;
}

CLONES static void encode_run(const Table table, const Trellis *job, size_t number) {
    const float *targets = job->targets + number * BLOCK, *weights = job->weights + number * BLOCK;
    uint8_t *codes = job->codes + number * RUN_BYTES;
    float *levels = job->levels + number * BLOCK;
    uint16_t states[BLOCK];
    const Stretch around = {targets, weights, BLOCK - AROUND, 2 * AROUND}, whole = {targets, weights, 0, BLOCK};
    viterbi(table, &around, ANY, states);
    viterbi(table, &whole, states[AROUND - 1] % HISTORIES, states);
    write_run(table, states, codes, levels);
    for (int history = 0; job->exact && history < HISTORIES && !is_exact(targets, weights, levels); history++) {
        viterbi(table, &whole, history, states);
        write_run(table, states, codes, levels);
    }
}

void trellis_run(const Trellis *job) {
    Table table;
    fill_table(table);
    for (size_t number = 0; number < job->count; number++) encode_run(table, job, number);
}
