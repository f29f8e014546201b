"""The gated delta rule by torch's operations: the recurrence of native/delta.h, `CHUNK` tokens at a time.

Within a chunk all tokens are computed at once: what each adds to the state follows from those before it by a triangular
system (arXiv:2412.06464, section 3.3), so that the state is read and written once a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
_TENSORS = 12  # of a chunk's keys or values that live at once, at the most
_PAIRS = 6  # of its pairs of tokens


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """query, key (T, heads, key columns), of length one but for query's scale; value (T, heads, value columns); decay
    (T, heads), its logarithm; beta (T, heads); state (heads, key columns, value columns), which is replaced by the one
    after the tokens; all float32 → (T, heads, value columns)."""
    result = torch.empty_like(value)
    for begin in range(0, len(value), CHUNK):
        some = slice(begin, begin + CHUNK)
        chunk = [each[some].transpose(0, 1) for each in (query, key, value, decay, beta)]
        result[some] = _chunk(chunk, state).transpose(0, 1)
    return result


def workspace_bytes(heads: int, key_columns: int, value_columns: int) -> int:
    """What `delta_rule` takes at the most, beside its arguments and its result."""
    columns = key_columns + value_columns
    return 4 * heads * (CHUNK * (_TENSORS * columns + _PAIRS * CHUNK) + 2 * key_columns * value_columns)


def _chunk(chunk: list[Tensor], state: Tensor) -> Tensor:
    """`delta_rule` of a chunk's query, key, value, decay and beta, (heads, T, ..) each."""
    query, key, value, decay, beta = chunk
    gone = decay.cumsum(1)[..., None]  # logarithm of what has decayed since the chunk began
    pairs = (gone - gone.transpose(1, 2)).masked_fill(_later(gone), float("-inf")).exp()
    weighed = key * beta[..., None]
    system = (weighed @ key.transpose(1, 2)) * pairs
    since = gone.exp()
    known = torch.cat((value * beta[..., None], weighed * since), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    added, read = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    added = added - read @ state
    result: Tensor = (query * since) @ state + ((query @ key.transpose(1, 2)) * pairs) @ added
    last = gone[:, -1:]
    state.mul_(last.exp()).add_((key * (last - gone).exp()).transpose(1, 2) @ added)
    return result


def _later(gone: Tensor) -> Tensor:
    """(T, T), true where the second token comes after the first."""
    tokens = gone.shape[1]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=gone.device).triu(1)
