/* Neurons as records (../../neurons.h), sixteen codes at a time, over Vector. */

/* What one half of a record, W3's row (0) or W2's column (1), is decoded with: weight = code * scale + zero. */
typedef struct {
    const uint8_t *codes;
    const uint8_t *parameters;
    size_t groups;
    int bits;
} Half;

static inline __attribute__((always_inline)) Half half_of(const Neurons *neurons, const uint8_t *record, size_t half, int bits) {
    const size_t bytes = neurons->width * (size_t)bits / 8, groups = neurons->width / neurons->group;
    const size_t parameters = bits == 4 ? 2 * groups * sizeof(bf16) : 2 * groups + sizeof(bf16);
    return (Half){record + half * bytes, record + 2 * bytes + half * parameters, groups, bits};
}

static inline __attribute__((always_inline)) float scale_of(const Half *half, size_t group) {
    const bf16 *first = (const bf16 *)half->parameters;
    return half->bits == 4 ? from_bf16(first[group]) : from_bf16(first[0]) * (float)half->parameters[sizeof(bf16) + group];
}

/* 4 bits count from -8 on. */
static inline __attribute__((always_inline)) float zero_of(const Half *half, size_t group, float scale) {
    const bf16 *first = (const bf16 *)half->parameters;
    if (half->bits == 4) return from_bf16(first[half->groups + group]) - 8 * scale;
    return from_bf16(first[0]) * (float)(int8_t)half->parameters[sizeof(bf16) + half->groups + group];
}

static inline __attribute__((always_inline)) float up_of(const Neurons *neurons, const Half *half, int bits, const float *x,
                                                             const float *sums) {
    const size_t bytes = neurons->width * (size_t)bits / 8, group = neurons->group;
    Vector total = zeros();
    float rest = 0;
    for (int strip = 0; strip < 8 / bits; strip++)
        for (size_t b = 0; b < bytes; b += group) {
            const size_t g = ((size_t)strip * bytes + b) / group;
            const float scale = scale_of(half, g);
            Vector products = zeros();
            for (size_t c = b; c < b + group; c += LANES)
                products = times_plus(codes_of(half->codes + c, strip * bits, bits), load(x + (size_t)strip * bytes + c), products);
            total = times_plus(products, all(scale), total);
            rest += zero_of(half, g, scale) * sums[g];
        }
    return sum_of(total) + rest;
}

static inline __attribute__((always_inline)) void ups(const Neurons *neurons, int bits, const float *x, const float *sums,
                                                      size_t begin, size_t end, float *products) {
    for (size_t i = begin; i < end; i++) {
        const size_t neuron = (size_t)neurons->used[i];
        const Half row = half_of(neurons, neurons->records + neuron * neurons->record_bytes, 0, bits);
        products[i] = from_bf16(neurons->gates[neuron]) * up_of(neurons, &row, bits, x, sums);
    }
}

static void neurons_up(const Neurons *neurons, const float *x, const float *sums, size_t begin, size_t end, float *products) {
    if (neurons->bits == 4)
        ups(neurons, 4, x, sums, begin, end, products);
    else
        ups(neurons, 2, x, sums, begin, end, products);
}

static inline __attribute__((always_inline)) void downs(const Neurons *neurons, int bits, const float *products, size_t begin,
                                                        size_t end, bf16 *out) {
    const size_t bytes = neurons->width * (size_t)bits / 8;
    float total[8 / 2][BYTES_TASK];
    memset(total, 0, sizeof total);
    for (size_t i = 0; i < neurons->count; i++) {
        const uint8_t *record = neurons->records + (size_t)neurons->used[i] * neurons->record_bytes;
        const Half column = half_of(neurons, record, 1, bits);
        for (int strip = 0; strip < 8 / bits; strip++)
            for (size_t b = begin; b < end;) {
                const size_t g = ((size_t)strip * bytes + b) / neurons->group, next = (b / neurons->group + 1) * neurons->group;
                const float scale = scale_of(&column, g);
                const Vector scaled = all(products[i] * scale), zero = all(products[i] * zero_of(&column, g, scale));
                for (; b < next && b < end; b += LANES) {
                    float *sums = total[strip] + (b - begin);
                    const Vector before = plus(load(sums), zero);
                    store(sums, times_plus(codes_of(column.codes + b, strip * bits, bits), scaled, before));
                }
            }
    }
    for (int strip = 0; strip < 8 / bits; strip++)
        for (size_t b = begin; b < end; b += LANES)
            store_bf16(out + (size_t)strip * bytes + b, load(total[strip] + (b - begin)));
}

static void neurons_down(const Neurons *neurons, const float *products, size_t begin, size_t end, bf16 *out) {
    if (neurons->bits == 4)
        downs(neurons, 4, products, begin, end, out);
    else
        downs(neurons, 2, products, begin, end, out);
}
