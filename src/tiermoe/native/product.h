/* Tokens times one packed matrix, by a team of threads. */
#ifndef TIERMOE_PRODUCT_H
#define TIERMOE_PRODUCT_H

#include "matrix.h"
#include "team.h"

/* out (tokens, rows) = x (tokens, columns) times the matrix. room: for prepared_room(...) floats. */
void product_run(const Matrix *matrix, const bf16 *x, size_t tokens, float *room, bf16 *out, size_t threads,
                 Pool pool);

/* What products want to know of x (matrix_prepare), for many tokens made as tasks of a phase of its own, for few by each
 * thread: that costs less than waiting for another. */
typedef struct {
    const Matrix *matrix;
    const bf16 *x;
    size_t tokens;
    float *room;
} Prepared;

/* Floats of `room`, which begins at a cache line, for a team of `threads`. */
size_t prepared_room(const Matrix *matrix, size_t tokens, size_t threads);

/* Tasks of the phase of its own; 0: none is needed. */
size_t prepare_tasks(const Prepared *prepared);
void prepare_task(const Prepared *prepared, size_t task);

/* What each thread does before its first product. */
void prepare_begin(const Prepared *prepared, size_t thread);

/* What is known, for thread `thread`. */
const float *prepared_of(const Prepared *prepared, size_t thread);

#endif
