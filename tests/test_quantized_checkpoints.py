"""Checkpoints that come quantised: gpt-oss in MXFP4 and DeepSeek-V3 in FP8, dequantised one expert at a time.

The oracle is transformers' own dequantising load of the same files.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import tiermoe
from tiermoe.batch import Batch, prompt
from tiermoe.config import settings
from tiermoe.engine.load import load_blueprint, resolve_for, start, starts_lean
from tiermoe.model.blueprint import inspect_model
from tiermoe.model.prepare_store import found_store
from tiny import auto_class, write

SETTINGS = settings(memory="4GiB", device="cpu", bits=16, cache="30%")


def to_mxfp4(directory: Path) -> None:
    """Rewrites a gpt-oss checkpoint's experts as MXFP4: random codes, two a byte, and a scale a block of 32."""
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_, out = tensors.pop(name).shape
        shape = (experts, out, in_ // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    name_quantization(directory, {"quant_method": "mxfp4", "modules_to_not_convert": []})


def to_fp8(directory: Path, block: int = 32) -> None:
    """Rewrites a DeepSeek-V3 checkpoint's linear layers as FP8 with a scale a block."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight") or "_proj_with_mqa.weight" in name]:
        weight = tensors[name].float()
        rows, columns = (-(-size // block) for size in weight.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scale = padded.view(rows, block, columns, block).abs().amax((1, 3)).clamp(min=1e-6) / 448
        full = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / full).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    name_quantization(
        directory,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [block, block],
        },
    )


def name_quantization(directory: Path, settings: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def compare(directory: Path, model_type: str) -> None:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    quantization = _dequantising(config)
    plain = auto_class(model_type).from_pretrained(
        directory, dtype=torch.bfloat16, experts_implementation="eager", quantization_config=quantization
    )
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="30%")
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))
    generic, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="30%", decoder="generic")
    with torch.no_grad():
        expected = plain.eval()(ids).logits
        assert torch.equal(generic(ids).logits, expected)
        error = (ours(ids).logits - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    assert error.median() < 0.05
    generic.tiermoe.close()
    assert ours.generate(ids, max_new_tokens=6, do_sample=False).shape[1] == 15
    packed, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=8, dense_bits=16)
    difference = (packed(ids).logits - ours(ids).logits).float()
    assert difference.abs().mean() < 0.1 * ours(ids).logits.float().abs().mean()
    ours.tiermoe.close()
    packed.tiermoe.close()


def started_alone(directory: Path) -> bool:
    blueprint = inspect_model(directory, str(directory))
    return starts_lean(blueprint, resolve_for(blueprint, SETTINGS), found_store(blueprint, None))


def assert_same_alone(directory: Path) -> None:
    """An engine without transformers' modelling code has the logits of a loaded model's."""
    assert started_alone(directory)
    found = []
    for make in (start, lambda *given: load_blueprint(*given).tiermoe):
        engine = make(inspect_model(directory, str(directory)), SETTINGS)
        cache = engine.new_cache()
        found.append(engine.step(Batch((prompt(cache.open(), range(3, 30)),)), cache, every=True))
        engine.close()
    assert torch.equal(*found)


def _dequantising(config: dict[str, Any]) -> Any:
    from transformers import FineGrainedFP8Config, Mxfp4Config

    settings = {name: value for name, value in config.items() if name not in ("quant_method", "fmt")}
    cls = Mxfp4Config if config["quant_method"] == "mxfp4" else FineGrainedFP8Config
    return cls(**settings, dequantize=True)


def test_gpt_oss_mxfp4(tmp_path: Path) -> None:
    to_mxfp4(write(tmp_path, "gpt_oss", torch.bfloat16))
    compare(tmp_path, "gpt_oss")
    assert_same_alone(tmp_path)  # its dense weights are as they are


def test_deepseek_v3_fp8(tmp_path: Path) -> None:
    to_fp8(write(tmp_path, "deepseek_v3", torch.bfloat16))
    compare(tmp_path, "deepseek_v3")
    assert not started_alone(tmp_path)  # its dense weights have to be converted


def test_loading_experts_in_mxfp4_warns_of_nothing(tmp_path: Path) -> None:
    """transformers' quantiser says what its kernels lack; nothing here uses them."""
    to_mxfp4(write(tmp_path, "gpt_oss", torch.bfloat16))
    told: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("transformers")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    transformers_logging.warning_once.cache_clear()  # what was told before is told again
    logger.addHandler(handler)
    try:
        model, _ = tiermoe.load(tmp_path, memory="4GiB", device="cpu")
    finally:
        logger.removeHandler(handler)
    model.tiermoe.close()
    assert not [message for message in told if "MXFP4" in message]
