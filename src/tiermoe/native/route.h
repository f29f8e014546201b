/* Routers: a matrix, how its products become scores, and how a token's experts are chosen by them. */
#ifndef TIERMOE_ROUTE_H
#define TIERMOE_ROUTE_H

#include "quants.h"

typedef enum {
    SOFTMAX, /* scores: the softmax of all logits */
    CHOSEN,  /* scores: the logits; the weights are the softmax of the chosen ones */
    SIGMOID, /* scores: the sigmoid of each logit */
    SQRT_SOFTPLUS, /* scores: the root of log(1 + e^logit), each rounded to bfloat16 where logits are (DeepSeek-V4) */
    SCORINGS
} Scoring;

typedef struct {
    const bf16 *weight;      /* (parts, experts, columns), whose sum it is; columns a multiple of 32 */
    size_t parts;            /* 3 of float32 */
    const bf16 *bias;        /* (experts), of the logits; NULL: none */
    const float *correction; /* (experts), added to the scores for choosing, not to the weights; NULL: none */
    int corrects_logits;     /* it is added to the logits, and what is chosen by is that (Kolibri) */
    size_t experts, columns, k;
    size_t groups, kept;     /* consecutive experts in `groups` groups, the best `kept` of which are chosen from */
    size_t judges;           /* a group is as good as the sum of so many of its best scores: 1 or 2 */
    Scoring scoring;
    int exact_logits;        /* float32; else rounded to bfloat16 */
    int round_weights;       /* to bfloat16, in the end */
    int normalise;           /* the weights are divided by their sum plus epsilon */
    float epsilon, scale;    /* the weights are multiplied by scale */
} Router;

/* logits (tokens, router->experts) of x (tokens, router->columns). */
void route_logits(const Router *router, const bf16 *x, size_t tokens, float *logits);

/* The same by a team. */
void route_logits_run(const Router *router, const bf16 *x, size_t tokens, float *logits, size_t threads);

/* The k experts with the largest scores, the largest first, of equal ones the first first, and their weights. */
void route_choose(const Router *router, const float *logits, int64_t *chosen, float *weights);

/* What each of x (tokens, router->columns) chooses, (tokens, router->k), by a team. */
void route_run(const Router *router, const bf16 *x, size_t tokens, int64_t *chosen, float *weights, size_t threads);

#endif
