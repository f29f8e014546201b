/* What products want to know of x beforehand: the sums of its groups of columns, where something is added to codes. */

/* sums[m * groups + g] = the sum of columns g * group .. of x[m], x (tokens, groups * group); group 16 or a multiple of 32. */
static void group_sums(const bf16 *x, size_t group, size_t groups, size_t tokens, float *sums) {
    static const bf16 ONES[DOT] = {[0 ... DOT - 1] = 0x3F80};
    const Columns ones = load_columns(ONES);
    for (size_t i = 0; i < tokens * groups; i++, x += group) {
        if (group == LANES) {
            sums[i] = sum_of(load_bf16(x));
            continue;
        }
        Dot sum = no_dot();
        for (size_t c = 0; c < group; c += DOT) sum = dot(sum, load_columns(x + c), ones);
        sums[i] = sum_of_dot(sum);
    }
}
