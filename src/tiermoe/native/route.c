#include "route.h"

#include <math.h>

#include "kernels.h"
#include "team.h"

void route_logits(const Router *router, const bf16 *x, size_t tokens, float *logits) {
    const size_t count = tokens * router->experts;
    kernels->logits(router->weight, x, tokens, router->experts, router->columns, logits);
    for (size_t part = 1; part < router->parts; part++) {
        float more[count];
        kernels->logits(router->weight + part * router->experts * router->columns, x, tokens, router->experts, router->columns, more);
        for (size_t i = 0; i < count; i++) logits[i] += more[i];
    }
    for (size_t i = 0; i < tokens * router->experts; i++) {
        if (router->bias) logits[i] += from_bf16(router->bias[i % router->experts]);
        if (!router->exact_logits) logits[i] = from_bf16(to_bf16(logits[i]));
    }
}

/* The place of the largest of the values that are not `out` (NULL: none is), the first of equal ones. At least one is not. */
static size_t largest(const float *values, const uint8_t *out, size_t count) {
    size_t best = count;
    for (size_t i = 0; i < count; i++)
        if (!(out && out[i]) && (best == count || values[i] > values[best])) best = i;
    return best;
}

/* The sum of the `judges` largest scores of a group. */
static float worth(const float *scores, size_t count, size_t judges) {
    const size_t best = largest(scores, NULL, count);
    float second = -INFINITY;
    for (size_t i = 0; judges > 1 && i < count; i++)
        if (i != best) second = fmaxf(second, scores[i]);
    return judges > 1 ? scores[best] + second : scores[best];
}

/* The experts of groups that are not among the best are out. */
static void keep_groups(const Router *router, const float *scores, uint8_t *out) {
    const size_t each = router->experts / router->groups;
    float worths[router->groups];
    uint8_t kept[router->groups];
    for (size_t g = 0; g < router->groups; g++) worths[g] = worth(scores + g * each, each, router->judges), kept[g] = 0;
    for (size_t i = 0; i < router->kept; i++) kept[largest(worths, kept, router->groups)] = 1;
    for (size_t e = 0; e < router->experts; e++) out[e] = !kept[e / each];
}

/* The softmax of some logits in their place; `most`: the largest of them. */
static void softmax(float *logits, size_t count, float most) {
    float sum = 0;
    for (size_t i = 0; i < count; i++) logits[i] -= most;
    kernels->exponentials(logits, count);
    for (size_t i = 0; i < count; i++) sum += logits[i];
    for (size_t i = 0; i < count; i++) logits[i] /= sum;
}

/* Whether a logit's score depends on no other logit. */
static int scores_alone(const Router *router) { return router->scoring == SIGMOID || router->scoring == SQRT_SOFTPLUS; }

/* Such scores of some logits in their place. */
static void score_alone(const Router *router, float *logits, size_t count) {
    if (router->scoring == SIGMOID) {
        for (size_t i = 0; i < count; i++) logits[i] = -logits[i];
        kernels->exponentials(logits, count);
        for (size_t i = 0; i < count; i++) logits[i] = 1 / (1 + logits[i]);
        return;
    }
    kernels->softplus(logits, count);
    for (size_t i = 0; i < count; i++)
        logits[i] = router->exact_logits ? sqrtf(logits[i]) : from_bf16(to_bf16(sqrtf(from_bf16(to_bf16(logits[i])))));
}

void route_choose(const Router *router, const float *logits, int64_t *chosen, float *weights) {
    const size_t experts = router->experts, k = router->k;
    const float most = logits[largest(logits, NULL, experts)];
    const int in_order = router->groups == 1 && !router->correction; /* logits rank as their scores */
    float shares[experts], scores[experts], kept = 0;
    uint8_t out[experts]; /* chosen, or of a group that is not kept */
    memset(out, 0, experts);
    memcpy(shares, logits, sizeof shares);
    if (router->scoring == SOFTMAX) softmax(shares, experts, most);
    if (scores_alone(router) && !in_order) score_alone(router, shares, experts);
    for (size_t e = 0; e < experts; e++)
        scores[e] = (in_order || router->corrects_logits ? logits[e] : shares[e]) + (router->correction ? router->correction[e] : 0);
    if (router->groups > 1) keep_groups(router, scores, out);
    for (size_t i = 0; i < k; i++) {
        const size_t best = largest(scores, out, experts);
        chosen[i] = (int64_t)best;
        weights[i] = shares[best];
        out[best] = 1;
    }
    if (router->scoring == CHOSEN) softmax(weights, k, most);
    if (scores_alone(router) && in_order) score_alone(router, weights, k);
    for (size_t i = 0; i < k; i++) kept += weights[i];
    for (size_t i = 0; i < k; i++) {
        if (router->normalise) weights[i] /= kept + router->epsilon;
        weights[i] *= router->scale;
        if (router->round_weights) weights[i] = from_bf16(to_bf16(weights[i]));
    }
}

enum { TOGETHER = 8 }; /* tokens of a task */

typedef struct {
    const Router *router;
    const bf16 *x;
    size_t tokens;
    float *logits;
    int64_t *chosen;
    float *weights;
} Routing;

static size_t count_from(const Routing *job, size_t first) { return job->tokens - first < TOGETHER ? job->tokens - first : TOGETHER; }

static void logits_some(void *data, size_t thread, size_t task) {
    const Routing *job = data;
    const Router *router = job->router;
    const size_t first = task * TOGETHER;
    (void)thread;
    route_logits(router, job->x + first * router->columns, count_from(job, first), job->logits + first * router->experts);
}

static void route_some(void *data, size_t thread, size_t task) {
    const Routing *job = data;
    const Router *router = job->router;
    const size_t first = task * TOGETHER, count = count_from(job, first);
    float logits[TOGETHER * router->experts];
    (void)thread;
    route_logits(router, job->x + first * router->columns, count, logits);
    for (size_t t = 0; t < count; t++)
        route_choose(router, logits + t * router->experts, job->chosen + (first + t) * router->k, job->weights + (first + t) * router->k);
}

static void run(Routing *job, void (*some)(void *, size_t, size_t), size_t threads) {
    const Phase phase = {NULL, some, (job->tokens + TOGETHER - 1) / TOGETHER};
    team_run(&phase, 1, job, phase.tasks > 1 ? threads : 1, TORCHS);
}

void route_logits_run(const Router *router, const bf16 *x, size_t tokens, float *logits, size_t threads) {
    Routing job = {.router = router, .x = x, .tokens = tokens, .logits = logits};
    run(&job, logits_some, threads);
}

void route_run(const Router *router, const bf16 *x, size_t tokens, int64_t *chosen, float *weights, size_t threads) {
    Routing job = {.router = router, .x = x, .tokens = tokens, .chosen = chosen, .weights = weights};
    run(&job, route_some, threads);
}
