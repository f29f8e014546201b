"""Where the cases of Triton's kernels run, what they may differ by, and their inputs."""

import os

import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Error of one element, in units of |x| @ |w|: the result is rounded to its dtype, the tiled kernel rounds the
# weights to it too (each half a unit in the last place: 2**-8 in bfloat16, 2**-11 in float16); the rest is
# float32 arithmetic.
TOLERANCE = {torch.float32: 2**-20, torch.float16: 1.01 * 2**-10, torch.bfloat16: 1.01 * 2**-7}
DTYPES = tuple(TOLERANCE)


def tokens(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype).to(DEVICE)
