"""The memory plan: its parts add up, follow the settings, and agree with what transformers really holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from tiermoe import native
from tiermoe.config import MIB, format_size, settings
from tiermoe.engine import budget as plan_module
from tiermoe.engine.budget import plan_memory
from tiermoe.engine.load import resolve_for
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.model import stored_weights as dense_weights
from tiermoe.model.families import FAMILIES
from tiermoe.model.hf import generic
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.packing import packable, packed_bytes
from tiermoe.model.stored_weights import LazyTensor, loading_needs
from tiermoe.platform import machine
from tiermoe.platform.process_memory import ACTIVATIONS_HEAP
from tiermoe.types import Need, Phase, Workload
from tiny import CONFIGS, auto_class, config_of, oracle, write

INTERPRETER = 300 * MIB
PROBED = {
    "bailing_hybrid", "gemma4_text", "glm5_next_text", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe",
    "mimo_v2_flash", "nemotron_h", "qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text",
}  # fmt: skip
"""Families with heads of several sizes, or with states beside keys and values."""
FIXED = ("interpreter", "dense", "kv_cache", "activations", "staging")
Planner = Callable[..., MemoryPlan]


@pytest.fixture(scope="module")
def blueprint(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    directory = write(tmp_path_factory.mktemp("plan") / "tiny", "qwen3_moe", torch.bfloat16)
    return inspect_model(directory, "tiny")


@pytest.fixture
def planned(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Plans with an interpreter of a fixed size."""
    monkeypatch.setattr(plan_module, "resident_bytes", lambda: INTERPRETER)
    return lambda **options: plan_memory(
        blueprint, resolve_for(blueprint, settings(**{"memory": "1GiB", "device": "cpu", **options})), None
    )


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
@pytest.mark.parametrize("dense_bits", [16, 8, 4])
def test_the_parts_add_up(bits: int, dense_bits: int, planned: Planner) -> None:
    plan = planned(bits=bits, dense_bits=dense_bits)
    assert plan.total == sum(nbytes for _, nbytes, _ in plan.rows())
    assert plan.total == sum(getattr(plan, name) for name in FIXED) + plan.slots * plan.slot_bytes <= plan.budget
    assert (plan.all_slots, plan.layer_slots, plan.token_slots) == (24, 3, 9)
    assert plan.slots == 24


def test_dense_weights_are_those_of_the_model(blueprint: Blueprint, planned: Planner) -> None:
    parameters = {id(p): p.numel() * p.element_size() for p in blueprint.skeleton.parameters()}
    buffers = sum(b.numel() * b.element_size() for b in blueprint.skeleton.buffers())
    assert planned(dense_bits=16).dense == sum(parameters.values()) + buffers
    dense = {bits: planned(dense_bits=bits).dense for bits in (16, 8, 4)}
    assert dense[16] > dense[8] > dense[4]
    packed = sum(blueprint.skeleton.get_submodule(name).weight.numel() for name in packable(blueprint))
    assert dense[16] - dense[8] <= packed  # two bytes a weight become one and a scale a row


def test_dense_weights_that_stay_in_float32_are_counted_as_such(tmp_path: Path) -> None:
    """Hunyuan 4's output layer. Its routers, which newer transformers widen, are taken as they are stored."""
    found = inspect_model(write(tmp_path / "tiny", "hy_v4", torch.bfloat16), "tiny")
    loaded = oracle(tmp_path / "tiny", "hy_v4", torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.bfloat16()
    parts = [*loaded.named_parameters(), *loaded.named_buffers()]
    assert found.dense_bytes() == sum(tensor.nbytes for name, tensor in parts if ".experts." not in name)
    layers = [loaded.get_submodule(name) for name in packable(found)]
    assert packed_bytes(found, 8)[0] == sum(layer.weight.nbytes for layer in layers)
    assert loaded.lm_head in layers


def test_settings_move_the_rows_they_are_about(planned: Planner) -> None:
    usual = {"chunk": 16, "context": 128, "dense_bits": 16}
    base = planned(**usual)

    def changed(**options: Any) -> set[str]:
        other = planned(**{**usual, **options})
        return {name for name in (*FIXED, "slot_bytes", "slots") if getattr(other, name) != getattr(base, name)}

    assert changed(context=256) == {"kv_cache", "activations"}
    assert changed(chunk=64) == {"activations"}
    decoded = {"activations"} if native.available() else set()  # native kernels decode no 4-bit matrix
    assert changed(dense_bits=8) == {"dense"} | decoded
    assert changed(bits=8) == {"slot_bytes"} | decoded
    assert changed(bits=2) == set()  # a slot of one page either way
    assert changed(batch=2) == {"kv_cache", "activations"}
    assert changed(cache="50%") == {"slots"}
    assert changed(lanes=2) == set()
    assert planned(bits=16, lanes=4).staging == 2 * planned(bits=16, lanes=2).staging > 0
    assert planned(context=256).kv_cache == 2 * planned(context=128).kv_cache


def test_the_context_left_out_and_asked_for(planned: Planner) -> None:
    assert planned().context == 256  # the tiny model's own, below 4096
    assert planned(context=17).context == 17
    with pytest.raises(ConfigError, match=r"a context of 257 tokens is more than the 256 .*lower --context"):
        planned(context=257)


@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.integers(301 * MIB, 330 * MIB),
    st.integers(0, 1 * MIB),
    st.sampled_from([16, 8, 4, 3, 2]),
    st.sampled_from([16, 8, 4]),
)
def test_more_memory_never_gives_fewer_slots(
    planned: Planner, memory: int, more: int, bits: int, dense_bits: int
) -> None:
    def slots(budget: int) -> int:
        try:
            plan = planned(memory=budget, bits=bits, dense_bits=dense_bits, context=64, chunk=16)
        except BudgetError:
            return 0
        assert plan.layer_slots <= plan.slots <= plan.all_slots
        assert plan.total <= budget
        return plan.slots

    assert slots(memory) <= slots(memory + more)


EMBEDDING = 128 * 64 * 2


def least(plan: Any) -> int:
    """Bytes with which the tiny model just runs: its embedding on disk."""
    fixed = plan.fixed - plan.idle_activations
    return int(fixed + plan.layer_slots * plan.slot_bytes - (0 if plan.embedding_on_disk else EMBEDDING))


def test_memory_of_activations_stays_only_where_experts_have_theirs(planned: Planner) -> None:
    roomy = planned()
    assert roomy.idle_activations == ACTIVATIONS_HEAP
    assert roomy.activations > ACTIVATIONS_HEAP
    all_fit = roomy.fixed + roomy.all_slots * roomy.slot_bytes
    assert planned(memory=all_fit).idle_activations == ACTIVATIONS_HEAP
    short = planned(memory=all_fit - 1)
    assert short.idle_activations == 0
    assert short.slots == short.all_slots
    assert short.activations == roomy.activations - ACTIVATIONS_HEAP


def test_the_embedding_stays_on_disk_only_where_experts_need_its_room(planned: Planner) -> None:
    roomy = planned()
    assert not roomy.embedding_on_disk
    all_fit = roomy.fixed - roomy.idle_activations + roomy.all_slots * roomy.slot_bytes
    assert not planned(memory=all_fit).embedding_on_disk
    short = planned(memory=all_fit - 1)
    assert short.embedding_on_disk
    assert roomy.dense - short.dense == EMBEDDING
    assert not planned(memory=all_fit - 1, cache="30%").embedding_on_disk  # asked for less than there is room for
    assert (roomy.unless_mapped, short.unless_mapped) == (EMBEDDING, 0)
    notes = [{what: note for what, _, note in plan.rows()}["dense weights"] for plan in (roomy, short)]
    assert notes == [
        f"resident; where the store is mapped {format_size(EMBEDDING)} of embedding stay on disk",
        "resident; the embedding on disk",
    ]
    assert not planned(cache="30%").unless_mapped  # slots are copies


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
@pytest.mark.parametrize("dense_bits", [16, 4])
def test_too_little_is_refused_with_what_is_enough(bits: int, dense_bits: int, planned: Planner) -> None:
    with pytest.raises(
        BudgetError, match=r"64 MiB are too little: interpreter \d+ MiB, dense .* need .*Use --memory"
    ) as refused:
        planned(memory="64MiB", bits=bits, dense_bits=dense_bits)
    advice = re.search(r"--memory (\S+)", str(refused.value))
    assert advice
    plan = planned(memory=advice[1], bits=bits, dense_bits=dense_bits)
    assert plan.slots >= plan.layer_slots
    with pytest.raises(BudgetError):
        planned(memory=least(plan) - 1, bits=bits, dense_bits=dense_bits)


def test_dense_layers_follow_the_experts_bits(planned: Planner) -> None:
    """What is left out is what is named, and the plan says which; an output layer keeps 6 bits."""
    named = {2: 4, 4: 4, 8: 8, 16: 16}
    for bits, dense_bits in named.items():
        assert planned(bits=bits) == planned(bits=bits, dense_bits=dense_bits)
    assert [planned(bits=bits).dense_bits for bits in named] == ["4 (lm_head 6)", "4 (lm_head 6)", "8", "16"]
    assert planned(set={"bits": 16}).dense == planned(dense_bits=16).dense
    assert planned(bits=16, set={"dense_bits": 4}).dense == planned().dense


def test_a_store_on_disk_is_advised_where_it_is_enough(planned: Planner) -> None:
    """CORM's preset holds the store in main memory."""
    in_memory = {"store": "memory"}
    short = least(planned(set=in_memory)) - 1000
    with pytest.raises(BudgetError, match=r"or --set store=disk, which saves"):
        planned(set=in_memory, memory=short)
    planned(memory=short)


def test_dense_bits_are_advised_where_they_are_enough(planned: Planner) -> None:
    plan = planned(dense_bits=16)
    short = least(plan) - 1000
    with pytest.raises(BudgetError, match=r"or --dense-bits \d, which saves") as no:
        planned(memory=short, dense_bits=16)
    advice = re.search(r"--dense-bits (\d)", str(no.value))
    assert advice
    assert planned(memory=short, dense_bits=int(advice[1])).slots >= 3


@pytest.mark.parametrize("cache", ["1%", "5KiB", 4096])
def test_a_cache_below_one_layer_s_experts_is_refused(cache: Any, planned: Planner) -> None:
    with pytest.raises(
        BudgetError, match=r"a cache of \d experts cannot hold the 3 that one layer uses .*; use --cache"
    ) as no:
        planned(cache=cache)
    advice = re.search(r"--cache (\S+)", str(no.value))
    assert advice
    assert planned(cache=advice[1]).slots == 3


def test_caches_by_share_and_by_size(planned: Planner) -> None:
    assert planned(cache="50%").slots == 12
    assert planned(cache="100%").slots == planned(cache="1GiB").slots == 24
    roomy = planned()
    slot = roomy.slot_bytes
    assert planned(cache=7 * slot + 1).slots == 7
    short = roomy.fixed - roomy.idle_activations - EMBEDDING + 5 * slot
    assert planned(cache="50%", memory=short).slots == 5  # --memory stays the bound


def test_a_cache_below_one_token_s_experts_is_warned_of(planned: Planner) -> None:
    (warning,) = planned(cache="25%").warnings
    assert "holds 6 experts, one token uses 9" in warning
    assert planned(cache="40%").warnings == []


def test_memory_left_out_comes_from_the_machine(planned: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "available_memory", lambda: (2000 * MIB, "that the machine has free"))
    plan = planned(memory=None)
    assert plan.budget == 1600 * MIB + INTERPRETER
    assert plan.budget_source == "80% of the 1.95 GiB that the machine has free"


def test_a_low_pool_holds_what_its_bytes_say(tmp_path: Path) -> None:
    """Slots of 2 bits have their stored size, five ninths of 4 bits': HOBBIT's low pool holds as many more."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32}
    model = inspect_model(write(tmp_path / "model", "qwen3_moe", torch.bfloat16, **sizes), "model")
    changes = {"prefetch": "none", "t1": 0.4, "t2": 0.7, "weights": "0.4,0.3,0.2,0.1", "low_share": 0.5}
    options = settings(preset="hobbit", set=changes, cache="30%", memory="4GiB", device="cpu")
    plan = plan_memory(model, resolve_for(model, options), None)
    high, low = plan.pools
    assert (high.bits, low.bits) == ((4,), (2,))
    assert low.slot_bytes == 3 * 256 * 256 * 5 // 16  # three matrices at 2.5 bits a weight
    assert high.slot_bytes == 3 * 256 * 256 * 9 // 16
    half = plan.experts / 2
    assert low.slots == pytest.approx(half / low.slot_bytes, abs=2)
    assert high.slots == pytest.approx(half / high.slot_bytes, abs=2)


def growing_bytes(config: Any, load: Workload, latent: bool = False) -> int:
    """What the generic decoder's cache says it needs."""
    return sum(need.nbytes for need in generic.needs(config, load, latent, False) if need.part == "kv cache")


@pytest.mark.parametrize("model_type", sorted(set(CONFIGS) - PROBED))
def test_key_value_bytes_are_those_of_a_real_cache(model_type: str) -> None:
    switch = model_type == "switch_transformers"
    config = config_of(model_type)
    model = auto_class(model_type).from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(3, 128, (2, 20))
    with torch.no_grad():
        cache = model(ids, **({"decoder_input_ids": ids} if switch else {})).past_key_values
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers] if switch else cache.layers
    # a window is a view: what it was cut from is held as well
    held = [sum(t.untyped_storage().nbytes() for t in (layer.keys, layer.values)) for layer in layers]
    assert sum(held) > 0
    latent = model_type in FAMILIES and FAMILIES[model_type].latent_kv
    planned = growing_bytes(config, Workload(context=20, chunk=20, sequences=2, itemsize=2, threads=1), latent)
    expanded = 2 * 20 * 2 * 4 * (16 + 16 + 16 + 8) if latent else 0  # kv_b_proj's output and the keys made of it
    assert planned == sum(held) + 2 * max(held) + expanded  # and one layer's copies while it grows


@pytest.mark.parametrize(("chunk", "context"), [(4, 40), (8, 40), (16, 10)])
def test_layers_with_a_window_hold_the_window_and_a_chunk(chunk: int, context: int) -> None:
    config = config_of("gpt_oss", sliding_window=8)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    model = auto_class("gpt_oss").from_config(config, dtype=torch.float32).eval()
    cache, most = DynamicCache(config=config), 0
    for part in torch.randint(3, 128, (1, context)).split(chunk, dim=1):
        with torch.no_grad():
            model(part, past_key_values=cache)
        most = max(most, sum(t.untyped_storage().nbytes() for la in cache.layers for t in (la.keys, la.values)))
    whole = growing_bytes(config, Workload(context, context, 1, 4, 1))
    planned = growing_bytes(config, Workload(context, chunk, 1, 4, 1))
    growing = 2 * max(t.keys.untyped_storage().nbytes() + t.values.untyped_storage().nbytes() for t in cache.layers)
    assert planned - growing == most
    assert (planned < whole) == (7 + chunk < context)


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            400000.
Pages inactive:                           20000.
Pages speculative:                          300.
Pages purgeable:                             40.
Pages wired down:                        100000.
"Translation faults":                 123456789.
"""


def test_free_memory_of_a_mac_is_what_can_be_taken_at_once() -> None:
    assert machine.vm_stat_available(VM_STAT) == 16384 * (10000 + 20000 + 300 + 40)
    assert machine.vm_stat_available("vm_stat: not here") is None


def test_where_a_system_does_not_say_what_is_free_all_of_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_linux_available", "_macos_available", "_posix_available", "_cgroup_left"):
        monkeypatch.setattr(machine, name, lambda: None)
    free, source = machine.available_memory()
    assert 0 < free <= 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert "50% of the machine's memory" in source


def test_packing_and_loading_are_held_against_the_budget(
    blueprint: Blueprint, planned: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    assert 0 < plan.packing <= plan.budget  # nothing is packed yet
    assert 0 < plan.loading <= plan.total
    assert [what for what, _, _ in plan.phases()] == ["while packing"]
    much = {phase: [Need("something", 2 << 30, phase)] for phase in (Phase.PACKING, Phase.LOADING)}
    for name, needs in (("while_packing", (1, much[Phase.PACKING])), ("while_loading", much[Phase.LOADING])):
        with monkeypatch.context() as patch:
            patch.setattr(plan_module, name, lambda *args, needs=needs: needs)
            with pytest.raises(
                BudgetError, match=r"(packing|loading).* needs 2 GiB \(something 2 GiB\).*--memory 2052MiB"
            ):
                planned()


def test_loading_counts_what_is_converted(tmp_path: Path) -> None:
    directory = write(tmp_path / "wide", "qwen3_moe", torch.float32)
    text = (directory / "config.json").read_text().replace("float32", "bfloat16")
    (directory / "config.json").write_text(text)
    found = inspect_model(directory, "wide")
    needs = {need.part: need.nbytes for need in loading_needs(found, dense=1000)}
    assert needs["dense"] == 1000
    assert needs["conversion"] > 0
    key = "model.embed_tokens.weight"
    lazy = LazyTensor(found.checkpoint, key, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_weights, "CONVERTED", 1024)  # a few rows at a time
        assert torch.equal(lazy[...], found.checkpoint.read(key).bfloat16())
