#include "kv_codes.h"

#include <math.h>

static const float WHOLE = 12582912.0f; /* 1.5 * 2^23: adding it rounds |x| < 2^22 to a whole number */

void kv_encode(const bf16 *row, size_t columns, int8_t *codes, bf16 *scale) {
    float largest = 0;
    for (size_t i = 0; i < columns; i++) {
        const float size = fabsf(from_bf16(row[i]));
        largest = size > largest ? size : largest;
    }
    *scale = to_bf16(largest / 127);
    const float step = from_bf16(*scale);
    for (size_t i = 0; i < columns; i++) {
        const float code = step > 0 ? from_bf16(row[i]) / step : 0;
        const float least = code >= -127 ? code : -127; /* also where it is undefined */
        codes[i] = (int8_t)((least <= 127 ? least : 127) + WHOLE - WHOLE);
    }
}
