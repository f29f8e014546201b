"""`tiermoe eval --tasks`: lm-eval in this process. The oracle is lm-eval on transformers' eager model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from commands import Command
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.harness import FILES, evaluate_tasks, results_of, tasks_asked
from tiermoe.model.tokenizer import load_tokenizer

QUESTION = "question,choice0,choice1,choice2,choice3,answer\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Few documents of each task, as the published files have them."""
    folder = tmp_path / "data"
    for name in ("gsm8k", "mmlu/dev", "mmlu/test", "piqa", "truthfulqa", "winogrande"):
        (folder / name).mkdir(parents=True)
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is twice {n}.\n#### {2 * n}"} for n in range(3, 9)]
    for part in ("train", "test"):
        (folder / f"gsm8k/{part}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in sums[:6]))
    rows = [f'"Which is {n}, of all?",{n},{n + 1},two,three,{n % 4}\n' for n in range(6)]
    (folder / "mmlu/dev/college_sums_dev.csv").write_text(QUESTION + "".join(rows[:5]))
    (folder / "mmlu/test/college_sums_test.csv").write_text("".join(rows).replace(",0\n", ",A\n"))  # both spellings
    goals = [{"goal": f"to see {n}", "sol1": "look.", "sol2": "close the eyes."} for n in range(4)]
    (folder / "piqa/valid.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in goals))
    (folder / "piqa/valid-labels.lst").write_text("0\n1\n0\n1\n")
    (folder / "truthfulqa/TruthfulQA.csv").write_text(
        "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
        "Adversarial,Seeds,What do seeds do?,Nothing,Nothing; Very little.,They grow; You die,here\n"
    )
    row = {"context_options": ["A king had a", "A queen had a"], "continuation": "crown.", "gold": 1}
    (folder / "winogrande/winogrande.jsonl").write_text(json.dumps(row))
    return folder


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek"])
def test_figures_are_those_of_transformers_eager_model(family: str, data: Path, tmp_path: Path) -> None:
    """Under a cache that cannot hold all experts; of six tasks, two of them with generated or shared examples."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    directory = tiny.write(tmp_path / "model", family, torch.float32, max_position_embeddings=2048)
    tasks = ["gsm8k", "mmlu", "piqa", "truthfulqa", "winogrande"]
    options: dict[str, Any] = {"memory": "4GiB", "device": "cpu", "bits": 16, "cache": "40%", "lanes": 1}
    options["store"] = tmp_path / "store"
    result = evaluate_tasks(str(directory), tasks, data, 3, options, lambda *_: None)
    plain, tokenizer = tiny.oracle(directory, family, torch.float32), load_tokenizer(directory)
    oracle = huggingface.HFLM(
        pretrained=plain, tokenizer=tokenizer, backend="causal", batch_size=1, max_length=2048, softmax_dtype="float64"
    )
    expected = results_of(oracle, tasks, str(data), 3)
    assert result["tasks"].keys() == expected.keys() == set(tasks)
    for task in tasks:
        assert result["tasks"][task] == pytest.approx(expected[task], rel=1e-5, nan_ok=True)
    assert 0 < result["tasks"]["truthfulqa"]["acc"] < 1
    assert 0 < result["hit_rate"] < 1
    assert result["bytes_read"] > 0


def test_an_encoder_decoder_model(data: Path, tmp_path: Path) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    family = "switch_transformers"
    directory = tiny.write(tmp_path / "model", family, torch.float32, expert_capacity=512)
    options = {"memory": "4GiB", "device": "cpu", "bits": 16, "store": tmp_path / "store"}
    result = evaluate_tasks(str(directory), ["piqa"], data, None, options, lambda *_: None)
    oracle = huggingface.HFLM(
        pretrained=tiny.oracle(directory, family, torch.float32), tokenizer=load_tokenizer(directory),
        backend="seq2seq", batch_size=1, max_length=256, softmax_dtype="float64",
    )  # fmt: skip
    assert result["tasks"] == results_of(oracle, ["piqa"], str(data), None)


def test_the_command_prints_each_task(data: Path, shipped: Path, tiermoe_: Command) -> None:
    pytest.importorskip("lm_eval")
    words = ["--tasks", "piqa,mmlu", "--limit", "2", "--memory", "4GiB", "--preset", "lru"]
    ended = tiermoe_("eval", shipped, "--data", data, *words)
    assert ended.code == 0, ended.err
    assert "acc_norm" in ended.out
    assert "±" in ended.out
    assert "mmlu" in ended.out
    assert "2 documents of each task" in ended.err


def test_a_task_without_its_data_is_refused_in_a_line(data: Path, shipped: Path, tiermoe_: Command) -> None:
    assert tasks_asked("piqa, mmlu,piqa", data) == ["piqa", "mmlu"]
    for task, cause in (
        ("wikitext", "wikitext2/wiki.test.raw is missing; download the published files of wikitext into"),
        ("humaneval", "runs what a model writes"),
        ("boolq", "'boolq' is not known; --tasks takes gsm8k, mmlu"),
        (",", "no task is named"),
    ):
        assert cause in tiermoe_("eval", shipped, "--tasks", task, "--data", data).cause
    assert "name the folder" in tiermoe_("eval", shipped, "--tasks", "piqa").cause
    assert "texts of its own" in tiermoe_("eval", shipped, "--tasks", "piqa", "--text", data).cause
    assert "are of --tasks" in tiermoe_("eval", shipped, "--text", data, "--limit", 3).cause
    with pytest.raises(ConfigError, match="mmlu/dev/"):
        tasks_asked("mmlu", data / "mmlu")
    assert set(FILES) == {"gsm8k", "mmlu", "piqa", "truthfulqa", "wikitext", "winogrande"}
