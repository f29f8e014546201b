/* Root mean square norms of rows, of any of their kinds (norm_row.h). */
#ifndef TIERMOE_NORM_H
#define TIERMOE_NORM_H

#include "norm_row.h"
#include "team.h"

/* out (rows, width) = the norms of x (rows, width). */
void norm_run(const bf16 *x, const bf16 *weight, float epsilon, NormKind kind, size_t rows, size_t width, bf16 *out,
              size_t threads, Pool pool);

#endif
