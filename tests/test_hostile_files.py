"""Checkpoints, GGUF files, stores and traces that were altered: every command on them works, or ends with one line and
exit code 2, without memory for what is not there."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.gguf_reader import GGUFReader, ReaderField
from safetensors.torch import load_file, save_file

import gguf_files
import tiny
from commands import Command, Outcome
from tiermoe.errors import ConfigError, StoreError, TraceError
from tiermoe.formats.store import open_store
from tiermoe.formats.store_files import cache_folder
from tiermoe.lab.trace import read_trace

Alteration = Callable[[Path], object]

RUN = ("--memory", "4GiB", "--bits", "16", "--max-tokens", "2", "--lanes", "1")
DEEP = "[" * 100_000 + "]" * 100_000


def ends_well(outcome: Outcome) -> str:
    """What a command said that ended as it should: '' where it worked."""
    assert "unforeseen" not in outcome.err
    return outcome.cause if outcome.code else ""


def json_fields(file: str, **fields: Any) -> Alteration:
    def alter(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))

    return alter


def config(**fields: Any) -> Alteration:
    return json_fields("config.json", **fields)


def generation(**fields: Any) -> Alteration:
    return json_fields("generation_config.json", do_sample=True, **fields)


def template(text: str) -> Alteration:
    return json_fields("tokenizer_config.json", chat_template=text)


def content(file: str, text: str) -> Alteration:
    return lambda model: (model / file).write_text(text)


def tensors(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Alteration:
    """The first tensor with `part` in its name becomes another one, or none."""

    def alter(model: Path) -> None:
        path = model / "model.safetensors"
        found: dict[str, Any] = load_file(path)
        name = next(name for name in found if part in name)
        found[name] = change(found[name])
        save_file({name: each.contiguous() for name, each in found.items() if each is not None}, path)

    return alter


def header(change: Callable[[dict[str, Any]], Any]) -> Alteration:
    """The header of the weights, of which change gives a document or its text."""

    def alter(model: Path) -> None:
        path = model / "model.safetensors"
        whole = path.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        made = change(json.loads(whole[8:end]))
        text = made if isinstance(made, bytes) else json.dumps(made).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[end:])

    return alter


def first_entry(**fields: Any) -> Alteration:
    return header(lambda entries: {**entries, "lm_head.weight": {**entries["lm_head.weight"], **fields}})


def index(shard: Any) -> Alteration:
    return content("model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": shard}}))


def vocabulary(model: Path) -> None:
    path = model / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"] = {word: 60 * at for word, at in document["model"]["vocab"].items()}
    path.write_text(json.dumps(document))


ALTERED: dict[str, tuple[Alteration, str]] = {
    "heads": (config(num_attention_heads=8), "q_proj.weight has shape"),
    "no heads": (config(num_attention_heads=0), "cannot be built"),
    "head columns": (config(head_dim=10**9), "says head_dim 1,000,000,000"),
    "negative": (config(head_dim=-1), "cannot be built"),
    "vocabulary": (config(vocab_size=129), "embed_tokens.weight has shape (128, 64)"),
    "layers": (config(num_hidden_layers=10**12), "says num_hidden_layers 1,000,000,000,000"),
    "experts": (config(num_local_experts=9), "has model.layers.0.mlp.experts.gate_up_proj of 8 experts"),
    "many experts": (config(num_experts=1 << 40), "says num_experts"),
    "no expert a token": (config(num_experts_per_tok=0), "says that a token uses 0 of the 8 experts"),
    "nameless experts a token": (config(num_experts_per_tok=None), "cannot read"),
    "columns of experts": (config(moe_intermediate_size=0), "has shape"),
    "activation": (config(hidden_act="nope"), "cannot be built"),
    "rope": (config(rope_parameters={"rope_type": "nope", "rope_theta": 1e4}), "cannot be built"),
    "rope without factor": (config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "cannot"),
    "window": (config(sliding_window=-1, use_sliding_window=True), "sees -1 tokens"),
    "padding": (config(pad_token_id=500), "cannot be built"),
    "end": (config(eos_token_id="x"), "cannot read"),
    "step": (config(decoder_sparse_step=0), "cannot be built"),
    "parts": (config(text_config={"num_experts": 8}), "cannot read"),
    "classes": (config(architectures=3), "cannot read"),
    "kind": (config(model_type=["x"]), "names no model_type"),
    "encoder": (config(is_encoder_decoder=True), "has an encoder and a decoder"),
    "deep config": (config(more=json.loads("[" * 200 + "]" * 200)), "nested deeper"),
    "deeper config": (content("config.json", DEEP), "nested deeper"),
    "deep index": (content("model.safetensors.index.json", DEEP), "nested deeper"),
    "deep header": (header(lambda _: DEEP.encode()), "nested deeper"),
    "deep generation": (content("generation_config.json", DEEP), "nested deeper"),
    "generation": (content("generation_config.json", "[]"), "no JSON object"),
    "temperature": (generation(temperature="x"), "temperature is 'x'"),
    "end of answers": (generation(eos_token_id="x"), "eos_token_id is 'x'"),
    "nucleus": (generation(top_k=2.5), "top_k is 2.5"),
    "penalty": (generation(repetition_penalty="x"), "repetition_penalty is 'x'"),
    "template raises": (template("{{ raise_exception('no \x1b[31mred') }}"), r"no \x1b[31mred"),
    "template": (template("{% for %}"), "chat template does not take this prompt"),
    "template of nothing": (template("{# nothing #}"), "the prompt has no tokens"),
    "template divides": (template("{{ 1 / 0 }}"), "chat template does not take this prompt"),
    "template for ever": (template("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"), "chat template does not take"),
    "token ids": (vocabulary, "the model has 128: they do not belong together"),
    "an expert's tensor": (tensors("experts.3.down", lambda _: None), "down_proj of 7 experts"),
    "a tensor": (tensors("k_proj", lambda _: None), "lacks 1 weights"),
    "turned": (tensors("embed_tokens", lambda tensor: tensor.T), "embed_tokens.weight has shape (64, 128)"),
    "flat": (tensors("q_proj", torch.flatten), "q_proj.weight has shape (4096,)"),
    "an expert's shape": (tensors("experts.0.up", lambda tensor: tensor[:5]), "has shape (37, 64)"),
    "integers": (tensors("norm", lambda tensor: tensor.int()), ""),
    "sizes": (first_entry(shape=[-1, -4096]), "malformed safetensors header"),
    "beyond": (first_entry(data_offsets=[1 << 70, 1 << 71]), "malformed safetensors header"),
    "absolute": (index("/etc/hostname"), "lies outside of its folder"),
    "above": (index("a/../../model.safetensors"), "lies outside of its folder"),
    "windows": (index("C:\\x.safetensors"), "lies outside of its folder"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("hostile") / "model", "qwen3_moe", torch.bfloat16)


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """One to alter."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_checkpoint_works_or_is_refused_in_a_line(name: str, model: Path, tiermoe_: Command) -> None:
    alter, cause = ALTERED[name]
    alter(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends_well(tiermoe_("show", model))
    ends_well(tiermoe_("plan", model, "--memory", "4GiB"))
    said = ends_well(tiermoe_("run", model, "hi", *RUN))
    assert cause in said
    assert bool(cause) == bool(said)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB


def test_links_of_the_hub_s_cache_are_followed(model: Path, tmp_path: Path, tiermoe_: Command) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    names = list(load_file(model / "model.safetensors"))
    shutil.move(model / "model.safetensors", blobs / "abc")
    (model / "part.safetensors").symlink_to(blobs / "abc")
    document = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(document))
    assert tiermoe_("run", model, "hi", *RUN).code == 0


# --- code of the checkpoint's own ---


def brings_code(model: Path, marker: Path) -> None:
    """Both configs name classes in a file that leaves a mark when it is imported."""
    (model / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM\n"
        "class Config(Qwen3MoeConfig): pass\n"
        "class Model(Qwen3MoeForCausalLM): pass\n"
        "class Tokenizer(PreTrainedTokenizerFast): pass\n"
    )
    config(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})(model)
    json_fields("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.Tokenizer"]})(model)


@pytest.mark.parametrize("words", [("show",), ("plan", "--memory", "4GiB"), ("run", "hi", *RUN)])
def test_a_checkpoint_s_own_code_never_runs(
    words: tuple[str, ...], model: Path, tmp_path: Path, tiermoe_: Command
) -> None:
    brings_code(model, tmp_path / "ran")
    outcome = tiermoe_(words[0], model, *words[1:], stdin="y\n" * 5)
    assert outcome.code == 0, outcome.err
    assert "its own code" in outcome.out or "names code of the model's own, which does not run" in outcome.err
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_needs_its_own_code(model: Path, tmp_path: Path, tiermoe_: Command) -> None:
    brings_code(model, tmp_path / "ran")
    json_fields("tokenizer_config.json", tokenizer_class="Tokenizer")(model)
    (model / "tokenizer.json").unlink()
    assert "never runs a checkpoint's code" in tiermoe_("run", model, "hi", *RUN, stdin="y\n" * 5).cause
    config(model_type="their_moe")(model)
    for command in (("show",), ("plan",), ("run", "hi")):
        cause = tiermoe_(command[0], model, *command[1:], stdin="y\n" * 5).cause
        assert "tiermoe never runs a checkpoint's own code" in cause
    assert not (tmp_path / "ran").exists()


# --- GGUF files ---


def entry(kind: int, form: str, *values: Any) -> bytes:
    return struct.pack("<I", kind) + struct.pack(f"<{form}", *values)


def text(value: bytes) -> bytes:
    return entry(8, "Q", len(value)) + value


VALUES = {
    "nothing": entry(4, "I", 0),
    "one": entry(4, "I", 1),
    "seven": entry(4, "I", 7),
    "much": entry(4, "I", 1 << 29),
    "most": entry(10, "Q", (1 << 64) - 1),
    "negative": entry(5, "i", -1),
    "nan": entry(6, "f", float("nan")),
    "text": text(b"x\x1b[31m"),
    "array": entry(9, "IQ", 5, 3) + struct.pack("<3i", 1, 2, 3),
    "deep": struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0),
}
"""Types and values of an entry."""
KEYS = (
    "block_count", "expert_count", "expert_used_count", "embedding_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "context_length", "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip


class GgufHeader:
    """A file with another header: with another entry, or another size of a tensor."""

    def __init__(self, file: Path) -> None:
        reader, self._content = GGUFReader(file), file.read_bytes()
        tensors = {each.name: each.field for each in reader.tensors}
        self._fields, self._data = {**reader.fields, **tensors}, int(reader.data_offset)
        self._end = max(map(end_of, tensors.values()))

    def with_entry(self, key: str, value: bytes) -> bytes:
        field = self._fields[key]
        return self._with(field.offset + 8 + len(key), end_of(field), value)

    def with_first_size(self, tensor: str, size: int) -> bytes:
        at = self._fields[tensor].offset + 8 + len(tensor) + 4  # behind the name and the number of dimensions
        return self._with(at, at + 8, struct.pack("<Q", size))

    def _with(self, begin: int, end: int, value: bytes) -> bytes:
        header = self._content[:begin] + value + self._content[end : self._end]
        return header + bytes(-len(header) % 32) + self._content[self._data :]


def end_of(field: ReaderField) -> int:
    return int(field.offset + sum(part.nbytes for part in field.parts))


@pytest.fixture(scope="module")
def gguf_header(tmp_path_factory: pytest.TempPathFactory, shipped: Path) -> GgufHeader:
    out, kinds = tmp_path_factory.mktemp("hostile") / "model.gguf", gguf_files.kinds("q8_0", "q4_0")
    model = gguf_files.model_of("qwen3_moe")
    gguf_files.write(out, model, "qwen3_moe", kinds, vocabulary=shipped / "tokenizer.json")
    return GgufHeader(out)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", KEYS)
def test_an_altered_gguf_file_works_or_is_refused_in_a_line(
    key: str, value: str, gguf_header: GgufHeader, tmp_path: Path, tiermoe_: Command
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_header.with_entry(f"qwen3moe.{key}", VALUES[value]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = ends_well(tiermoe_("plan", file, "--memory", "4GiB"))
    assert said or value not in ("text", "array", "deep", "nan", "negative")
    assert not (key == "block_count" and value == "much") or "536,870,912 layers" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB


@pytest.mark.parametrize("size", [0, 32, 1 << 60])
@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down_exps.weight"])
def test_a_gguf_file_with_a_tensor_of_another_size(
    tensor: str, size: int, gguf_header: GgufHeader, tmp_path: Path, tiermoe_: Command
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_header.with_first_size(tensor, size))
    assert ends_well(tiermoe_("run", file, "hi", "--memory", "4GiB"))


# --- strings for a terminal ---


def test_no_string_of_a_model_reaches_the_terminal_as_it_is(model: Path, tiermoe_: Command) -> None:
    def renamed(entries: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("q_proj", "q\x1b[31m_proj"): entry for name, entry in entries.items()}

    shown = Path(shutil.move(model, model.with_name("[red]\x1b[31m\u202e")))
    outcome = tiermoe_("show", shown)
    assert outcome.code == 0, outcome.err
    assert r"[red]\x1b[31m\u202e" in outcome.out.replace("\n", "")
    header(renamed)(shown)
    first_entry(dtype="\x1b]0;title\x07")(shown)
    refused = tiermoe_("run", shown, "hi", *RUN)
    assert r"\x1b]0;title\x07" in refused.cause
    for said in (outcome.out, outcome.err, refused.err):
        assert not set(said) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize("stdin", [b"\xff", "\udcff"])
def test_a_prompt_that_is_no_utf_8(stdin: str | bytes, model: Path, tiermoe_: Command) -> None:
    assert "not valid UTF-8" in tiermoe_("run", model, "-", *RUN, stdin=stdin).cause
    assert "the prompt is not valid UTF-8" in tiermoe_("run", model, "\udcff", *RUN).cause
    assert "not valid UTF-8" in tiermoe_("chat", model, "--memory", "4GiB", "--bits", "16", stdin=stdin).err


# --- stores, traces, folders ---


def test_a_store_reads_no_file_outside_of_its_folder(model: Path, tmp_path: Path, tiermoe_: Command) -> None:
    store = tmp_path / "store"
    assert tiermoe_("pack", model, "--out", store, "--bits", "4", "--dense-bits", "4").code == 0
    table = json.loads((store / "store.json").read_text())
    (precision,), (dense,) = table["precisions"].values(), table["dense"].values()
    segment = precision["layers"][0]["experts"][0]["segments"][0]
    for owner, key in ((segment, 0), (dense, "file")):
        name = owner[key]
        for other in ("/etc/hostname", f"../{store.name}/{name}"):
            owner[key] = other
            (store / "store.json").write_text(json.dumps(table))
            with pytest.raises(StoreError, match="lies outside of the store"):
                open_store(store)
        owner[key] = name


def test_experts_in_place_are_read_from_the_checkpoint_alone(model: Path, tmp_path: Path, tiermoe_: Command) -> None:
    words = ("run", model, "hi", *RUN, "--store", tmp_path / "store", "--json")
    said = json.loads(tiermoe_(*words).out)["token_ids"]
    other = Path(shutil.copyfile(model / "model.safetensors", model / "other.safetensors"))
    other.write_bytes(bytes(other.stat().st_size))
    table = tmp_path / "store" / "store.json"
    document = json.loads(table.read_text())
    (precision,) = document["precisions"].values()
    for expert in precision["layers"][1]["experts"]:
        expert["segments"] = [[str(other), *place] for _, *place in expert["segments"]]
    table.write_text(json.dumps(document))
    assert json.loads(tiermoe_(*words).out)["token_ids"] == said


@pytest.mark.parametrize("change", ["top_k", "tensors", "gate"])
def test_a_damaged_outline_is_made_anew(change: str, model: Path, tmp_path: Path, tiermoe_: Command) -> None:
    words = ("run", model, "hi", *RUN, "--store", tmp_path / "store", "--json")
    said = json.loads(tiermoe_(*words).out)["token_ids"]
    file = tmp_path / "store" / "outline.json"
    whole = file.read_bytes()
    document = json.loads(whole)
    if change == "top_k":
        document["layers"][0]["top_k"] = "x"
    elif change == "tensors":
        document["tensors"].popitem()
    else:
        document["gate"] = [["x"]]
    file.write_text(json.dumps(document))
    assert json.loads(tiermoe_(*words).out)["token_ids"] == said
    assert file.read_bytes() == whole


def test_deep_files_of_the_cache_are_made_anew(
    model: Path, tmp_path: Path, tiermoe_: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERMOE_CACHE", str(tmp_path))
    for name in ("machine.json", "store/outline.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(DEEP)
    assert tiermoe_("run", model, "hi", *RUN, "--store", tmp_path / "store").code == 0
    assert tiermoe_("plan", model, "--memory", "4GiB").code == 0
    assert isinstance(json.loads((tmp_path / "machine.json").read_text()), dict)


def test_a_trace_that_unpacks_to_too_much(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with gzip.open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    with pytest.raises(TraceError, match=r"unpacks to more than 18 MiB, 32 times its size"):
        read_trace(path)
    with gzip.open(path, "wb") as file:
        file.write(DEEP.encode())
    with pytest.raises(TraceError, match="line 1 is no JSON"):
        read_trace(path)


def test_without_a_home_nothing_is_put_into_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMOE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/tiermoe")
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError, match="HOME and XDG_CACHE_HOME are empty; set one of them"):
        cache_folder()


# --- what nobody foresaw ---


def test_an_error_that_nobody_foresaw(model: Path, tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise KeyError("of a kind")

    monkeypatch.setattr("tiermoe.cli.describe.describe_model", breaks)
    cause = tiermoe_("show", model).cause
    assert cause == (
        "tiermoe: an unforeseen error (KeyError: 'of a kind'); TIERMOE_TRACEBACK=1 before the command shows where"
    )
    monkeypatch.setenv("TIERMOE_TRACEBACK", "1")
    with pytest.raises(KeyError, match="of a kind"):
        tiermoe_("show", model)
