"""The trellis of 2 bits: codes against every way to close a run, in float64."""

from __future__ import annotations

import pytest
import torch

from tiermoe import native
from tiermoe.formats import trellis
from tiermoe.formats.quantizers import LinearQuantizer
from tiermoe.formats.trellis import FACTORS, KEPT, LEVELS, Trellis

HOW = [
    pytest.param(True, marks=pytest.mark.skipif(not native.quantizes(), reason="needs the native kernels")),
    False,
]


class Given(LinearQuantizer):
    """Scales that were found before."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


@pytest.fixture(params=HOW, ids=lambda native_: "native" if native_ else "torch")
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "quantizes", lambda: False)


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def level_of(run: bytes, row: int) -> int:
    j, i = row % 16, row // 16
    word = run[j - 1] | run[j] << 8
    return LEVELS[(word & KEPT[i]) * FACTORS[i] >> 16 & 31]


def best_of_all(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The least error of each run, float64: the Viterbi algorithm for every four codes that it may close with."""
    states, closings = torch.arange(1024), torch.arange(256)  # the last five codes, the oldest first
    costs = torch.full((256, len(targets), 256), torch.inf, dtype=torch.float64)
    costs[closings, :, closings] = 0
    for position in range(64):
        j, i = position // 4, position % 4
        codes = [states // 4**k % 4 for k in range(5)]
        word = sum(code * 4 ** (4 + i - age) for age, code in enumerate(codes))
        level = torch.tensor(LEVELS).double()[(word & KEPT[i]) * FACTORS[i] // 65536 % 32]
        error = weights[:, 16 * i + j, None] * (targets[:, 16 * i + j, None] - level) ** 2
        costs = (costs[:, :, states // 4] + error).view(256, -1, 4, 256).amin(2)
    return costs[closings, :, closings].amin(0)


@pytest.mark.usefixtures("how")
def test_codes_are_nearly_as_good_as_any() -> None:
    targets, weights = random(6, 64) * 250, random(6, 64, 1).square()
    codes, levels = trellis.nearest(targets, weights)
    runs = [run.numpy().tobytes() for run in codes]
    assert levels.tolist() == [[level_of(run, row) for row in range(64)] for run in runs]
    got = ((levels - targets).double().square() * weights).sum(1)
    least = best_of_all(targets.double(), weights.double())
    assert bool((got >= least * (1 - 1e-5)).all())
    assert float(got.sum() / least.sum()) < 1.02


@pytest.mark.usefixtures("how")
def test_levels_of_any_codes_are_kept() -> None:
    """Under scales of either sign, of 0, and very small ones: whatever was solved for is what is stored."""
    encoding, generator = Trellis(64), torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (64, 32), generator=generator).to(torch.uint8)
    scale = (torch.randn(64, 2, generator=generator) * 0.01).bfloat16().float()
    scale[9], scale[10] = 0, 1e-30
    fields = {"codes": codes, "scales": scale.t().contiguous().view(64, 2)}
    weight = encoding.decode(fields, 64, 128, torch.float32)
    stored = encoding.encode(weight, Given(scale), torch.float32)
    assert torch.equal(encoding.decode(stored, 64, 128, torch.float32), weight)
