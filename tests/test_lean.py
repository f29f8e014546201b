"""A start over our own decoder alone: no modelling code is imported, and the logits are those behind a transformers
model, bit for bit."""

from __future__ import annotations

import json
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
from parity import close, logits
from patience import PATIENCE_S
from tiermoe.batch import Batch, decode, prompt
from tiermoe.config import settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import load_blueprint, resolve_for, start, starts_lean
from tiermoe.errors import StoreError
from tiermoe.formats.outline import NAME, Origin, read_outline, write_outline
from tiermoe.kernels.gates import GATES, gate_named, other_gate
from tiermoe.model import prepare_store
from tiermoe.model.hf import configs, skeleton
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.prepare_store import found_store, open_or_create, store_root
from tiermoe.model.stored_weights import EmbeddingOnDisk, StoredWeights
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
        return loaded_once(directory, tmp_path / "store", bits, dense_bits)

    return make


def loaded_once(directory: Path, store: Path, bits: int, dense_bits: int) -> Case:
    made = Case(directory, store, {"bits": bits, "dense_bits": dense_bits})
    assert not made.is_lean()
    made.behind_a_model().close()
    return made


@pytest.fixture
def qwen(case: Callable[..., Case]) -> Case:
    return case("qwen3_moe")


def all_logits(engine: Engine) -> torch.Tensor:
    """(tokens, vocabulary) of a prompt and of tokens decoded after it. Closes the engine."""
    cache = engine.new_cache(1, len(IDS))
    slab = cache.open()
    found = [engine.step(Batch((prompt(slab, IDS[:-DECODED]),)), cache, every=True)]
    for at in range(len(IDS) - DECODED, len(IDS)):
        found.append(engine.step(Batch((decode(slab, at, IDS[at]),)), cache))
    engine.close()
    return torch.cat(found)


# the same bits


AS_PUBLISHED = ("deepseek_v3", "gpt_oss", "mixtral", "nemotron_h", "qwen3_next")
"""Families that run at 16 bits too; `test_tensors_are_those_that_transformers_loads` has the weights of all."""


@pytest.mark.parametrize(
    ("family", "bits"), [*((family, 4) for family in OWN_DECODERS), *((family, 16) for family in AS_PUBLISHED)]
)
def test_every_decoder_gives_the_same_bits(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, bits: int
) -> None:
    this = Case(tiny_model(family, torch.bfloat16), tmp_path, {"bits": bits, "dense_bits": bits})
    assert not this.is_lean()
    behind = all_logits(this.behind_a_model())
    assert torch.equal(all_logits(this.alone()), behind)


@pytest.mark.parametrize("family", OWN_DECODERS)
def test_tensors_are_those_that_transformers_loads(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    this = Case(tiny_model(family, torch.bfloat16), tmp_path, {"bits": 16, "dense_bits": 16})
    model = load_blueprint(this.inspect(), this.settings)
    blueprint = this.inspect()
    weights = StoredWeights(blueprint, model.tiermoe.store, None, False)
    loaded = model.state_dict()
    assert loaded.keys() == blueprint.outline.tensors.keys()
    for path, tensor in loaded.items():
        assert weights.tensor(path).dtype == tensor.dtype, path
        assert torch.equal(weights.tensor(path), tensor), path
        assert weights.has(path)
    model.tiermoe.close()


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
    this = replace(this, store=this.store / "another")
    this.behind_a_model().close()
    assert torch.equal(all_logits(this.alone()), all_logits(this.behind_a_model()))


def test_a_bias_that_stays_in_float32_loses_nothing(case: Callable[..., Case]) -> None:
    """DeepSeek-V3 publishes its correction in float32 beside weights in bfloat16, and chooses experts by it."""
    this, name = case("deepseek_v3", torch.bfloat16), "e_score_correction_bias"
    file = this.directory / "model.safetensors"
    tensors = load_file(file)
    biases = {key: torch.rand(tensor.shape) for key, tensor in tensors.items() if key.endswith(name)}
    assert biases
    save_file(tensors | biases, file, {"format": "pt"})
    this = replace(this, store=this.store / "wide")
    model = load_blueprint(this.inspect(), this.settings)
    state, plain = model.state_dict(), oracle(this.directory, "deepseek_v3", torch.bfloat16).state_dict()
    for key, bias in biases.items():
        assert torch.equal(state[key], bias)
        assert torch.equal(plain[key], bias)
    model.tiermoe.close()
    assert torch.equal(all_logits(this.alone()), all_logits(this.behind_a_model()))


def test_an_embedding_left_on_disk_gives_the_same_bits(case: Callable[..., Case]) -> None:
    blueprint = case("mixtral", torch.float32).inspect()
    store = open_or_create(blueprint, store_root(blueprint, None))
    ids = torch.tensor(IDS)
    apart, whole = (StoredWeights(blueprint, store, None, on_disk) for on_disk in (True, False))
    found = apart.embedding("model.embed_tokens")
    assert isinstance(found, EmbeddingOnDisk)
    assert torch.equal(found(ids), whole.embedding("model.embed_tokens")(ids))


def test_it_computes_what_transformers_does(case: Callable[..., Case]) -> None:
    this = case("qwen3_moe", torch.float32)
    plain = oracle(this.directory, "qwen3_moe", torch.float32)
    assert close(all_logits(this.alone())[None], logits(plain, "qwen3_moe", torch.tensor([IDS])))


# when it may


@pytest.mark.parametrize(
    "changes", [{"decoder": "generic"}, {"bits": 8, "dense_bits": 16}, {"bits": 16, "dense_bits": 8}]
)
def test_what_needs_more_is_not_started_so(qwen: Case, changes: dict[str, Any]) -> None:
    assert qwen.is_lean()
    other = replace(qwen, options=qwen.options | changes)
    assert not other.is_lean()
    engine = start(other.inspect(), other.settings)  # behind a transformers model, whose engine it is
    assert all_logits(engine).shape == (len(IDS), 128)


def test_families_without_a_decoder_are_not_started_so(case: Callable[..., Case]) -> None:
    assert not case("switch_transformers").is_lean()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("olmoe", {"hidden_act": "gelu_new"}),
        ("gemma4_text", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}),
        ("olmoe", {"hidden_act": "gelu"}),  # which the decoder takes, but whose experts' gate has no name
    ],
)
def test_a_config_that_it_cannot_compute_is_not_started_so(
    case: Callable[..., Case], family: str, changes: dict[str, Any]
) -> None:
    assert not case(family, **changes).is_lean()


@pytest.mark.parametrize("lean", [True, False])
def test_memory_of_activations_is_kept_as_planned(qwen: Case, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(process_memory, "keep_activations", lambda planned, idle: told.append((planned, idle)))
    engine = qwen.alone() if lean else qwen.behind_a_model()
    assert told == [(engine.plan.activations, process_memory.ACTIVATIONS_HEAP)]
    engine.close()


@pytest.mark.parametrize("lean", [True, False])
def test_a_table_that_lacks_nothing_is_read_once(qwen: Case, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    open_store = prepare_store.open_store
    monkeypatch.setattr(prepare_store, "open_store", lambda root: read.append(root) or open_store(root))
    engine = start(qwen.inspect(), qwen.settings) if lean else qwen.behind_a_model()
    engine.close()
    assert read == [qwen.store]


@pytest.mark.parametrize("family", [*OWN_DECODERS, "switch_transformers"])
def test_a_model_s_class_is_known_without_making_one(tiny_model: Callable[..., Path], family: str) -> None:
    found = inspect_model(tiny_model(family, torch.bfloat16), "tiny")
    assert found.model_class is type(found.skeleton)


def test_a_model_is_loaded_without_another_one_made(qwen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is packed and the outline says the rest."""
    monkeypatch.setattr(skeleton, "Skeleton", lambda *_: pytest.fail("a skeleton is made"))
    qwen.behind_a_model().close()


def test_a_store_without_an_outline_gets_one(qwen: Case) -> None:
    (qwen.store / NAME).unlink()
    assert not qwen.is_lean()
    start(qwen.inspect(), qwen.settings).close()
    assert qwen.is_lean()


def test_packing_leaves_an_outline(case: Callable[..., Case], tiermoe_: Any, tmp_path: Path) -> None:
    directory = write(tmp_path / "packed", "mixtral", torch.bfloat16)
    assert tiermoe_("pack", directory, "--bits", "4", "--out", tmp_path / "out").code == 0
    assert Case(directory, tmp_path / "out", {"bits": 4}).is_lean()


def test_a_store_that_is_made_anew_keeps_an_outline(qwen: Case) -> None:
    (qwen.store / "store.json").write_text("torn")
    blueprint = qwen.inspect()
    assert blueprint.known is not None
    open_or_create(blueprint, qwen.store, force=True)
    assert qwen.inspect().known == blueprint.known


def test_an_outline_of_another_transformers_is_passed_over(qwen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "transformers_version", lambda: "0.0")
    assert not qwen.is_lean()
    start(qwen.inspect(), qwen.settings).close()
    assert qwen.is_lean()
    monkeypatch.undo()
    assert not qwen.is_lean()


def test_an_outline_of_another_checkpoint_is_passed_over(qwen: Case) -> None:
    config = json.loads((qwen.directory / "config.json").read_text())
    (qwen.directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert not qwen.is_lean()
    with pytest.raises(StoreError, match="another checkpoint"):
        start(qwen.inspect(), qwen.settings)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "tiermoe-outline"}', "null"])
def test_a_torn_outline_is_passed_over(qwen: Case, content: str) -> None:
    (qwen.store / NAME).write_text(content)
    assert not qwen.is_lean()


@pytest.mark.parametrize("missing", ["layers", "tensors", "tied", "gate", "whole", "made"])
def test_an_outline_that_lacks_something_is_passed_over(qwen: Case, missing: str) -> None:
    document = json.loads((qwen.store / NAME).read_text())
    del document[missing]
    (qwen.store / NAME).write_text(json.dumps(document))
    assert not qwen.is_lean()


@pytest.mark.parametrize("family", [*OWN_DECODERS, "switch_transformers"])
def test_an_outline_is_read_as_it_was_written(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    outline = inspect_model(tiny_model(family, torch.bfloat16), "tiny").outline
    write_outline(tmp_path, Origin("abc", "5"), outline)
    assert read_outline(tmp_path, Origin("abc", "5")) == outline
    assert read_outline(tmp_path, Origin("abd", "5")) is None
    assert read_outline(tmp_path, Origin("abc", "6")) is None


def test_checkpoints_that_were_moved_are_not_started_so(case: Callable[..., Case], tmp_path: Path) -> None:
    this = case("granitemoe")  # at 16 bits its experts are served from the checkpoint
    moved = replace(this, directory=this.directory.rename(tmp_path / "moved"))
    assert not moved.is_lean()
    moved.behind_a_model().close()


def test_gates_have_names() -> None:
    for name, kind in GATES.items():
        gate = gate_named(name, *range(7, 7 + kind.settings))
        assert gate_named(*json.loads(json.dumps(gate.stored))) == gate
    assert other_gate("SwitchExperts", torch.nn.functional.silu).stored is None
    for wrong in (("another",), ("silu", 7.0), ("clamped", 7.0)):
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


def test_commands_import_no_modelling_code(qwen: Case, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words that are told again and again. " * 30)
    shared = ["--store", qwen.store, "--bits", "16", "--memory", "4GiB", "--threads", "1"]
    short, sizes = ["--tokens", "16", "--prompt", "4"], ["--window", "8", "--reference", "16bit"]
    run = ["run", qwen.directory, "hi", "--max-tokens", "2", *shared]
    (first,) = imported(run)  # keeps the tokenizer
    assert first == ["transformers"]
    found = imported(
        run,
        ["chat", qwen.directory, "--max-tokens", "2", *shared],
        ["plan", qwen.directory, *shared[:-2]],
        ["eval", qwen.directory, "--text", text, *short, *sizes, *shared],
        ["trace", qwen.directory, "--text", text, *short, "--sequence", "16", "--out", tmp_path / "trace", *shared],
        ["run", qwen.directory, "hi", "--decoder", "generic", *shared],
    )
    assert found[:-1] == [[]] * 3 + [["transformers"]] * 2
    assert "transformers.modeling_utils" in found[-1]


def test_the_second_run_of_the_shipped_model_imports_no_transformers(tmp_path: Path) -> None:
    run = ["run", SHIPPED, "Once", "--max-tokens", "1", "--store", tmp_path, "--memory", "4GiB"]
    (first,), (second,) = imported(run), imported(run)
    assert "transformers" in first
    assert second == []
