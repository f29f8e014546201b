/* What products want to know of x beforehand: of blocks of rows its integers, of others the sums of groups. */
static int of_spans(Coding coding) { return coding == INT4 || coding == INT2 || coding == INT6 || coding == NL4; }

static size_t prepared_of(const Matrix *matrix) {
    return of_spans(matrix->coding) ? matrix->columns / span_of(matrix) * SPAN_FLOATS : matrix_groups(matrix);
}

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    if (!of_spans(matrix->coding)) {
        group_sums(x, matrix->group, matrix_groups(matrix), tokens, prepared);
        return;
    }
    const size_t span = span_of(matrix), spans = tokens * matrix->columns / span;
    for (size_t i = 0; i < spans; i++) to_span(x + i * span, span, (SpanX *)prepared + i);
}
