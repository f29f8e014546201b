"""Checkpoints as llama.cpp's files: MXFP4 by its definition, and logits equal to those of transformers.

The logits need llama-cpp-python and gguf, in this environment or in the interpreter that TIERMOE_PEER_PYTHON names;
they are left out elsewhere.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmark_commands import benchmark_runner
from benchmarks.random_model import KINDS, config_of, write
from tests import tiny
from tiermoe.bench.llama.checkpoint import Checkpoint
from tiermoe.bench.llama.mxfp4 import dequantise, ggml_blocks

PEER = os.environ.get("TIERMOE_PEER_PYTHON", sys.executable)
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def weight(code: int, exponent: int) -> float:
    """One MXFP4 weight (OCP Microscaling Formats, E2M1 with an E8M0 scale)."""
    return (-1 if code & 8 else 1) * MAGNITUDES[code & 7] * 2.0 ** (exponent - 127)


def test_mxfp4_by_its_definition() -> None:
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (2, 3, 2, 16), dtype=np.uint8)
    scales = draw.integers(110, 130, (2, 3, 2), dtype=np.uint8)
    found, stored = dequantise(blocks, scales), ggml_blocks(blocks, scales).reshape(2, 3, 2, 17)
    assert found.shape == (2, 3, 64)
    for at in np.ndindex(2, 3, 2):
        *row, group = at
        pairs = [(byte & 15, byte >> 4) for byte in blocks[at].tolist()]
        want = [weight(code, int(scales[at])) for pair in pairs for code in pair]
        assert found[tuple(row)][32 * group : 32 * group + 32].tolist() == want
        exponent, *halves = stored[at].tolist()
        low = [weight(byte & 15, exponent) for byte in halves]
        high = [weight(byte >> 4, exponent) for byte in halves]
        assert low + high == want
    assert torch.equal(torch.from_numpy(found).bfloat16().float(), torch.from_numpy(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bfloat16_is_rounded_as_torch_rounds(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"x": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = torch.from_numpy(Checkpoint(tmp_path).bfloat16_bits("x").astype(np.int32).astype(np.int16))
    assert torch.equal(found.view(torch.bfloat16), values.bfloat16())


@functools.cache
def peer_missing() -> bool:
    command = [PEER, "-c", "import llama_cpp, gguf, numpy"]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
         "beta_slow": 1.0, "factor": 4.0}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe tied": ("qwen3_moe", {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {**_YARN, "truncate": True}, "sliding_window": 32}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "glm4_moe": ("glm4_moe", {"routed_scaling_factor": 1.5, "attention_bias": True}),
}


@pytest.fixture
def differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], dict[str, Any]]:
    """A checkpoint → what `benchmarks.llamacpp logits` says of its file in float32."""
    if peer_missing():
        pytest.skip(f"{PEER} has no llama-cpp-python and gguf")
    run_, peer = benchmark_runner(monkeypatch, capsys), ["--peer-python", PEER, "--threads", "1"]

    def compare(model: Path) -> dict[str, Any]:
        file = model.parent / "model.gguf"
        capsys.readouterr()
        run_("benchmarks.llamacpp", "convert", model, "--type", "f32", "--out", file, *peer)
        return run_("benchmarks.llamacpp", "logits", model, file, "--tokens", "150", *peer)[0]

    return compare


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_has_the_logits_of_transformers(
    name: str, shipped: Path, tmp_path: Path, differs: Callable[[Path], dict[str, Any]]
) -> None:
    model_type, changes = MODELS[name]
    model = tiny.write(tmp_path / "model", model_type, torch.float32, vocab_size=4096, **changes)
    shutil.copyfile(shipped / "tokenizer.json", model / "tokenizer.json")
    found = differs(model)
    assert found["max_abs_difference"] < 2e-5 * found["max_abs_logit"]
    assert found["same_argmax"] == 1.0


def test_so_it_has_for_experts_in_mxfp4(tmp_path: Path, differs: Callable[[Path], dict[str, Any]]) -> None:
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 8, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    rotary = {**KINDS["gpt-oss-20b"].config["rope_scaling"], "truncate": True}
    write("gpt-oss-20b", tmp_path / "model", config_of("gpt-oss-20b", 2, **sizes, rope_scaling=rotary))
    found = differs(tmp_path / "model")
    assert found["max_abs_difference"] < 2e-5 * found["max_abs_logit"]
    assert found["same_argmax"] == 1.0
