#include "hqq.h"

#include "kernels.h"
#include "team.h"

static void solve_block(void *data, size_t thread, size_t number) {
    const Hqq *job = data;
    (void)thread;
    job->shrunk[number] = !kernels->hqq(job, number);
}

void hqq_run(const Hqq *job, size_t threads) {
    const Phase phase = {NULL, solve_block, (job->weights.rows + job->block - 1) / job->block};
    team_run(&phase, 1, (void *)job, threads, TORCHS);
}
