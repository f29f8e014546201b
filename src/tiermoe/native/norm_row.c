#include "norm_row.h"

#include <math.h>

#include "norm.h"
#include "vector.h"

enum { LANES = 16 };

TARGET static void layer_norm(const Norm *norm, const bf16 *x, bf16 *out) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (size_t i = 0; i < norm->width; i += LANES) sum = _mm512_add_ps(sum, load_bf16(x + i));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)norm->width);
    for (size_t i = 0; i < norm->width; i += LANES) {
        const __m512 apart = _mm512_sub_ps(load_bf16(x + i), mean);
        squares = _mm512_fmadd_ps(apart, apart, squares);
    }
    const float variance = _mm512_reduce_add_ps(squares) / (float)norm->width;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(variance + norm->epsilon));
    for (size_t i = 0; i < norm->width; i += LANES) {
        const __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(load_bf16(x + i), mean), scale);
        const __m512 bias = norm->bias ? load_bf16(norm->bias + i) : _mm512_setzero_ps();
        store_bf16(out + i, _mm512_fmadd_ps(load_bf16(norm->weight + i), scaled, bias));
    }
}

float norm_row_scale(const Norm *norm, const bf16 *x) {
    return norm->kind == LAYER_NORM ? 0 : norm_scale(x, norm->width, norm->epsilon);
}

TARGET void norm_part(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out) {
    const bf16 *weight = norm->weight + begin;
    if (norm->kind == RMS_NORM) {
        norm_apply(x, weight, scale, width, out);
        return;
    }
    for (size_t i = 0; i < width; i += LANES)
        store_bf16(out + i, _mm512_mul_ps(load_bf16(weight + i), _mm512_mul_ps(load_bf16(x + i), _mm512_set1_ps(scale))));
}

void norm_row(const Norm *norm, const bf16 *x, bf16 *out) {
    if (norm->kind == LAYER_NORM)
        layer_norm(norm, x, out);
    else
        norm_part(norm, x, norm_row_scale(norm, x), 0, norm->width, out);
}
