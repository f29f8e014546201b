"""The trellis of 2 bits: what is stored against loops that follow the docstring, codes against every way to close a
run, in float64."""

from __future__ import annotations

import pytest
import torch

from tiermoe import native
from tiermoe.formats import trellis
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.int4 import CPU_LAYOUT
from tiermoe.formats.quantizers import QUANTIZERS, LinearQuantizer
from tiermoe.formats.trellis import FACTORS, KEPT, LEVELS, Trellis
from tiermoe.types import MoeLayer, Part

HQQ = QUANTIZERS["hqq"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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


def decoded(fields: dict[str, torch.Tensor], rows: int, columns: int, group: int) -> torch.Tensor:
    """By the docstring of `Trellis`."""
    codes, scales = fields["codes"].numpy().tobytes(), fields["scales"].float().flatten().tolist()
    want = torch.empty(rows, columns)
    for block in range(rows // 64):
        for column in range(columns):
            four = block * 16 * columns + column // 4 * 64 + (0, 2, 1, 3)[column % 4]
            run = codes[four : four + 61 : 4]
            for row in range(64):
                scale = scales[(block * (columns // group) + column // group) * 64 + row]
                want[block * 64 + row, column] = level_of(run, row) * scale
    return want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [128, 64])
def test_a_weight_is_its_level_times_its_groups_scale(group: int, dtype: torch.dtype) -> None:
    rows, columns = 128, 256
    encoding, weight = Trellis(CPU_LAYOUT, group), random(rows, columns)
    weight[5, :group] = 0
    fields = encoding.encode(weight, HQQ, dtype)
    assert {f.name: (f.dtype, f.shape) for f in encoding.stored_fields(rows, columns, dtype)} == {
        name: (value.dtype, tuple(value.shape)) for name, value in fields.items()
    }
    want = decoded(fields, rows, columns, group)
    assert torch.equal(encoding.decode(fields, rows, columns, torch.float32), want)
    assert torch.equal(encoding.decode(fields, rows, columns, dtype), want.to(dtype))
    assert not want[5, :group].any()
    assert float((want - weight).square().sum() / weight.square().sum()) < 0.085  # four levels: .118


def best_of_all(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The least error of each run, float64: the Viterbi algorithm for every four codes that it may close with."""
    found = torch.full((len(targets),), torch.inf, dtype=torch.float64)
    states = torch.arange(1024)  # the last five codes, the oldest first
    for closing in range(256):
        costs = torch.full((len(targets), 256), torch.inf, dtype=torch.float64)
        costs[:, closing] = 0
        for position in range(64):
            j, i = position // 4, position % 4
            codes = [states // 4**k % 4 for k in range(5)]
            word = sum(code * 4 ** (4 + i - age) for age, code in enumerate(codes))
            level = torch.tensor(LEVELS).double()[(word & KEPT[i]) * FACTORS[i] // 65536 % 32]
            error = weights[:, 16 * i + j, None] * (targets[:, 16 * i + j, None] - level) ** 2
            arrived = costs[:, states // 4] + error
            costs = arrived.view(-1, 4, 256).amin(1)
        found = torch.minimum(found, costs[:, closing])
    return found


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
    encoding, generator = Trellis(CPU_LAYOUT, 64), torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (64, 32), generator=generator).to(torch.uint8)
    scale = (torch.randn(64, 2, generator=generator) * 0.01).bfloat16().float()
    scale[9], scale[10] = 0, 1e-30
    fields = {"codes": codes, "scales": scale.t().contiguous().view(64, 2)}
    weight = encoding.decode(fields, 64, 128, torch.float32)
    stored = encoding.encode(weight, Given(scale), torch.float32)
    assert torch.equal(encoding.decode(stored, 64, 128, torch.float32), weight)


@pytest.mark.parametrize(
    ("hidden", "inner", "names"),
    [
        (256, 64, ("tcq2/{}/g128", "nl3/{}/g64")),
        (192, 128, ("tcq2/{}/g64", "nl3/{}/g64")),
        (96, 64, ("nl2/{}/g32", "u2/{}/g64")),
        (256, 48, ("u2/{}/g64", "int8")),
    ],
)
def test_down_projections_have_three_bits_beside_a_trellis(hidden: int, inner: int, names: tuple[str, str]) -> None:
    parts = (Part("gate_up_proj", (2 * inner, hidden)), Part("down_proj", (hidden, inner)))
    layer = MoeLayer("mlp", 4, 2, parts)
    form = expert_format(layer, 2, torch.bfloat16, CPU_LAYOUT, "gptq-nonlinear")
    assert [each.name for each in form.encodings.values()] == [name.format(CPU_LAYOUT) for name in names]
    uncalibrated = expert_format(layer, 2, torch.bfloat16, CPU_LAYOUT, "nonlinear")
    assert not any(isinstance(each, Trellis) for each in uncalibrated.encodings.values())
