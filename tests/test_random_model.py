"""Checkpoints of real models' shapes: transformers loads what is written, and the sizes are the published ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmark_commands import Printed, benchmark_runner
from benchmarks import random_model
from benchmarks.random_model import ALL, SMALL, Spec, config_of, layers_within, specs, write
from tiny import auto_class

BILLIONS = {
    "gpt-oss-120b": 116.83,
    "qwen3-30b-a3b": 30.53,
    "gpt-oss-20b": 20.91,
    "deepseek-v2-lite": 15.71,
    "glm-4.5-air": 106.85,
    "mixtral-8x7b": 46.70,
    "phi-3.5-moe": 41.87,
    "qwen1.5-moe-a2.7b": 14.32,
    "olmoe-1b-7b": 6.92,
}


@pytest.mark.parametrize("kind", ALL)
def test_transformers_loads_what_is_written(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "model"
    config = config_of(kind, 2, **SMALL[kind])
    write(kind, out, config)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model, info = auto_class(config["model_type"]).from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_hidden_layers == 2
    ids = AutoTokenizer.from_pretrained(out)("Once upon a time there was", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(ids).logits[0]
    assert 0.1 < logits.std().item() < 10
    assert model.generate(ids, max_new_tokens=9, do_sample=False).shape[1] == ids.shape[1] + 9


@pytest.mark.parametrize("kind", ALL)
def test_a_whole_model_has_the_published_number_of_weights(kind: str) -> None:
    each = {"codes": 2, "exponents": 0}
    count = sum(math.prod(spec.shape) * each.get(spec.kind, 1) for _, spec in specs(kind, config_of(kind)))
    assert count / 1e9 == pytest.approx(BILLIONS[kind], abs=0.006)


def test_as_many_layers_as_a_size_has() -> None:
    sizes = [
        sum(spec.nbytes for _, spec in specs("deepseek-v2-lite", config_of("deepseek-v2-lite", layers)))
        for layers in (1, 2, 3)
    ]
    assert [layers_within("deepseek-v2-lite", each) for each in (1, *sizes, 1e12)] == [1, 1, 2, 3, 27]
    assert layers_within("deepseek-v2-lite", sizes[2] - 1) == 2


def test_tensors_differ_and_have_their_kinds_spread() -> None:
    drawing = random_model.Drawing(0)
    first, second = (drawing.draw(Spec((64, 256))).float() for _ in range(2))
    assert not torch.equal(first, second)
    assert first.std().item() == pytest.approx(1 / 16, rel=0.05)
    assert drawing.draw(Spec((4096,), "exponents")).unique().tolist() == [119, 120, 121]


def test_files_are_small_and_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("qwen3-30b-a3b", 2, **SMALL["qwen3-30b-a3b"])
    monkeypatch.setattr(random_model, "SHARD", 100 << 10)
    sizes: list[int] = []
    real: Callable[..., None] = random_model.save_file

    def fails(tensors: dict[str, torch.Tensor], *rest: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()) if len(tensors) > 1 else 0)
        if len(sizes) == 3:
            raise OSError("no space")
        real(tensors, *rest)

    monkeypatch.setattr(random_model, "save_file", fails)
    with pytest.raises(OSError, match="no space"):
        write("qwen3-30b-a3b", tmp_path / "model", config)
    assert list(tmp_path.iterdir()) == []
    total = write("qwen3-30b-a3b", tmp_path / "model", config)
    assert max(sizes) <= 100 << 10
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3
    assert total < sum(file.stat().st_size for file in files) < total + len(files) * (64 << 10)


def test_a_folder_that_is_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_: Printed = benchmark_runner(monkeypatch, capsys)
    with pytest.raises(SystemExit):
        run_("benchmarks.random_model", "gpt-oss-20b", tmp_path)
    assert "is there already" in capsys.readouterr().err
