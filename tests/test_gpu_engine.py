"""A whole model over the GPU tiers: of a pretended GPU, and of a real one where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import tiermoe
from fake_gpu import FakeGpu
from gpu_models import FAMILY, needs_gpu
from parity import logits, put_decoded_experts, tokens
from patience import until
from tiermoe.config import Settings, settings
from tiermoe.engine import budget, load, service
from tiermoe.engine.budget import RESERVE, divided_with_gpu
from tiermoe.engine.memory_plan import GpuMemoryPlan, MemoryPlan
from tiermoe.errors import BudgetError, ConfigError, DeviceError
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload import cuda, slots
from tiermoe.offload.disk import LANES
from tiermoe.offload.presets import Resolved, compose
from tiermoe.offload.profiles import Tables
from tiermoe.types import Need, Phase
from tiny import oracle, write

GIB = 1 << 30


def results(loaded: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two prompts, and of every token that follows one of them."""
    ids = tokens(1, 6, seed=4).to(loaded.device)
    answer = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return logits(loaded, FAMILY, tokens(2, 9).to(loaded.device)).cpu(), torch.stack(answer.logits).cpu()


@pytest.mark.parametrize("bits", [4, 2, 16])
def test_bit_identical_for_every_cache(
    bits: int, gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    resident, _ = on_fake_gpu(gpu_model, bits=bits)
    expected = results(resident)
    experts = resident.tiermoe.plan.all_slots
    assert resident.tiermoe.plan.slots == experts
    small, large = (
        [("15%", 1, "lru"), ("40%", 5, "mixtral-offload")],
        [("100%", 2, "lru"), ("30%", experts, "mixtral-offload")],
    )
    for cache, host_slots, preset in small + large:
        loaded, _ = on_fake_gpu(gpu_model, host_slots, bits=bits, cache=cache, preset=preset)
        assert loaded.tiermoe.plan.slots <= experts * float(cache[:-1]) / 100
        found = results(loaded)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_every_expert_is_read_once_where_main_memory_holds_all(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    loaded, gpu = on_fake_gpu(gpu_model, 24, cache="15%", preset="lru", warm=False)
    results(loaded)
    link, stats = loaded.tiermoe.link, loaded.tiermoe.stats()
    assert stats["expert_misses"] == len(gpu.asked) == link.host.hits + link.host.misses
    assert link.host.misses <= loaded.tiermoe.plan.all_slots == 24 < link.host.hits
    assert link.counters().bytes_copied == len(gpu.asked) * loaded.tiermoe.plan.slot_bytes
    assert link.counters().bytes_read == link.host.misses * loaded.tiermoe.plan.slot_bytes


def test_main_memory_is_filled_in_the_background(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    cold, _ = on_fake_gpu(gpu_model, 24, cache="15%", preset="lru", warm=False)
    expected = results(cold)
    loaded, _ = on_fake_gpu(gpu_model, 24, cache="15%", preset="lru")
    engine = loaded.tiermoe
    until(lambda: engine.stats()["host_experts"] == engine.plan.all_slots == 24)
    misses = engine.link.host.misses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results(loaded), expected, strict=True))
    assert engine.link.host.misses == misses
    assert engine.link.counters().bytes_read == 24 * engine.plan.slot_bytes


def test_copies_bound_a_run_and_are_its_bandwidth(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    loaded, gpu = on_fake_gpu(gpu_model, 24, cache="15%", preset="lru", warm=False)
    gpu.copy_s = 1e3  # of its clock: no time passes
    before = loaded.tiermoe.snapshot()
    results(loaded)
    used, slot_bytes = loaded.tiermoe.snapshot().since(before), loaded.tiermoe.plan.slot_bytes
    assert used.bytes_copied == len(gpu.asked) * slot_bytes
    assert used.copy_s >= 1e3 * len(gpu.asked)
    assert loaded.tiermoe.stats()["link_bandwidth"] == pytest.approx(used.bytes_copied / used.copy_s)


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8 GiB"
LOST = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize("decoder", ["auto", "generic"])
@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), BudgetError, r"20\.00 MiB asked for, 8 GiB free; .* --gpu-memory"),
        (torch.AcceleratorError(LOST), DeviceError, "failed while computing: CUDA error: unspecified launch failure;"),
    ],
)
def test_a_gpu_that_fails_within_a_run_is_named_and_the_model_goes_on(
    failure: Exception, raised: type[Exception], said: str, decoder: str, gpu_model: Path, gpu_of_8_gib: None,
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded, gpu = on_fake_gpu(gpu_model, 24, cache="15%", preset="lru", decoder=decoder)
    expected = results(loaded)
    unpinned: list[int] = []
    monkeypatch.setattr(slots, "unpin_memory", lambda tensor: unpinned.append(tensor.numel()))
    gpu.failure = failure
    with pytest.raises(raised, match=said):
        results(loaded)
    gpu.failure = None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results(loaded), expected, strict=True))
    gpu.failure = failure
    with pytest.raises(raised, match=said):
        results(loaded)
    loaded.tiermoe.close()
    assert unpinned == [24 * loaded.tiermoe.plan.slot_bytes]


def test_a_model_that_does_not_load_gives_pinned_memory_back(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(slots, "unpin_memory", lambda tensor: unpinned.append(tensor.numel()))
        raise ConfigError("the composition does not fit the model")

    unpinned: list[int] = []
    monkeypatch.setattr(service, "assemble", refuse)
    with pytest.raises(ConfigError, match="does not fit the model"):
        on_fake_gpu(gpu_model, 24, cache="15%", preset="lru")
    assert len(unpinned) == 1


@pytest.mark.parametrize(
    ("text", "raised"),
    [
        ("CUDA error: out of memory", BudgetError),
        ("Triton Error [CUDA]: out of memory", BudgetError),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", BudgetError),
        ("Triton Error [CUDA]: an illegal memory access was encountered", DeviceError),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ],
)
def test_errors_of_libraries_are_told_apart(text: str, raised: type[Exception], gpu_of_8_gib: None) -> None:
    def ask(device: Any) -> None:
        raise RuntimeError(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", ask)
        with pytest.raises(raised) as found:
            cuda.free_memory("cuda")
    assert type(found.value) is raised
    assert "\n" not in str(found.value)


def test_slots_that_a_gpu_has_no_room_for_are_refused(gpu_of_8_gib: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sizes: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        BudgetError, match=r"cuda ran out of memory while making 3 slots of 4,096 bytes: 9\.00 GiB asked"
    ):
        slots.DeviceSlots(3, 100, "cuda")


def test_what_cpus_alone_compute_runs_there_with_a_word(tmp_path: Path, gpu_of_8_gib: None) -> None:
    said = r"the GGUF file has its experts in Q4_0, which .*; --bits 4 packs"
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.model_of(FAMILY), FAMILY, gguf_files.kinds("q4_0"))
    blueprint = inspect_model(file, str(file))
    plan = load.plan_for(blueprint, settings(memory="4GiB"))
    assert not isinstance(plan, GpuMemoryPlan)
    assert re.search(f"no GPU is used: {said}", plan.warnings[0])
    with pytest.raises(ConfigError, match=rf"device 'cuda' was asked for, but {said}.*or use --device cpu"):
        load.plan_for(blueprint, settings(memory="4GiB", device="cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        plan = load.plan_for(blueprint, settings(memory="4GiB"))
    assert not any("GPU" in each for each in plan.warnings)


@pytest.mark.parametrize(("bits", "kind"), [(4, "int4/"), (2, "u2/")])
def test_equals_the_decoded_weights(
    bits: int, kind: str, gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    loaded, _ = on_fake_gpu(gpu_model, 3, cache="40%", bits=bits)
    encodings = {e.name for form in loaded.tiermoe.service.packed[bits].formats for e in form.encodings.values()}
    assert all(name.startswith(kind) for name in encodings)
    plain = oracle(gpu_model, FAMILY, torch.float32)
    put_decoded_experts(loaded.tiermoe, plain)
    mine, theirs = (logits(each, FAMILY, tokens(1, 9).to(each.device)).cpu() for each in (loaded, plain))
    assert (mine - theirs).abs().max() <= 2e-4 * theirs.abs().max()


@pytest.fixture
def gpu_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 * GIB, 10 * GIB))
    monkeypatch.setattr(budget, "resident_bytes", lambda: 300 << 20)


def test_plan_of_a_gpu(gpu_model: Path, gpu_of_8_gib: None) -> None:
    whole = tiermoe.plan(gpu_model, memory="4GiB")
    assert isinstance(whole, GpuMemoryPlan)
    assert (whole.device, whole.gpu_budget) == ("cuda", 8 * GIB - RESERVE)
    assert whole.slots == whole.all_slots
    assert whole.host_slots == LANES  # main memory has nothing to add, so no more than it takes to load
    assert whole.total == whole.interpreter + whole.staging + LANES * whole.slot_bytes <= whole.budget
    assert whole.gpu_total == whole.dense + whole.kv_cache + whole.activations + whole.experts
    rows = {what: nbytes for what, nbytes, _ in whole.rows()}
    assert rows["GPU: in all"] == whole.gpu_total == sum(rows[f"GPU: {part}"] for part in (
        "dense weights", "key/value cache", "activations", "expert cache"))  # fmt: skip
    assert sum(nbytes for what, nbytes in rows.items() if "GPU" not in what) == whole.total


def test_plan_of_a_small_gpu(gpu_model: Path, gpu_of_8_gib: None) -> None:
    whole = tiermoe.plan(gpu_model, memory="4GiB")
    room = whole.gpu_fixed + 7 * whole.slot_bytes + 100
    small = tiermoe.plan(gpu_model, memory="4GiB", gpu_memory=room)
    assert isinstance(small, GpuMemoryPlan)
    assert (small.slots, small.host_slots, small.gpu_budget_source) == (7, small.all_slots, "--gpu-memory")
    assert len(small.warnings) == 1
    assert "one token uses 9" in small.warnings[0]
    assert tiermoe.plan(gpu_model, memory="4GiB", gpu_memory=room, cache="15%").slots == 3
    with pytest.raises(BudgetError, match=r"on cuda are too little: .* Use --gpu-memory \d+MiB or more"):
        tiermoe.plan(gpu_model, memory="4GiB", gpu_memory=whole.gpu_fixed + whole.slot_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "while_loading", lambda *args: [Need("dense", 5 * GIB, Phase.LOADING)])
        with pytest.raises(BudgetError, match=r"are too little: loading needs 5 GiB .* Use --memory \d+MiB or more"):
            tiermoe.plan(gpu_model, memory="4GiB")  # weights come through main memory
    with pytest.raises(BudgetError, match=r"4 pinned experts .* Use --memory \d+MiB or more"):
        tiermoe.plan(gpu_model, memory=whole.total - 1)
    wide = tiermoe.plan(gpu_model, memory="4GiB", bits=16)
    assert isinstance(wide, GpuMemoryPlan)
    room = wide.gpu_fixed + 20 * wide.slot_bytes
    tight = tiermoe.plan(gpu_model, memory=wide.interpreter + wide.dense, gpu_memory=room, bits=16)
    assert isinstance(tight, GpuMemoryPlan)
    assert tight.slots == 20 > tight.host_slots == (wide.dense - wide.staging) // wide.slot_bytes
    assert "what the GPU lacks comes from disk" in tight.warnings[0]
    with pytest.raises(BudgetError, match="has 8 GiB free, 9 GiB are asked for"):
        tiermoe.plan(gpu_model, memory="4GiB", gpu_memory="9GiB")
    with pytest.raises(BudgetError, match="the smallest --cache is"):
        tiermoe.plan(gpu_model, memory="4GiB", cache="5%")


HOBBIT = {"t1": 0.4, "t2": 0.7, "weights": "0.4,0.3,0.2,0.1", "low_share": 0.3}


@pytest.fixture(scope="module")
def larger_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of several pages at 4 bits and fewer at 2."""
    changes = {"hidden_size": 128, "moe_intermediate_size": 128}
    return write(tmp_path_factory.mktemp("larger"), FAMILY, torch.float32, **changes)


def test_slots_are_as_large_as_what_they_hold(larger_experts: Path, gpu_of_8_gib: None) -> None:
    one = tiermoe.plan(larger_experts, memory="4GiB")
    assert isinstance(one, GpuMemoryPlan)
    room = one.gpu_fixed + 10 * one.slot_bytes
    both = tiermoe.plan(larger_experts, memory="4GiB", gpu_memory=room, preset="hobbit", set=HOBBIT)
    low = tiermoe.plan(larger_experts, memory="4GiB", gpu_memory=room, bits=2, dense_bits=4)
    assert isinstance(both, GpuMemoryPlan)
    assert isinstance(low, GpuMemoryPlan)
    assert low.slot_bytes < one.slot_bytes
    assert low.slots == (room - low.gpu_fixed) // low.slot_bytes > 10
    sizes = {4: one.slot_bytes, 2: low.slot_bytes}
    for pools in (both.pools, both.host_pools):
        assert [(pool.bits, pool.slot_bytes) for pool in pools] == [((bits,), sizes[bits]) for bits in (4, 2)]
    assert both.gpu_total <= both.gpu_budget
    assert both.experts == sum(pool.slots * sizes[pool.bits[0]] for pool in both.pools) > 8 * one.slot_bytes
    assert both.host_experts == both.all_slots * sum(sizes.values())


def test_what_a_plan_asks_for_is_enough(larger_experts: Path, gpu_of_8_gib: None) -> None:
    """A share for low copies so small that its pinned slots are more than their share of the bytes."""
    changes = {**HOBBIT, "low_share": 0.05}
    whole = tiermoe.plan(larger_experts, memory="4GiB", preset="hobbit", set=changes)
    room = whole.gpu_fixed + 6 * whole.slot_bytes
    small = {"preset": "hobbit", "set": changes, "gpu_memory": room}
    with pytest.raises(BudgetError, match=r"Use --memory \d+MiB or more") as refused:
        tiermoe.plan(larger_experts, memory=whole.fixed + LANES * whole.slot_bytes, **small)
    asked = re.search(r"--memory (\d+MiB)", str(refused.value))
    assert asked
    plan = tiermoe.plan(larger_experts, memory=asked[1], **small)
    assert all(pool.slots >= LANES for pool in plan.host_pools)
    assert plan.total <= plan.budget
    notes = {what: note for what, _, note in plan.rows()}
    first, second = plan.pools
    assert notes["GPU: expert cache"] == f"{first.slots} at 4 bits, {second.slots} at 2 bits"


def test_a_token_of_one_expert_needs_a_slot_of_each_precision(tmp_path: Path, gpu_of_8_gib: None) -> None:
    changes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts_per_tok": 1}
    model = write(tmp_path, FAMILY, torch.float32, **changes)
    options = {"memory": "4GiB", "preset": "hobbit", "set": HOBBIT}
    both = tiermoe.plan(model, **options)
    sizes = sum(pool.slot_bytes for pool in both.pools)
    assert tiermoe.plan(model, **options, gpu_memory=both.gpu_fixed + sizes).experts == sizes
    with pytest.raises(BudgetError, match="are too little"):
        tiermoe.plan(model, **options, gpu_memory=both.gpu_fixed + sizes - 1)
    on_cpu = tiermoe.plan(model, **{**options, "device": "cpu"}, cache=sizes)
    assert on_cpu.experts == sum(pool.slot_bytes for pool in on_cpu.pools) <= sizes


def test_main_memory_pins_no_cache_where_the_gpu_has_each_expert_in_its_precision(gpu_of_8_gib: None) -> None:
    table = {(layer, expert): 4 if expert % 2 else 2 for layer in range(4) for expert in range(8)}
    sizes = {4: 100_000, 2: 60_000}
    resolved = Resolved(Settings(), compose("edgemoe"), Tables(bits=table), (4, 2))
    base = MemoryPlan(
        4 * GIB, "", (), slot_bytes=100_000, slots=0, all_slots=32, layer_slots=2, token_slots=8, context=1
    )
    plan = divided_with_gpu(base, 32 * 100_000, resolved, sizes, "cuda", (GIB, ""))
    assert [(pool.bits, pool.slots) for pool in plan.pools] == [((4,), 16), ((2,), 16)]
    assert [pool.slots for pool in plan.host_pools] == [LANES, LANES]
    assert not plan.warnings


def test_a_copy_moves_an_expert_s_own_bytes(
    larger_experts: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    loaded, gpu = on_fake_gpu(larger_experts, 3, preset="hobbit", set={**HOBBIT, "prefetch": "none"}, cache="40%")
    results(loaded)
    engine = loaded.tiermoe
    high, low = (pool.slot_bytes for pool in engine.plan.pools)
    assert low < high
    copied = [copy.host.nbytes for copy in gpu.asked]
    assert set(copied) == {high, low}
    assert copied.count(low) == engine.loader.counts.low_loads
    assert engine.link.counters().bytes_copied == sum(copied)


def test_devices(gpu_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.resolve_device("auto") == cuda.resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"'cuda' was asked for, but .*; use --device cpu"):
        tiermoe.load(gpu_model, memory="4GiB", device="cuda")
    with pytest.raises(ConfigError, match="--gpu-memory was given, but the model runs on the CPU"):
        tiermoe.plan(gpu_model, memory="4GiB", gpu_memory="1GiB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cuda.resolve_device("auto") == "cuda"
    assert cuda.resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match="there are cuda:0 to cuda:1"):
        cuda.resolve_device("cuda:2")


@needs_gpu
@pytest.mark.parametrize(
    ("family", "bits", "changes"),
    [
        *(
            (family, bits, {})
            for family in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
            for bits in (16, 8, 4, 2)
        ),
        *(("qwen3_moe", bits, {"unit": "neuron", "theta": 0.2}) for bits in (4, 2)),
    ],
)
def test_a_real_gpu_says_what_the_cpu_says(family: str, bits: int, changes: dict[str, Any], tmp_path: Path) -> None:
    directory = write(tmp_path / "model", family, torch.float32)
    ids = tokens(1, 12)
    options = {"max_new_tokens": 16, "do_sample": False}
    answers, scores = [], []
    for device, cache in (("cpu", "100%"), ("cuda", "100%"), ("cuda", "40%")):
        given = {"bits": bits, "dense_bits": 16, "cache": cache, "device": device, "set": changes}
        loaded, _ = tiermoe.load(directory, memory="8GiB", **given)
        mine = ids.to(loaded.device)
        answers.append(loaded.generate(mine, attention_mask=torch.ones_like(mine), **options).cpu())
        scores.append(logits(loaded, family, mine).cpu())
        stats = loaded.tiermoe.stats()
        assert device == "cpu" or 0 < stats["peak_gpu_memory_bytes"] <= loaded.tiermoe.plan.gpu_budget
        loaded.tiermoe.close()
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert torch.equal(scores[1], scores[2])  # on one device, the cache's size changes nothing
    assert (scores[1] - scores[0]).abs().max() <= 1e-3 * scores[0].abs().max()
