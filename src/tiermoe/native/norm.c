#include "norm.h"

#include <math.h>

#include "vector.h"

TARGET float norm_scale(const bf16 *x, size_t width, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (size_t i = 0; i < width; i += 16) {
        const __m512 values = load_bf16(x + i);
        squares = _mm512_fmadd_ps(values, values, squares);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + epsilon);
}

TARGET void norm_apply(const bf16 *x, const bf16 *weight, float scale, size_t width, bf16 *out) {
    for (size_t i = 0; i < width; i += 16) {
        const __m512 scaled = as_bf16(_mm512_mul_ps(load_bf16(x + i), _mm512_set1_ps(scale)));
        store_bf16(out + i, _mm512_mul_ps(load_bf16(weight + i), scaled));
    }
}
