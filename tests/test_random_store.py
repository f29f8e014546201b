"""Stores with random experts: the engine computes what their codes say, and follows a recorded routing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import random_model
from benchmarks.full_size_child import Choices
from benchmarks.gpu_run import Fed, engine_of
from benchmarks.random_model import SMALL, Config, config_of, write
from benchmarks.random_store import fill
from benchmarks.recorded_routing import Routing, routing_for
from small_traces import write_trace
from test_full_size import recorded
from tiermoe.config import Settings, settings
from tiermoe.errors import PackError
from tiermoe.formats.store import Store
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.types import Extent
from tiny import auto_class

KIND, LAYERS = "qwen3-30b-a3b", 3
PROMPT, DECODED = [5, 9, 2, 11, 7], [3, 8, 4]


class Made(NamedTuple):
    """A checkpoint without experts, and its store."""

    directory: Path
    asked: Settings
    store: Store

    @property
    def blueprint(self) -> Blueprint:
        return inspect_model(self.directory, str(self.directory), self.asked.store)


def made(folder: Path, config: Config | None = None, routing: Routing | None = None, **options: Any) -> Made:
    directory = folder / "model"
    write(KIND, directory, config or config_of(KIND, LAYERS, **SMALL[KIND]), routing=routing, experts=False)
    asked = settings(device="cpu", bits=4, dense_bits=16, context=64, store=folder / "store", **options)
    blueprint = inspect_model(directory, str(directory), asked.store)
    return Made(directory, asked, fill(blueprint, asked, routing.columns if routing else 0))


def read(extent: Extent) -> bytes:
    content = b""
    for segment in extent.segments:
        with open(segment.file, "rb") as file:
            file.seek(segment.offset)
            content += file.read(segment.nbytes)
    return content


def decoded(store: Store, key: str, layer: int) -> dict[str, torch.Tensor]:
    """The experts of a layer as a checkpoint has them."""
    form, prefix, found = store.expert_format(key, layer), f"model.layers.{layer}.mlp.experts", {}
    for expert, extent in enumerate(store.precisions[key].layers[layer].extents):
        views = form.stored.views(torch.frombuffer(bytearray(read(extent)), dtype=torch.uint8))
        for part in form.layer.parts:
            weight = form.encodings[part.name].decode(views[part.name], *part.out_in, torch.float32)
            names = ("gate", "up") if part.name.startswith("gate_up") else ("down",)
            for name, rows in zip(names, weight.chunk(len(names)), strict=True):
                found[f"{prefix}.{expert}.{name}_proj.weight"] = rows.contiguous()
    return found


def logits_of(engine: Any, tokens: Sequence[int]) -> torch.Tensor:
    fed = Fed(engine, tokens[: len(PROMPT)], tokens[len(PROMPT) :])
    fed.decode(len(tokens) - len(PROMPT))
    return fed.logits[-1].float()


def test_the_engine_computes_what_the_codes_say(tmp_path: Path) -> None:
    """Beside transformers' eager experts with the decoded weights, in float32."""
    model = made(tmp_path, cache="50%")
    plain = tmp_path / "plain"
    shutil.copytree(model.directory, plain)
    for shard in plain.glob("model-*.safetensors"):
        save_file({name: value.float() for name, value in load_file(shard).items()}, shard, {"format": "pt"})
    experts = [decoded(model.store, "4-hqq", layer) for layer in range(LAYERS)]
    save_file({name: value for layer in experts for name, value in layer.items()}, plain / "experts.safetensors",
              {"format": "pt"})  # fmt: skip
    reference, info = auto_class("qwen3_moe").from_pretrained(plain, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT + DECODED])).logits[0, -1]
    with engine_of(model.blueprint, model.asked) as engine:
        assert engine.plan.slots < engine.plan.all_slots
        found = logits_of(engine, PROMPT + DECODED)
    assert (found - expected).abs().max() < 0.08 * expected.std()  # bfloat16 rounds


def test_an_expert_has_a_place_of_its_own(tmp_path: Path) -> None:
    """On the drive, and of its number a layer before it is another; the checkpoint's own take no room."""
    model = made(tmp_path, preset="hobbit", set={"t1": 0.6, "t2": 0.9, "weights": "1,0,0,0"})
    assert set(model.store.precisions) == {"4-hqq", "2-hqq"}
    for precision in model.store.precisions.values():
        extents = [extent for layer in precision.layers for extent in layer.extents]
        assert len({(each.segments[0].file, each.segments[0].offset) for each in extents}) == LAYERS * 8
        for first, second in zip(precision.layers, precision.layers[1:], strict=False):
            assert all(a.checksum != b.checksum for a, b in zip(first.extents, second.extents, strict=True))
    holes = (model.directory / "experts.safetensors").stat()
    assert holes.st_size > 2 * LAYERS * 8 * 3 * 64 * 32
    assert holes.st_blocks * 512 < holes.st_size / 2


def test_what_a_preset_does_not_ask_for_goes(tmp_path: Path) -> None:
    model = made(tmp_path, preset="hobbit", set={"t1": 0.6, "t2": 0.9, "weights": "1,0,0,0"})
    asked = settings(device="cpu", bits=4, dense_bits=16, store=model.asked.store, preset="io-qexp")
    assert set(fill(model.blueprint, asked, kept=("4-hqq",)).precisions) == {"4-hqq", "4-linear"}
    files = {path.name.partition("-layer")[0] for path in (tmp_path / "store").glob("experts-*")}
    assert files == {"experts-4-hqq", "experts-4-linear"}


def test_tokens_are_routed_as_they_were_recorded(tmp_path: Path) -> None:
    config = config_of(KIND, LAYERS, **{**SMALL[KIND], "hidden_size": 512, "num_experts_per_tok": 3})
    routing = routing_for(write_trace(tmp_path / "t.trace", recorded()), config)
    model = made(tmp_path, config, routing, cache="50%")
    with engine_of(model.blueprint, model.asked) as engine:
        fed = Fed(engine, routing.tokens(3), routing.tokens(9, 3))
        for token in routing.tokens(9, 3):
            choices = Choices()
            engine.observe(choices)
            fed.feed(token)
            engine.observe(None)
            assert [set(choices.chosen[layer]) for layer in range(LAYERS)] == [set(e) for e in routing.chosen[token]]


def test_a_drive_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    model = made(tmp_path)
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda folder: usage._replace(free=100 << 10))
    with pytest.raises(PackError, match=r"are to be written into .*, 100 KiB are free; free some, or name another"):
        write(KIND, tmp_path / "other", config_of(KIND, LAYERS, **SMALL[KIND]))
    asked = settings(device="cpu", bits=8, dense_bits=16, store=model.asked.store)
    with pytest.raises(PackError, match="100 KiB are free"):
        fill(model.blueprint, asked)
    assert not list(tmp_path.glob("*/experts-8-*"))
    assert not (tmp_path / "other").exists()
