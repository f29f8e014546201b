/* Tokens times one packed matrix, by a team of threads. */
#ifndef TIERMOE_PRODUCT_H
#define TIERMOE_PRODUCT_H

#include "matrix.h"
#include "team.h"

/* out (tokens, rows) = x (tokens, columns) times the matrix. sums: room for sums_room(...) floats. */
void product_run(const Matrix *matrix, const bf16 *x, size_t tokens, float *sums, bf16 *out, size_t threads,
                 Pool pool);

/* The sums of groups that products need, for many tokens made as tasks of a phase of their own, for few by each thread:
 * that costs less than waiting for another. */
typedef struct {
    const Matrix *matrix;
    const bf16 *x;
    size_t tokens;
    float *room;
} Sums;

/* Floats of `room` for a team of `threads`. */
size_t sums_room(const Matrix *matrix, size_t tokens, size_t threads);

/* Tasks of the phase of its own; 0: none is needed. */
size_t sums_tasks(const Sums *sums);
void sums_task(const Sums *sums, size_t task);

/* What each thread does before its first product. */
void sums_begin(const Sums *sums, size_t thread);

/* The sums, for thread `thread`. */
const float *sums_of(const Sums *sums, size_t thread);

#endif
