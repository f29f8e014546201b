"""The kernels of one instruction set beside those of another: the same store, results apart by the rounding of sums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from commands import Command
from native_experts import checkpoint
from small_engines import logits_of_steps
from tiermoe import native
from tiermoe.cli.describe import missing_kernels
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.evaluate import settings_of

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

IDS = torch.randint(3, 128, (24,), generator=torch.Generator().manual_seed(0)).tolist()
FAMILIES = {
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 12},
    "deepseek_v2": {
        "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "head_dim": 64, "q_lora_rank": None,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = native.instruction_set()
    yield
    native.available.cache_clear()
    assert before is not None
    native.use(before)


def test_generic_c_runs_everywhere_and_the_fastest_is_taken() -> None:
    found = native.instruction_sets()
    assert found[-1] == "generic"
    for name in found:
        native.use(name)
        assert native.instruction_set() == name


def test_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str) -> str | None:
        monkeypatch.setenv(native.ISA, name)
        native.available.cache_clear()
        return native.instruction_set()

    assert asked("generic") == "generic"
    here = ", ".join(native.instruction_sets())
    with pytest.raises(ConfigError, match=f"TIERMOE_ISA='sse9' names no kernels that this machine runs; it has {here}"):
        asked("sse9")
    monkeypatch.setenv(native.SWITCH, "0")
    with pytest.raises(ConfigError, match="TIERMOE_NATIVE=0 keeps them out"):
        asked("generic")


def test_a_plan_says_which_kernels_run(tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA, "generic")
    native.available.cache_clear()
    done = tiermoe_("plan", shipped, "--cache", "25%", "--context", "256")
    assert re.search(r"CPU kernels: +generic\b", done.out)


@pytest.mark.parametrize("words", [("run", "Once", "--max-tokens", "2"), ("chat",)], ids=["run", "chat"])
def test_a_session_says_that_there_are_no_compiled_kernels(
    tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    words = (words[0], str(shipped), *words[1:], "--memory", "4GiB", "--lanes", "1")
    assert "compiled kernels" not in tiermoe_(*words).err
    monkeypatch.setenv(native.SWITCH, "0")
    native.available.cache_clear()
    told = tiermoe_(*words).err
    assert told.count("note: TIERMOE_NATIVE=0 keeps the compiled kernels out: torch computes, slowly; unset it\n") == 1


def test_what_to_do_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_kernels(torch.bfloat16) == ""
    monkeypatch.setattr(native, "available", lambda: False)  # as in a build without a compiler
    assert "install a C compiler and reinstall tiermoe, or install one of its wheels" in missing_kernels(torch.bfloat16)
    assert missing_kernels(torch.float32) == ""
    monkeypatch.undo()


@pytest.mark.parametrize("name", native.instruction_sets())
def test_reports_name_what_computed(shipped: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each instruction set, and torch without them; `tests/test_cli.py` has a model that no native kernel takes."""
    for switch, computed in (("1", f"native {name}"), ("0", "torch")):
        monkeypatch.setenv(native.SWITCH, switch)
        native.available.cache_clear()
        native.use(name)
        with tiermoe.load(shipped, memory="4GiB", lanes=1) as (model, tokenizer):
            ids = tokenizer("Once", return_tensors="pt").input_ids
            report = tiermoe.generate(model, tokenizer, ids, tiermoe.Sampling(max_tokens=1)).as_dict()
            assert {report["kernels"], model.tiermoe.stats()["kernels"]} == {computed}
            assert settings_of(model.tiermoe)["kernels"] == computed


def test_a_plan_counts_the_speed_of_torch(tiermoe_: Command, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(*words: str) -> dict[str, Any]:
        told = tiermoe_("plan", shipped, "--memory", "4GiB", "--json", *words)
        return dict(json.loads(told.out)["expectation"])

    compiled = expected()
    assert compiled["rates"]["torch_s"] is None
    monkeypatch.setenv(native.SWITCH, "0")
    native.available.cache_clear()
    found = expected()
    assert 0 < found["rates"]["torch_s"][0] <= found["rates"]["torch_s"][1]
    assert found["decode_tok_s"]["high"] < compiled["decode_tok_s"]["high"] / 2
    assert found["decode_tok_s"]["low"] < compiled["decode_tok_s"]["low"] / 2
    elsewhere = expected("--machine", "desktop-ddr5")  # what is installed there is not known
    assert elsewhere["rates"]["torch_s"] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_packed_under_one_runs_under_every_other(family: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "model", family, **FAMILIES[family])
    packed_here, found = {}, {}
    for name in native.instruction_sets():
        native.use(name)
        tiermoe.load(directory, store=tmp_path / name, bits=4, dense_bits=4, memory="4GiB")[0].tiermoe.close()
        files = sorted((tmp_path / name).rglob("*.safetensors"))
        packed_here[name] = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    assert len(set(packed_here.values())) == 1
    for name in native.instruction_sets():
        native.use(name)
        for cache in ("100%", "40%"):
            model, _ = tiermoe.load(directory, store=tmp_path / "generic", bits=4, dense_bits=4, cache=cache)
            found[name, cache] = logits_of_steps(model.tiermoe, IDS, 12).float()
            model.tiermoe.close()
        assert torch.equal(found[name, "100%"], found[name, "40%"])  # whatever the cache holds
    want = found["generic", "100%"]
    for name in native.instruction_sets():
        error = (found[name, "100%"] - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.median() < 0.02, name
