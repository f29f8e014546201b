#include "rotary.h"

#include <string.h>

#include "kernels.h"

void rotate(const bf16 *head, const bf16 *cos, const bf16 *sin, size_t rotary, size_t columns, int interleaved,
            bf16 *out) {
    kernels->rotate(head, cos, sin, rotary, interleaved, out);
    if (out != head) memcpy(out + rotary, head + rotary, (columns - rotary) * sizeof *out);
}
