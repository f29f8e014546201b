"""Recurrences of state-space layers after their convolutions (native/scan.h): Mamba-2's for up to `FEW_TOKENS` tokens a
call, and Mamba-1's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.formats.encoding import scratch
from tiermoe.kernels.convolution import COLUMNS, StatePiece
from tiermoe.kernels.linear import plain
from tiermoe.native import _native, available, structs
from tiermoe.types import FEW_TOKENS

_MOST_CHANNEL_STATE = 256


def takes_scan(dtype: torch.dtype, columns: int) -> bool:
    """Whether `ScanKernel` supports this dtype and head size."""
    return dtype == torch.bfloat16 and columns % COLUMNS == 0 and available()


def takes_channel_scan(dtype: torch.dtype, channels: int, state: int) -> bool:
    """Whether `ChannelScanKernel` takes these sizes."""
    return takes_scan(dtype, channels) and state <= _MOST_CHANNEL_STATE


def scan_bytes(heads: int, columns: int, groups: int, state: int) -> int:
    """Largest workspace of `ScanKernel`."""
    return FEW_TOKENS * 4 * (2 * groups * state + 2 * heads + heads * columns)


class ScanKernel:
    """Scan of one layer of Mamba-2, with its gate and its norm. rates, biases, skips float32 (heads); norm bfloat16
    (heads * columns); state: columns of a key. Keeps the tensors alive."""

    def __init__(
        self,
        rates: Tensor,
        biases: Tensor,
        skips: Tensor,
        norm: Tensor,
        epsilon: float,
        groups: int,
        state: int,
        least_step: float = 0.0,
    ) -> None:
        factors, heads = (rates, biases, skips), len(rates)
        if not plain(norm) or any(each.dtype != torch.float32 or each.shape != (heads,) for each in factors):
            raise ValueError("norm must be contiguous bfloat16, rates, biases and skips float32")
        self._tensors = (*factors, norm)
        self._packed = _native.pack(
            structs.Scan(
                rates=rates.data_ptr(), biases=biases.data_ptr(), skips=skips.data_ptr(), norm=norm.data_ptr(),
                epsilon=epsilon, least_step=least_step, heads=heads, columns=len(norm) // heads, groups=groups,
                state=state,
            )
        )  # fmt: skip

    def workspace(self, tokens: int) -> int:
        """Workspace of a step of `tokens` tokens, in bytes."""
        return _native.scan_workspace(self._packed, tokens)

    def __call__(
        self, mixed: Tensor, times: Tensor, gates: Tensor, pieces: Sequence[StatePiece], states: Tensor
    ) -> Tensor:
        """mixed (T, channels), values, keys and queries after the convolution; times (T, heads); gates (T, values);
        bfloat16, rows contiguous. states float32 (.., heads, state, columns), contiguous, of all places → (T, values).
        The interpreter's lock is released meanwhile."""
        out = gates.new_empty(gates.shape)
        threads = torch.get_num_threads()
        for piece in pieces:
            at = piece.begin
            workspace = scratch.address("scan", self.workspace(piece.end - at))
            step = structs.ScanStep(
                rows=piece.rows, mixed=mixed[at:].data_ptr(), times=times[at:].data_ptr(), gates=gates[at:].data_ptr(),
                mixed_stride=mixed.stride(0), times_stride=times.stride(0), gates_stride=gates.stride(0),
                states=states.data_ptr(), out=out[at:].data_ptr(),
            )  # fmt: skip
            _native.run_scan(self._packed, _native.pack(step), workspace, threads)
        return out


class ChannelScanKernel:
    """Scan of one layer of Mamba-1, with its gate. rates (state, channels), skips (channels), float32. Keeps the
    tensors alive."""

    def __init__(self, rates: Tensor, skips: Tensor) -> None:
        if rates.dtype != torch.float32 or skips.dtype != torch.float32 or not rates.is_contiguous():
            raise ValueError("rates and skips must be contiguous float32")
        self._tensors = rates, skips
        state, channels = rates.shape
        self._packed = _native.pack(
            structs.ChannelScan(rates=rates.data_ptr(), skips=skips.data_ptr(), state=state, channels=channels)
        )

    def __call__(
        self,
        values: Tensor,
        times: Tensor,
        gates: Tensor,
        key: Tensor,
        query: Tensor,
        pieces: Sequence[StatePiece],
        states: Tensor,
    ) -> Tensor:
        """values, times, gates (T, channels), key, query (T, state), bfloat16, rows contiguous; states float32
        (.., state, channels), contiguous, of all places → (T, channels). The interpreter's lock is released
        meanwhile."""
        out = values.new_empty(values.shape)
        for piece in pieces:
            at = piece.begin
            step = structs.ChannelScanStep(
                rows=piece.rows, values=values[at:].data_ptr(), times=times[at:].data_ptr(),
                gates=gates[at:].data_ptr(), keys=key[at:].data_ptr(), queries=query[at:].data_ptr(),
                values_stride=values.stride(0), times_stride=times.stride(0), gates_stride=gates.stride(0),
                keys_stride=key.stride(0), queries_stride=query.stride(0), states=states.data_ptr(),
                out=out[at:].data_ptr(),
            )  # fmt: skip
            _native.run_channel_scan(self._packed, _native.pack(step), torch.get_num_threads())
        return out
