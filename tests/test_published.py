"""Checkpoints that come quantised, used as published; beside transformers' eager model of what the codes stand for."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils import logging as transformers_logging

import tiermoe
from commands import Command
from gguf_engines import eager_greedy, engine_of, logits_of
from parity import close, tokens
from published import edit_config, edit_tensors, publish
from small_engines import greedy
from tiermoe.config import settings
from tiermoe.engine.load import resolve_for, starts_lean
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import own_linears
from tiermoe.model.prepare_store import found_store
from tiny import oracle

WIDE = {"moe_intermediate_size": 64, "hidden_size": 128}


CASES = [
    ("gpt_oss", "mxfp4", {}, "MXFP4"),
    ("qwen3_moe", "fp8", WIDE, "FP8"),
    ("deepseek_v3", "fp8", {}, "FP8"),
    ("minimax_m2", "fp8 in wide blocks", {"intermediate_size": 64}, "FP8"),
    ("qwen3_moe", "fp8 by row", WIDE, "FP8"),
    ("qwen3_moe", "fp8 by matrix", {}, "FP8"),
    ("qwen3_moe", "int4", WIDE, "INT4"),
    ("deepseek_v3", "int4", {}, "INT4"),
    ("qwen3_moe", "mxfp4 packed", WIDE, "MXFP4"),
    ("qwen3_moe", "nvfp4", WIDE, "NVFP4"),
    ("qwen3_moe", "gptq", WIDE, "GPTQ"),
    ("deepseek_v3", "gptq", {}, "GPTQ"),
    ("qwen3_moe", "awq", WIDE, "AWQ"),
    ("deepseek_v3", "nvfp4 of modelopt", {}, "NVFP4"),
    ("deepseek_v4", "deepseek_v4 in fp8", {"hidden_size": 256}, "FP8"),
]


def write(tmp_path: Path, family: str = "gpt_oss", scheme: str = "mxfp4", **changes: Any) -> tuple[Path, Any]:
    """(a quantised checkpoint, the eager model)."""
    quantized, plain = publish(tmp_path, family, scheme, **changes)
    return quantized, oracle(plain, family, torch.float32)


def eager(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize(("family", "scheme", "changes", "label"), CASES, ids=lambda value: str(value)[:20])
def test_logits_and_tokens(family: str, scheme: str, changes: dict[str, Any], label: str, tmp_path: Path) -> None:
    quantized, model = write(tmp_path, family, scheme, **changes)
    ids = tokens(1, 30)[0].tolist()
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store")
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert greedy(engine, ids, 24) == eager_greedy(model, ids, 24)
    engine.close()
    engine = engine_of(quantized, torch.bfloat16, store=tmp_path / "narrow")
    assert close(logits_of(engine, ids), wanted)
    assert engine.store.precisions.keys() == {"16"}
    blueprint = inspect_model(quantized, str(quantized), tmp_path / "narrow")
    assert blueprint.own_types() == label
    engine.close()


def test_deepseek_v4_as_published(tmp_path: Path) -> None:
    """With the names of DeepSeek's config, and a layer behind the last one that predicts several tokens."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    quantized, model = write(tmp_path, "deepseek_v4", "deepseek_v4", hidden_size=256, compress_rates=rates)
    edit_tensors(
        quantized,
        lambda tensors: tensors.update(
            {name.replace("layers.2", "mtp.0"): each.clone() for name, each in tensors.items() if "layers.2" in name}
        ),
    )
    config = json.loads((quantized / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters"):
        del config[name]
    config |= {"compress_ratios": [128, 4, 0, 0], "num_hash_layers": 2, "qk_rope_head_dim": 8, "expert_dtype": "fp4"}
    (quantized / "config.json").write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    ).state_dict()
    assert all(torch.equal(theirs[name].float(), values.float()) for name, values in model.state_dict().items())
    ids = tokens(1, 140)[0].tolist()
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store")
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert greedy(engine, ids, 24) == eager_greedy(model, ids, 24)
    engine.close()
    assert inspect_model(quantized, str(quantized), tmp_path / "store").own_types() == "MXFP4"


def test_experts_are_exactly_what_their_codes_stand_for(tmp_path: Path) -> None:
    quantized, model = write(tmp_path)
    engine = engine_of(quantized, torch.bfloat16, store=tmp_path / "store")
    experts = model.model.layers[1].mlp.experts
    of_layer = engine.store.expert_format("16", 1)
    blueprint = inspect_model(quantized, str(quantized), tmp_path / "store")
    for expert in (0, 5):
        read = blueprint.experts.read(1, expert)
        for part in of_layer.layer.parts:
            wanted = getattr(experts, part.name).data[expert]
            assert torch.equal(read[part.name].float(), wanted)
    engine.close()


@pytest.mark.parametrize(("family", "scheme"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8")])
def test_a_small_cache_changes_no_bit(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, family, scheme)
    ids, found = tokens(1, 30)[0].tolist(), []
    for cache in ("100%", "40%"):
        engine = engine_of(quantized, torch.bfloat16, store=tmp_path / "store", cache=cache, lanes=2)
        found.append(logits_of(engine, ids))
        engine.close()
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("family", "scheme"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("deepseek_v4", "deepseek_v4")]
)
def test_the_disk_holds_no_second_copy(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, family, scheme)
    store, before = tmp_path / "store", sorted(quantized.iterdir())
    found = []
    for _ in range(2):  # the second starts from the outline
        engine = engine_of(quantized, torch.bfloat16, store=store)
        found.append(logits_of(engine, [3, 4, 5]))
        engine.close()
    assert torch.equal(*found)
    left = {each.name: each.stat().st_size for each in store.iterdir()}
    assert "outline.json" in left
    assert "store.json" not in left
    assert sum(left.values()) < 1 << 20
    assert sorted(quantized.iterdir()) == before
    blueprint = inspect_model(quantized, str(quantized), store)
    asked = settings(memory="4GiB", store=store)
    assert starts_lean(blueprint, resolve_for(blueprint, asked), found_store(blueprint, store))


def test_dense_layers_stay_in_eight_bits(tmp_path: Path) -> None:
    """Layers that the model does not have, as DeepSeek publishes for predicting several tokens, are not loaded."""
    quantized, _ = publish(tmp_path, "qwen3_moe", "fp8", **WIDE)
    name, more = "model.layers.0.self_attn.q_proj.weight", "model.layers.9.eh_proj.weight"
    edit_tensors(
        quantized,
        lambda tensors: tensors.update({f"{more}{end}": tensors[f"{name}{end}"].clone() for end in ("", "_scale_inv")}),
    )
    blueprint = inspect_model(quantized, str(quantized), tmp_path / "store")
    kept = own_linears(blueprint, "cpu")
    assert {path.rpartition(".")[2] for path in kept} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert own_linears(blueprint, "cuda") == {}
    assert name in blueprint.dense_keys
    assert more in blueprint.checkpoint
    assert more not in blueprint.dense_keys


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4"), ("deepseek_v4", "deepseek_v4")],
)
def test_transformers_code_and_protocol(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, model = write(tmp_path, family, scheme)
    loaded, _ = tiermoe.load(quantized, memory="4GiB", decoder="generic", store=tmp_path / "store", threads=1)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert close(loaded(ids).logits.flatten(0, 1), model(ids).logits.flatten(0, 1))
    assert loaded.generate(ids, max_new_tokens=6, do_sample=False).shape[1] <= 15
    loaded.tiermoe.close()


@pytest.mark.parametrize(("family", "scheme"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4")])
def test_bits_that_are_asked_for_are_packed(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, model = write(tmp_path, family, scheme)
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store", bits=8)
    ids = tokens(1, 20)[0].tolist()
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    assert engine.store.precisions.keys() == {"8", "16"}
    assert bool(engine.store.dense) == (scheme != "fp8")  # which its other layers have too: they stay
    engine.close()


def test_bits_that_a_preset_asks_for_are_packed(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gpt_oss", "mxfp4")
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store", preset="io-qexp")
    assert engine.settings.bits_used == 4
    assert "4-linear" in engine.store.precisions
    engine.close()


def test_nothing_is_said_of_transformers_kernels(tmp_path: Path) -> None:
    told: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("transformers")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    transformers_logging.warning_once.cache_clear()  # what was told before is told again
    logger.addHandler(handler)
    try:
        for family, scheme in (("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4")):
            quantized, _ = publish(tmp_path / family, family, scheme)
            model, _ = tiermoe.load(quantized, memory="4GiB", device="cpu", store=tmp_path / family / "store")
            model.tiermoe.close()
    finally:
        logger.removeHandler(handler)
    assert not [message for message in told if re.search("mxfp4|fp8|quanti|kernel|triton", message, re.IGNORECASE)]


@pytest.mark.parametrize(("family", "scheme", "label"), [("gpt_oss", "mxfp4", "MXFP4"), ("qwen3_moe", "fp8", "FP8")])
def test_commands(family: str, scheme: str, label: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, family, scheme)
    common = ("--memory", "4GiB", "--store", tmp_path / "store")
    for _ in range(2):
        done = tiermoe_("run", quantized, "the", "--max-tokens", "4", *common)
        assert done.code == 0, done
        assert "packing" not in done.err
    plan = tiermoe_("plan", quantized, *common)
    assert plan.code == 0
    assert f"experts as the file has them ({label})" in " ".join(plan.out.split())
    assert "packing" not in plan.out
    shown = " ".join(tiermoe_("show", quantized, "--store", tmp_path / "store").out.split())
    assert f"{label}, used in place" in shown
    packed = tiermoe_("pack", quantized, "--out", tmp_path / "store")
    assert packed.code == 0, packed
    assert "served from the checkpoint, no copy" in packed.err
    assert not list((tmp_path / "store").glob("experts-*"))


# --- what cannot be used ---
def cause(tiermoe_: Command, quantized: Path) -> str:
    found = {tiermoe_(*words).cause for words in (("run", quantized, "hi"), ("plan", quantized), ("show", quantized))}
    assert len(found) == 1, found
    return found.pop()


def test_scales_that_are_missing(tmp_path: Path, tiermoe_: Command) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    quantized, _ = publish(tmp_path / "a", "gpt_oss", "mxfp4")
    edit_tensors(quantized, lambda tensors: tensors.pop(f"{name}_scales"))
    assert f"holds {name}_blocks without its scales {name}_scales; download it again" in cause(tiermoe_, quantized)
    quantized, _ = publish(tmp_path / "b", "gpt_oss", "mxfp4")
    edit_tensors(quantized, lambda tensors: tensors.pop(f"{name}_blocks"))
    assert f"holds {name}_scales without its codes {name}_blocks; download it again" in cause(tiermoe_, quantized)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    quantized, _ = publish(tmp_path / "c", "qwen3_moe", "fp8")
    edit_tensors(quantized, lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"holds {name} without its scales {name}_scale_inv" in cause(tiermoe_, quantized)
    name = "layers.1.ffn.experts.3.w2"
    for index, (left, lost) in enumerate(
        ((".weight without its scales", "scale"), (".scale without its codes", "weight"))
    ):
        quantized, _ = publish(tmp_path / str(index), "deepseek_v4", "deepseek_v4")
        edit_tensors(quantized, lambda tensors, lost=lost: tensors.pop(f"{name}.{lost}"))
        assert re.search(rf"holds {name}{left} .*{name}.{lost}; download it again", cause(tiermoe_, quantized))


@pytest.mark.parametrize(
    ("family", "scheme", "name", "change", "message"),
    [
        (
            "gpt_oss",
            "mxfp4",
            "model.layers.1.mlp.experts.down_proj_scales",
            lambda scales: scales[:, :32],
            "(8, 32, 2)",
        ),
        ("deepseek_v4", "deepseek_v4", "layers.1.ffn.experts.3.w1.scale", lambda scales: scales.t(), "(2, 32)"),
        ("deepseek_v4", "deepseek_v4", "layers.1.ffn.experts.3.w1.scale", lambda scales: scales[:, :1], "(32, 1)"),
        ("deepseek_v4", "deepseek_v4", "layers.1.attn.indexer.wq_b.scale", lambda _: torch.ones(3, 1), "(3, 1)"),
    ],
)
def test_scales_of_another_shape(
    family: str, scheme: str, name: str, change: Any, message: str, tmp_path: Path, tiermoe_: Command
) -> None:
    quantized, _ = publish(tmp_path, family, scheme)
    edit_tensors(quantized, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))
    assert f"{name} of shape {message} are not the scales of" in cause(tiermoe_, quantized)


@pytest.mark.parametrize("method", ["bitsandbytes", "quark"])
def test_a_method_that_is_not_read(method: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, "qwen3_moe", "int4")
    edit_config(quantized, quantization_config={"quant_method": method, "bits": 4})
    assert f"is quantised by {method}, which tiermoe does not read; it reads mxfp4, fp8" in cause(tiermoe_, quantized)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("weight_zero_point", "4 bits with zero points"),
        ("weight_g_idx", "4 bits with columns in another order"),
    ],
)
def test_a_variant_that_is_not_read(more: str, what: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, "qwen3_moe", "int4")
    name = f"model.layers.0.mlp.experts.0.gate_proj.{more}"
    edit_tensors(quantized, lambda tensors: tensors.update({name: torch.zeros(1)}))
    assert f"is {what}, which tiermoe does not read" in cause(tiermoe_, quantized)


@pytest.mark.parametrize(
    ("changes", "what"), [({"bits": 8}, "GPTQ of 8 bits"), ({"desc_act": True}, "GPTQ with columns in another order")]
)
def test_a_gptq_that_is_not_read(changes: dict[str, Any], what: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, "qwen3_moe", "gptq")
    edit_config(quantized, quantization_config={"quant_method": "gptq", "bits": 4, **changes})
    assert f"is {what}" in cause(tiermoe_, quantized)
