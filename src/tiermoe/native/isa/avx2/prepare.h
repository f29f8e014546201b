/* What products want to know of x beforehand: its integers, of blocks of rows by spans, of blocks of GGUF files and published
 * codes of 4 bits by strips; of others the sums of groups. */
static int of_spans(Coding coding) { return coding == INT4 || coding == INT2 || coding == INT6 || is_uneven(coding); }
static int of_strips(Coding coding) { return coding >= FIRST_GGUF && coding != E4M3; }

static size_t prepared_of(const Matrix *matrix) {
    if (of_spans(matrix->coding)) return matrix->columns / span_of(matrix) * SPAN_FLOATS;
    return of_strips(matrix->coding) ? strips_of(matrix->columns) * WHOLE_FLOATS : matrix_groups(matrix);
}

static void prepare_strips(const Matrix *matrix, const bf16 *x, Whole *strips) {
    for (size_t begin = 0; begin < matrix->columns; begin += STRIP, strips++) {
        const size_t width = matrix->columns - begin < STRIP ? matrix->columns - begin : STRIP;
        const size_t groups = has_offsets(matrix->coding) ? width / matrix->group : 0;
        float sums[STRIP_GROUPS];
        group_sums(x + begin, matrix->group, groups, 1, sums);
        to_whole(x + begin, width, sums, groups, strips);
        move_columns(matrix->coding, matrix->group, width / PART, strips);
    }
}

static void prepare(const Matrix *matrix, const bf16 *x, size_t tokens, float *prepared) {
    const size_t columns = matrix->columns;
    if (of_spans(matrix->coding)) {
        const size_t span = span_of(matrix), spans = tokens * columns / span;
        for (size_t i = 0; i < spans; i++) to_span(x + i * span, span, (SpanX *)prepared + i);
    } else if (of_strips(matrix->coding)) {
        for (size_t m = 0; m < tokens; m++) prepare_strips(matrix, x + m * columns, (Whole *)prepared + m * strips_of(columns));
    } else {
        group_sums(x, matrix->group, matrix_groups(matrix), tokens, prepared);
    }
}
