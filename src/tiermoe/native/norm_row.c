#include "norm_row.h"

#include "kernels.h"

float norm_row_scale(const Norm *norm, const bf16 *x) {
    return norm->kind == LAYER_NORM ? 0 : kernels->norm_scale(x, norm->width, norm->epsilon);
}

void norm_part(const Norm *norm, const bf16 *x, float scale, size_t begin, size_t width, bf16 *out) {
    kernels->norm_part(norm, x, scale, begin, width, out);
}

void norm_row(const Norm *norm, const bf16 *x, bf16 *out) {
    if (norm->kind == LAYER_NORM)
        kernels->layer_norm(norm, x, out);
    else
        kernels->norm_part(norm, x, norm_row_scale(norm, x), 0, norm->width, out);
}
