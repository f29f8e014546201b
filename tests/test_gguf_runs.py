"""What a GGUF file runs as: mixtures of types, NVFP4, small caches, transformers' protocol, commands; what it leaves on
the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf_files
import tiermoe
from commands import Command
from gguf_engines import agree, eager, eager_greedy, engine_of, logits_in, logits_of
from gguf_files import Kinds, altered, kinds
from parity import close, tokens
from small_engines import greedy
from tiermoe.errors import ModelError
from tiermoe.formats.expert_format import PAGE
from tiermoe.formats.gguf_file import open_gguf, read_whole
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import own_linears
from tiermoe.model.stored_weights import EmbeddingOnDisk

WIDE = "qwen3_moe, wide"
"""Rows of whole blocks of every type."""
IDS = tokens(1, 40)[0].tolist()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def written(folder: Path, name: str, kind: Kinds, **others: Any) -> tuple[Path, Any]:
    """A file, and transformers' eager model with its weights."""
    model = gguf_files.model_of(name)
    return gguf_files.write(folder / "m.gguf", model, name, kind, **others), model


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


def up_and_down(up: str, down: str) -> Kinds:
    """Gate in Q8_0. Values in another dtype than is computed in may lie beside blocks."""
    return lambda name: up if "ffn_up_exps" in name else down if "ffn_down_exps" in name else "q8_0"


MIXTURES = [
    (WIDE, by_layer, "IQ4_NL, Q4_K, Q6_K"),
    (WIDE, below_three_bits, "IQ1_M, IQ2_S, IQ2_XXS, IQ3_S"),
    ("qwen3_moe", up_and_down("q4_0", "q8_0"), "Q8_0, Q8_0 and Q4_0"),
    ("qwen3_moe", up_and_down("q8_0", "f32"), "Q8_0, float32"),
    ("qwen3_moe", up_and_down("f16", "bf16"), "Q8_0 and float16"),
]


@DTYPES
@pytest.mark.parametrize(("name", "kind", "label"), MIXTURES, ids=[label for *_, label in MIXTURES])
def test_types_are_mixed_within_an_expert_and_between_layers(
    name: str, kind: Kinds, label: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    file, model = written(tmp_path, name, kind)
    assert agree(logits_in(file, IDS, dtype, store=tmp_path / "store", cache="50%"), eager(model, IDS))
    assert label in inspect_model(file, str(file), tmp_path / "store").own_types()


@pytest.mark.parametrize("threads", ["native", "python"])
def test_biases_in_float32_are_rounded_in_the_slot(
    threads: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if threads == "python":
        request.getfixturevalue("without_native")
    file, model = written(tmp_path, "gpt_oss", kinds("mxfp4", dense="q8_0"))
    found = logits_in(file, IDS, torch.bfloat16, store=tmp_path / "store", cache="40%")
    assert close(found, eager(model, IDS))


@pytest.mark.parametrize("kind", [kinds("q8_0", "q4_0", "q5_0"), kinds("nvfp4")], ids=["blocks", "nvfp4"])
def test_a_small_cache_changes_no_bit(kind: Kinds, tmp_path: Path) -> None:
    file, _ = written(tmp_path, WIDE, kind)
    store = tmp_path / "store"
    found = [logits_in(file, IDS, torch.bfloat16, store=store, cache=cache, lanes=2) for cache in ("100%", "40%")]
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["q8_0", "mxfp4"])
def test_matrices_lie_in_slots_as_in_the_pages_of_the_file(kind: str, tmp_path: Path) -> None:
    file, model = written(tmp_path, WIDE, kinds(kind))
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
    forms = blueprint.expert_formats(16, "expert", "")
    assert len({form.slot.nbytes for form in forms}) == 1
    assert forms[0].slot.nbytes >= max(piece.at + piece.nbytes for piece in pieces)
    assert agree(logits_in(file, IDS, store=tmp_path / "store", cache="40%"), eager(model, IDS))


@pytest.mark.parametrize(("decoder", "tied"), [("auto", True), ("generic", False)])
def test_transformers_protocol(decoder: str, tied: bool, tmp_path: Path, shipped: Path) -> None:
    name = "qwen3_moe of 4096 tokens" + ", tied" * tied
    file, model = written(tmp_path, name, kinds("f32", dense="q8_0"), vocabulary=shipped / "tokenizer.json")
    loaded, tokenizer = tiermoe.load(file, memory="4GiB", decoder=decoder, store=tmp_path / "store", threads=1)
    ids = tokens(1, 20)
    with torch.no_grad():
        assert agree(loaded(ids).logits, model(ids).logits)
    answer = loaded.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert answer.shape[1] <= 28
    assert tokenizer("the")["input_ids"]
    loaded.tiermoe.close()


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16), ("f32", torch.float32)])
def test_experts_in_one_dtype_are_computed_in_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file, model = written(tmp_path, "mixtral", kinds(kind))
    assert inspect_model(file, str(file)).dtype == dtype
    assert close(logits_in(file, IDS[:20], dtype, store=tmp_path / "store"), eager(model.to(dtype), IDS[:20]))


def test_commands(tmp_path: Path, shipped: Path, tiermoe_: Command) -> None:
    """The disk holds no second copy of the experts."""
    name, store = "qwen3_moe of 4096 tokens", tmp_path / "store"
    file, _ = written(tmp_path, name, kinds("q8_0", "q4_0"), vocabulary=shipped / "tokenizer.json")
    common = ("--memory", "4GiB", "--store", store)
    for _ in range(2):  # the second starts from the outline
        done = tiermoe_("run", file, "the", "--max-tokens", "4", *common)
        assert done.code == 0, done
    plan = tiermoe_("plan", file, *common)
    assert "experts as the file has them (Q4_0, Q8_0)" in " ".join(plan.out.split())
    assert "gguf/q4_0" in tiermoe_("show", file, "--store", store).out
    for more in ((), ("--force",)):
        packed = tiermoe_("pack", file, "--out", store, *more)
        assert packed.code == 0, packed
        assert "served from the checkpoint, no copy" in packed.err
    left = {each.name: each.stat().st_size for each in store.iterdir()}
    assert "outline.json" in left
    assert not [each for each in left if each.startswith("experts-")]
    assert sum(left.values()) < 1 << 20


# NVFP4: blocks and factors, which llama.cpp's converter writes as tensors of their own


@pytest.mark.parametrize("name", [WIDE, "deepseek_v3 of 64 columns", "qwen3_next"])
def test_nvfp4_s_logits_and_tokens_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    """Of the second model each head has rows of whole blocks."""
    file, model = written(tmp_path, name, kinds("nvfp4"))
    engine = engine_of(file, store=tmp_path / "store")
    assert agree(logits_of(engine, IDS), eager(model, IDS))
    assert greedy(engine, IDS[:16], 24) == eager_greedy(model, IDS[:16], 24)
    engine.close()
    narrow = logits_in(file, IDS, torch.bfloat16, store=tmp_path / "narrow")
    assert close(narrow, eager(model, IDS), within=0.1)  # untrained weights make much of activations of 8 bits
    assert inspect_model(file, str(file), tmp_path / "narrow").own_types().startswith("NVFP4")


def test_a_matrix_of_nvfp4_and_another_type_is_packed(tmp_path: Path) -> None:
    file, model = written(tmp_path, WIDE, lambda name: "q8_0" if "ffn_up_exps" in name else "nvfp4")
    with pytest.raises(ModelError, match=r"as NVFP4 and Q8_0, which kernels .* do not take in place; --bits 4 packs"):
        engine_of(file, store=tmp_path / "store")
    assert close(logits_in(file, IDS, torch.bfloat16, store=tmp_path / "store", bits=8), eager(model, IDS))


def test_factors_that_are_not_one_for_each_expert(tmp_path: Path) -> None:
    file, _ = written(tmp_path, WIDE, kinds("nvfp4"))
    factors = {"blk.0.ffn_up_exps.scale": np.ones(3, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"scale is F32 of shape \(3,\), not F32 of \(8,\); convert the model again"):
        open_gguf(altered(file, tmp_path / "other.gguf", tensors=factors))


def test_experts_of_gemma_4_have_their_scales_in_their_factors(tmp_path: Path) -> None:
    """llama.cpp's converter multiplies an expert's scale into the factor of its last matrix."""
    folded = {f"blk.{layer}.ffn_down_exps.scale": None for layer in (0, 2)}  # the writer gives the second no factors
    file, model = written(tmp_path, "gemma4 of 64 columns", kinds("nvfp4", "nvfp4", "q8_0"), tensors=folded)
    for layer in (0, 2):
        torch.nn.init.ones_(model.model.layers[layer].router.per_expert_scale)
    assert agree(logits_in(file, IDS, store=tmp_path / "store"), eager(model, IDS))


# linear attention, and the table of n-grams


@DTYPES
def test_heads_in_another_order_within_a_block_stay_in_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """A block of 256 columns holds two heads of values, in another order than transformers'."""
    file, model = written(tmp_path, "qwen3_5_moe of wide heads", kinds("q4_k", dense="q6_k"))
    assert agree(logits_in(file, IDS, dtype, store=tmp_path / "store"), eager(model, IDS))
    kept = own_linears(inspect_model(file, str(file), tmp_path / "store"), "cpu")
    assert {f"model.layers.0.linear_attn.{name}" for name in ("out_proj", "in_proj_qkv")} <= kept.keys()


def test_older_files_have_the_projection_of_linear_attention_in_one(tmp_path: Path) -> None:
    """In the order of transformers' Qwen3-Next."""
    model, parts = gguf_files.model_of("qwen3_next"), {}
    for layer in (0, 2):
        parts |= {f"blk.{layer}.attn_{name}.weight": None for name in ("qkv", "gate")}
        parts[f"blk.{layer}.ssm_in.weight"] = model.model.layers[layer].linear_attn.in_proj_qkvz.weight.detach().numpy()
    file = gguf_files.write(tmp_path / "m.gguf", model, "qwen3_next", kinds("q8_0"), tensors=parts)
    assert agree(logits_in(file, IDS, store=tmp_path / "store"), eager(model, IDS))


@pytest.mark.parametrize("kind", [kinds("q8_0", "q5_0", "q4_0"), kinds("f32")], ids=["blocks", "plain"])
def test_rows_of_the_table_of_n_grams_are_read_from_the_file(kind: Kinds, shipped: Path, tmp_path: Path) -> None:
    """N-grams end where the model's texts do, which the tokenizer may call otherwise; their rows alone are read."""
    end = 2  # of a text, by the model's config
    file, model = written(tmp_path, "qwen4_exp", kind, vocabulary=shipped / "tokenizer.json")
    headers = open_gguf(file)
    assert headers.tensors["per_layer_token_embd.weight"] not in read_whole(headers)
    engine = engine_of(file, store=tmp_path / "store")
    assert inspect_model(file, "model", tmp_path / "store").config.eos_token_id == [end, 0]
    assert isinstance(engine.decoder.layers[0].ngrams.table.__self__, EmbeddingOnDisk)
    ids = [end if at in (3, 11, 12, 20) else token for at, token in enumerate(IDS)]
    found = logits_of(engine, ids)
    engine.close()
    assert agree(found, eager(model, ids))
