/* rotary.h over Vector. */

/* bfloat16(bfloat16(a * b) + bfloat16(c * d)) is what is stored of this. */
static inline Vector sum_of_products(Vector a, Vector b, Vector c, Vector d) {
    return plus(as_bf16(times(a, b)), as_bf16(times(c, d)));
}

static void rotate_columns(const bf16 *head, const bf16 *cos, const bf16 *sin, size_t rotary, int interleaved, bf16 *out) {
    const size_t half = rotary / 2;
    for (size_t i = 0; i < half; i += LANES) {
        const size_t some = half - i < LANES ? half - i : LANES;
        Vector first, second;
        if (interleaved)
            load_pairs(head + 2 * i, some, &first, &second);
        else
            first = load_some(head + i, some), second = load_some(head + half + i, some);
        const Vector negative = minus(zeros(), second);
        store_some(out + i, some, sum_of_products(first, load_some(cos + i, some), negative, load_some(sin + i, some)));
        store_some(out + half + i, some,
                   sum_of_products(second, load_some(cos + half + i, some), first, load_some(sin + half + i, some)));
    }
}
