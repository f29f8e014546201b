#include "codes.h"

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
