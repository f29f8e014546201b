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
    size_t *tokens_of, *next; /* of each expert: its tokens, and the row for the next of them or NONE */
    const bf16 **summands;    /* (tokens, k): rows of `outputs`, NULL until they are computed */
    Share *shares;
} Job;

static const size_t NONE = (size_t)-1;

/* The parts of the workspace, each on a line of its own. */
static size_t lay_out(Job *job, size_t tokens, size_t threads, char *begin) {
    const Expert *form = job->block->forms;
    const size_t count = job->block->router.experts, choices = tokens * job->block->router.k;
    const size_t rows = tokens > 1 ? choices : 1;
    size_t room = 0;
    for (size_t f = 0; f < job->block->form_count; f++) {
        const size_t own = experts_prepared(&form[f], rows, choices, threads);
        room = own > room ? own : room;
    }
    char *end = begin;
#define PART(field, n)       \
    job->field = (void *)end; \
    end += ((n) * sizeof *job->field + 63) / 64 * 64;
    PART(logits, tokens * count)
    PART(chosen, choices)
    PART(weights, choices)
    PART(tokens_of, count)
    PART(next, count)
    PART(summands, choices)
    PART(shares, count < choices ? count : choices)
    PART(gathered, tokens > 1 ? choices * form->first.columns : 0)
    PART(inner, choices * form->second.columns)
    PART(outputs, choices * form->second.rows)
    PART(prepared, room)
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
    route_logits(router, job->x + token * router->columns, 1, logits);
    route_choose(router, logits, chosen, weights);
    sort(chosen, weights, router->k);
}

/* What each token chose is known: no expert has computed yet. Returns how many there are among them. */
static size_t begin(Job *job, size_t tokens) {
    const size_t count = job->block->router.experts, choices = tokens * job->block->router.k;
    memset(job->tokens_of, 0, count * sizeof *job->tokens_of);
    memset(job->summands, 0, choices * sizeof *job->summands);
    size_t distinct = 0;
    for (size_t c = 0; c < choices; c++)
        if ((size_t)job->chosen[c] < count) distinct += !job->tokens_of[job->chosen[c]]++;
    return distinct;
}

size_t moe_block_route(const MoeBlock *block, const bf16 *x, size_t tokens, void *workspace, size_t threads) {
    Job job = {.block = block, .x = x};
    lay_out(&job, tokens, threads, workspace);
    const Phase routing = {NULL, route, tokens};
    team_run(&routing, 1, &job, threads, OWN);
    return begin(&job, tokens);
}

const int64_t *moe_block_chosen(const MoeBlock *block, size_t tokens, void *workspace, size_t threads) {
    Job job = {.block = block};
    lay_out(&job, tokens, threads, workspace);
    return job.chosen;
}

void moe_block_routed(const MoeBlock *block, const int64_t *chosen, const float *weights, size_t tokens, void *workspace,
                      size_t threads) {
    Job job = {.block = block};
    const size_t k = block->router.k;
    lay_out(&job, tokens, threads, workspace);
    memcpy(job.chosen, chosen, tokens * k * sizeof *chosen);
    memcpy(job.weights, weights, tokens * k * sizeof *weights);
    for (size_t t = 0; t < tokens; t++) sort(job.chosen + t * k, job.weights + t * k, k);
    begin(&job, tokens);
}

/* Moves the shares of the precision of share `begun` to those after it; returns where they end. */
static size_t alike_first(Share *shares, size_t begun, size_t count) {
    const Expert *one = &shares[begun].expert;
    size_t end = begun + 1;
    for (size_t i = end; i < count; i++) {
        const Share share = shares[i];
        if (!matrices_alike(&one->first, &share.expert.first) || !matrices_alike(&one->second, &share.expert.second)) continue;
        shares[i] = shares[end], shares[end++] = share;
    }
    return end;
}

/* One token's row of x serves all its experts, and an expert that it names twice computes it once; the rows of several
 * tokens are gathered by expert. */
size_t moe_block_experts(const MoeBlock *block, const bf16 *x, size_t tokens, void *workspace, size_t threads,
                         const int64_t *experts, size_t count, size_t row) {
    Job job = {.block = block, .x = x};
    const size_t k = block->router.k, columns = block->router.columns, choices = tokens * k;
    lay_out(&job, tokens, threads, workspace);
    memset(job.next, 0xff, block->router.experts * sizeof *job.next);
    size_t rows = 0, shares = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t its = tokens > 1 ? job.tokens_of[experts[i]] : job.tokens_of[experts[i]] > 0;
        if (!its) continue;
        job.shares[shares++] = (Share){block->experts[experts[i]], tokens > 1 ? rows : 0, its, rows};
        job.next[experts[i]] = rows, rows += its;
    }
    bf16 *outputs = job.outputs + row * columns;
    for (size_t c = 0; c < choices; c++) {
        if ((size_t)job.chosen[c] >= block->router.experts || job.next[job.chosen[c]] == NONE) continue;
        const size_t at = job.next[job.chosen[c]];
        job.summands[c] = outputs + at * columns;
        if (tokens == 1) continue;
        memcpy(job.gathered + at * columns, x + c / k * columns, columns * sizeof(bf16));
        job.next[job.chosen[c]]++;
    }
    for (size_t begun = 0, end; begun < shares; begun = end) {
        end = alike_first(job.shares, begun, shares);
        experts_run(job.shares + begun, end - begun, tokens > 1 ? job.gathered : x, tokens > 1 ? rows : 1, rows, job.inner,
                    job.prepared, outputs, threads, OWN);
    }
    return row + rows;
}

void moe_block_sum(const MoeBlock *block, const bf16 *residual, size_t tokens, void *workspace, size_t threads, bf16 *out) {
    Job job = {.block = block};
    const size_t k = block->router.k, columns = block->router.columns;
    lay_out(&job, tokens, threads, workspace);
    experts_combine_many(job.summands, job.weights, tokens, k, columns, out, threads, OWN);
    if (residual) kernels->add(out, 1, residual, tokens * columns);
}

size_t moe_block_run(const MoeBlock *block, const bf16 *x, const bf16 *residual, size_t tokens, void *workspace, bf16 *out,
                     size_t threads) {
    int64_t experts[block->router.experts];
    Job job = {.block = block};
    const size_t distinct = moe_block_route(block, x, tokens, workspace, threads);
    lay_out(&job, tokens, threads, workspace);
    for (size_t e = 0, found = 0; found < distinct; e++) {
        if (!job.tokens_of[e]) continue;
        if (!block->experts[e].first.weights) return 0;
        experts[found++] = (int64_t)e;
    }
    moe_block_experts(block, x, tokens, workspace, threads, experts, distinct, 0);
    moe_block_sum(block, residual, tokens, workspace, threads, out);
    return distinct;
}
