/* Where sums of groups are all that products want to know of x beforehand. */
static size_t prepared_of(const Matrix *matrix) { return matrix_groups(matrix); }

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    group_sums(x, matrix->group, matrix_groups(matrix), tokens, prepared);
}
