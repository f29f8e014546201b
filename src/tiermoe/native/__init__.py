"""Native kernels: C for several instruction sets (isa/*.c); the process uses one of them.

They compute in bfloat16 on weights of 2 and 4 (even and uneven levels), 3, 6, 8 and 16 bits, on the blocks of GGUF
files and on the codes of published checkpoints, never rounding a weight, and widen a GPU's 2 bits to 4. A build with
TIERMOE_NATIVE=0 lacks them: torch's operators compute there (`kernels/linear.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from ctypes import sizeof
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

import torch

from tiermoe.config import NATIVE_SWITCH
from tiermoe.errors import ConfigError
from tiermoe.native import structs

try:
    from tiermoe.native import _native
except ImportError:
    _native = None  # type: ignore[assignment]

SWITCH = NATIVE_SWITCH
ISA = "TIERMOE_ISA"
"""Environment variable: the instruction set whose kernels run, one of `instruction_sets`; else the fastest."""


class ScaleKind(IntEnum):
    """Type of the scales of E2M1, S4, U4 and E4M3; the order is that of quants.h."""

    FLOAT = 0
    BF16 = 1
    HALF = 2
    E8M0 = 3
    E4M3_TIMES = 4
    E4M3_OVER = 5


ROWS = 64  # at 2, 3, 4 and 6 bits a matrix has a multiple of them
GROUPS = (32, 64, 128, 256)  # weights of a row that share a scale at 2, 3, 4 and 6 bits
PUBLISHED = ("E2M1", "S4", "U4", "E4M3")
COLUMNS = {"INT8": 64, "BF16": 32} | dict.fromkeys(PUBLISHED, 32)  # a matrix has a multiple of them
MOST_COLUMNS = 1 << 15  # but at 4 and 6 bits of our own: some rows are decoded on a thread's stack
MOST_GROUP = 256
"""Weights that share a scale, at most, where `hqq` finds it (encode.h)."""
WEIGHTS = (torch.bfloat16, torch.float32)
"""Dtypes of the weights that `hqq` and `encode` take."""
UNEVEN = ("NL4", "NL3", "NL2")
UNEVEN_GROUP = 64  # their longest
_IN_BLOCKS = ("INT2", "INT4", "INT6", "TCQ2", *UNEVEN)  # of 64 rows


def _quants() -> list[tuple[str, int, int, int]]:
    """The quants of the compiled module. ImportError where it is of other sources than this file."""
    if _native is None:
        return []
    if _native.structs() != {each.__name__: sizeof(each) for each in structs.STRUCTS}:
        raise ImportError(f"{_native.__file__} is compiled from other sources: install tiermoe again")
    return _native.quants()


CODINGS: dict[str, int] = {name: number for number, (name, *_) in enumerate(_quants())}
"""Codings of a matrix (quants.h) and their numbers; nothing in a build without kernels."""
GROUPS_OF: dict[str, int] = {name: group for name, _, _, group in _quants()}
"""Coding → columns to a scale; 0 where a matrix says how many."""
GATES: dict[str, int] = {} if _native is None else {name: number for number, name in enumerate(_native.gates())}
"""Gates of experts that the kernels compute (expert.h), and their numbers."""


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether our own kernels compute in this process: those of the instruction set that TIERMOE_ISA names, else of the
    fastest that this machine has. ConfigError for a name that this machine does not run."""
    asked, off = os.environ.get(ISA, ""), os.environ.get(SWITCH) == "0"
    if asked:
        _check(asked, off)
    if _native is None or off:
        return False
    if asked:
        _native.use(asked)
    any(_native.join_team(path) for path in _openmp_libraries())
    return True


def computes_on(device: torch.device) -> bool:
    """Whether our own kernels compute with tensors on a device: a CPU alone. ConfigError as `available`."""
    return device.type == "cpu" and available()


def instruction_set() -> str | None:
    """The instruction set whose kernels compute; None where torch's operators do. ConfigError as `available`."""
    return _native.used() if available() else None


def instruction_sets() -> list[str]:
    """Instruction sets that this build has and this machine runs, the fastest first: avx512bf16 (AVX-512 with BF16 and
    VBMI), avxvnni (AVX2 with AVX-VNNI), avx2 (with FMA), neondot (64-bit Arm with dot products of bytes), neon (64-bit
    Arm), generic (any machine)."""
    return [] if _native is None else _native.instruction_sets()


def library() -> Path | None:
    """The file of the native kernels; None where they do not compute."""
    return Path(_native.__file__) if available() else None


def use(name: str) -> None:
    """Changes to another of `instruction_sets`, while no kernel runs. ValueError for any other name."""
    if available():
        _native.use(name)


def _check(asked: str, off: bool) -> None:
    here = instruction_sets()
    if off:
        raise ConfigError(f"{ISA}={asked} asks for native kernels and {SWITCH}=0 keeps them out: unset one of them")
    if _native is None:
        raise ConfigError(f"{ISA}={asked} asks for native kernels, and this build has none: install with a C compiler")
    if asked not in here:
        raise ConfigError(f"{ISA}={asked!r} names no kernels that this machine runs; it has {', '.join(here)}")


def quantizes() -> bool:
    """Whether this build has `hqq`, `encode` and `uneven`, which run on any machine and give the same bytes on each."""
    return available()


def takes(dtype: torch.dtype, coding: str, out: int, in_: int, group: int) -> bool:
    """Whether the kernels compute products with a matrix (out, in_) in `dtype`. group: columns that share a scale."""
    if coding in _IN_BLOCKS:
        fits = out % ROWS == 0 and group in GROUPS and in_ % group == 0
        fits = fits and (coding not in UNEVEN or group <= UNEVEN_GROUP)
    else:
        fits = in_ % COLUMNS.get(coding, group) == 0 and in_ <= MOST_COLUMNS
    return dtype == torch.bfloat16 and fits and available() and coding in CODINGS


def hqq(
    weights: torch.Tensor,
    group: int,
    block: int,
    largest: int,
    thresholds: Sequence[float],
    found: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
) -> list[int]:
    """Half-quadratic quantization (`quantizers`) of weights (rows, columns), contiguous, of one of `WEIGHTS`, in
    blocks of `block` rows. group: a multiple of 16, at most `MOST_GROUP`.

    thresholds: for each step the size up to which errors are shrunk to nothing. found: codes uint8 (rows, columns) or
    None, scales and offsets float32 (rows, columns / group), to be filled. Returns the blocks that are not solved,
    since an error in them is larger."""
    rows = len(weights)
    codes, scale, offset = found
    limits = torch.tensor(thresholds, dtype=torch.float64)
    shrunk = torch.zeros(-(-rows // block), dtype=torch.uint8)
    job = structs.Hqq(
        weights=_weights(weights), group=group, block=block, largest=largest, thresholds=limits.data_ptr(),
        steps=len(thresholds), codes=None if codes is None else codes.data_ptr(), scale=scale.data_ptr(),
        offset=offset.data_ptr(), shrunk=shrunk.data_ptr(),
    )  # fmt: skip
    _native.hqq(_native.pack(job), torch.get_num_threads())
    unsolved: list[int] = shrunk.nonzero().flatten().tolist()
    return unsolved


def encode(
    coding: str,
    weights: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    codes: torch.Tensor,
) -> tuple[float, float]:
    """The codes that are nearest to weights (rows, columns) under given scales and zeros, in the order of quants.h, for
    kernels that compute in `dtype`; weights and `dtype` are of `WEIGHTS`, columns a multiple of 16.

    scales, zeros: float32 (rows, columns / group), as they are stored; at 6 bits scales are found, not taken. codes:
    uint8, to be filled. Returns the sums of squares of what decoding differs by, and of the weights."""
    rows = len(weights)
    squares = torch.empty(-(-rows // ROWS), 2, dtype=torch.float64)
    job = structs.Codes(
        coding=CODINGS[coding], weights=_weights(weights), group=group, exact=dtype == torch.float32,
        scales=scales.data_ptr(), zeros=None if zeros is None else zeros.data_ptr(), codes=codes.data_ptr(),
        squares=squares.data_ptr(),
    )  # fmt: skip
    _native.encode(_native.pack(job), torch.get_num_threads())
    error, size = squares.sum(0).tolist()
    return error, size


def uneven(
    coding: str, weights: torch.Tensor, group: int, candidates: Sequence[float], steps: int, blocks: torch.Tensor
) -> None:
    """Encodes weights, float32 (rows, columns), in `formats.nonuniform`, one of `UNEVEN`: fills its field `blocks`.

    candidates: scales to try in units of a group's largest magnitude. steps: of least squares from the best of them."""
    rows, columns = weights.shape
    tried = torch.tensor(candidates, dtype=torch.float32)
    job = structs.Uneven(
        coding=CODINGS[coding], weights=weights.data_ptr(), rows=rows, columns=columns, group=group,
        candidates=tried.data_ptr(), count=len(candidates), steps=steps, blocks=blocks.data_ptr(),
    )  # fmt: skip
    _native.uneven(_native.pack(job), torch.get_num_threads())


def trellis(targets: torch.Tensor, weights: torch.Tensor, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 (S, 16) and what they stand for, float32 (S, 64), of runs of targets in units of their scales, by
    weighted squares of errors; both float32 (S, 64), contiguous (`formats.trellis`). exact: targets of weights above 0
    are levels, and the codes of those very levels are found."""
    codes = torch.empty(len(targets), ROWS // 4, dtype=torch.uint8)
    levels = torch.empty_like(targets)
    job = structs.Trellis(
        targets=targets.data_ptr(), weights=weights.data_ptr(), count=len(targets), exact=exact,
        codes=codes.data_ptr(), levels=levels.data_ptr(),
    )  # fmt: skip
    _native.trellis(_native.pack(job))
    return codes, levels


def _weights(weights: torch.Tensor) -> structs.Weights:
    rows, columns = weights.shape
    return structs.Weights(weights.data_ptr(), rows, columns, weights.dtype == torch.float32)


def _openmp_libraries() -> list[str]:
    """OpenMP runtimes of this process, torch's own first."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    paths = dict.fromkeys(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*)$", maps, re.MULTILINE))
    return sorted(paths, key=lambda path: "/torch/" not in path)
