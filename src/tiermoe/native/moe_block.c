#include "moe_block.h"

#include <string.h>

#include "kernels.h"

typedef struct {
    const MoeBlock *block;
    const bf16 *x;
    float *logits;
    bf16 *gathered, *inner, *outputs;
    int64_t *chosen; /* (tokens, k), of each token in ascending order */
    float *weights, *prepared;
    size_t *next;          /* of each expert: the row of `outputs` for its next token */
    const bf16 **summands; /* (tokens, k): rows of `outputs` */
    Share *shares;
} Job;

/* The parts of the workspace, each on a line of its own. */
static size_t lay_out(Job *job, size_t tokens, size_t threads, char *begin) {
    const Expert *expert = job->block->experts;
    const size_t count = job->block->router.experts, choices = tokens * job->block->router.k;
    const size_t rows = tokens > 1 ? choices : 1;
    char *end = begin;
#define PART(field, n)       \
    job->field = (void *)end; \
    end += ((n) * sizeof *job->field + 63) / 64 * 64;
    PART(logits, tokens * count)
    PART(chosen, choices)
    PART(weights, choices)
    PART(next, count)
    PART(summands, choices)
    PART(shares, count < choices ? count : choices)
    PART(gathered, tokens > 1 ? choices * expert->first.columns : 0)
    PART(inner, choices * expert->second.columns)
    PART(outputs, choices * expert->second.rows)
    PART(prepared, experts_prepared(expert, rows, choices, threads))
#undef PART
    return (size_t)(end - begin);
}

size_t moe_block_workspace(const MoeBlock *block, size_t tokens, size_t threads) {
    Job job = {.block = block};
    return lay_out(&job, tokens, threads, NULL);
}

/* By ascending expert. */
static void sort(int64_t *chosen, float *weights, size_t k) {
    for (size_t i = 1; i < k; i++)
        for (size_t j = i; j && chosen[j] < chosen[j - 1]; j--) {
            const int64_t expert = chosen[j];
            const float weight = weights[j];
            chosen[j] = chosen[j - 1], weights[j] = weights[j - 1];
            chosen[j - 1] = expert, weights[j - 1] = weight;
        }
}

static void route(void *data, size_t thread, size_t token) {
    const Job *job = data;
    const Router *router = &job->block->router;
    float *logits = job->logits + token * router->experts;
    int64_t *chosen = job->chosen + token * router->k;
    float *weights = job->weights + token * router->k;
    (void)thread;
    route_logits(router, job->x + token * router->columns, logits);
    route_choose(router, logits, chosen, weights);
    sort(chosen, weights, router->k);
}

/* Each chosen expert with its tokens, the results one after the other; returns how many experts, 0 where one is not here.
 * One token's row of x serves all its experts; those of several are gathered by expert. */
static size_t share_out(Job *job, size_t tokens) {
    const size_t k = job->block->router.k, choices = tokens * k, columns = job->block->router.columns;
    size_t shares = 0, begin = 0;
    memset(job->next, 0, job->block->router.experts * sizeof *job->next);
    for (size_t c = 0; c < choices; c++) job->next[job->chosen[c]]++;
    for (size_t e = 0; e < job->block->router.experts; e++) {
        const size_t its = job->next[e];
        if (!its) continue;
        if (!job->block->experts[e].first.weights) return 0;
        job->shares[shares++] = (Share){job->block->experts[e], tokens > 1 ? begin : 0, its, begin};
        job->next[e] = begin, begin += its;
    }
    for (size_t c = 0; c < choices; c++) {
        const size_t row = job->next[job->chosen[c]]++;
        job->summands[c] = job->outputs + row * columns;
        if (tokens > 1) memcpy(job->gathered + row * columns, job->x + c / k * columns, columns * sizeof(bf16));
    }
    return shares;
}

size_t moe_block_run(const MoeBlock *block, const bf16 *x, const bf16 *residual, size_t tokens, void *workspace, bf16 *out,
                     size_t threads) {
    Job job = {.block = block, .x = x};
    const size_t k = block->router.k, columns = block->router.columns, choices = tokens * k;
    lay_out(&job, tokens, threads, workspace);
    const Phase routing = {NULL, route, tokens};
    team_run(&routing, 1, &job, threads, OWN);
    const size_t shares = share_out(&job, tokens);
    if (!shares) return 0;
    experts_run(job.shares, shares, tokens > 1 ? job.gathered : x, tokens > 1 ? choices : 1, choices, job.inner, job.prepared,
                job.outputs, threads, OWN);
    experts_combine_many(job.summands, job.weights, tokens, k, columns, out, threads, OWN);
    if (residual) kernels->add(out, 1, residual, tokens * columns);
    return shares;
}
