"""A start over our own decoder alone: no modelling code is imported, and the logits are those behind a transformers
model, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import SHIPPED
from patience import PATIENCE_S
from small_engines import logits_of_steps
from tiermoe.config import settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import load_blueprint, resolve_for, start, starts_lean
from tiermoe.errors import StoreError
from tiermoe.formats.outline import NAME
from tiermoe.kernels.gates import gate_named
from tiermoe.model import prepare_store
from tiermoe.model.hf import configs, skeleton
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.prepare_store import found_store, open_or_create
from tiermoe.model.stored_weights import StoredWeights
from tiermoe.platform import process_memory
from tiny import OWN_DECODERS, oracle, write

IDS = [5, 9, 31, 77, 12, 64, 100, 3, 18, 42, 7]
DECODED = 4  # of them


@dataclass
class Case:
    """A tiny checkpoint and its store."""

    directory: Path
    store: Path
    options: dict[str, Any]

    def inspect(self) -> Blueprint:
        return inspect_model(self.directory, "tiny", self.store)

    @property
    def settings(self) -> Any:
        return settings(
            **{"store": self.store, "warm": False, "lanes": 1, "memory": "4GiB", "device": "cpu", **self.options}
        )

    def is_lean(self) -> bool:
        blueprint = self.inspect()
        return starts_lean(blueprint, resolve_for(blueprint, self.settings), found_store(blueprint, self.store))

    def behind_a_model(self) -> Engine:
        engine: Engine = load_blueprint(self.inspect(), self.settings).tiermoe
        return engine

    def alone(self) -> Engine:
        assert self.is_lean()
        return start(self.inspect(), self.settings)


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    """(family, dtype, bits, dense bits, what `tiny.write` takes) → a case that has been loaded once."""

    def make(
        family: str, dtype: torch.dtype = torch.bfloat16, bits: int = 16, dense_bits: int = 16, **changes: Any
    ) -> Case:
        directory = write(tmp_path / "model", family, dtype, **changes)
        return loaded_once(Case(directory, tmp_path / "store", {"bits": bits, "dense_bits": dense_bits}))

    return make


def loaded_once(made: Case) -> Case:
    assert not made.is_lean()
    made.behind_a_model().close()
    return made


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case for tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("ready")
    directory = write(folder / "model", "qwen3_moe", torch.bfloat16)
    return loaded_once(Case(directory, folder / "store", {"bits": 16, "dense_bits": 16}))


def all_logits(engine: Engine) -> torch.Tensor:
    """(tokens, vocabulary) of a prompt and of tokens decoded after it. Closes the engine."""
    found = logits_of_steps(engine, IDS, len(IDS) - DECODED, every=True)
    engine.close()
    return found


# the same bits


PACKED = (
    "deepseek_v3", "deepseek_v4", "gemma4_text", "gpt_oss", "granitemoehybrid", "mixtral", "nemotron_h", "qwen3_next",
    "qwen4_exp_text",
)  # fmt: skip
"""Families that run packed too: of each kind of attention, and of dense parts beside experts."""


@pytest.mark.parametrize(
    ("family", "bits"), [*((family, 16) for family in OWN_DECODERS), *((family, 4) for family in PACKED)]
)
def test_every_decoder_has_the_tensors_and_the_bits_that_it_has_behind_a_model(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, bits: int
) -> None:
    this = Case(tiny_model(family, torch.bfloat16), tmp_path, {"bits": bits, "dense_bits": bits})
    assert not this.is_lean()
    model = load_blueprint(this.inspect(), this.settings)
    blueprint = this.inspect()
    assert blueprint.model_class is type(blueprint.skeleton)  # known without making one
    if bits == 16:
        weights = StoredWeights(blueprint, model.tiermoe.store, None, False)
        loaded = model.state_dict()
        assert loaded.keys() == blueprint.outline.tensors.keys()
        for path, tensor in loaded.items():
            assert weights.has(path)
            assert weights.tensor(path).dtype == tensor.dtype, path
            assert torch.equal(weights.tensor(path), tensor), path
    behind = all_logits(model.tiermoe)
    assert torch.equal(all_logits(this.alone()), behind)


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("deepseek_v3", torch.float32, {}),
        ("deepseek_v3", torch.float16, {}),  # whose routers' bias transformers keeps in float32
        ("deepseek_v2", torch.bfloat16, {"q_lora_rank": None}),
        ("qwen3_moe", torch.bfloat16, {"tie_word_embeddings": True}),
        ("qwen2_moe", torch.float32, {"attention_bias": True}),
    ],
)
def test_other_checkpoints_give_the_same_bits(
    case: Callable[..., Case], family: str, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    this = case(family, dtype, **changes)
    assert torch.equal(all_logits(this.alone()), all_logits(this.behind_a_model()))


def test_tensors_of_another_dtype_than_the_models_give_the_same_bits(case: Callable[..., Case]) -> None:
    this = case("glm4_moe", torch.float32)
    config = json.loads((this.directory / "config.json").read_text())
    (this.directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    this = loaded_once(replace(this, store=this.store / "another"))
    assert torch.equal(all_logits(this.alone()), all_logits(this.behind_a_model()))


def test_a_bias_that_stays_in_float32_loses_nothing(tmp_path: Path) -> None:
    """DeepSeek-V3 publishes its correction in float32 beside weights in bfloat16, and chooses experts by it."""
    directory, name = write(tmp_path / "model", "deepseek_v3", torch.bfloat16), "e_score_correction_bias"
    file = directory / "model.safetensors"
    tensors = load_file(file)
    biases = {key: torch.rand(tensor.shape) for key, tensor in tensors.items() if key.endswith(name)}
    assert biases
    save_file(tensors | biases, file, {"format": "pt"})
    this = Case(directory, tmp_path / "store", {"bits": 16, "dense_bits": 16})
    model = load_blueprint(this.inspect(), this.settings)
    state, plain = model.state_dict(), oracle(directory, "deepseek_v3", torch.bfloat16).state_dict()
    for key, bias in biases.items():
        assert torch.equal(state[key], bias)
        assert torch.equal(plain[key], bias)
    behind = all_logits(model.tiermoe)
    assert torch.equal(all_logits(this.alone()), behind)


# when it may


@pytest.mark.parametrize(
    "changes", [{"decoder": "generic"}, {"bits": 8, "dense_bits": 16}, {"bits": 16, "dense_bits": 8}]
)
def test_what_needs_more_is_not_started_so(ready: Case, changes: dict[str, Any], tmp_path: Path) -> None:
    assert ready.is_lean()
    store = shutil.copytree(ready.store, tmp_path / "store")
    other = replace(ready, store=store, options=ready.options | changes)
    assert not other.is_lean()
    engine = start(other.inspect(), other.settings)  # behind a transformers model, whose engine it is
    assert all_logits(engine).shape == (len(IDS), 128)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("switch_transformers", {}),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("olmoe", {"hidden_act": "gelu_new"}),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}),
        ("olmoe", {"hidden_act": "gelu"}),  # which the decoder takes, but whose experts' gate has no name
    ],
)
def test_what_it_cannot_compute_is_not_started_so(
    case: Callable[..., Case], family: str, changes: dict[str, Any]
) -> None:
    assert not case(family, **changes).is_lean()


@pytest.mark.parametrize("lean", [True, False])
def test_a_start_reads_one_table_makes_one_model_and_keeps_the_memory_that_is_planned(
    ready: Case, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is packed and the outline says the rest."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(process_memory, "keep_activations", lambda planned, idle: told.append((planned, idle)))
    read: list[Path] = []
    open_store = prepare_store.open_store
    monkeypatch.setattr(prepare_store, "open_store", lambda root: read.append(root) or open_store(root))
    monkeypatch.setattr(skeleton, "Skeleton", lambda *_: pytest.fail("a skeleton is made"))
    engine = start(ready.inspect(), ready.settings) if lean else ready.behind_a_model()
    engine.close()
    assert read == [ready.store]
    assert told == [(engine.plan.activations, process_memory.ACTIVATIONS_HEAP)]


def test_packing_leaves_an_outline(case: Callable[..., Case], tiermoe_: Any, tmp_path: Path) -> None:
    directory = write(tmp_path / "packed", "mixtral", torch.bfloat16)
    assert tiermoe_("pack", directory, "--bits", "4", "--out", tmp_path / "out").code == 0
    assert Case(directory, tmp_path / "out", {"bits": 4}).is_lean()


def test_an_outline_that_is_not_whole_is_passed_over(ready: Case) -> None:
    file = ready.store / NAME
    document = json.loads(file.read_text())
    wrong = ["", "[]", "{}", '{"format": "tiermoe-outline"}', "null"]
    for missing in ("layers", "tensors", "tied", "gate", "whole", "made"):
        wrong.append(json.dumps({name: value for name, value in document.items() if name != missing}))
    for content in wrong:
        file.write_text(content)
        assert not ready.is_lean(), content
    file.write_text(json.dumps(document))
    assert ready.is_lean()


def test_an_outline_that_is_missing_or_of_another_transformers_is_made_anew(
    case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    this = case("qwen3_moe")
    (this.store / NAME).unlink()
    assert not this.is_lean()
    start(this.inspect(), this.settings).close()
    assert this.is_lean()
    monkeypatch.setattr(configs, "transformers_version", lambda: "0.0")
    assert not this.is_lean()
    start(this.inspect(), this.settings).close()
    assert this.is_lean()
    monkeypatch.undo()
    assert not this.is_lean()


def test_a_store_that_is_made_anew_keeps_its_outline_and_another_checkpoint_is_told_from_it(
    case: Callable[..., Case],
) -> None:
    this = case("qwen3_moe")
    (this.store / "store.json").write_text("torn")
    blueprint = this.inspect()
    assert blueprint.known is not None
    open_or_create(blueprint, this.store, force=True)
    assert this.inspect().known == blueprint.known
    config = json.loads((this.directory / "config.json").read_text())
    (this.directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert not this.is_lean()
    with pytest.raises(StoreError, match="another checkpoint"):
        start(this.inspect(), this.settings)


def test_checkpoints_that_were_moved_are_not_started_so(case: Callable[..., Case], tmp_path: Path) -> None:
    this = case("granitemoe")  # at 16 bits its experts are served from the checkpoint
    moved = replace(this, directory=this.directory.rename(tmp_path / "moved"))
    assert not moved.is_lean()
    moved.behind_a_model().close()


@pytest.mark.parametrize("wrong", [("another",), ("silu", 7.0), ("clamped", 7.0)])
def test_a_gate_that_nobody_knows_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="no gate"):
        gate_named(*wrong)


# what it imports

RUN = """
import io, sys, json
from tiermoe.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv, sys.stdin = ["tiermoe", *words], io.StringIO("hi\\n/bye\\n")
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (words, ended.code)
    named = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
    named = [name for name in named if not name.startswith("transformers.models.auto.")]  # tables of names
    more = ("transformers", "transformers.modeling_utils", "torch._dynamo", "sympy")
    found.append(named + [name for name in more if name in sys.modules])
print(json.dumps(found), file=sys.stderr)
"""


def imported(*commands: list[Any]) -> list[list[str]]:
    """What a process of its own had imported of transformers and its modelling code after each of `commands`."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    ended = subprocess.run([sys.executable, "-c", RUN, words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    found: list[list[str]] = json.loads(ended.stderr.splitlines()[-1])
    return found


def test_commands_import_no_modelling_code_and_a_second_run_no_transformers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words that are told again and again. " * 30)
    shared = ["--store", tmp_path / "store", "--bits", "16", "--memory", "4GiB", "--threads", "1"]
    short, sizes = ["--tokens", "16", "--prompt", "4"], ["--window", "8", "--reference", "16bit"]
    run = ["run", SHIPPED, "Once", "--max-tokens", "2", *shared]
    (first,) = imported(run)  # packs, and keeps the tokenizer
    assert "transformers" in first
    found = imported(
        run,
        ["chat", SHIPPED, "--max-tokens", "2", *shared],
        ["plan", SHIPPED, *shared[:-2]],
        ["eval", SHIPPED, "--text", text, *short, *sizes, *shared],
        ["trace", SHIPPED, "--text", text, *short, "--sequence", "16", "--out", tmp_path / "trace", *shared],
        ["run", SHIPPED, "Once", "--max-tokens", "2", "--decoder", "generic", *shared],
    )
    assert found[:-1] == [[]] * 3 + [["transformers"]] * 2
    assert "transformers.modeling_utils" in found[-1]
