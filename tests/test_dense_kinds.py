"""`python -m benchmarks.dense_kinds`: what packing each kind of dense layer costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmark_commands import benchmark_runner
from tiny import write


def test_each_kind_alone_and_all_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path / "tiny", "qwen3_moe", torch.bfloat16)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a small model that spoke in single letters. " * 4)
    words = (model, "--text", text, "--tokens", 64, "--window", 16)
    run = benchmark_runner(monkeypatch, capsys)
    found, shown = run("benchmarks.dense_kinds", *words)
    assert found["weights"] == {"q_proj": 3 * 4096, "o_proj": 3 * 4096, "lm_head": 8192}  # others are too small
    kl = {row["recipe"]: row["kl"][0] for row in found["rows"]}
    assert kl["all at 16"] == 0
    for kind in ("q_proj", "o_proj", "lm_head"):
        assert 0 < kl[f"{kind} at 8"] < kl[f"{kind} at 6"] < kl[f"{kind} at 4"] < kl["all at 4"]
    for bits in (6, 8):
        assert kl["all at 8"] < kl[f"4, lm_head {bits}"] < kl["all at 4"]
    assert "all at 4" in shown
    packed, _ = run("benchmarks.dense_kinds", *words, "--experts", 4)
    assert packed["perplexity_16bit"] == found["perplexity_16bit"]
    assert packed["rows"][0]["kl"][0] > 0
