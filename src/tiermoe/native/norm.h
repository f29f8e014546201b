/* Norms of each kind that decoder layers have: of one row, and of rows by a team of threads. */
#ifndef TIERMOE_NORM_H
#define TIERMOE_NORM_H

#include "quants.h"
#include "team.h"

typedef enum {
    RMS_NORM,         /* weight * bfloat16(x / sqrt(mean(x^2) + epsilon)) */
    RMS_NORM_AT_ONCE, /* bfloat16(weight * x / sqrt(mean(x^2) + epsilon)) */
    RMS_NORM_CENTRED, /* bfloat16((1 + weight) * x / sqrt(mean(x^2) + epsilon)) */
    LAYER_NORM,       /* bfloat16(weight * (x - mean(x)) / sqrt(variance(x) + epsilon) + bias) */
} NormKind;

typedef struct {
    const bf16 *weight; /* (width); NULL: there is no norm */
    const bf16 *bias;   /* of a layer norm; NULL: none */
    size_t width;       /* a multiple of 16 */
    float epsilon;
    NormKind kind;
} Norm;

/* The factor of x (width) in a root mean square norm; 0 for a layer norm, which has its own. */
float norm_row_scale(const Norm *norm, const bf16 *x);

/* out (width) = the norm of columns begin .. begin + width of a row whose factor is `scale`. x and out may be the same. */
void norm_part(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out);

/* out (norm->width) = the norm of x. x and out may be the same. */
void norm_row(const Norm *norm, const bf16 *x, bf16 *out);

/* out (rows, width) = the norms of x (rows, width). */
void norm_run(const bf16 *x, const bf16 *weight, float epsilon, NormKind kind, size_t rows, size_t width, bf16 *out,
              size_t threads, Pool pool);

#endif
