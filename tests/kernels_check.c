/* Every instruction set's kernels that this machine runs, against plain sums in double precision: products of each coding,
 * gates, weighted sums, norms, rotary embedding, routers' logits, attention; and the bytes that are packed. A token's bits do not depend on the
 * tokens beside it. Built and run by test_native_build.py, with sanitizers and in an emulator: no Python, no torch.
 *
 * Prints a line for each set; ends with 1 where a value is wrong. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "delta.h"
#include "gguf_weights.h"
#include "kernels.h"
#include "trellis.h"

enum { ROWS = 192, COLUMNS = 512, TOKENS = 41, LONG = 2304 }; /* LONG: columns, of more than a span of AVX-512 */

static uint64_t state = 1;
static int wrong;

static uint32_t bits(void) { return (uint32_t)((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
static float number(void) { return (float)((int)(bits() % 2001) - 1000) / 500; }
static void numbers(bf16 *to, size_t count, float scale) {
    for (size_t i = 0; i < count; i++) to[i] = to_bf16(scale * number());
}

/* What sets have to give bit for bit, in the order in which each of them gives it: by the first set's. */
static uint64_t marks[1 << 12];
static size_t mark;

static void same(const char *set, const char *what, const void *data, size_t bytes) {
    uint64_t sum = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    if (!marks[mark]) marks[mark] = sum;
    if (marks[mark++] != sum) wrong++, printf("%s, %s: other bits than the set before\n", set, what);
}

/* Reports a value that is further from `want` than roundings to bfloat16 of numbers of `size` take it. */
static void expect(const char *set, const char *what, double got, double want, double size) {
    if (fabs(got - want) <= 0.008 * fabs(want) + 1e-4 * size) return;
    if (wrong++ < 20) printf("%s, %s: %g instead of %g\n", set, what, got, want);
}

/* The same of float32 alone. */
static void close_to(const char *set, const char *what, double got, double want) {
    if (fabs(got - want) <= 2e-6 * fabs(want) + 1e-30) return;
    if (wrong++ < 20) printf("%s, %s: %g instead of %g\n", set, what, got, want);
}

static double weight_of(const Matrix *matrix, size_t r, size_t c) {
    const uint8_t *codes = matrix->weights;
    const bf16 *scales = matrix->scales;
    const size_t block = r / BLOCK, in = r % BLOCK, j = in % 32, high = in / 32, g = c / matrix->group;
    if (matrix->coding == BF16) return from_bf16(((const bf16 *)matrix->weights)[r * COLUMNS + c]);
    if (matrix->coding == INT8) return (double)((const int8_t *)codes)[r * COLUMNS + c] * from_bf16(scales[r]);
    if (matrix->coding == INT2) { /* two columns in a nibble */
        const int code = codes[block * 16 * COLUMNS + c / 2 * 32 + j] >> (4 * high + c % 2 * 2) & 3;
        const bf16 *pair = scales + 2 * (g * matrix->rows + r);
        return (code - 2) * (double)from_bf16(pair[0]) + from_bf16(pair[1]);
    }
    if (matrix->coding == INT4) {
        const int code = codes[block * 32 * COLUMNS + c * 32 + j] >> 4 * high & 15;
        const bf16 *pair = scales + 2 * (g * matrix->rows + r);
        return (code - 8) * (double)from_bf16(pair[0]) + from_bf16(pair[1]);
    }
    if (is_uneven(matrix->coding)) { /* of four columns a plane of 32 bytes for each bit */
        const size_t bits = matrix->coding == NL4 ? 4 : matrix->coding == NL3 ? 3 : 2, place = c % 4;
        const uint8_t *run = codes + (block * (COLUMNS / matrix->group) + g) * (128 + matrix->group * 8 * bits);
        unsigned nibbles[4], code;
        for (size_t p = 0; p < bits; p++) nibbles[p] = run[128 + (c % matrix->group / 4 * bits + p) * 32 + j] >> 4 * high & 15;
        if (bits == 4) code = nibbles[place];
        else if (bits == 2) code = nibbles[place / 2] >> 2 * (place % 2) & 3;
        else code = place < 3 ? nibbles[place] & 7 : nibbles[0] >> 3 | nibbles[1] >> 3 << 1 | nibbles[2] >> 3 << 2;
        return (double)uneven_levels(matrix->coding)[code] * from_bf16(((const bf16 *)run)[in]);
    }
    const double own_scale = from_bf16(scales[block * BLOCK * (COLUMNS / matrix->group) + g * BLOCK + in]);
    if (matrix->coding == TCQ2) { /* byte k of a column: codes of rows k, 16 + k, 32 + k, 48 + k */
        static const unsigned factors[] = {17 * 2048, 117 * 512, 145 * 128, 1115 * 32}, dropped[] = {4, 4, 64, 64};
        const uint8_t *column = codes + block * 16 * COLUMNS + c / 4 * 64 + c % 2 * 2 + c % 4 / 2;
        const unsigned k = in % 16, word = column[4 * ((k + 15) % 16)] + 256u * column[4 * k], i = in / 16;
        const unsigned level = word / dropped[i] * dropped[i] * factors[i] / 65536 % 32;
        return ((double)TRELLIS_CODES[level] - 32) * own_scale;
    }
    const uint8_t *four = codes + block * 48 * COLUMNS + c / 4 * 192;
    const int low = four[c % 4 * 32 + j] >> 4 * high & 15;
    const int two = four[128 + c % 4 / 2 * 32 + j] >> (c % 2 * 4 + (high ? 0 : 2)) & 3;
    return (low + 16 * two - 32) * own_scale;
}

static const size_t COUNTS[] = {1, 2, 3, 7, 9, 25, TOKENS};

/* out = the products of all counts of tokens, the last count's in the end; a token's bits are those that it has alone. */
static void products_of_any_count(const Kernels *set, const Matrix *matrix, const char *name, const bf16 *x, bf16 *out) {
    const size_t rows = matrix->rows, each = set->prepared(matrix), blocks = matrix_blocks(matrix);
    float *prepared = aligned_alloc(64, (sizeof *prepared * TOKENS * each + 64) / 64 * 64);
    bf16 alone[BLOCK];
    for (size_t n = 0; n < sizeof COUNTS / sizeof *COUNTS; n++) {
        const size_t tokens = COUNTS[n], m = tokens - 1;
        set->prepare(matrix, x, tokens, prepared);
        for (size_t b = 0; b < blocks; b++) {
            const size_t width = rows - b * BLOCK < BLOCK ? rows - b * BLOCK : BLOCK;
            set->product[matrix->coding](matrix, b, x, prepared, tokens, out + b * BLOCK, rows);
            set->product[matrix->coding](matrix, b, x + m * matrix->columns, prepared + m * each, 1, alone, rows);
            if (memcmp(alone, out + m * rows + b * BLOCK, width * sizeof *out))
                wrong++, printf("%s, %s: a token among %zu has other bits than alone\n", set->name, name, tokens);
        }
    }
    free(prepared);
}

/* Column c of a token as products of whole numbers take it: of each 32 columns codes of 8 bits times a scale. */
static double as_integer(const bf16 *x, size_t c) {
    float largest = 0;
    for (size_t i = c / 32 * 32; i < c / 32 * 32 + 32; i++) largest = fmaxf(largest, fabsf(from_bf16(x[i])));
    return largest ? (double)rintf(from_bf16(x[c]) * (127 / largest)) * (largest / 127) : 0;
}

static void products(const Kernels *set, Coding coding, size_t rows, size_t group) {
    static const char *const NAMES[] = {"4 bits", "8 bits", "16 bits", "6 bits", "2 bits",
                                        "uneven 4 bits", "uneven 3 bits", "uneven 2 bits", "trellis"};
    const size_t groups = coding == BF16 ? 0 : COLUMNS / group, runs = rows / BLOCK * groups;
    const size_t bytes = coding == INT2 || coding == TCQ2 ? rows * COLUMNS / 4 : rows * COLUMNS * 2;
    const size_t room = is_uneven(coding) ? runs * uneven_group_bytes(coding, group) : bytes;
    uint8_t *weights = malloc(room); /* of its own size, so that reading past it is found */
    bf16 *scales = malloc(2 * sizeof *scales * rows * (groups ? groups : 1));
    bf16 *x = malloc(sizeof *x * TOKENS * COLUMNS), *out = calloc(TOKENS * rows, sizeof *out);
    for (size_t i = 0; i < room; i++) weights[i] = (uint8_t)bits();
    if (coding == BF16) numbers((bf16 *)weights, rows * COLUMNS, 0.1f);
    numbers(scales, 2 * rows * (groups ? groups : 1), 0.01f);
    for (size_t run = 0; is_uneven(coding) && run < runs; run++)
        numbers((bf16 *)(weights + run * uneven_group_bytes(coding, group)), BLOCK, 0.001f);
    numbers(x, TOKENS * COLUMNS, 1);
    const Matrix matrix = {coding, weights, scales, rows, COLUMNS, group, NULL, SCALE_FLOAT, 1, 1, 1};
    products_of_any_count(set, &matrix, NAMES[coding], x, out);
    same(set->name, NAMES[coding], out, TOKENS * rows * sizeof *out);
    for (size_t m = 0; m < TOKENS; m += 8)
        for (size_t r = 0; r < rows; r++) {
            double want = 0, size = 0;
            for (size_t c = 0; c < COLUMNS; c++) {
                const bf16 *token = x + m * COLUMNS;
                const double part = weight_of(&matrix, r, c) * (coding == BF16 ? from_bf16(token[c]) : as_integer(token, c));
                want += part, size += fabs(part);
            }
            expect(set->name, NAMES[coding], from_bf16(out[m * rows + r]), want, size);
        }
    free(weights), free(scales), free(x), free(out);
}

static void gguf_products(const Kernels *set, Coding coding, size_t rows, size_t columns) {
#define NAME_OF(coding, name, columns, bytes, group, offsets) #coding,
#define GROUP_OF(coding, name, columns, bytes, group, offsets) group,
    static const char *const NAMES[] = {EACH_GGUF_QUANT(NAME_OF)};
    static const size_t GROUPS[] = {EACH_GGUF_QUANT(GROUP_OF)};
    const char *name = NAMES[coding - Q8_0];
    const size_t group = GROUPS[coding - Q8_0], each = gguf_columns(coding);
    const size_t row_bytes = columns / each * gguf_bytes(coding);
    uint8_t *room = malloc(rows * row_bytes + 1), *weights = room + 1; /* blocks begin at any byte */
    for (size_t i = 0; i < rows * row_bytes; i++) weights[i] = (uint8_t)bits();
    for (size_t i = 0; i < rows * row_bytes; i += gguf_bytes(coding)) gguf_scales(coding, weights + i, bits());
    const Matrix matrix = {coding, weights, NULL, rows, columns, group, NULL, SCALE_FLOAT, 1, 1, 1};
    bf16 *x = malloc(sizeof *x * TOKENS * columns), *out = calloc(TOKENS * rows, sizeof *out);
    numbers(x, TOKENS * columns, 1);
    products_of_any_count(set, &matrix, name, x, out);
    same(set->name, name, out, TOKENS * rows * sizeof *out);
    for (size_t m = 0; m < TOKENS; m += 8)
        for (size_t r = 0; r < rows; r++) {
            double want = 0, size = 0;
            for (size_t c = 0; c < columns; c++) {
                const uint8_t *block = weights + r * row_bytes + c / each * gguf_bytes(coding);
                const double part = gguf_weight(coding, block, c % each) * as_integer(x + m * columns, c);
                want += part, size += fabs(part);
            }
            expect(set->name, name, from_bf16(out[m * rows + r]), want, size);
        }
    free(room), free(x), free(out);
}

static double e4m3(int byte) {
    const int exponent = byte >> 3 & 15, rest = byte & 7;
    const double size = exponent ? ldexp(8 + rest, exponent - 10) : ldexp(rest, -9);
    return byte & 0x80 ? -size : size;
}

static size_t scale_index(const Matrix *matrix, size_t r, size_t c) {
    const size_t across = (matrix->columns + matrix->scale_columns - 1) / matrix->scale_columns;
    return r / matrix->scale_rows * across + c / matrix->scale_columns;
}

static double scale_at(const Matrix *matrix, size_t r, size_t c) {
    const size_t at = scale_index(matrix, r, c);
    const float *factors = matrix->zeros_or_factors;
    switch (matrix->scale_kind) {
        case SCALE_FLOAT: return ((const float *)matrix->scales)[at];
        case SCALE_BF16: return from_bf16(((const bf16 *)matrix->scales)[at]);
        case SCALE_HALF: return half_at((const uint8_t *)matrix->scales + 2 * at);
        case SCALE_E4M3_TIMES: return e4m3(((const uint8_t *)matrix->scales)[at]) * factors[r / matrix->factor_rows];
        case SCALE_E4M3_OVER: return e4m3(((const uint8_t *)matrix->scales)[at]) / factors[r / matrix->factor_rows];
        default: return ldexp(1, ((const uint8_t *)matrix->scales)[at] - 127);
    }
}

static double code_at(const Matrix *matrix, size_t r, size_t c) {
    const uint8_t *codes = matrix->weights;
    if (matrix->coding == E4M3) return e4m3(codes[r * matrix->columns + c]);
    const int nibble = nibble_at(codes + (r * matrix->columns + c) / 2, c % 2);
    if (matrix->coding == U4) return nibble - ((const uint8_t *)matrix->zeros_or_factors)[scale_index(matrix, r, c)];
    return matrix->coding == S4 ? nibble - 8 : FP4[nibble];
}

/* Codes of any value but what is undefined, scales of a usual size in as many bytes as they need. */
static void published_products(const Kernels *set, Coding coding, ScaleKind kind, size_t rows, size_t columns, size_t scale_rows,
                               size_t scale_columns) {
    static const char *const NAMES[] = {"4 bits of floats", "4 bits, signed", "4 bits and zeros", "8 bits of floats"};
    static const size_t BYTES[] = {4, 2, 2, 1, 1, 1};
    static const float FACTORS[] = {0.003f, 0.011f};
    const char *name = NAMES[coding - E2M1];
    const size_t count = (rows + scale_rows - 1) / scale_rows * ((columns + scale_columns - 1) / scale_columns);
    const size_t all = rows * columns / (coding == E4M3 ? 1 : 2);
    uint8_t *codes = malloc(all), *scales = malloc(count * BYTES[kind]), *zeros = malloc(count);
    bf16 *x = malloc(sizeof *x * TOKENS * columns), *out = calloc(TOKENS * rows, sizeof *out);
    for (size_t i = 0; i < all; i++) {
        codes[i] = (uint8_t)bits();
        if (coding == E4M3 && (codes[i] & 0x7F) == 0x7F) codes[i]--;
    }
    for (size_t i = 0; i < count; i++) {
        zeros[i] = (uint8_t)(bits() % 17);
        if (kind == SCALE_FLOAT) ((float *)(void *)scales)[i] = 0.01f * number();
        if (kind == SCALE_BF16) ((bf16 *)(void *)scales)[i] = to_bf16(0.01f * number());
        if (kind == SCALE_HALF) scales[2 * i] = (uint8_t)bits(), scales[2 * i + 1] = (uint8_t)(0x14 | (bits() & 0x83));
        if (kind == SCALE_E8M0) scales[i] = (uint8_t)(112 + bits() % 12);
        if (kind >= SCALE_E4M3_TIMES) scales[i] = (uint8_t)(bits() % 0x7F);
    }
    const size_t group = scale_columns == 16 ? 16 : 32;
    const void *more = coding == U4 ? (const void *)zeros : FACTORS;
    const Matrix matrix = {coding, codes, scales, rows, columns, group, more, kind, scale_rows, scale_columns, (rows + 1) / 2};
    numbers(x, TOKENS * columns, 1);
    products_of_any_count(set, &matrix, name, x, out);
    same(set->name, name, out, TOKENS * rows * sizeof *out);
    for (size_t m = 0; m < TOKENS; m += 8)
        for (size_t r = 0; r < rows; r++) {
            double want = 0, size = 0;
            for (size_t c = 0; c < columns; c++) {
                const bf16 *token = x + m * columns;
                const double taken = coding == E4M3 ? from_bf16(token[c]) : as_integer(token, c);
                const double part = code_at(&matrix, r, c) * scale_at(&matrix, r, c) * taken;
                want += part, size += fabs(part);
            }
            expect(set->name, name, from_bf16(out[m * rows + r]), want, size);
        }
    free(codes), free(scales), free(zeros), free(x), free(out);
}

static void gates(const Kernels *set) {
    bf16 values[3][2 * BLOCK], out[3 * BLOCK];
    numbers(values[0], sizeof values / sizeof **values, 3);
    for (int gate = SILU; gate < GATES; gate++) {
        const Expert expert = {.gate = gate, .limit = 2, .alpha = 1.702f};
        set->gate((const bf16(*)[2 * BLOCK])values, &expert, 3, out, BLOCK);
        for (int m = 0; m < 3; m++)
            for (int i = 0; i < BLOCK; i++) {
                const int pairs = gate == CLAMPED;
                double g = from_bf16(values[m][pairs ? 2 * i : i]), up = from_bf16(values[m][pairs ? 2 * i + 1 : BLOCK + i]);
                if (gate == CLAMPED || gate == CLAMPED_HALVES || gate == LIMITED_SILU) g = fmin(g, 2), up = fmax(-2, fmin(up, 2));
                double want = (up + 1) * g / (1 + exp(-expert.alpha * g));
                if (gate == SILU || gate == LIMITED_SILU) want = g / (1 + exp(-g)) * up;
                if (gate == GELU_TANH) want = g / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (g + 0.044715 * g * g * g))) * up;
                if (gate == RELU_SQUARED) want = fmax(g, 0) * fmax(g, 0);
                expect(set->name, "a gate", from_bf16(out[m * BLOCK + i]), want, 400 * fabs(want)); /* rounded three times on the way */
            }
    }
}

static void rows(const Kernels *set) {
    enum { WIDTH = 96, HALF = 20 };
    bf16 x[3][WIDTH], weight[WIDTH], bias[WIDTH], out[WIDTH], of_cos[WIDTH], of_sin[WIDTH];
    float logits[3], cos[WIDTH], sin[WIDTH];
    numbers(x[0], 3 * WIDTH, 1), numbers(weight, WIDTH, 1), numbers(bias, WIDTH, 1), numbers(of_cos, WIDTH, 0.5f), numbers(of_sin, WIDTH, 0.5f);
    for (int i = 0; i < WIDTH; i++) cos[i] = from_bf16(of_cos[i]), sin[i] = from_bf16(of_sin[i]);
    const bf16 *const three[] = {x[0], x[1], x[2]};
    const float factors[] = {0.5f, -1.25f, 2};
    set->combine(three, factors, 3, WIDTH, out);
    for (int i = 0; i < WIDTH; i++) {
        double want = 0, size = 0;
        for (int e = 0; e < 3; e++) want += factors[e] * from_bf16(x[e][i]), size += fabs(factors[e] * from_bf16(x[e][i]));
        expect(set->name, "a weighted sum", from_bf16(out[i]), want, 100 * size);
    }
    double squares = 0, mean = 0, variance = 0;
    for (int i = 0; i < WIDTH; i++) squares += pow(from_bf16(x[0][i]), 2) / WIDTH, mean += from_bf16(x[0][i]) / WIDTH;
    for (int i = 0; i < WIDTH; i++) variance += pow(from_bf16(x[0][i]) - mean, 2) / WIDTH;
    const float scale = set->norm_scale(x[0], WIDTH, 1e-5f);
    same(set->name, "a norm's factor", &scale, sizeof scale);
    expect(set->name, "a norm's factor", scale, 1 / sqrt(squares + 1e-5), 1);
    for (int kind = RMS_NORM; kind <= LAYER_NORM; kind++) {
        const Norm norm = {weight, bias, WIDTH, 1e-5f, kind};
        if (kind == LAYER_NORM)
            set->layer_norm(&norm, x[0], out);
        else
            set->norm_part(&norm, x[0], scale, 0, WIDTH, out);
        for (int i = 0; i < WIDTH; i++) {
            const double value = from_bf16(x[0][i]), w = from_bf16(weight[i]);
            const double layer = w * (value - mean) / sqrt(variance + 1e-5) + from_bf16(bias[i]);
            const double want = kind == LAYER_NORM ? layer : (kind == RMS_NORM_CENTRED ? 1 + w : w) * value * scale;
            expect(set->name, "a norm", from_bf16(out[i]), want, 200);
        }
    }
    for (int interleaved = 0; interleaved < 3; interleaved++) {
        set->rotate(x[0], cos, sin, 2 * HALF, interleaved, out);
        for (int i = 0; i < HALF; i++) {
            const double a = from_bf16(x[0][interleaved ? 2 * i : i]), b = from_bf16(x[0][interleaved ? 2 * i + 1 : HALF + i]);
            expect(set->name, "rotary", from_bf16(out[i]), a * cos[i] - b * sin[i], 200);
            expect(set->name, "rotary", from_bf16(out[HALF + i]), b * cos[HALF + i] + a * sin[HALF + i], 200);
        }
    }
    set->logits(x[0], weight, 1, 3, WIDTH, logits);
    same(set->name, "a router's logits", logits, sizeof logits);
    for (int r = 0; r < 3; r++) {
        double want = 0;
        for (int i = 0; i < WIDTH; i++) want += (double)from_bf16(x[r][i]) * from_bf16(weight[i]);
        expect(set->name, "a router's logit", logits[r], want, 10);
    }
}

/* A token of linear attention, in a strip of columns and in some more. */
static void deltas(const Kernels *set) {
    enum { KEYS = 32, WIDTH = 80, TAPS = 4 };
    float state[KEYS][WIDTH], after[KEYS][WIDTH], key[KEYS], query[KEYS], value[WIDTH], got[WIDTH], decays[KEYS], beta;
    bf16 inputs[TAPS][WIDTH], taps[TAPS][WIDTH], weight[WIDTH], gate[WIDTH], out[WIDTH];
    const bf16 *rows[TAPS];
    double length = 0, squares;
    numbers(inputs[0], TAPS * WIDTH, 1), numbers(taps[0], TAPS * WIDTH, 1), numbers(weight, WIDTH, 1), numbers(gate, WIDTH, 1);
    for (int i = 0; i < TAPS; i++) rows[i] = inputs[i];
    for (int kind = 0; kind < 4; kind++) { /* with and without a bias and silu */
        set->convolve(rows, TAPS, taps[0], WIDTH, kind & 1 ? weight : NULL, kind & 2, WIDTH, value);
        for (int c = 0; c < WIDTH; c++) {
            double sum = kind & 1 ? from_bf16(weight[c]) : 0;
            for (int i = 0; i < TAPS; i++) sum += (double)from_bf16(inputs[i][c]) * from_bf16(taps[i][c]);
            expect(set->name, "a convolution", value[c], kind & 2 ? sum / (1 + exp(-sum)) : sum, 400);
        }
    }
    for (int by_sigmoid = 0; by_sigmoid < 2; by_sigmoid++) {
        set->delta_factors(inputs[0], value, 0.7f, by_sigmoid ? -5 : 0, 20, got, gate, &beta);
        close_to(set->name, "a beta", beta, from_bf16(to_bf16((float)(1 / (1 + exp(-from_bf16(*gate)))))));
        for (int c = 0; c < 20; c++) {
            const double step = from_bf16(inputs[0][c]) + value[c];
            const double softplus = log1p(exp(step)), sigmoid = 1 / (1 + exp(-0.7 * step));
            close_to(set->name, "a decay", got[c], exp(by_sigmoid ? -5 * sigmoid : -0.7 * softplus));
        }
    }
    for (int k = 0; k < KEYS; k++) key[k] = number(), query[k] = number(), length += (double)key[k] * key[k];
    for (int k = 0; k < KEYS; k++)
        for (int c = 0; c < WIDTH; c++) state[k][c] = number();
    float unit[KEYS];
    memcpy(unit, key, sizeof key);
    set->delta_unit(unit, KEYS, 0.5f);
    for (int k = 0; k < KEYS; k++) expect(set->name, "a key of length one", unit[k], 0.5 * key[k] / sqrt(length + 1e-6), 1);
    for (int k = 0; k < KEYS; k++) decays[k] = 0.9f - 0.02f * (float)k;
    for (int by_row = 0; by_row < 2; by_row++) {
        set->delta_rule(state[0], after[0], KEYS, WIDTH, WIDTH, unit, query, value, decays, by_row ? KEYS : 1, 0.4f, got);
        squares = 0;
        for (int c = 0; c < WIDTH; c++) {
            double read = 0, want = 0;
            for (int k = 0; k < KEYS; k++) read += decays[by_row * k] * state[k][c] * unit[k];
            for (int k = 0; k < KEYS; k++) {
                const double its = decays[by_row * k] * state[k][c] + 0.4 * (value[c] - read) * unit[k];
                expect(set->name, "a state", after[k][c], its, 1);
                want += its * query[k];
            }
            expect(set->name, "what a state gives", got[c], want, KEYS);
            squares += pow(from_bf16(to_bf16(got[c])), 2) / WIDTH;
        }
        set->delta_gate(got, weight, 1e-5f, by_row ? DELTA_SIGMOID : DELTA_SILU, gate, WIDTH, out);
        for (int c = 0; c < WIDTH; c++) {
            const double z = from_bf16(gate[c]), normed = from_bf16(to_bf16(got[c])) / sqrt(squares + 1e-5);
            const double opening = (by_row ? 1 : z) / (1 + exp(-z));
            expect(set->name, "a gated norm", from_bf16(out[c]), normed * from_bf16(weight[c]) * opening, 400);
        }
    }
    memcpy(out, inputs[0], sizeof out);
    set->times_sigmoid(out, gate, WIDTH);
    for (int c = 0; c < WIDTH; c++)
        expect(set->name, "a sigmoid's share", from_bf16(out[c]), from_bf16(inputs[0][c]) / (1 + exp(-from_bf16(gate[c]))), 400);
}

/* Mamba-2's recurrence of a head, in columns that are no whole strip and tokens that are no whole block. */
static void scans(const Kernels *set) {
    enum { STATE = 23, WIDTH = 112, STEPS = 11, HEADS = 20 };
    static float states[2][STATE][WIDTH], alone[STATE][WIDTH], shared[STEPS][2 * STATE], factors[2][STEPS], out[2][STEPS][WIDTH];
    static double want[STATE][WIDTH];
    static bf16 values[STEPS][WIDTH], gates[STEPS][WIDTH], normed[WIDTH], weight[WIDTH];
    bf16 raw[HEADS];
    float biases[HEADS], rates[HEADS], steps[HEADS], decays[HEADS];
    numbers(values[0], STEPS * WIDTH, 1), numbers(gates[0], STEPS * WIDTH, 1), numbers(weight, WIDTH, 1);
    for (int h = 0; h < HEADS; h++) raw[h] = to_bf16((float)(h - 10) * 8), biases[h] = number(), rates[h] = number() + 2;
    for (int least = 0; least < 2; least++) {
        set->scan_steps(raw, biases, rates, 0.5f * (float)least, HEADS, steps, decays);
        same(set->name, "time steps", steps, sizeof steps), same(set->name, "decays", decays, sizeof decays);
        for (int h = 0; h < HEADS; h++) {
            const double x = (double)from_bf16(raw[h]) + biases[h];
            const double step = fmax(0.5 * least, x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)));
            close_to(set->name, "a time step", steps[h], step);
            if (rates[h] * step < 80) expect(set->name, "a decay", decays[h], exp(-rates[h] * step), 1e-6);
        }
    }
    for (int t = 0; t < STEPS; t++) {
        factors[0][t] = number() + 2.5f, factors[1][t] = t == 5 ? 0 : 0.9f;
        for (int k = 0; k < 2 * STATE; k++) shared[t][k] = number();
    }
    for (int k = 0; k < STATE; k++)
        for (int c = 0; c < WIDTH; c++) want[k][c] = states[0][k][c] = number();
    ScanStrip strip = {STEPS, STATE, WIDTH, WIDTH, states[0][0], states[1][0], values[0], gates[0], WIDTH, WIDTH, shared[0],
                       shared[0] + STATE, factors[0], factors[1], 2 * STATE, 1, 0.7f, out[0][0], WIDTH};
    set->scan(&strip);
    memcpy(alone, states[0], sizeof alone);
    for (int t = 0; t < STEPS; t++) {
        const ScanStrip one = {1, STATE, WIDTH, WIDTH, alone[0], alone[0], values[t], gates[t], WIDTH, WIDTH, shared[t],
                               shared[t] + STATE, factors[0] + t, factors[1] + t, 2 * STATE, 1, 0.7f, out[1][t], WIDTH};
        set->scan(&one);
        for (int c = 0; c < WIDTH; c++) {
            const double value = from_bf16(values[t][c]), gate = from_bf16(gates[t][c]);
            double sum = 0;
            for (int k = 0; k < STATE; k++) {
                want[k][c] = factors[1][t] * want[k][c] + shared[t][k] * (value * factors[0][t]);
                sum += want[k][c] * shared[t][STATE + k];
            }
            expect(set->name, "a scan", out[0][t][c], (sum + 0.7f * value) * gate / (1 + exp(-gate)), 1);
        }
    }
    if (memcmp(out[0], out[1], sizeof out[0]) || memcmp(alone, states[1], sizeof alone))
        wrong++, printf("%s: a scan has other bits token by token\n", set->name);
    same(set->name, "a scan", out[0], sizeof out[0]);
    set->scan_norm(out[0][0], weight, 1e-5f, WIDTH, normed);
    double squares = 0;
    for (int c = 0; c < WIDTH; c++) squares += (double)out[0][0][c] * out[0][0][c] / WIDTH;
    for (int c = 0; c < WIDTH; c++)
        expect(set->name, "a norm", from_bf16(normed[c]), out[0][0][c] / sqrt(squares + 1e-5) * from_bf16(weight[c]), 1);
    same(set->name, "a norm", normed, sizeof normed);
}

/* Mamba-1's, of two rows. */
static void channel_scans(const Kernels *set) {
    enum { STATE = 5, WIDTH = 48, STEPS = 7, FROM = 16 };
    static float states[4][STATE][WIDTH], rates[STATE][WIDTH], skips[WIDTH];
    static double want[2][STATE][WIDTH];
    static bf16 values[STEPS][WIDTH], times_[STEPS][WIDTH], gates[STEPS][WIDTH], keys[STEPS][STATE], queries[STEPS][STATE];
    static bf16 out[STEPS][WIDTH];
    const int64_t ends[] = {3, STEPS}, before[] = {0, 2}, after[] = {1, 2}, prompts[] = {1, 1};
    const ChannelScan layer = {rates[0], skips, STATE, WIDTH};
    const ChannelScanStep step = {{STEPS, 2, ends, before, after, prompts}, values[0], times_[0], gates[0], keys[0], queries[0],
                                  WIDTH, WIDTH, WIDTH, STATE, STATE, states[0][0], out[0]};
    numbers(values[0], STEPS * WIDTH, 1), numbers(times_[0], STEPS * WIDTH, 2), numbers(gates[0], STEPS * WIDTH, 1);
    numbers(keys[0], STEPS * STATE, 1), numbers(queries[0], STEPS * STATE, 1);
    for (int c = 0; c < WIDTH; c++) {
        skips[c] = number();
        for (int k = 0; k < STATE; k++) {
            rates[k][c] = number() + 2;
            for (int row = 0; row < 2; row++) want[row][k][c] = states[before[row]][k][c] = number();
        }
    }
    for (size_t row = 0; row < 2; row++) set->scan_channels(&layer, &step, row, FROM, WIDTH - FROM);
    for (int t = 0; t < STEPS; t++)
        for (int c = FROM; c < WIDTH; c++) {
            const double x = from_bf16(times_[t][c]), time = log1p(exp(x)), value = from_bf16(values[t][c]);
            const double gate = from_bf16(gates[t][c]);
            double sum = skips[c] * value;
            for (int k = 0; k < STATE; k++) {
                double *its = &want[t >= 3][k][c];
                *its = exp(-time * rates[k][c]) * *its + from_bf16(keys[t][k]) * value * time;
                sum += *its * from_bf16(queries[t][k]);
            }
            expect(set->name, "a scan of channels", from_bf16(out[t][c]), sum * gate / (1 + exp(-gate)), 10);
        }
    for (int k = 0; k < STATE; k++)
        for (int c = FROM; c < WIDTH; c++)
            for (int row = 0; row < 2; row++)
                expect(set->name, "a channel's state", states[after[row]][k][c], want[row][k][c], 1);
    same(set->name, "a scan of channels", out, sizeof out);
}

static void attention(const Kernels *set) {
    enum { KEY = 96, VALUE = 160, ROOM = 300, QUERIES_HERE = 7, END = 250 };
    static bf16 keys[ROOM * KEY], values[ROOM * VALUE], queries[QUERIES_HERE * KEY], out[VALUE];
    static float results[2][QUERIES_HERE * (TILE_HEADER + VALUE)], in_order[2 * (TILE_HEADER + VALUE)];
    const size_t each = tile_result(VALUE);
    numbers(keys, ROOM * KEY, 1), numbers(values, ROOM * VALUE, 1), numbers(queries, QUERIES_HERE * KEY, 1);
    const Positions positions = {keys, values, NULL, NULL, 16, KEY, VALUE, KEY, VALUE, ROOM, NULL};
    set->attend_tile(&positions, queries, QUERIES_HERE, 3, TILE, 0.1f, results[0]);
    set->attend_tile(&positions, queries, QUERIES_HERE, TILE, END, 0.1f, results[1]);
    for (int q = 0; q < QUERIES_HERE; q++) {
        double scores[END], sum = 0, most = -1e30;
        for (int p = 3; p < END; p++) {
            scores[p] = 0;
            for (int c = 0; c < KEY; c++) scores[p] += 0.1 * from_bf16(queries[q * KEY + c]) * from_bf16(keys[p * KEY + c]);
            most = fmax(most, scores[p]);
        }
        for (int p = 3; p < END; p++) sum += exp(scores[p] - most);
        for (int t = 0; t < 2; t++) memcpy(in_order + t * each, results[t] + q * each, each * sizeof(float));
        set->merge_tiles(in_order, 2, each, VALUE, NULL, out);
        same(set->name, "attention", out, sizeof out);
        for (int c = 0; c < VALUE; c++) {
            double want = 0;
            for (int p = 3; p < END; p++) want += exp(scores[p] - most) / sum * from_bf16(values[p * VALUE + c]);
            expect(set->name, "attention", from_bf16(out[c]), want, 20);
        }
    }
}

/* Column c of row p of codes: of 8 bits a number each, of 4 bits two of each 32 columns in a byte. */
static double kept(const int8_t *codes, size_t columns, size_t bits, size_t p, size_t c) {
    if (bits == 8) return codes[p * columns + c];
    const uint8_t byte = (uint8_t)codes[(p * columns + c / 32 * 32) / 2 + c % 16];
    return from_bf16(CODES_OF_4[c % 32 < 16 ? byte & 15 : byte >> 4]);
}

/* Queries of a prompt, over rows of bfloat16 and over codes, in a ring that has begun again, with windows and a sink. */
static void prompts(const Kernels *set, size_t coded) {
    enum { KEY = 96, VALUE = 160, ROOM = 260, COUNT = 37, FIRST = 400, WINDOW = 200, EACH = 3 };
    static bf16 keys[ROOM * KEY], values[ROOM * VALUE], scales[2][ROOM], queries[COUNT * KEY], out[COUNT * VALUE], alone[VALUE];
    static int8_t codes[2][ROOM * VALUE];
    const float sink = 0.5f;
    float *workspace = malloc(sizeof *workspace * rows_workspace(KEY, VALUE));
    for (int i = 0; i < ROOM * VALUE; i++) codes[0][i] = (int8_t)(bits() % 255 - 127), codes[1][i] = (int8_t)(bits() % 255 - 127);
    numbers(keys, ROOM * KEY, 1), numbers(values, ROOM * VALUE, 1), numbers(queries, COUNT * KEY, 1);
    for (int i = 0; i < ROOM; i++) scales[0][i] = to_bf16(0.01f + 1e-5f * (float)i), scales[1][i] = to_bf16(0.02f - 1e-5f * (float)i);
    const Positions plain = {keys, values, NULL, NULL, 16, KEY, VALUE, KEY, VALUE, ROOM, NULL};
    const Positions short_ = {codes[0], codes[1], scales[0], scales[1], coded, KEY, VALUE, KEY, VALUE, ROOM, NULL};
    const Positions *positions = coded < 16 ? &short_ : &plain;
    QueryRows rows = {.count = COUNT, .scale = 0.1f};
    for (size_t r = 0; r < COUNT; r++) {
        rows.queries[r] = queries + r * KEY, rows.out[r] = out + r * VALUE;
        rows.end[r] = FIRST + r / EACH + 1, rows.begin[r] = rows.end[r] - WINDOW;
        rows.sinks[r] = r % EACH ? NULL : &sink;
    }
    set->attend_rows(positions, &rows, workspace);
    same(set->name, "a prompt's attention", out, sizeof out);
    for (size_t r = 0; r < COUNT; r += 4) {
        double scores[WINDOW], sum = rows.sinks[r] ? exp(0.5) : 0;
        for (size_t i = 0; i < WINDOW; i++) {
            const size_t p = (rows.begin[r] + i) % ROOM;
            scores[i] = 0;
            for (size_t c = 0; c < KEY; c++) {
                const double key = coded < 16 ? kept(codes[0], KEY, coded, p, c) * from_bf16(scales[0][p]) : from_bf16(keys[p * KEY + c]);
                scores[i] += 0.1 * from_bf16(queries[r * KEY + c]) * key;
            }
            sum += exp(scores[i]);
        }
        for (size_t c = 0; c < VALUE; c++) {
            double want = 0;
            for (size_t i = 0; i < WINDOW; i++) {
                const size_t p = (rows.begin[r] + i) % ROOM;
                const double value = coded < 16 ? kept(codes[1], VALUE, coded, p, c) * from_bf16(scales[1][p]) : from_bf16(values[p * VALUE + c]);
                want += exp(scores[i]) / sum * value;
            }
            expect(set->name, "a prompt's attention", from_bf16(out[r * VALUE + c]), want, 20);
        }
        QueryRows one = {.count = 1, .queries = {rows.queries[r]}, .out = {alone}, .begin = {rows.begin[r]},
                         .end = {rows.end[r]}, .sinks = {rows.sinks[r]}, .scale = 0.1f};
        set->attend_rows(positions, &one, workspace);
        if (memcmp(alone, out + r * VALUE, sizeof alone))
            wrong++, printf("%s: a query of a prompt has other bits among others than alone\n", set->name);
    }
    free(workspace);
}

extern const Kernels kernels_generic;

/* What is packed has the bytes that plain C gives it. */
static void packing(const Kernels *set, Coding coding, size_t rows, size_t group, int wide) {
    enum { COUNT = 13, WIDE = 320 };
    static const double thresholds[COUNT] = {1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9};
    const Kernels *const both[] = {set, &kernels_generic};
    const size_t groups = coding == INT8 ? 1 : WIDE / group, blocks = (rows + BLOCK - 1) / BLOCK, count = rows * WIDE;
    const size_t coded = coding == INT8 ? count : coding == INT6 ? count * 3 / 4 : coding == INT4 ? count / 2 : count / 4;
    float *weights = malloc(count * sizeof *weights), *scales[2], *zeros[2];
    bf16 *narrow = malloc(count * sizeof *narrow);
    uint8_t *codes[2], *solved[2];
    double squares[2][4] = {{0}};
    for (size_t i = 0; i < count; i++) weights[i] = 0.1f * number(), narrow[i] = to_bf16(weights[i]);
    for (size_t i = 0; i < group; i++) weights[i] = 0.25f, narrow[i] = to_bf16(0.25f);
    for (int k = 0; k < 2; k++) {
        const Weights from = {wide ? (const void *)weights : (const void *)narrow, rows, WIDE, wide};
        scales[k] = malloc(rows * groups * sizeof *scales[k]), zeros[k] = malloc(rows * groups * sizeof *zeros[k]);
        codes[k] = malloc(coded), solved[k] = malloc(count);
        if (coding == INT4 || coding == INT2) {
            const Hqq hqq = {from, group, rows, coding == INT4 ? 15 : 3, thresholds, COUNT, solved[k], scales[k], zeros[k], NULL};
            if (!both[k]->hqq(&hqq, 0)) wrong++, printf("%s: not solved\n", set->name);
            for (size_t i = 0; i < rows * groups; i++) zeros[k][i] += (float)middle_code(coding) * scales[k][i];
            if (k && memcmp(solved[0], solved[1], count)) wrong++, printf("%s: other codes of HQQ\n", set->name);
        }
        for (size_t r = 0; coding == INT8 && r < rows; r++) scales[k][r] = 0.002f;
        const Codes job = {coding, from, coding == INT8 ? WIDE : group, wide, scales[k], zeros[k], codes[k], squares[k]};
        for (size_t b = 0; b < blocks; b++) both[k]->encode(&job, b);
    }
    if (memcmp(codes[0], codes[1], coded) || memcmp(squares[0], squares[1], sizeof *squares) ||
        memcmp(scales[0], scales[1], rows * groups * sizeof **scales))
        wrong++, printf("%s: coding %d packed in groups of %zu is not what plain C packs\n", set->name, coding, group);
    if (!(squares[0][0] >= 0 && squares[0][0] < 0.2 * squares[0][1])) wrong++, printf("%s: coding %d is far off\n", set->name, coding);
    for (int k = 0; k < 2; k++) free(scales[k]), free(zeros[k]), free(codes[k]), free(solved[k]);
    free(weights), free(narrow);
}

int main(void) {
    for (const Kernels *const *set = kernels_here(); *set; set++) {
        state = 1, mark = 0;
        for (size_t group = 32; group <= 256; group *= 2) {
            products(*set, INT4, ROWS, group), products(*set, INT6, ROWS, group), products(*set, INT2, ROWS, group), products(*set, TCQ2, ROWS, group);
            for (Coding coding = NL4; group <= 64 && coding <= NL2; coding++) products(*set, coding, ROWS, group);
        }
        products(*set, INT8, ROWS, COLUMNS), products(*set, BF16, ROWS, COLUMNS);
        products(*set, INT8, ROWS - 30, COLUMNS), products(*set, BF16, ROWS - 30, COLUMNS);
        for (Coding coding = FIRST_GGUF; coding <= LAST_GGUF; coding++) {
            gguf_products(*set, coding, 2 * BLOCK, 512), gguf_products(*set, coding, BLOCK + 7, 256);
            gguf_products(*set, coding, 5, LONG);
            if (gguf_columns(coding) == 32) gguf_products(*set, coding, BLOCK + 3, 32), gguf_products(*set, coding, 9, 416);
        }
        for (int kind = SCALE_FLOAT; kind < SCALE_KINDS; kind++)
            for (Coding coding = FIRST_PUBLISHED; coding <= LAST_PUBLISHED; coding++) {
                if (coding == U4 && kind >= SCALE_E4M3_TIMES) continue;
                published_products(*set, coding, kind, 2 * BLOCK, 512, 1, 32);
                published_products(*set, coding, kind, BLOCK + 7, 416, 32, 128);
                published_products(*set, coding, kind, BLOCK + 3, 288, 1, 288);
                published_products(*set, coding, kind, 9, 32, 128, 128);
                published_products(*set, coding, kind, 5, LONG + 32, 1, 32);
                if (coding == E2M1) published_products(*set, coding, kind, BLOCK + 4, 544, 1, 16);
            }
        gates(*set), rows(*set), deltas(*set), scans(*set), channel_scans(*set), attention(*set), prompts(*set, 16), prompts(*set, 8), prompts(*set, 4);
        for (int wide = 0; wide < 2; wide++) {
            for (size_t group = 32; group <= 64; group *= 2) {
                packing(*set, INT6, BLOCK, group, wide), packing(*set, INT4, BLOCK + 16, group, wide);
                packing(*set, INT2, BLOCK + 16, group, wide);
            }
            packing(*set, INT8, BLOCK + 7, 32, wide);
        }
        printf("%s\n", (*set)->name);
    }
    return wrong != 0;
}
