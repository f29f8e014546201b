"""Quantisers that are calibrated: what experts get on a text, experts packed with it, `tiermoe pack` around both."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from commands import Command
from sources import EXPERTS, RandomExperts, contents, empty_store
from test_pack import dies_at, in_a_process_of_its_own
from tiermoe.engine import expert_inputs
from tiermoe.engine.expert_inputs import FOLDER, Text, forget_inputs, recorded_inputs, shipped_text
from tiermoe.errors import PackError
from tiermoe.formats import encode_experts
from tiermoe.formats.gptq import UniformLevels, solve
from tiermoe.formats.pack import pack_experts
from tiermoe.formats.store import Store, open_store
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.prepare_store import open_or_create, store_root

PARTS = {"gate_up_proj": 64, "down_proj": 48}


class SomeInputs:
    """`encode_experts.Inputs` of random tokens."""

    def __init__(self, made_from: str = "a text") -> None:
        self.made_from = made_from

    def moments(self, layer: int, expert: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(layer * 100 + expert)
        inputs = {part: torch.randn(200, columns, generator=generator) for part, columns in PARTS.items()}
        return {part: values.t() @ values for part, values in inputs.items()}


def stored_fields(store: Store, key: str, layer: int, expert: int) -> dict[str, dict[str, torch.Tensor]]:
    (segment,) = store.precisions[key].layers[layer].extents[expert].segments
    content = Path(segment.file).read_bytes()[segment.offset : segment.offset + segment.nbytes]
    return store.expert_format(key, layer).stored.views(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def packed(root: Path, bits: int = 4, source: RandomExperts | None = None, workers: int = 1, **named: Any) -> None:
    store = open_store(root) if (root / "store.json").exists() else empty_store(root)
    inputs = SomeInputs(**named)
    pack_experts(store, source or RandomExperts(), bits, "gptq", workers=workers, inputs=inputs)


@pytest.mark.parametrize("bits", [4, 2])
def test_experts_are_packed_as_solved(bits: int, tmp_path: Path) -> None:
    """The matrix of 64 columns; that of 48 has no such format and takes 8 bits, as without inputs."""
    packed(tmp_path, bits)
    store, source = open_store(tmp_path), RandomExperts()
    assert store.precisions[f"{bits}-gptq"].made_from == "a text"
    for expert in range(EXPERTS):
        tensors = source.read(1, expert)
        fields = stored_fields(store, f"{bits}-gptq", 1, expert)
        form = store.expert_format(f"{bits}-gptq", 1)
        moments = SomeInputs().moments(1, expert, tensors)
        wanted = solve(tensors["gate_up_proj"], moments["gate_up_proj"], UniformLevels(bits, 64, torch.bfloat16)).values
        decoded = form.encodings["gate_up_proj"].decode(fields["gate_up_proj"], 96, 64, torch.float32)
        assert torch.equal(decoded, wanted)
        assert form.encodings["down_proj"].bits == 8
        assert torch.equal(fields["bias"]["weight"], tensors["bias"])
        error = store.precisions[f"{bits}-gptq"].layers[1].errors[expert]
        down = form.encodings["down_proj"].decode(fields["down_proj"], 64, 48, torch.bfloat16).float()
        apart = (decoded - tensors["gate_up_proj"]).square().sum() + (down - tensors["down_proj"]).square().sum()
        size = sum(tensors[part].float().square().sum() for part in PARTS)
        assert error == pytest.approx(float((apart / size).sqrt()), rel=1e-3)


def test_workers_and_interruptions_change_nothing(tmp_path: Path) -> None:
    packed(tmp_path / "whole")
    packed(tmp_path / "several", workers=3)
    empty_store(tmp_path / "killed")
    status = in_a_process_of_its_own(lambda: packed(tmp_path / "killed", source=RandomExperts(before=dies_at(5))))
    assert os.WTERMSIG(status) == signal.SIGKILL
    again = RandomExperts()
    packed(tmp_path / "killed", source=again)
    assert {layer for layer, _ in again.reads} == {1, 2}
    whole = contents(tmp_path / "whole")
    assert contents(tmp_path / "several") == contents(tmp_path / "killed") == whole


def test_layers_of_another_text_are_packed_anew(tmp_path: Path) -> None:
    empty_store(tmp_path)
    in_a_process_of_its_own(lambda: packed(tmp_path, source=RandomExperts(before=dies_at(9))))
    again = RandomExperts()
    packed(tmp_path, source=again, made_from="another text")
    assert {layer for layer, _ in again.reads} == {0, 1, 2}
    assert open_store(tmp_path).precisions["4-gptq"].made_from == "another text"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_moments_are_those_of_transformers(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what its experts modules get, and of what lies between an expert's matrices, by its eager code."""
    monkeypatch.setattr(expert_inputs, "SEEN", 0)
    directory = tiny_model(family, torch.float32)
    blueprint = inspect_model(directory, family, tmp_path)
    store = open_or_create(blueprint, store_root(blueprint, tmp_path))
    ids = torch.randint(3, 128, (20, 32), generator=torch.Generator().manual_seed(0))
    inputs = recorded_inputs(blueprint, store, Text("ids", ids), lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager", dtype=torch.float32)
    modules = [model.get_submodule(layer.name) for layer in blueprint.layers]
    got: list[list[torch.Tensor]] = [[] for _ in modules]
    for number, module in enumerate(modules):
        module.register_forward_pre_hook(lambda _, args, at=number: got[at].extend(args))
    with torch.no_grad():
        model(ids)
    for layer, module in enumerate(modules):
        hidden, index, weights = (values.reshape(-1, values.shape[-1]) for values in got[layer][:3])
        assert len(hidden) == ids.numel()
        for expert in (0, 5):
            tensors = blueprint.experts.read(layer, expert)
            found = inputs.moments(layer, expert, tensors)
            tokens, ranks = (index == expert).nonzero(as_tuple=True)
            x, gate = hidden[tokens], weights[tokens, ranks][:, None]
            inner = _inner(module, expert, x)
            first, second = found.values()
            torch.testing.assert_close(first, (x * gate).t() @ (x * gate), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(second, (inner * gate).t() @ (inner * gate), rtol=1e-3, atol=1e-4)


def _inner(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if getattr(module, "is_transposed", False):
            features = x @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert]
        else:
            features = x @ module.gate_up_proj[expert].t()
        return module._apply_gate(features)


def test_rare_experts_take_other_tokens_too(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """No expert is without moments, and a recording that is there is used again until it is forgotten."""
    directory = tiny_model("qwen3_moe", torch.float32)
    blueprint = inspect_model(directory, "tiny", tmp_path)
    store = open_or_create(blueprint, store_root(blueprint, tmp_path))
    ids = torch.randint(3, 128, (1, 8), generator=torch.Generator().manual_seed(0))
    runs: list[str] = []
    for _ in range(2):
        inputs = recorded_inputs(blueprint, store, Text("ids", ids), lambda what, *_: runs.append(what))
        for expert in range(8):
            found = inputs.moments(0, expert, blueprint.experts.read(0, expert))
            assert all(float(moments.diagonal().sum()) > 0 for moments in found.values())
    assert runs.count("running the calibration text") == 1
    recorded_inputs(blueprint, store, Text("others", ids.flip(1)), lambda what, *_: runs.append(what))
    assert runs.count("running the calibration text") == 2
    forget_inputs(store.root)
    assert not (store.root / FOLDER).exists()


class Interrupted(BaseException):
    pass


def test_a_recording_goes_on_where_it_was_interrupted(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes as without the interruption, though the step that was interrupted had left some of its own."""
    monkeypatch.setattr(expert_inputs, "TOGETHER", 2)
    directory = tiny_model("qwen3_moe", torch.float32)
    text = Text("ids", torch.randint(3, 128, (7, 8), generator=torch.Generator().manual_seed(0)))

    def recorded(root: Path, stop: int | None = None) -> list[int]:
        """The windows after each step; stop: the step that is interrupted after its first layer."""
        blueprint = inspect_model(directory, "tiny", root)
        store = open_or_create(blueprint, store_root(blueprint, root))
        steps: list[int] = []

        def interrupted(descriptor: int) -> None:
            if len(steps) == stop:  # what a window's first layer takes in is in its file
                raise Interrupted

        def progress(what: str, done: int, _: int) -> None:
            if what == "running the calibration text":
                steps.append(done)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", interrupted)
            recorded_inputs(blueprint, store, text, progress)
        return steps

    assert recorded(tmp_path / "whole") == [2, 4, 6, 7]
    with pytest.raises(Interrupted):
        recorded(tmp_path / "broken", stop=2)
    assert recorded(tmp_path / "broken") == [6, 7]
    assert recorded(tmp_path / "broken") == []
    whole, broken = (contents(next((tmp_path / name).rglob(FOLDER))) for name in ("whole", "broken"))
    assert whole == broken
    short = next((tmp_path / "broken").rglob("layer001.index"))
    short.write_bytes(short.read_bytes()[:-4])  # something else has been here: nothing of it is believed
    assert recorded(tmp_path / "broken") == [2, 4, 6, 7]


def test_a_disk_without_room(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused beforehand counts the experts at 8 bits too; a disk that fills is said in words."""
    directory = tiny_model("mixtral", torch.float32)
    blueprint = inspect_model(directory, "tiny", tmp_path)
    store = open_or_create(blueprint, store_root(blueprint, tmp_path))
    text = Text("ids", torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(0)))
    with monkeypatch.context() as patched:
        patched.setattr(type(blueprint.experts), "in_place", lambda *_: None)
        patched.setattr(expert_inputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
        with pytest.raises(PackError, match=r"of the experts' inputs in .*, and .* of experts at 8 bits to run"):
            recorded_inputs(blueprint, store, text, lambda *_: None)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recorded_inputs(blueprint, store, text, lambda *_: None)  # experts are packed from now on
    forget_inputs(store.root)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PackError, match=r"the disk filled while packing into .*; free some space and run again"):
            recorded_inputs(blueprint, store, text, lambda *_: None)
    recorded_inputs(blueprint, store, text, lambda *_: None)


def test_no_more_experts_are_solved_at_a_time_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    in_order = encode_experts.in_order

    def counted(work: Any, count: int, workers: int) -> Any:
        together.append(workers)
        return in_order(work, count, workers)

    monkeypatch.setattr(encode_experts, "in_order", counted)
    packed(tmp_path / "much", workers=3)
    monkeypatch.setattr(encode_experts, "available_memory", lambda: (200_000, "that the machine has free"))
    packed(tmp_path / "little", workers=3)
    assert set(together[:3]) == {3}
    assert set(together[3:]) == {1}


def test_pack_calibrates(
    tiermoe_: Command, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose tokens are single letters."""
    model = tiny_model("qwen3_moe", torch.float32)
    for name in ("TOKENS", "LEAST_TOKENS"):
        monkeypatch.setattr(expert_inputs, name, 1024)
    text, other, short = (tmp_path / name for name in ("text.txt", "other.txt", "short.txt"))
    text.write_text(shipped_text()[:2000])
    other.write_text(shipped_text()[2000:4000])
    short.write_text(shipped_text()[:900])
    store = tmp_path / "store"
    words = ("pack", model, "--out", store, "--dense-bits", "16", "--calibration-text")
    cause = tiermoe_("run", model, "Once", "--quantizer", "gptq", "--store", store, "--max-tokens", "2").cause
    assert "tiermoe pack MODEL --bits 4 --quantizer gptq packs them" in cause
    assert "short.txt has 768 tokens" in tiermoe_(*words, short, "--quantizer", "gptq").cause
    assert "--calibration-text is for --quantizer gptq or gptq-nonlinear" in tiermoe_(*words, text).cause
    outcome = tiermoe_(*words, text, "--quantizer", "gptq-nonlinear")
    assert outcome.code == 0, outcome.err
    assert "running the calibration text: done" in outcome.err
    table = open_store(store)
    precision = table.precisions["4-gptq-nonlinear"]
    assert precision.made_from.startswith("1024 tokens, ")
    assert all(name.startswith("nl4/") for layer in precision.layers for name in layer.encodings.values())
    assert not (store / FOLDER).exists()
    again = tiermoe_(*words, text, "--quantizer", "gptq-nonlinear")
    assert (again.code, "running" in again.err) == (0, False)
    refused = tiermoe_(*words, other, "--quantizer", "gptq-nonlinear").cause
    assert f"holds 4-gptq-nonlinear as calibrated on {precision.made_from}; --force packs it anew" in refused
    ran = tiermoe_("run", model, "Once", "--quantizer", "gptq-nonlinear", "--dense-bits", "16", "--store", store,
                   "--max-tokens", "4", "--temperature", "0")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out


def test_the_shipped_text_is_not_the_held_out_one(shipped: Path) -> None:
    held_out = (shipped.parents[1] / "data" / "heldout.txt").read_text().split("\n")
    assert not {line for line in shipped_text().split("\n") if len(line) > 20} & set(held_out)
