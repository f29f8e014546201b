"""What to expect of a plan: arithmetic that can be done by hand, and what holds for any model and machine."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import Command
from small_traces import decode, layer, trace_of
from tiermoe import native
from tiermoe.cli.describe import backend_of
from tiermoe.config import CacheSize, settings
from tiermoe.engine import machine_rates as measured
from tiermoe.engine.backend import kernels_of
from tiermoe.engine.expectation import RECORDINGS, LayerWork, Range, Work, expect, hit_rates
from tiermoe.engine.load import resolve_for
from tiermoe.lab.simulate import ReplaySettings, replay
from tiermoe.lab.trace import Times
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload.computers import COMPUTERS, DRIVES, Rates
from tiermoe.offload.presets import compose
from tiermoe.platform import bandwidth
from tiny import write

RATES = Rates(memory=10e9, drive=1e9, arithmetic=100e9, source="by hand")
WORK = Work(
    moe=[LayerWork(experts=64, top_k=4, slot_bytes=1_000_000, stored_bytes=1_000_000)] * 10,
    dense_bytes=60_000_000, kv_bytes=0, operations=200e6, share=1.0, chunk=512, context=4096, layers=10, ours=True,
)  # fmt: skip


def test_all_in_memory_is_bound_by_memory() -> None:
    found = expect(WORK, RATES)
    assert found.memory_bytes == 60e6 + 10 * 4 * 1e6
    assert found.decode_tok_s.high == pytest.approx(10e9 / 100e6)
    assert found.drive_bytes == Range(0, 0)
    assert found.hit_rate == Range(1, 1)
    # a prompt of 512 computes 102.4 GFLOP; nothing has to be read where an earlier answer left it
    assert found.first_token_s.low == pytest.approx(102.4 / 100 + 0.01)


def test_small_experts_take_the_time_of_deciding() -> None:
    small = [LayerWork(experts=64, top_k=4, slot_bytes=1_000, stored_bytes=1_000)] * 10
    work = replace(WORK, moe=small, dense_bytes=0, share=0.25)
    (low, high), _ = hit_rates(64, 4, 0.25)
    found = expect(work, RATES)
    assert found.decode_tok_s.high == pytest.approx(1 / (10 * 1e-4 + 40 * (1 - high) * (5e-5 + 1e-6)))
    slow = 10 * (3e-4 + 6e-4) + 40e3 / 5e9 + 40 * (1 - low) * (5e-4 + 1e3 / 0.6e9)
    assert found.decode_tok_s.low == pytest.approx(1 / slow)
    assert found.first_token_s.high > 640 * 5e-4
    assert "0.1 to 0.6 ms a layer" in found.assumptions
    held = expect(replace(work, share=1), RATES)
    assert "ms a layer" not in held.assumptions
    # a prompt's experts are read once where the cache is empty
    assert "0.05 to 0.5 ms an expert that is read" in held.assumptions
    assert held.first_token_s.high > 600 * 5e-4


def test_a_prompt_in_chunks_reads_experts_again() -> None:
    whole, chunks = (expect(replace(WORK, share=0.1, chunk=size), RATES) for size in (512, 128))
    assert chunks.first_token_s.high > whole.first_token_s.high
    assert chunks.first_token_s.low > whole.first_token_s.low


def test_what_torch_computes_takes_the_time_that_it_was_measured_to_take() -> None:
    slow = replace(RATES, torch_s=(1e-9, 3e-9))  # of 40 MB of experts: 40 and 120 ms
    found = expect(replace(WORK, packed_bytes=20_000_000), slow)
    assert found.decode_tok_s.high == pytest.approx(1 / (0.5 * 40e-3 + 10 * 3e-4))
    assert found.decode_tok_s.low == pytest.approx(1 / (100e6 / 5e9 + 60e6 * 3e-9 + 10 * 4e-3))
    assert found.first_token_s.high > expect(WORK, RATES).first_token_s.high + 630e6 * 3e-9
    assert "torch's products" in found.assumptions


works = st.builds(
    Work,
    moe=st.lists(
        st.builds(
            LayerWork,
            experts=st.integers(8, 512), top_k=st.integers(1, 8),
            slot_bytes=st.integers(1 << 12, 1 << 26), stored_bytes=st.integers(1 << 12, 1 << 26),
        ), min_size=1, max_size=4,
    ),
    dense_bytes=st.integers(1 << 20, 1 << 34), kv_bytes=st.floats(0, 1e6), operations=st.floats(1e6, 1e12),
    share=st.floats(0.001, 1), chunk=st.integers(1, 1024), context=st.integers(2, 8192), layers=st.integers(1, 100),
    ours=st.booleans(),
)  # fmt: skip


@given(works, st.floats(1.1, 10))
def test_more_memory_or_a_faster_machine_is_not_slower(work: Work, factor: float) -> None:
    base = expect(work, RATES)
    assert 0 < base.decode_tok_s.low <= base.decode_tok_s.high
    assert 0 < base.first_token_s.low <= base.first_token_s.high
    assert 0 <= base.hit_rate.low <= base.hit_rate.high <= 1
    faster = [
        expect(work, replace(RATES, memory=RATES.memory * factor)),
        expect(work, replace(RATES, drive=RATES.drive * factor)),
        expect(work, replace(RATES, arithmetic=RATES.arithmetic * factor)),
        expect(replace(work, share=min(1, work.share * factor)), RATES),
    ]
    for other in faster:
        assert other.decode_tok_s.low >= base.decode_tok_s.low * (1 - 1e-9)
        assert other.decode_tok_s.high >= base.decode_tok_s.high * (1 - 1e-9)
        assert other.first_token_s.high <= base.first_token_s.high * (1 + 1e-9)


def test_recorded_rates_rise_with_the_cache() -> None:
    for recording in RECORDINGS:
        shares = [0.0, *(share for share, _, _ in recording.hits), 1.0]
        found = [hit_rates(recording.experts, recording.top_k, share)[0] for share in shares]
        assert found[0] == (0, 0)
        assert found[-1] == (1, 1)
        assert all(low <= high for low, high in found)
        assert [low for low, _ in found] == sorted(low for low, _ in found)
        assert [high for _, high in found] == sorted(high for _, high in found)
    least = [hit_rates(128, 8, share)[0][0] for share in (0.2, 0.25, 0.3)]
    assert least[0] < least[1] < least[2]
    assert "Qwen3-30B-A3B" in hit_rates(128, 8, 0.25)[1]
    assert "Qwen3-30B-A3B" in hit_rates(256, 8, 0.25)[1]
    assert "stories-7m" in hit_rates(8, 2, 0.25)[1]


def test_a_replay_lies_within_the_range() -> None:
    """The simulator's own clock as the oracle: routing that hits as a recording did, on a link of the drive's rate."""
    rng, experts, top_k, layers = random.Random(3), 32, 4, 6
    weights = [1 / (1 + rank) ** 0.5 for rank in range(experts)]
    passes = []
    for _ in range(160):
        chosen = []
        for _ in range(layers):
            row: list[int] = []
            while len(row) < top_k:
                expert = rng.choices(range(experts), weights)[0]
                row += [expert] if expert not in row else []
            chosen.append(layer(row))
        passes.append(decode(*chosen))
    nbytes, dense = 1_000_000, 20_000_000
    each = nbytes / RATES.memory
    times = Times(dense / RATES.memory, {4: each}, 0.0, {4: each})
    recorded = trace_of(passes, experts, top_k, nbytes, times)
    for share in (0.25, 0.5, 0.75):
        composition = compose("default", {"prefetch": "none"})
        got = replay(recorded, composition, ReplaySettings(CacheSize(fraction=share), RATES.drive))
        work = Work(
            [LayerWork(experts, top_k, nbytes, nbytes)] * layers, dense, 0, 1e6, share, 512, 4096, layers, ours=True
        )
        found = expect(work, RATES)
        assert found.decode_tok_s.low <= got.decode_tok_s <= found.decode_tok_s.high, (share, found, got)


# --- machines ---


def test_named_machines_are_ordered_as_people_know_them() -> None:
    speed = {name: expect(WORK, computer.rates()).decode_tok_s.high for name, computer in COMPUTERS.items()}
    assert speed["raspberry-pi-5"] < speed["laptop-ddr4"] < speed["laptop-ddr5"] < speed["macbook-pro-m1-max"]
    starved = replace(WORK, share=0.1)
    slow, fast = (expect(starved, COMPUTERS[name].rates()) for name in ("raspberry-pi-5-sdcard", "raspberry-pi-5"))
    assert slow.decode_tok_s.high < fast.decode_tok_s.low
    assert all(computer.source for computer in COMPUTERS.values())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each measurement, which is a short one."""
    found: list[int] = []
    monkeypatch.setattr(bandwidth, "measure", lambda threads: found.append(threads) or {"bandwidth": 12e9})
    monkeypatch.setattr(measured, "_SECONDS", 0.01)
    monkeypatch.setattr(measured, "_SCRATCH", 8 << 20)
    return found


def test_a_machine_is_measured_once(tmp_path: Path, calls: list[int]) -> None:
    threads = torch.get_num_threads()
    folder = tmp_path / "cache"
    first = measured.machine_rates(folder, 1)
    assert (first.memory, calls) == (12e9, [1])
    assert first.drive > 0
    assert first.arithmetic > 0
    assert measured.machine_rates(folder, 1) == first
    assert calls == [1]
    assert [file.name for file in folder.iterdir()] == [measured.NAME]  # what was written to be read is gone
    assert torch.get_num_threads() == threads

    file = folder / measured.NAME
    document = json.loads(file.read_text())
    file.write_text(re.sub(r'"day": "\d+', '"day": "1999', json.dumps(document)))
    assert measured.machine_rates(folder, 1).memory == 12e9
    assert calls == [1, 1]
    for torn in ('{"', "[]", json.dumps({case: {**entry, "memory": -1} for case, entry in document.items()})):
        file.write_text(torn)
        measured.machine_rates(folder, 1)
    assert calls == [1] * 5


@pytest.mark.usefixtures("calls")
def test_what_is_measured_on_a_busy_machine_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "ALONE_SHARE", 0.75)
    monkeypatch.setattr(measured, "product_rate", lambda: (1e9, 0.4))
    found = measured.machine_rates(tmp_path, 2)
    assert found.source.endswith(
        "with 2 threads, while other programs took 60% of their time: the figures are too low, and not kept"
    )
    monkeypatch.setattr(measured, "product_rate", lambda: (3e9, 0.99))
    assert measured.machine_rates(tmp_path, 2).arithmetic == 3e9
    monkeypatch.setattr(measured, "product_rate", lambda: (2e9, 0.99))
    kept = measured.machine_rates(tmp_path, 2)
    assert kept.arithmetic == 3e9
    assert "kept in" in kept.source


# --- the command ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("expect") / "tiny", "qwen3_moe", torch.bfloat16, vocab_size=4000)


def test_plan_says_what_to_expect(tiermoe_: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    told = tiermoe_("plan", model, "--memory", "4GiB", "--machine", "macbook-air-m2", "--cache", "50%")
    assert told.code == 0
    out = " ".join(told.out.split())
    assert re.search(r"expect: [\d.]+ to [\d.]+ tokens a second; first token [\d.]+ to [\d.]+ s after a", out)
    assert re.search(r"a token: reads .* of memory; \d+% to \d+% of its experts are in the cache", out)
    assert "dense weights: " not in out
    dense = tiermoe_(
        "plan", model, "--bits", "2", "--dense-bits", "16", "--memory", "4GiB", "--machine", "macbook-air-m2"
    ).out
    assert "of that, at 16 bits; --dense-bits 4 packs" in " ".join(dense.split())
    assert re.search(r"machine: memory 80 GB/s, .* Apple: 100 GB/s; .* assumed: ", out)
    found = json.loads(tiermoe_("plan", model, "--memory", "4GiB", "--machine", "macbook-air-m2", "--json").out)
    assert found["expectation"]["decode_tok_s"]["low"] <= found["expectation"]["decode_tok_s"]["high"]
    assert found["expectation"]["rates"]["memory"] == 80e9
    assert found["download"] is None
    assert found["decoder"] == "tiermoe's own, for qwen3_moe"


def test_another_drive_in_this_machine(tiermoe_: Command, model: Path) -> None:
    rates = {}
    for machine in (None, "sdcard"):
        words = ["--machine", machine] if machine else []
        rates[machine] = json.loads(tiermoe_("plan", model, "--memory", "4GiB", "--json", *words).out)
    here, other = (rates[name]["expectation"]["rates"] for name in (None, "sdcard"))
    assert other["memory"] == here["memory"]
    assert other["drive"] == DRIVES["sdcard"].bandwidth
    assert "measured on" in here["source"]
    assert "SanDisk" in other["source"]


def test_machines_that_are_not_known(tiermoe_: Command, model: Path) -> None:
    unknown = tiermoe_("plan", model, "--memory", "4GiB", "--machine", "macbook-air-m0").cause
    assert re.search(r"unknown machine 'macbook-air-m0'; did you mean 'macbook-air-m\d'\?", unknown)
    assert all(name in unknown for name in (*COMPUTERS, *DRIVES))
    assert "give --memory beside --machine" in tiermoe_("plan", model, "--machine", "steam-deck").cause


def test_presets_whose_speed_nobody_recorded(tiermoe_: Command, model: Path) -> None:
    told = tiermoe_("plan", model, "--memory", "4GiB", "--set", "routing=half", "--set", "prefetch=none")
    assert re.search(r"expect: +not known: the preset default reads otherwise", told.out)


def test_why_no_faster_code_runs(
    tiermoe_: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(directory: Path, **options: Any) -> Any:
        blueprint = inspect_model(directory, "tiny")
        return backend_of(blueprint, resolve_for(blueprint, settings(device="cpu", **options)))

    own = runs(model)
    assert (own.decoder, own.ours) == ("tiermoe's own, for qwen3_moe", True)
    generic = runs(model, decoder="generic")
    assert (generic.decoder, generic.ours) == ("transformers' code (--decoder generic): slower", False)
    without = write(tmp_path / "switch", "switch_transformers", torch.bfloat16)
    assert "tiermoe has no decoder of its own for switch_transformers" in runs(without).decoder
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    odd = write(tmp_path / "dynamic", "qwen3_moe", torch.bfloat16, **dynamic)
    assert "does not compute this config: silu, rotary embedding 'dynamic'" in runs(odd).decoder
    if native.available():
        single = write(tmp_path / "single", "qwen3_moe", torch.float32)
        assert "compute in bfloat16, the checkpoint is in float32" in runs(single).kernels
        narrow = write(tmp_path / "narrow", "qwen3_moe", torch.bfloat16, moe_intermediate_size=48)
        assert "torch's operators for experts' matrices of 96 x 64 at 4 bits" in runs(narrow).kernels
        for directory, computed in (
            (model, f"native {native.instruction_set()}"),
            (narrow, "torch"),
            (single, "torch"),
        ):
            blueprint = inspect_model(directory, "tiny")
            assert kernels_of(blueprint, resolve_for(blueprint, settings(device="cpu")), "cpu") == computed
    shown = tiermoe_("show", model)
    assert "tiermoe's own, for qwen3_moe" in shown.out
    monkeypatch.delenv(native.ISA, raising=False)
    monkeypatch.setenv(native.SWITCH, "0")
    native.available.cache_clear()
    assert runs(model).kernels == "torch's operators: TIERMOE_NATIVE=0, slower"
    monkeypatch.undo()
    native.available.cache_clear()
