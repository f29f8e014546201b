"""Experts of a GGUF file packed in fewer bits beside it: what they compute, what stays in the file, what a second run
and an interrupted one pack, and what the plan says first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gguf_files
from commands import Command
from gguf_engines import eager, engine_of, logits_of
from gguf_files import kinds
from parity import tokens
from tiermoe.config import format_size, settings
from tiermoe.engine.load import start
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
from tiermoe.model.hf.blueprint import inspect_model

NARROW = "qwen3_moe, narrow"
"""Rows and columns that 3 and 2 bits take."""


def write(folder: Path, name: str = NARROW) -> tuple[Path, Any]:
    """A file with experts in Q4_0 and other layers in Q8_0, and transformers' eager model with its weights."""
    model = gguf_files.model_of(name)
    file = gguf_files.write(folder / "m.gguf", model, name, kinds("q4_0", dense="q8_0"))
    return file, model


def quantized(model: Any, bits: int, quantizer: str) -> Any:
    """The model with each of its experts' matrices as `bits` have it: the file's own values, quantised once."""
    with torch.no_grad():
        for layer in model.model.layers:
            for stacked in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                for matrix in stacked:
                    out, in_ = matrix.shape
                    encoding = encoding_for(bits, out, in_, torch.float32, quantizer)
                    fields = encoding.encode(matrix, QUANTIZERS[quantizer], torch.float32)
                    matrix.copy_(encoding.decode(fields, out, in_, torch.float32))
    return model


@pytest.mark.parametrize(("bits", "quantizer", "cache"), [(3, "nonlinear", "50%"), (2, "hqq", "100%")])
def test_experts_are_quantised_and_other_layers_stay(bits: int, quantizer: str, cache: str, tmp_path: Path) -> None:
    file, model = write(tmp_path)
    ids = tokens(1, 30)[0].tolist()
    plain, wanted = eager(model, ids), eager(quantized(model, bits, quantizer), ids)
    engine = engine_of(file, torch.float32, store=tmp_path / "store", bits=bits, cache=cache)
    found = logits_of(engine, ids)
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max() < (plain - wanted).abs().max()
    assert engine.settings.dense_bits_used == 16
    assert not engine.store.dense
    assert not list((tmp_path / "store").glob("dense-*"))
    engine.close()


def contents(store: Path) -> dict[str, tuple[int, int]]:
    """Name of each file of experts → when it was written, bytes."""
    return {each.name: (each.stat().st_mtime_ns, each.stat().st_size) for each in store.glob("experts-*")}


class Interrupted(Exception):
    """What stops a packing in a test."""


def test_an_interrupted_packing_goes_on_and_a_later_run_packs_nothing(tmp_path: Path) -> None:
    file, _ = write(tmp_path, f"{NARROW}, of 2 layers")
    store, seen = tmp_path / "store", list[int]()

    def started(progress: Any) -> None:
        asked = settings(bits=3, store=store, threads=1)
        start(inspect_model(file, str(file), store), asked, progress).close()

    def stopping(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        started(stopping)
    first = contents(store)
    assert list(first) == ["experts-3-nonlinear-layer000.safetensors"]
    started(lambda what, done, total: seen.append(done))
    assert contents(store).items() > first.items()
    assert seen[0] == seen[-1] // 2  # the first layer was there
    packed, seen[:] = contents(store), []
    started(lambda what, done, total: seen.append(done))
    assert (contents(store), seen) == (packed, [])


def test_the_plan_says_what_packing_takes(tmp_path: Path, tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write(tmp_path)
    store = tmp_path / "store"
    words = ("plan", file, "--store", store, "--memory", "4GiB", "--machine", "nvme", "--bits", "3")
    planned = json.loads(tiermoe_(*words, "--json").out)
    assert 0 < planned["to_pack_seconds"]["low"] < planned["to_pack_seconds"]["high"]
    said = " ".join(tiermoe_(*words).out.split())
    assert f"writes {format_size(planned['to_pack_bytes'])} of experts to" in said
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert "where only 1000 B are free" in " ".join(tiermoe_(*words).out.split())
    engine = engine_of(file, torch.bfloat16, store=store, bits=3)
    layers = engine.store.precisions["3-nonlinear"].layers
    assert planned["to_pack_bytes"] == sum(extent.nbytes for layer in layers for extent in layer.extents)
    engine.close()
    dense = json.loads(tiermoe_(*words, "--dense-bits", "4", "--json").out)["to_pack_bytes"]
    engine = engine_of(file, torch.bfloat16, store=store, bits=3, dense_bits=4)
    assert 0 < dense == sum(each.stat().st_size for each in store.glob("dense-*"))
    engine.close()
    after = json.loads(tiermoe_(*words, "--json").out)
    assert (after["to_pack_bytes"], after["to_pack_seconds"]) == (0, None)
    assert "packing:" not in tiermoe_(*words).out


def test_presets_on_a_file(tmp_path: Path, shipped: Path, tiermoe_: Command) -> None:
    model = gguf_files.model_of(f"{NARROW}, of 4096 tokens")
    file = gguf_files.write(
        tmp_path / "m.gguf", model, f"{NARROW}, of 4096 tokens", kinds("q8_0"), vocabulary=shipped / "tokenizer.json"
    )
    common = (file, "--store", tmp_path / "store")
    run = ("run", *common, "the", "--max-tokens", "4", "--memory", "4GiB", "--cache", "50%", "--json")
    assert json.loads(tiermoe_(*run, "--preset", "nimble").out)["bits"] == 16
    refused = tiermoe_(*run, "--preset", "nimble-3bit").cause
    assert "tiermoe pack MODEL --bits 3 --quantizer gptq-nonlinear packs them, in about 1 min of a core" in refused
    assert "or choose --quantizer nonlinear" in refused
    plan = " ".join(tiermoe_("plan", *common, "--memory", "4GiB", "--preset", "nimble-3bit").out.split())
    assert "'tiermoe pack MODEL --bits 3 --quantizer gptq-nonlinear' calibrates and packs, before a run" in plan
    uncalibrated = tiermoe_(*run, "--preset", "nimble-3bit", "--quantizer", "nonlinear")
    assert json.loads(uncalibrated.out)["bits"] == 3
    text = tmp_path / "text.txt"
    text.write_text((Path(__file__).parent.parent / "data" / "heldout.txt").read_text()[:40_000])
    packed = tiermoe_("pack", *common, "--bits", "3", "--quantizer", "gptq", "--calibration-text", text)
    assert packed.code == 0, packed
    report = json.loads(tiermoe_(*run, "--preset", "nimble-3bit").out)
    assert (report["bits"], report["dense_bits"]) == (3, 16)
    assert not list((tmp_path / "store").glob("dense-*"))
