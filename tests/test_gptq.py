"""GPTQ: its codes against the textbook's loop, what it promises of the change, and its way into every encoding."""

from __future__ import annotations

import itertools

import pytest
import torch

from tiermoe.errors import PackError
from tiermoe.formats import gptq
from tiermoe.formats.encoding import Encoding, encode_rows
from tiermoe.formats.gptq import (
    Levels,
    NonUniformLevels,
    Place,
    Solved,
    TrellisLevels,
    UniformLevels,
    change,
    levels_of,
    solve,
)
from tiermoe.formats.int4 import Int2, Int4
from tiermoe.formats.nonuniform import NonUniform
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.trellis import Trellis

BF16 = torch.bfloat16
ENCODINGS: list[Encoding] = [
    Int4(64), Int4(32), Int2(64), NonUniform(4, 32),
    NonUniform(3, 64), NonUniform(2, 64), Trellis(128), Trellis(64),
]  # fmt: skip


def some_moments(columns: int, seed: int = 0, tokens: int = 500) -> torch.Tensor:
    """Of inputs that follow each other, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator) ** 2
    inputs = torch.randn(tokens, columns, generator=generator) @ mixed
    return inputs.t() @ inputs / tokens


def some_weight(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(BF16)


def textbook(bits: int, weight: torch.Tensor, moments: torch.Tensor, place: Place) -> torch.Tensor:
    """Levels by the loop of Optimal Brain Quantization in the columns' order: the inverse itself, float64, from which
    a column is eliminated once it is rounded."""
    rest, inverse = weight.double().clone(), torch.linalg.inv(moments.double())
    scale, zero = place.scale.double(), place.zero.double()
    levels, middle = torch.empty_like(rest), 2 ** (bits - 1)
    for column in range(rest.shape[1]):
        levels[:, column] = ((rest[:, column] - zero) / scale).round().clamp(-middle, middle - 1)
        error = rest[:, column] - (levels[:, column] * scale + zero)
        rest -= torch.outer(error / inverse[column, column], inverse[column])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column, column] = 1.0  # it is not used again
    return levels.float()


@pytest.mark.parametrize("bits", [4, 2])
def test_codes_are_those_of_the_textbook(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "ROUNDS", 0)
    weight, moments = some_weight(48, 64).float(), some_moments(64)
    falling = moments.diagonal().argsort(descending=True)  # the order in which columns are treated
    moments = moments[falling][:, falling]
    found = solve(weight, moments, UniformLevels(bits, 64, BF16))
    damped = moments + torch.eye(64) * gptq.DAMPING * moments.diagonal().mean()
    levels = textbook(bits, weight, damped, Place(found.scale[:, 0], found.zero[:, 0]))
    assert torch.equal(found.values, levels * found.scale + found.zero)


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are worked through apart, the last ones fewer, get what they get together."""
    weight, moments = some_weight(40, 64).float(), some_moments(64)
    whole = solve(weight, moments, UniformLevels(4, 32, BF16))
    monkeypatch.setattr(gptq, "ROWS_TOGETHER", 16)
    parts = solve(weight, moments, UniformLevels(4, 32, BF16))
    for mine, its in zip(parts, whole, strict=True):
        assert float((mine == its).float().mean()) > 0.98  # products of other shapes round otherwise
        torch.testing.assert_close(mine, its, rtol=0.2, atol=0.05)


def test_no_single_code_can_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scales that were found every other level of every column changes more: rounds enough to settle."""
    monkeypatch.setattr(gptq, "ROUNDS", 12)
    weight, moments = some_weight(4, 32).float(), some_moments(32)
    found = solve(weight, moments, UniformLevels(4, 32, BF16))
    damped = moments + torch.eye(32) * gptq.DAMPING * moments.diagonal().mean()
    for row, column in itertools.product(range(4), range(32)):
        least = change(weight, found.values, damped)
        for level in range(-8, 8):
            tried = found.values.clone()
            tried[row, column] = level * found.scale[row, 0] + found.zero[row, 0]
            assert change(weight, tried, damped) >= least * (1 - 1e-5)


def test_as_good_as_trying_all() -> None:
    """Four columns, 16 ** 4 codes: with the scales that were found no others are much better."""
    weight, moments = some_weight(6, 4).float(), some_moments(4)
    found = solve(weight, moments, UniformLevels(4, 4, BF16))
    all_levels = torch.tensor(list(itertools.product(range(-8, 8), repeat=4)), dtype=torch.float32)
    for row in range(6):
        apart = all_levels * found.scale[row] + found.zero[row] - weight[row]
        least = float(((apart @ moments) * apart).sum(1).min())
        mine = change(weight[row : row + 1], found.values[row : row + 1], moments)
        assert mine <= 1.5 * least + 1e-6


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda each: each.name)
def test_outputs_change_less_than_by_rounding(encoding: Encoding) -> None:
    weight, moments = some_weight(64, 128), some_moments(128)
    levels = levels_of(encoding, BF16)
    assert levels is not None
    stored = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)
    rounded = encoding.decode(stored, 64, 128, torch.float32)
    found = solve(weight, moments, levels)
    assert change(weight.float(), found.values, moments) < 0.6 * change(weight.float(), rounded, moments)


@pytest.mark.parametrize(
    "levels",
    [
        UniformLevels(4, 32, BF16),
        UniformLevels(2, 64, BF16),
        NonUniformLevels(4, 32),
        NonUniformLevels(3, 64),
        NonUniformLevels(2, 64),
        TrellisLevels(128, BF16),
    ],
)
def test_every_round_lowers_the_change(levels: Levels, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, moments = some_weight(64, 128), some_moments(128)
    damped = moments + torch.eye(128) * gptq.DAMPING * moments.diagonal().mean()
    changes = []
    for rounds in range(4):
        monkeypatch.setattr(gptq, "ROUNDS", rounds)
        changes.append(change(weight.float(), solve(weight, moments, levels).values, damped))
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 0.99 * changes[0]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("compute", [BF16, torch.float32])
def test_encodings_hold_what_was_found(encoding: Encoding, compute: torch.dtype) -> None:
    """Bit for bit, whole and in row blocks, a group of equal weights and one of zeros among them."""
    weight = some_weight(128, 128)
    weight[3, :64] = 0.25
    weight[7] = 0
    levels = levels_of(encoding, compute)
    assert levels is not None
    found = solve(weight, some_moments(128), levels)
    parts = [Solved(found).rows(first, first + 64) for first in (0, 64)]
    for values, quantizer in parts:
        stored, _ = encode_rows(encoding, quantizer, values, compute)
        decoded = encoding.decode(stored, 64, 128, compute)
        assert torch.equal(decoded, values.to(compute))


@pytest.mark.parametrize("columns", [64, 128])
def test_inputs_that_are_always_0_do_no_harm(columns: int) -> None:
    moments = some_moments(columns)
    moments[5] = moments[:, 5] = 0
    for its in (moments, torch.zeros(columns, columns)):
        found = solve(some_weight(16, columns), its, UniformLevels(4, 64, BF16))
        assert torch.isfinite(found.values).all()
        assert float((found.values - some_weight(16, columns).float()).abs().max()) < 1


def test_infinite_values_are_refused() -> None:
    weight = some_weight(16, 64)
    weight[2, 3] = torch.inf
    with pytest.raises(PackError, match="infinite or undefined"):
        solve(weight, some_moments(64), UniformLevels(4, 64, BF16))
    with pytest.raises(PackError, match="infinite or undefined"):
        solve(some_weight(16, 64), torch.full((64, 64), torch.nan), UniformLevels(4, 64, BF16))
