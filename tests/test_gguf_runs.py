"""What a GGUF file runs as: mixtures of types, small caches, transformers' protocol, commands; what it leaves on the
disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import tiermoe
from commands import Command
from gguf_engines import engine_of, logits_of
from gguf_files import Kinds, kinds
from parity import close, tokens
from tiermoe.formats.expert_format import PAGE
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import own_linears

WIDE = "qwen3_moe, wide"
"""Rows of whole blocks of every type."""


def eager(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


def by_layer(name: str) -> str:
    """Types as llama.cpp mixes them: between an expert's matrices, and between layers."""
    if "ffn_down_exps" in name:
        return "q6_k" if name.startswith("blk.0.") else "iq4_nl"
    return "q4_k" if "_exps" in name else "q5_k" if "attn" in name else "q6_k"


def below_three_bits(name: str) -> str:
    """As in the files of people with little memory."""
    first = name.startswith("blk.0.")
    if "ffn_down_exps" in name:
        return "iq3_s" if first else "iq2_s"
    return ("iq2_xxs" if first else "iq1_m") if "_exps" in name else "iq3_xxs" if "attn" in name else "q6_k"


MIXTURES = {
    by_layer: (("q4_k", "q6_k"), ("q4_k", "iq4_nl")),
    below_three_bits: (("iq2_xxs", "iq3_s"), ("iq1_m", "iq2_s")),
}
"""Types of gate and up, and of down, by layer."""


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: mixture.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_are_mixed_within_an_expert_and_between_layers(
    dtype: torch.dtype, mixture: Kinds, tmp_path: Path
) -> None:
    model = gguf_files.model_of(WIDE)
    file = gguf_files.write(tmp_path / "m.gguf", model, WIDE, mixture)
    engine = engine_of(file, dtype, store=tmp_path / "store")
    ids = tokens(1, 40)[0].tolist()
    found, wanted = logits_of(engine, ids), eager(model, ids)
    if dtype == torch.float32:
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    else:
        assert close(found, wanted)
    encodings = [layer.encodings for layer in engine.store.precisions["16"].layers]
    assert encodings == [{"gate_up_proj": f"gguf/{up}", "down_proj": f"gguf/{down}"} for up, down in MIXTURES[mixture]]
    kept = own_linears(inspect_model(file, str(file), tmp_path / "store"), "cpu")
    assert kept.keys() >= {"lm_head", "model.layers.0.self_attn.q_proj"}
    engine.close()


@pytest.mark.parametrize("threads", ["native", "python"])
def test_biases_in_float32_are_rounded_in_the_slot(
    threads: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if threads == "python":
        request.getfixturevalue("without_native")
    model = gguf_files.model_of("gpt_oss")
    file = gguf_files.write(tmp_path / "m.gguf", model, "gpt_oss", kinds("mxfp4", dense="q8_0"))
    engine = engine_of(file, torch.bfloat16, store=tmp_path / "store", cache="40%")
    ids = tokens(1, 40)[0].tolist()
    assert close(logits_of(engine, ids), eager(model, ids))
    engine.close()


def test_a_small_cache_changes_no_bit(tmp_path: Path) -> None:
    file = gguf_files.write(
        tmp_path / "m.gguf", gguf_files.model_of("qwen3_moe"), "qwen3_moe", kinds("q8_0", "q4_0", "q5_0")
    )
    ids, found = tokens(1, 30)[0].tolist(), []
    for cache in ("100%", "40%"):
        engine = engine_of(file, torch.bfloat16, store=tmp_path / "store", cache=cache, lanes=2)
        found.append(logits_of(engine, ids))
        engine.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["q8_0", "mxfp4"])
def test_matrices_lie_in_slots_as_in_the_pages_of_the_file(kind: str, tmp_path: Path) -> None:
    model = gguf_files.model_of(WIDE)
    file = gguf_files.write(tmp_path / "m.gguf", model, WIDE, kinds(kind))
    blueprint = inspect_model(file, str(file), tmp_path / "store")
    assert blueprint.own_experts is not None
    extents = [extent for layer in blueprint.own_experts.layers for extent in layer.extents]
    moved = [{(piece.offset - piece.at) % PAGE == 0 for piece in extent.segments} for extent in extents]
    if kind == "q8_0":  # 17 pages a matrix
        assert moved == [{True}] * len(extents)
    else:  # 8.5: what does not begin a part may lie otherwise
        assert all(True in each for each in moved)
    pieces = [piece for extent in extents for piece in extent.segments]
    assert {piece.offset % PAGE for piece in pieces} != {0}
    forms = blueprint.expert_formats(16, "expert", "cpu", "")
    assert len({form.slot.nbytes for form in forms}) == 1
    assert forms[0].slot.nbytes >= max(piece.at + piece.nbytes for piece in pieces)
    ids = tokens(1, 30)[0].tolist()
    engine = engine_of(file, torch.float32, store=tmp_path / "store", cache="40%")
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    engine.close()


def test_the_disk_holds_no_second_copy(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "m.gguf", gguf_files.model_of("qwen3_moe"), "qwen3_moe", kinds("q8_0"))
    store = tmp_path / "store"
    for _ in range(2):  # the second starts from the outline
        engine = engine_of(file, torch.bfloat16, store=store)
        logits_of(engine, [3, 4, 5])
        engine.close()
    left = {each.name: each.stat().st_size for each in store.iterdir()}
    assert "outline.json" in left
    assert "store.json" not in left
    assert sum(left.values()) < 1 << 20


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decoder", ["auto", "generic"])
def test_transformers_protocol(decoder: str, tied: bool, tmp_path: Path, shipped: Path) -> None:
    name = "qwen3_moe of 4096 tokens" + ", tied" * tied
    model = gguf_files.model_of(name)
    file = gguf_files.write(
        tmp_path / "m.gguf", model, name, kinds("f32", dense="q8_0"), vocabulary=shipped / "tokenizer.json"
    )
    loaded, tokenizer = tiermoe.load(file, memory="4GiB", decoder=decoder, store=tmp_path / "store", threads=1)
    ids = tokens(1, 20)
    with torch.no_grad():
        assert (loaded(ids).logits - model(ids).logits).abs().max() <= 1e-3 * model(ids).logits.abs().max()
    answer = loaded.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert answer.shape[1] <= 28
    assert tokenizer("the")["input_ids"]
    loaded.tiermoe.close()


def test_bits_that_are_asked_for_are_packed(tmp_path: Path) -> None:
    model = gguf_files.model_of("qwen3_moe, narrow")
    file = gguf_files.write(tmp_path / "m.gguf", model, "qwen3_moe, narrow", kinds("q8_0"))
    engine = engine_of(file, torch.float32, store=tmp_path / "store", bits=8, dense_bits=16)
    ids = tokens(1, 20)[0].tolist()
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert engine.store.precisions.keys() == {"8", "16"}
    engine.close()


@pytest.mark.parametrize(
    ("up", "down", "label"),
    [("q4_0", "q8_0", "Q8_0, Q8_0 and Q4_0"), ("q8_0", "f32", "Q8_0, float32"), ("f16", "bf16", "Q8_0 and float16")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_up_and_down_of_two_types(up: str, down: str, label: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also values in another dtype than is computed in, beside blocks."""

    def kind(name: str) -> str:
        return up if "ffn_up_exps" in name else down if "ffn_down_exps" in name else "q8_0"

    model = gguf_files.model_of("qwen3_moe")
    file = gguf_files.write(tmp_path / "m.gguf", model, "qwen3_moe", kind)
    engine = engine_of(file, dtype, store=tmp_path / "store", cache="50%")
    ids = tokens(1, 30)[0].tolist()
    found, wanted = logits_of(engine, ids), eager(model, ids)
    if dtype == torch.float32:
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    else:
        assert close(found, wanted)
        assert label in inspect_model(file, str(file), tmp_path / "store").own_types()
    engine.close()


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16), ("f32", torch.float32)])
def test_experts_in_one_dtype_are_computed_in_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = gguf_files.model_of("mixtral")
    file = gguf_files.write(tmp_path / "m.gguf", model, "mixtral", kinds(kind))
    assert inspect_model(file, str(file)).dtype == dtype
    engine = engine_of(file, dtype, store=tmp_path / "store")
    ids = tokens(1, 20)[0].tolist()
    assert close(logits_of(engine, ids), eager(model.to(dtype), ids))
    engine.close()


def test_commands(tmp_path: Path, shipped: Path, tiermoe_: Command) -> None:
    name, vocabulary = "qwen3_moe of 4096 tokens", shipped / "tokenizer.json"
    model = gguf_files.model_of(name)
    file = gguf_files.write(tmp_path / "m.gguf", model, name, kinds("q8_0", "q4_0"), vocabulary=vocabulary)
    common = ("--memory", "4GiB", "--store", tmp_path / "store")
    for _ in range(2):
        done = tiermoe_("run", file, "the", "--max-tokens", "4", *common)
        assert done.code == 0, done
    plan = tiermoe_("plan", file, *common)
    assert plan.code == 0
    assert "experts as the file has them (Q4_0, Q8_0)" in " ".join(plan.out.split())
    show = tiermoe_("show", file, "--store", tmp_path / "store")
    assert "gguf/q4_0" in show.out
    for more in ((), ("--force",)):
        packed = tiermoe_("pack", file, "--out", tmp_path / "store", *more)
        assert packed.code == 0, packed
        assert "served from the checkpoint, no copy" in packed.err
    assert not list((tmp_path / "store").glob("experts-*"))
