/* Experts on packed weights: second(a gate of first(x)), where first(x) holds the values of gate and up, or of up alone. */
#ifndef TIERMOE_EXPERT_H
#define TIERMOE_EXPERT_H

#include "matrix.h"
#include "team.h"

enum { MOST_EXPERTS = 256 }; /* of a token */

/* The gates; Python finds them by name (kernels/gates.py). gate_of in isa/activations.h computes them.
 *   SILU            silu(gate) * up; gate and up are the halves
 *   CLAMPED         (up + 1) * gate * sigmoid(alpha * gate); gate and up take turns. gate at most limit, up -limit .. limit
 *   CLAMPED_HALVES  the same; gate and up are the halves
 *   GELU_TANH       gelu(gate) * up with the gelu of tanh; gate and up are the halves
 *   RELU_SQUARED    relu(up)^2: there is no gate
 *   LIMITED_SILU    silu(gate) * up; gate and up are the halves, within the limits of CLAMPED */
#define EACH_GATE(X) X(SILU) X(CLAMPED) X(CLAMPED_HALVES) X(GELU_TANH) X(RELU_SQUARED) X(LIMITED_SILU)

#define GATE_NUMBER(name) name,
typedef enum { EACH_GATE(GATE_NUMBER) GATES } Gate;

typedef struct {
    Matrix first;                         /* (2 I, H), of RELU_SQUARED (I, H); I a multiple of 64 */
    Matrix second;                         /* (H, I) */
    const bf16 *first_bias, *second_bias; /* NULL: none */
    Gate gate;
    float limit, alpha; /* CLAMPED, CLAMPED_HALVES; LIMITED_SILU has a limit alone */
} Expert;

/* An expert and the tokens that it computes: `tokens` rows of x from row `from` on, whose results are rows of out from
 * row `to` on. */
typedef struct {
    Expert expert;
    size_t from, tokens, to;
} Share;

/* out (results, H) = experts, all of one shape, of their rows of x (rows, H). Each value is rounded to bfloat16 where the
 * separate operations round it. inner: room for results * I values; sums: for experts_prepared(...) floats. */
void experts_run(const Share *shares, size_t count, const bf16 *x, size_t rows, size_t results, bf16 *inner, float *sums,
                 bf16 *out, size_t threads, Pool pool);

/* Floats that experts_run needs as `sums`. */
size_t experts_prepared(const Expert *expert, size_t rows, size_t results, size_t threads);

/* out (H) = sum of weights[i] * rows[i] (H), in their order, rounded after each step; 0 where there are none. */
void experts_combine(const bf16 *const *rows, const float *weights, size_t count, size_t columns, bf16 *out);

/* The same for `tokens` tokens with rows and weights (tokens, k), k at most MOST_EXPERTS; NULL where there is no row. */
void experts_combine_many(const bf16 *const *rows, const float *weights, size_t tokens, size_t k, size_t columns, bf16 *out,
                          size_t threads, Pool pool);

#endif
