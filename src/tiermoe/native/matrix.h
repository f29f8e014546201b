/* Products of bfloat16 tokens with a matrix (quants.h), a block of 64 rows at a time, by a team of threads. Every output is
 * summed in one order, whatever the number of tokens, threads or blocks. */
#ifndef TIERMOE_MATRIX_H
#define TIERMOE_MATRIX_H

#include "quants.h"
#include "team.h"

typedef struct {
    Coding coding;
    const void *weights; /* codes or weights */
    const void *scales;  /* INT4, INT2: pairs of scale and zero; INT6, INT8: scales; others: unused */
    size_t rows, columns;
    size_t group;        /* columns that share a scale: K in INT8 and BF16; in GGUF's blocks and published codes 32, or 16 */
    const void *zeros_or_factors; /* U4: zeros, a byte beside each scale; E2M1: factors of scales, one for each factor_rows
                                   * rows */
    ScaleKind scale_kind; /* E2M1, S4, U4, E4M3, as what follows */
    size_t scale_rows, scale_columns, factor_rows;
} Matrix;

/* Blocks of rows; the last one may have fewer than 64 in all but INT4, INT6 and INT2. */
size_t matrix_blocks(const Matrix *matrix);

/* What products with a matrix want to know of x beforehand, x (tokens, columns): so many floats for each token, which the
 * instruction set in use lays out as it likes, from a multiple of 32 bytes on. It is the same for all matrices alike. */
size_t matrix_prepared(const Matrix *matrix);
void matrix_prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared);
int matrices_alike(const Matrix *a, const Matrix *b);

/* out[m * stride + i] = row 64 * block + i of the matrix times x[m], rounded to bfloat16. */
void matrix_block(const Matrix *matrix, size_t block, const bf16 *x, const float *prepared, size_t tokens, bf16 *out,
                  size_t stride);

/* out (tokens, rows) = x (tokens, columns) times the matrix. room: for prepared_room(...) floats. */
void product_run(const Matrix *matrix, const bf16 *x, size_t tokens, float *room, bf16 *out, size_t threads,
                 Pool pool);

/* What products want to know of x (matrix_prepare), for many tokens made as tasks of a phase of its own, for few by each
 * thread: that costs less than waiting for another. */
enum {
    PREPARED_ALONE = 8, /* tokens that each thread prepares for itself, at the most */
    PREPARED_TASK = 32, /* tokens of a task */
};
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
