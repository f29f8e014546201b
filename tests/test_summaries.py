"""`tiermoe eval --pairs` and `compare --pairs`: summaries of documents, scored and written, by encoder–decoder models
and by others; the oracle is transformers' eager model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from commands import Command
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.evaluate import METRICS, prepare
from tiermoe.lab.measure.pairs import Pair
from tiermoe.lab.measure.scoring import mean_over_windows
from tiermoe.lab.measure.texts import WindowShape
from tiermoe.model.tokenizer import load_tokenizer
from tiny import oracle, write

PAIRS: list[Pair] = [
    ("the first one warms the cache", "cache"),
    ("a dog and a cat sat on a mat", "dog, cat"),
    ("nobody came", "no one was there at all"),
    ("rain fell on the hills for days", "rain"),
]
SHAPE = WindowShape(prompt=16, window=12, tokens=60)
OPTIONS: dict[str, Any] = {"memory": "4GiB", "device": "cpu", "cache": "40%", "lanes": 1, "bits": 16}


def nothing(*_: object) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for four tokens an expert, so that a longer pass leaves some out."""
    return write(tmp_path_factory.mktemp("summaries") / "switch", "switch_transformers", torch.float32)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for all tokens, so that passes of any length agree."""
    directory = tmp_path_factory.mktemp("summaries") / "roomy"
    return write(directory, "switch_transformers", torch.float32, expert_capacity=64)


def test_the_loss_of_summaries_is_transformers_own(roomy: Path) -> None:
    """Of whole summaries behind documents that are cut, by labels, as a model is trained."""
    plain, tokenizer = oracle(roomy, "switch_transformers", torch.float32), load_tokenizer(roomy)
    losses, tokens = 0.0, 0
    for document, summary in PAIRS[1:]:
        read, said = (torch.tensor([tokenizer.encode(text)]) for text in (document, summary))
        with torch.no_grad():
            loss = plain(input_ids=read[:, : SHAPE.prompt], labels=said[:, : SHAPE.window]).loss
        losses += float(loss) * said[:, : SHAPE.window].shape[1]
        tokens += said[:, : SHAPE.window].shape[1]
    result = prepare(str(roomy), PAIRS, SHAPE, OPTIONS).run("16bit", nothing)
    assert result["perplexity"] == pytest.approx(math.exp(losses / tokens), rel=1e-5)
    assert (result["documents"], result["tokens"]) == (3, tokens)
    assert result["decode_tok_s"] > 0


def test_the_loss_behind_a_document_that_a_decoder_reads(tiny: Path) -> None:
    plain, tokenizer = oracle(tiny, "qwen3_moe", torch.float32), load_tokenizer(tiny)
    found = []
    for document, summary in PAIRS[1:]:
        read = tokenizer.encode(document)[: SHAPE.prompt]
        said = tokenizer.encode(summary, add_special_tokens=False)[: SHAPE.window]
        with torch.no_grad():
            rows = plain(torch.tensor([read + said])).logits[0, len(read) - 1 : -1].log_softmax(-1)
        found += [-float(row[token]) for row, token in zip(rows, said, strict=True)]
    result = prepare(str(tiny), PAIRS, SHAPE, OPTIONS).run("none", nothing)
    assert result["perplexity"] == pytest.approx(math.exp(fmean(found)), rel=1e-5)


def test_sixteen_bits_are_fed_as_the_preset_is(switch: Path, tmp_path: Path) -> None:
    """Token by token: a pass over a summary would leave out tokens that its experts have no room for. The same beside a
    saved reference."""
    evaluation = prepare(str(switch), PAIRS, SHAPE, OPTIONS)
    result = evaluation.run("16bit", nothing)
    assert result["kl"] == pytest.approx(0, abs=1e-6)
    assert result["same_top1"] == 1
    evaluation.save_reference(tmp_path / "saved", nothing)
    assert evaluation.run(str(tmp_path / "saved"), nothing)["kl"] == pytest.approx(result["kl"], abs=1e-9)
    assert prepare(str(switch), PAIRS, SHAPE, {**OPTIONS, "bits": 4}).run("16bit", nothing)["kl"] > 1e-4


@pytest.mark.parametrize("family", ["switch_transformers", "qwen3_moe"])
def test_rouge2_is_that_of_transformers_greedy_summaries(family: str, switch: Path, tiny: Path, tmp_path: Path) -> None:
    """The references are its own summaries but for the last words, so that the scores are neither 0 nor 1."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge2"], use_stemmer=True)
    directory = switch if family == "switch_transformers" else tiny
    plain, tokenizer = oracle(directory, family, torch.float32), load_tokenizer(directory)
    tokenizer.model_max_length = 256
    pairs, expected = [], []
    for document, _ in PAIRS:
        ids = torch.tensor([tokenizer.encode(document)[: SHAPE.prompt]])
        answer = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=SHAPE.window, do_sample=False)
        said = tokenizer.decode(answer[0] if plain.config.is_encoder_decoder else answer[0, ids.shape[1] :], True)
        reference = f"one two three {said} four five"
        pairs.append((document, reference))
        expected.append(scorer.score(reference, said)["rouge2"].fmeasure)
    evaluation = prepare(str(directory), pairs, SHAPE, OPTIONS, "rouge2")
    result = evaluation.run("none", nothing)
    assert result["rouge2"] == pytest.approx(fmean(expected[1:]))
    assert result["rouge2_se"] == pytest.approx(stdev(expected[1:]) / math.sqrt(3))
    assert result["decode_tok_s"] > 0
    if fmean(expected[1:]) > 0:
        beside = evaluation.run("16bit", nothing)
        assert (beside["rouge2_16bit"], beside["rouge2_loss"]) == (result["rouge2"], 0)
    evaluation.save_reference(tmp_path / "saved", nothing)
    with pytest.raises(ConfigError, match="of these documents; make it again with --save-reference"):
        prepare(str(directory), pairs[::-1], SHAPE, OPTIONS, "rouge2").run(str(tmp_path / "saved"), nothing)


def test_windows_of_several_lengths_have_the_error_of_a_ratio() -> None:
    """Sums 2 and 9 of 1 and 3 tokens: the mean is 11/4, and the sums differ from it by -3/4 and 3/4."""
    score = mean_over_windows([torch.tensor([2.0]), torch.tensor([1.0, 3.0, 5.0])])
    assert score.value == pytest.approx(11 / 4)
    assert score.error == pytest.approx(stdev([-0.75, 0.75]) / 2 / math.sqrt(2))


# --- the commands ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"document": one, "summary": other}) + "\n" for one, other in PAIRS))
    return path


SMALL = ("--tokens", 60, "--prompt", 16, "--window", 12, "--memory", "4GiB", "--lanes", 1, "--cache", "40%")


@pytest.mark.parametrize("metric", METRICS)
def test_eval_of_an_encoder_decoder_model(metric: str, switch: Path, file: Path, tiermoe_: Command) -> None:
    pytest.importorskip("rouge_score")
    words = ("eval", switch, "--pairs", file, "--metric", metric, *SMALL, "--reference", "none")
    ended = tiermoe_(*words)
    assert ended.code == 0, ended.err
    assert {"perplexity": "perplexity", "rouge2": "ROUGE-2"}[metric] in ended.out
    assert "of 3 summaries, at most 12 each, of documents of at most 16" in ended.err
    assert "standard error over documents" in ended.err


def test_compare_of_an_encoder_decoder_model(switch: Path, file: Path, tiermoe_: Command) -> None:
    """In processes of their own, beside the 16-bit weights, which are exact."""
    words = ("compare", switch, "--pairs", file, "--presets", "lru", "--rounds", 1, "--bits", 16, *SMALL)
    ended = tiermoe_(*words, "--json")
    assert ended.code == 0, ended.err
    (row,) = json.loads(ended.out)
    assert (row["preset"], row["kl"], row["documents"]) == ("lru", pytest.approx(0, abs=1e-6), 3)
    pytest.importorskip("rouge_score")
    ended = tiermoe_(*words, "--metric", "rouge2", "--reference", "none")
    assert ended.code == 0, ended.err
    assert "ROUGE-2" in ended.out


def test_what_is_not_there_to_score_is_told(switch: Path, file: Path, tmp_path: Path, tiermoe_: Command) -> None:
    for command in ("eval", "compare"):
        assert "name what is scored" in tiermoe_(command, switch).cause
        assert "not both" in tiermoe_(command, switch, "--text", file, "--pairs", file).cause
    assert "give documents with their summaries by --pairs" in tiermoe_("eval", switch, "--text", file).cause
    assert "rouge2 needs documents" in tiermoe_("eval", switch, "--text", file, "--metric", "rouge2").cause
    assert (
        "'bleu' is not known; perplexity and rouge2"
        in tiermoe_("eval", switch, "--pairs", file, "--metric", "bleu").cause
    )
    one = tmp_path / "one.jsonl"
    one.write_text('{"document": "a", "summary": "b"}\n')
    assert "two at least" in tiermoe_("eval", switch, "--pairs", one, *SMALL).cause
    one.write_text('{"document": "a", "summary": "b"}\n{"document": "a", "summary": ""}\n')
    assert "pair 2 has an empty document or summary" in tiermoe_("eval", switch, "--pairs", one, *SMALL).cause
    picture = ("--metric", "rouge2", "--reference", "none", "--picture", tmp_path / "picture.svg")
    said = tiermoe_("compare", switch, "--pairs", file, *picture).cause
    assert "leave out --reference none" in said or "tiermoe[plots]" in said
