"""Missing experts on the CPU beside a GPU (HOBBIT, section 4): what comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiermoe
from fake_gpu import FakeGpu
from gpu_models import needs_gpu
from parity import tokens
from patience import within
from small_engines import OnRoute
from tiermoe.engine.moe import MoELayer
from tiermoe.engine.units import CpuHelper, LayerKernels
from tiermoe.errors import ConfigError, LoadError
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.experts import FusedExperts, expert_kernel, one_by_one
from tiermoe.kernels.gates import gate_named
from tiermoe.native import available
from tiermoe.offload.composition import require_device
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.loader import CPU_FALLBACK
from tiermoe.offload.presets import compose
from tiermoe.types import ExpertKey, MoeLayer, Part, Ready, Routed


@pytest.mark.parametrize("changes", [{}, {"unit": "neuron", "theta": "0.1"}, {"misses": "measured"}])
def test_the_cpu_alone_refuses(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"misses=(cpu|measured) .* use --set misses=load"):
        require_device(compose("lru", {"misses": "cpu", **changes}), "cpu")


def test_loading_on_the_cpu_refuses(gpu_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"misses=cpu .* use --set misses=load"):
        tiermoe.load(gpu_model, memory="4GiB", device="cpu", preset="lru", set={"misses": "cpu"})


class Kernel:
    """Computes one expert at a time."""

    def __init__(self, compute: Any) -> None:
        self._compute = compute

    def __call__(self, x: torch.Tensor, slot: Any) -> torch.Tensor:
        return self._compute(x, slot)

    def forward_one(self, x: torch.Tensor, slots: list[Any]) -> torch.Tensor:
        return torch.cat([self(x, slot) for slot in slots])

    def forward_ragged(self, x: torch.Tensor, counts: list[int], slots: list[Any], among_others: bool) -> torch.Tensor:
        return one_by_one(self, x, counts, slots)


class Layer:
    """An experts module of three experts whose outputs are 1e8, -1e8 and 1: 1 only where they are added in ascending
    order. Expert `away` comes first and is ready only once the device has been given both others."""

    def __init__(self, away: int) -> None:
        self.outputs = [1e8, -1e8, 1.0]
        self.away: Future[torch.Tensor] = Future()
        self.asked: list[tuple[int, int]] = []
        self._away, self._left = away, 2
        current = SimpleNamespace(
            run_layer=self._run, phase="decode", needs_weights=False, proceed=False, observer=None, unsure=None,
            adaptive=None, forecasts=SimpleNamespace(at=lambda hidden, layer: None),
        )  # fmt: skip
        views = lambda key, slot: slot  # noqa: E731
        kernels = dict.fromkeys((2, 4), Kernel(self._kernel))
        source = LayerKernels(kernels, views, self._on_cpu)  # type: ignore[arg-type]
        self.experts = MoELayer(0, 3, source, current)  # type: ignore[arg-type]

    def _run(self, routed: Routed, hidden: torch.Tensor) -> Iterator[list[Ready]]:
        yield [Ready(self._away, CPU_FALLBACK, 2)]
        yield from ([Ready(expert, expert, 4)] for expert in reversed(range(3)) if expert != self._away)

    def _kernel(self, x: torch.Tensor, slot: Any) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            self.away.set_result(torch.full((self.asked[0][1], 1), self.outputs[self._away]))
        return torch.full_like(x, self.outputs[slot])

    def _on_cpu(self, expert: int, bits: int, x: torch.Tensor) -> Future[torch.Tensor]:
        assert (expert, bits) == (self._away, 2)
        self.asked.append((expert, len(x)))
        return self.away


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("away", [0, 1, 2])
def test_results_are_joined_after_the_devices_work_and_added_in_order(away: int, rows: int) -> None:
    layer = Layer(away)
    index = torch.tensor([[2, 0, 1]]).expand(rows, 3)
    total = within(lambda: layer.experts(torch.zeros(rows, 1), index, torch.ones(rows, 3)))
    assert total.tolist() == [[1.0]] * rows
    assert layer.asked == [(away, rows)]


class Lender:
    """Lends one slot, by default an empty one."""

    def __init__(self, slot: torch.Tensor | None = None) -> None:
        self.slot = torch.zeros(0, dtype=torch.uint8) if slot is None else slot
        self.lent: list[ExpertKey] = []

    def borrow(self, key: ExpertKey) -> torch.Tensor:
        self.lent.append(key)
        return self.slot

    def give_back(self, key: ExpertKey) -> None:
        self.lent.remove(key)


def test_what_is_borrowed_is_given_back_also_where_computing_fails() -> None:
    lender = Lender()
    helper = CpuHelper(lender)
    output = helper.layer(2, {}, torch.relu)(5, 4, torch.zeros(1, 1))
    with pytest.raises(KeyError):  # no precision has a kernel
        output.result(10)
    helper.close()
    assert lender.lent == []


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_cpu_computes_from_the_slots_of_a_gpu_as_they_are(bits: int, rows: int) -> None:
    """The fused native kernels do where there are any: nothing is decoded, nor rearranged."""
    layer = MoeLayer("experts", 8, 2, (Part("gate_up", (256, 128)), Part("down", (128, 128))))
    form, gate = expert_format(layer, bits, torch.bfloat16, "hqq"), gate_named("silu")
    made = torch.Generator().manual_seed(bits)
    tensors = {part.name: torch.randn(part.shape, generator=made) * 0.1 for part in layer.parts}
    lender = Lender(torch.zeros(form.stored.nbytes, dtype=torch.uint8))
    form.encode(tensors, QUANTIZERS["hqq"], lender.slot)
    assert isinstance(expert_kernel(form, gate, "cpu"), FusedExperts) == available()
    helper, x = CpuHelper(lender), torch.randn(rows, 128, generator=made).bfloat16()
    found = helper.layer(0, {bits: form}, gate)(3, bits, x).result(60)
    helper.close()
    fields = form.slot.views(lender.slot)
    first, second = (
        form.encodings[part.name].decode(fields[part.name], *part.shape, torch.float32).double() for part in layer.parts
    )
    gated, up = (x.double() @ first.t()).chunk(2, 1)
    expected = (torch.nn.functional.silu(gated) * up) @ second.t()
    assert (found.double() - expected).norm() <= 2**-5 * expected.norm()


@pytest.fixture
def cooperating(
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]],
) -> Callable[..., tuple[Any, FakeGpu]]:
    """Loads a model over the fake GPU with misses=cpu, or as `misses` says."""

    def make(directory: Path, host_slots: int, misses: str = "cpu", **options: Any) -> tuple[Any, FakeGpu]:
        return on_fake_gpu(directory, host_slots, set={"misses": misses}, **options)

    return make


def generated(loaded: Any, rows: int) -> torch.Tensor:
    """Logits of every token that follows a prompt of 6, (tokens, rows, vocabulary)."""
    ids = tokens(rows, 6, seed=4).to(loaded.device)
    answer = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(answer.logits).cpu()


@pytest.mark.parametrize(
    ("bits", "preset", "host_slots"),
    [(16, "lru", 1), (8, "mixtral-offload", 5), (4, "lru", 24)],
)
def test_a_model_says_what_it_says_without(
    bits: int, preset: str, host_slots: int, gpu_model: Path, cooperating: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    resident, _ = tiermoe.load(gpu_model, memory="4GiB", bits=bits, dense_bits=16, device="cpu")
    expected = [generated(resident, rows) for rows in (1, 2)]
    resident.tiermoe.close()
    loaded, gpu = cooperating(gpu_model, host_slots, bits=bits, preset=preset, cache="15%")
    for rows, theirs in zip((1, 2), expected, strict=True):
        mine = within(lambda rows=rows: generated(loaded, rows))
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    stats, link = loaded.tiermoe.stats(), loaded.tiermoe.link
    counts = loaded.tiermoe.loader.counts
    assert stats["lossy"] == "misses=cpu"
    assert 0 < stats["experts_on_cpu"] == counts.cpu_fallback
    assert counts.loads <= len(gpu.asked) <= counts.loads + counts.speculative_loads  # some were recalled
    loaded.tiermoe.loader.drain()
    kept = {key for cache in link.host._caches.values() for key in cache._pins}
    assert kept == {key for key, *_ in link._copies._under_way}  # nothing stays lent
    loaded.tiermoe.close()
    assert not any(thread.name.startswith("tiermoe-cpu") for thread in threading.enumerate())


def test_decode_loads_nothing(gpu_model: Path, cooperating: Callable[..., tuple[Any, FakeGpu]]) -> None:
    loaded, gpu = cooperating(gpu_model, 24, preset="lru", cache="15%")
    phases: list[tuple[str, int]] = []
    loaded.tiermoe.observe(OnRoute(lambda routed, _: phases.append((routed.phase, len(gpu.asked)))))
    within(lambda: generated(loaded, 1))
    assert len({asked for phase, asked in phases if phase == "decode"}) == 1
    assert loaded.tiermoe.stats()["experts_on_cpu"] > 0


@pytest.mark.parametrize("copies_take_long", [False, True])
def test_what_takes_less_is_done(
    copies_take_long: bool,
    gpu_model: Path,
    cooperating: Callable[..., tuple[Any, FakeGpu]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not copies_take_long:
        monkeypatch.setattr(GpuLink, "seconds_per_load", 1e-9)
    loaded, gpu = cooperating(gpu_model, 24, misses="measured", preset="lru", cache="15%")
    gpu.copy_s = 1e6
    expected = within(lambda: generated(loaded, 1))
    engine = loaded.tiermoe
    before, costs = engine.loader.counts.copy(), engine.service.unit.miss_costs()
    assert engine.stats()["lossy"] == "misses=measured"
    assert costs.load_s >= 1e6 if copies_take_long else costs.load_s == 1e-9
    assert 0 < costs.cpu_s < 60  # one expert was tried
    again = within(lambda: generated(loaded, 1))
    assert (engine.loader.counts.minus(before).cpu_fallback > 0) == copies_take_long
    assert (again - expected).abs().max() <= 1e-4 * expected.abs().max()
    loaded.tiermoe.close()


def test_an_expert_that_cannot_be_read_is_named_and_the_model_goes_on(
    gpu_model: Path, cooperating: Callable[..., tuple[Any, FakeGpu]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = cooperating(gpu_model, 1, bits=16, preset="lru", cache="15%")
    expected = within(lambda: generated(loaded, 1))
    filler = loaded.tiermoe.link._filler
    fill = filler.fill

    def fails_beside(asked: ExpertKey, slot: torch.Tensor) -> None:
        if threading.current_thread().name.startswith("tiermoe-cpu"):
            raise LoadError(f"reading {asked} failed: the test was told so")
        fill(asked, slot)

    with monkeypatch.context() as patch:
        patch.setattr(filler, "fill", fails_beside)
        with pytest.raises(LoadError, match=r"reading layer .* failed"):
            within(lambda: generated(loaded, 1))
    assert torch.equal(within(lambda: generated(loaded, 1)), expected)


@needs_gpu
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_real_gpu_cooperates(bits: int, gpu_model: Path) -> None:
    scores = []
    for changes in ({}, {"misses": "cpu"}):
        loaded, _ = tiermoe.load(
            gpu_model, memory="8GiB", bits=bits, dense_bits=16, cache="40%", device="cuda", preset="lru", set=changes
        )
        ids = tokens(1, 6, seed=4).to(loaded.device)
        answer = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        scores.append(torch.stack(answer.logits).cpu())
        assert (loaded.tiermoe.stats()["experts_on_cpu"] > 0) == bool(changes)
        loaded.tiermoe.close()
    assert (scores[1] - scores[0]).abs().max() <= 1e-3 * scores[0].abs().max()
