#include "route.h"

#include <math.h>

#include "vector.h"

TARGET void route_logits(const bf16 *weight, const bf16 *x, size_t experts, size_t columns, bf16 *logits) {
    for (size_t e = 0; e < experts; e++, weight += columns)
        logits[e] = round_bf16(_mm512_reduce_add_ps(products(weight, x, columns)));
}

void route_choose(const bf16 *logits, size_t experts, size_t k, int normalise, int64_t *chosen, float *weights) {
    float largest = -INFINITY, sum = 0, kept = 0;
    for (size_t e = 0; e < experts; e++) largest = fmaxf(largest, from_bf16(logits[e]));
    for (size_t e = 0; e < experts; e++) sum += expf(from_bf16(logits[e]) - largest);
    for (size_t i = 0; i < k; i++) {
        float best = -INFINITY;
        int64_t at = -1;
        for (size_t e = 0; e < experts; e++) {
            const float logit = from_bf16(logits[e]);
            int taken = 0;
            for (size_t j = 0; j < i; j++) taken |= chosen[j] == (int64_t)e;
            if (!taken && (at < 0 || logit > best)) best = logit, at = (int64_t)e;
        }
        chosen[i] = at;
        weights[i] = expf(best - largest) / sum;
        kept += weights[i];
    }
    if (normalise)
        for (size_t i = 0; i < k; i++) weights[i] /= kept;
}
