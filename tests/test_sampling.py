"""What `run` and `chat` sample with: what is named, else what the model's generation_config.json says."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, set_seed

import tiermoe
from commands import Command
from tiermoe.generation.chat import Conversation
from tiermoe.generation.sampling import Sampling, sampling_for
from tiny import oracle, write

FAST = ("--memory", "4GiB", "--lanes", "1", "--bits", "16")
SAID = {"do_sample": True, "temperature": 1.7, "top_p": 0.9, "top_k": 5}
CHAT = Sampling(temperature=0.7, top_p=0.95)


@pytest.mark.parametrize(
    ("said", "named", "otherwise", "wanted"),
    [
        (None, {}, Sampling(), Sampling()),
        (None, {}, CHAT, CHAT),
        (None, {"temperature": 0.2}, CHAT, Sampling(temperature=0.2, top_p=0.95)),
        (SAID, {}, Sampling(), Sampling(temperature=1.7, top_p=0.9, top_k=5)),
        (SAID, {}, CHAT, Sampling(temperature=1.7, top_p=0.9, top_k=5)),
        (SAID, {"temperature": 0.0}, CHAT, Sampling(temperature=0.0, top_p=0.9, top_k=5)),
        (SAID, {"top_k": 2, "seed": 3}, Sampling(), Sampling(temperature=1.7, top_p=0.9, top_k=2, seed=3)),
        ({"do_sample": True}, {}, CHAT, Sampling(temperature=1.0)),
        ({"do_sample": False}, {}, Sampling(), Sampling()),
        ({"eos_token_id": 2}, {"max_tokens": 9}, CHAT, Sampling(9, 0.7, 0.95)),
    ],
)
def test_what_is_sampled_with(
    said: dict[str, Any] | None, named: dict[str, Any], otherwise: Sampling, wanted: Sampling
) -> None:
    assert sampling_for(said and GenerationConfig(**said), named, otherwise) == wanted


@pytest.mark.parametrize(
    ("named", "cause"), [({"top_p": 0.5}, "^top-p would do nothing"), ({"top_p": 0.5, "top_k": 3}, "^top-p and top-k")]
)
def test_what_would_do_nothing_is_refused(named: dict[str, Any], cause: str) -> None:
    with pytest.raises(tiermoe.ConfigError, match=cause):
        sampling_for(None, named, Sampling())
    with pytest.raises(tiermoe.ConfigError, match=cause):
        sampling_for(GenerationConfig(**SAID), {**named, "temperature": 0.0}, Sampling())
    assert sampling_for(GenerationConfig(**SAID), named, Sampling()).top_p == 0.5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sampling") / "tiny", "qwen3_moe", torch.float32)


def saying(tiny: Path, directory: Path, **said: Any) -> Path:
    """A copy of the checkpoint whose generation_config.json says this and no more."""
    shutil.copytree(tiny, directory)
    (directory / "generation_config.json").write_text(json.dumps(said))
    return directory


def answer(directory: Path, tokens: int, **options: Any) -> list[int]:
    """What transformers' own generate() gives for 'once upon'."""
    model = oracle(directory, "qwen3_moe", torch.float32)
    _, tokenizer = tiermoe.load(directory, memory="4GiB", bits=16, lanes=1)
    ids = tokenizer("once upon", return_tensors="pt").input_ids
    set_seed(3)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)
    return list(made[0, ids.shape[1] :].tolist())


def test_run_samples_as_the_model_says(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    directory = saying(tiny, tmp_path / "model", **SAID)
    words = ("run", directory, "once upon", *FAST, "--max-tokens", "12", "--json", "--seed", "3")
    sampled, greedy = tiermoe_(*words), tiermoe_(*words, "--temperature", "0")
    named = tiermoe_(*words, "--temperature", "1.7", "--top-p", "0.9", "--top-k", "5")
    assert json.loads(sampled.out)["token_ids"] == json.loads(named.out)["token_ids"]
    assert "sampling as the model's generation_config.json says: temperature 1.7, top-p 0.9, top-k 5" in sampled.err
    assert json.loads(greedy.out)["token_ids"] == answer(directory, 12, do_sample=False)
    assert "sampling" not in greedy.err
    assert json.loads(sampled.out)["token_ids"] != json.loads(greedy.out)["token_ids"]
    chat = tiermoe_("chat", directory, *FAST, "--top-k", "7", stdin="/set\n")
    assert "temperature = 1.7\ntop_p = 0.9\ntop_k = 7\n" in chat.err


def test_an_answer_ends_where_the_model_s_generation_config_says(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    whole = answer(tiny, 12, do_sample=False, eos_token_id=None)
    assert len(whole) == 12
    directory = saying(tiny, tmp_path / "model", eos_token_id=[2, whole[0]], pad_token_id=0)
    words = ("run", directory, "once upon", *FAST, "--max-tokens", "12", "--json")
    assert json.loads(tiermoe_(*words).out)["token_ids"] == whole[:1]


def test_the_shipped_model_does_not_repeat_itself(tiermoe_: Command, shipped: Path) -> None:
    words = ("run", shipped, "Why is the sky blue?", "--memory", "4GiB", "--lanes", "1", "--seed", "1")
    told = tiermoe_(*words)
    assert "sampling as the model's generation_config.json says: temperature 0.7, top-p 0.9, top-k all" in told.err
    assert most_of_a_sentence(told.out) <= 3
    assert most_of_a_sentence(tiermoe_(*words, "--temperature", "0").out) > 10  # the likeliest tokens do


def test_a_penalty_of_tokens_that_the_answer_has_counts_in_a_chat(shipped: Path) -> None:
    with tiermoe.load(shipped, memory="4GiB", device="cpu", lanes=1) as (model, tokenizer):
        answers = []
        for penalty in (0.0, 2.0):
            sampling = Sampling(max_tokens=24, temperature=0, frequency_penalty=penalty, logit_bias={5: 70.0, 6: 60.0})
            report = Conversation(model, tokenizer).reply("Once", sampling, lambda text: None)
            answers.append(report.token_ids)
    assert set(answers[0]) == {5}
    assert {5, 6} <= set(answers[1])


def most_of_a_sentence(text: str) -> int:
    """How often the sentence stands there that is there most often."""
    return Counter(text.split(".")).most_common(1)[0][1]


def test_a_torn_generation_config(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    directory = saying(tiny, tmp_path / "model")
    (directory / "generation_config.json").write_text("{")
    assert "generation_config.json cannot be read" in tiermoe_("run", directory, "hi", *FAST).cause
    cause = tiermoe_("run", tiny, "hi", *FAST, "--top-k", "3").cause
    assert "top-k would do nothing: at temperature 0 the likeliest token is taken" in cause
