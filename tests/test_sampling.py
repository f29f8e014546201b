"""Sampling: greedy, by temperature, among the likeliest; what a command names, else generation_config.json."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, set_seed

import tiermoe
from commands import Command
from tiermoe.engine.chat import Conversation
from tiermoe.engine.sampling import IMPOSSIBLE, Sampler, Sampling, log_probabilities, sampling_for
from tiermoe.errors import ConfigError
from tiny import oracle, write

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))


DRAWS = 4000


def shares(logits: torch.Tensor, **sampling: float | int) -> list[float]:
    """How often each token is drawn."""
    sampler = Sampler(Sampling(seed=1, **sampling))  # type: ignore[arg-type]
    drawn = Counter(sampler.choose(logits) for _ in range(DRAWS))
    return [drawn[token] / DRAWS for token in range(len(logits))]


def near(found: list[float], wanted: list[float]) -> bool:
    return all(abs(a - b) < 0.03 for a, b in zip(found, wanted, strict=True))


def test_temperature_0_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert Sampler(Sampling()).choose(torch.tensor([1.0, 3.0, 3.0, 2.0])) == 1


def test_tokens_are_drawn_by_their_probabilities() -> None:
    assert near(shares(LOGITS, temperature=1.0), [0.05, 0.4, 0.1, 0.3, 0.15])


def test_temperature_flattens() -> None:
    flat = torch.softmax(LOGITS / 2.0, 0).tolist()
    assert near(shares(LOGITS, temperature=2.0), flat)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),
    ],
)
def test_only_the_likeliest_are_drawn(options: dict[str, float], kept: list[int]) -> None:
    total = sum(float(LOGITS[token].exp()) for token in kept)
    wanted = [float(LOGITS[token].exp()) / total if token in kept else 0.0 for token in range(5)]
    assert near(shares(LOGITS, temperature=1.0, **options), wanted)


def test_a_nucleus_of_more_tokens_than_are_looked_at_first() -> None:
    logits = torch.zeros(5000)
    sampler = Sampler(Sampling(temperature=1.0, top_p=0.5, seed=2))
    drawn = {sampler.choose(logits) for _ in range(DRAWS)}
    assert 1500 < len(drawn) <= 2501


class _Threads(TorchDispatchMode):
    """Keeps how many threads torch has at each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_drawing_wakes_no_thread_of_torch_and_leaves_their_number(options: dict[str, float]) -> None:
    threads, logits, sampler = torch.get_num_threads(), torch.zeros(1000), Sampler(Sampling(**options))  # type: ignore[arg-type]
    torch.set_num_threads(2)
    try:
        with _Threads() as found:
            sampler.choose(logits)
        assert found.seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_seed_names_an_answer() -> None:
    first, second, other = (
        [Sampler(Sampling(temperature=1.0, seed=seed)).choose(LOGITS + step) for step in range(3)] for seed in (3, 3, 4)
    )
    assert first == second
    assert [Sampler(Sampling(temperature=1.0, seed=seed)).choose(LOGITS) for seed in range(40)].count(first[0]) < 40
    assert len(other) == 3


@pytest.mark.parametrize("sampler", [Sampler(Sampling(), 2.0), Sampler(Sampling(repetition_penalty=2.0), 0.5)])
def test_a_penalty_lowers_tokens_that_were_there(sampler: Sampler) -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    assert sampler.choose(logits, before=[0]) == 1
    assert logits.tolist() == [2.0, 1.5, -1.0]  # log probabilities are told of these
    assert sampler.choose(torch.tensor([-1.0, -1.5, -1.2]), before=[0]) == 2


def test_a_model_s_own_penalty_can_be_switched_off() -> None:
    assert Sampler(Sampling(repetition_penalty=1.0), penalty=2.0).choose(torch.tensor([2.0, 1.5]), before=[0]) == 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-38, 1e-37, 1e-30, 1e-6])
@pytest.mark.parametrize("options", [{}, {"top_p": 1e-38}, {"top_p": 1e-46, "top_k": 3}, {"min_p": 1.0}])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature: float, options: dict[str, Any]) -> None:
    for logits in (torch.tensor([12.0, 40.0, 39.0, -90.0]), torch.tensor([-50.0, -20.0, -torch.inf, -21.0])):
        sampler = Sampler(Sampling(temperature=temperature, seed=1, **options))
        assert {sampler.choose(logits) for _ in range(20)} == {1}


def test_the_hardest_biases_and_penalties_let_nothing_impossible_pass() -> None:
    logits = torch.tensor([-torch.inf, 3e4, -3e4, 0.0])
    for temperature in (0.0, 1e-38, 1.0, 100.0):
        hard = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0}
        sampler = Sampler(Sampling(temperature=temperature, logit_bias={0: 100, 2: -100}, seed=1, **hard))
        assert 0 not in {sampler.choose(logits, [0, 1, 2, 3] * 50, 100) for _ in range(20)}


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"logit_bias": {3: 1e30}}, "logit-bias must be from -100 to 100, got 1e"),
        ({"logit_bias": {3: float("nan")}}, "logit-bias must be"),
        ({"repetition_penalty": 0.0}, "repetition-penalty must be from 0.01 to 100, got 0"),
        ({"repetition_penalty": 1e38}, "repetition-penalty must be"),
    ],
)
def test_what_would_overflow_is_refused(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        Sampling(**wrong)


def test_what_cannot_come_has_a_log_probability_that_json_can_say() -> None:
    told, likeliest = log_probabilities(torch.tensor([-torch.inf, 0.0]), 0, 2)
    assert (told, likeliest) == (IMPOSSIBLE, [(1, 0.0), (0, IMPOSSIBLE)])


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
