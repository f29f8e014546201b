"""A causal convolution over a token's last inputs (native/convolution.h), and the rows of a step as the kernels of
layers with recurrent states take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tiermoe.kernels.linear import address, plain
from tiermoe.native import _native, available, structs
from tiermoe.types import FEW_TOKENS

COLUMNS = 16  # what the kernels take of channels, and of a head's columns, is a multiple of them
_MOST_TAPS = 8


class StatePiece:
    """Tokens begin .. end of a step, at most `FEW_TOKENS`, of one or several sequences. rows: of each sequence behind
    which of these tokens its own end, the places of its states before and after them, whether they are a prompt's."""

    def __init__(self, begin: int, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        self.begin, self.end = begin, begin + rows[-1][0]
        self._spans = torch.tensor(rows, dtype=torch.int64).t().contiguous()
        ends, before, after, prompts = (row.data_ptr() for row in self._spans)
        self.rows = structs.StateRows(
            tokens=rows[-1][0], rows=len(rows), ends=ends, before=before, after=after, prompts=prompts
        )


def state_pieces(spans: Sequence[tuple[int, int, int, bool]]) -> Iterator[StatePiece]:
    """All tokens of a step, some at a time. spans: of each sequence how many tokens it has, the places of its states
    before and after the step, whether they are a prompt's."""
    begin, tokens = 0, 0
    rows: list[tuple[int, int, int, bool]] = []
    for length, before, after, prompt in spans:
        while length:
            some = min(length, FEW_TOKENS - tokens)
            tokens, length = tokens + some, length - some
            rows.append((tokens, before, after, prompt))
            before = after
            if tokens == FEW_TOKENS:
                yield StatePiece(begin, rows)
                begin, tokens, rows = begin + tokens, 0, []
    if rows:
        yield StatePiece(begin, rows)


def takes_convolution(dtype: torch.dtype, channels: int, kept: int) -> bool:
    """Whether the kernel takes these sizes. kept: inputs before a token's own."""
    return dtype == torch.bfloat16 and channels % COLUMNS == 0 and kept < _MOST_TAPS and available()


class ConvolutionKernel:
    """Convolution of one layer. taps bfloat16 (kept + 1, channels), those of the oldest input first; bias bfloat16
    (channels). Keeps the tensors alive."""

    def __init__(self, taps: Tensor, bias: Tensor | None, silu: bool) -> None:
        if not plain(taps) or (bias is not None and not plain(bias)):
            raise ValueError("taps and bias must be contiguous bfloat16")
        self._tensors = taps, bias
        self.described = structs.Convolution(
            taps=taps.data_ptr(), bias=address(bias), kept=len(taps) - 1, channels=taps.shape[1], silu=silu
        )
        self._packed = _native.pack(self.described)

    def __call__(self, values: Tensor, pieces: Sequence[StatePiece], inputs: Tensor) -> Tensor:
        """values (T, channels) bfloat16, rows contiguous; inputs (.., kept, channels), contiguous, of all places →
        (T, channels). The interpreter's lock is released meanwhile."""
        out = values.new_empty(values.shape)
        for piece in pieces:
            step = convolution_step(piece, values, inputs)
            _native.convolve(self._packed, _native.pack(step), out[piece.begin :].data_ptr(), torch.get_num_threads())
        return out


def convolution_step(piece: StatePiece, values: Tensor, inputs: Tensor) -> structs.ConvolutionStep:
    """`ConvolutionKernel` of a piece."""
    return structs.ConvolutionStep(
        rows=piece.rows, values=values[piece.begin :].data_ptr(), stride=values.stride(0), inputs=inputs.data_ptr()
    )
