/* norm_row.h over Vector. */
#include <math.h>

static float norm_factor(const bf16 *x, size_t width, float epsilon) {
    Vector squares = zeros();
    for (size_t i = 0; i < width; i += LANES) {
        const Vector values = load_bf16(x + i);
        squares = times_plus(values, values, squares);
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)width + epsilon);
}

static void norm_columns(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out) {
    const bf16 *weight = norm->weight + begin;
    for (size_t i = 0; i < width; i += LANES) {
        const Vector scaled = times(load_bf16(x + i), all(scale)), its = load_bf16(weight + i);
        const Vector factor = norm->kind == RMS_NORM_CENTRED ? plus(all(1), its) : its;
        store_bf16(out + i, times(factor, norm->kind == RMS_NORM ? as_bf16(scaled) : scaled));
    }
}

static void layer_norm(const Norm *norm, const bf16 *x, bf16 *out) {
    Vector sum = zeros(), squares = zeros();
    for (size_t i = 0; i < norm->width; i += LANES) sum = plus(sum, load_bf16(x + i));
    const Vector mean = all(sum_of(sum) / (float)norm->width);
    for (size_t i = 0; i < norm->width; i += LANES) {
        const Vector apart = minus(load_bf16(x + i), mean);
        squares = times_plus(apart, apart, squares);
    }
    const float variance = sum_of(squares) / (float)norm->width;
    const Vector scale = all(1.0f / sqrtf(variance + norm->epsilon));
    for (size_t i = 0; i < norm->width; i += LANES) {
        const Vector scaled = times(minus(load_bf16(x + i), mean), scale);
        store_bf16(out + i, times_plus(load_bf16(norm->weight + i), scaled, norm->bias ? load_bf16(norm->bias + i) : zeros()));
    }
}
