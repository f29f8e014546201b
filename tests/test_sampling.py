"""Sampling: greedy, by temperature, truncated (top-k, top-p, min-p, sigma, typical, XTC), penalised (repetition, DRY);
what a command names, else generation_config.json. The references are the definitions, token by token."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, set_seed

import tiermoe
from commands import Command
from tiermoe.engine.dry import Breakers, Dry
from tiermoe.engine.generate import Conversation
from tiermoe.engine.sampling import (
    IMPOSSIBLE,
    Sampler,
    Sampling,
    log_probabilities,
    nucleus,
    sampling_for,
    typical,
    within_sigma,
    without_top_choices,
)
from tiermoe.errors import ConfigError
from tiny import oracle

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15, 0.0]))
VALUES = st.lists(st.integers(-60, 60), min_size=2, max_size=40, unique=True)
"""Tenths of logits; no two are equal, since of equal ones any may be kept."""


def drawn(count: int = 3000, **named: Any) -> dict[int, float]:
    """How often each token is drawn."""
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 1, **named}))
    found = Counter(sampler.choose(LOGITS) for _ in range(count))
    return {token: times / count for token, times in found.items()}


def test_temperature_0_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert Sampler(Sampling()).choose(torch.tensor([1.0, 3.0, 3.0, 2.0])) == 1


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.0}, [1]),
        ({"top_k": 3, "top_p": 0.0}, [1]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),
        ({"min_p": 0.3}, [1, 3, 4]),
        ({"top_n_sigma": 1.5}, [1, 3, 4]),  # the five have a standard deviation of .75
        ({"typical_p": 0.25}, [3]),  # an entropy of 1.39, surprises of 3, .92, 2.3, 1.2 and 1.9
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12}, [0, 2, 4]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12, "top_k": 3}, [4]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.58, "top_p": 0.6}, [1, 3]),
    ],
)
def test_each_draws_from_what_it_keeps_by_the_probabilities(named: dict[str, Any], kept: list[int]) -> None:
    weights = torch.softmax(LOGITS[kept] / named.get("temperature", 1.0), 0)
    assert drawn(**named) == pytest.approx(dict(zip(kept, weights.tolist(), strict=True)), abs=0.03)


def test_xtc_comes_by_chance() -> None:
    found = drawn(xtc_probability=0.4, xtc_threshold=0.2)  # leaves out the likeliest of two
    assert found[1] == pytest.approx(0.6 * 0.4, abs=0.03)


def probabilities_of(tenths: Sequence[int]) -> torch.Tensor:
    return torch.softmax(torch.tensor(tenths) / 10, 0)


@given(VALUES, st.integers(1, 30), st.booleans())
def test_sigma_keeps_logits_near_the_largest(tenths: list[int], n: int, masked: bool) -> None:
    logits = [value / 10 for value in tenths]
    mean = sum(logits) / len(logits)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logits) / len(logits))
    floor = max(logits) - n / 10 * deviation
    kept = [token for token, value in enumerate(logits) if value >= floor]
    given = torch.tensor([*logits, *[-torch.inf] * masked])
    found = (within_sigma(given, n / 10) > -torch.inf).nonzero().squeeze(1).tolist()
    unsure = [token for token, value in enumerate(logits) if abs(value - floor) < 1e-5]
    assert set(found) ^ set(kept) <= set(unsure)


def typical_tokens(probabilities: Sequence[float], share: float) -> list[int]:
    """By falling nearness of the surprise to the entropy, until they have more than `share`."""
    entropy = -sum(p * math.log(p) for p in probabilities)
    order = sorted(range(len(probabilities)), key=lambda token: abs(-math.log(probabilities[token]) - entropy))
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += probabilities[token]
        if total > share:
            break
    return kept


@given(VALUES, st.integers(0, 97), st.integers(0, 50))
def test_typical_tokens_surprise_as_much_as_is_expected(tenths: list[int], percent: int, top_k: int) -> None:
    probabilities = probabilities_of(tenths)
    likeliest = probabilities.topk(min(top_k or len(tenths), len(tenths))).indices.tolist()
    shares = [float(probabilities[token] / probabilities[likeliest].sum()) for token in likeliest]
    share = percent / 100 + 0.00317  # no sum is near it
    kept = {likeliest[at] for at in typical_tokens(shares, share)}
    found = typical(probabilities, share, top_k)
    assert set(found.nonzero().squeeze(1).tolist()) == kept
    assert float(found.sum()) == pytest.approx(1)
    inside = probabilities[list(kept)]
    torch.testing.assert_close(found[list(kept)], inside / inside.sum())


def test_a_share_that_is_met_ends_a_nucleus_and_no_typical_set() -> None:
    even = torch.tensor([0.5, 0.5])
    assert len(nucleus(even, 0, 0.5)[1]) == len(nucleus(even, 2, 0.5)[1]) == 1
    assert len(typical(even, 0.5, 0).nonzero()) == 2


def test_a_large_vocabulary_is_looked_at_as_far_as_needed() -> None:
    probabilities = torch.softmax(torch.arange(5000.0).flip(0) / 1e4, 0)
    kept = typical_tokens(probabilities.tolist(), 0.7)
    found = set(typical(probabilities, 0.7, 0).nonzero().squeeze(1).tolist())
    assert len(found ^ set(kept)) <= 4  # sums of 32 bits
    assert 256 < len(found) < 5000
    shares, tokens = nucleus(probabilities, 1000, 0.5)
    most = probabilities[:1000] / probabilities[:1000].sum()
    assert len(tokens) == int((most.cumsum(0) < 0.5).sum()) + 1 > 256
    assert shares.tolist() == probabilities[: len(tokens)].tolist()


@given(VALUES, st.integers(0, 100))
def test_top_choices_are_left_out_but_for_the_smallest(tenths: list[int], percent: int) -> None:
    probabilities, threshold = probabilities_of(tenths), percent / 100 + 0.00317
    order = sorted(range(len(tenths)), key=lambda token: -tenths[token])
    above = [token for token in order if float(probabilities[token]) >= threshold]
    kept = order[max(len(above) - 1, 0) :]
    weights = 7 * probabilities
    found = without_top_choices(weights, threshold)
    assert sorted(found.nonzero().squeeze(1).tolist()) == sorted(kept)
    assert found[kept].tolist() == weights[kept].tolist()


def test_nothing_impossible_is_the_smallest_top_choice() -> None:
    assert without_top_choices(torch.tensor([0.7, 0.3, 0.0]), 0.0).nonzero().squeeze(1).tolist() == [1]


def test_a_seed_names_an_answer_and_what_is_off_takes_no_random_number() -> None:
    off = {"typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.5, "dry_base": 3.0}
    first, again, other = (
        Sampler(Sampling(temperature=1.0, seed=seed, **named)) for seed, named in ((4, {}), (4, off), (5, {}))
    )
    chosen = [first.choose(LOGITS) for _ in range(50)]
    assert [again.choose(LOGITS) for _ in range(50)] == chosen
    assert [other.choose(LOGITS) for _ in range(50)] != chosen


@pytest.mark.parametrize(
    ("sampling", "penalty", "chosen"),
    [
        (Sampling(), 2.0, 1),  # the model's own
        (Sampling(repetition_penalty=2.0), 0.5, 1),
        (Sampling(repetition_penalty=1.0), 2.0, 0),
    ],
)
def test_a_penalty_lowers_tokens_that_were_there(sampling: Sampling, penalty: float, chosen: int) -> None:
    logits, sampler = torch.tensor([2.0, 1.5, -1.0]), Sampler(sampling, penalty)
    assert sampler.choose(logits, before=[0]) == chosen
    assert logits.tolist() == [2.0, 1.5, -1.0]  # log probabilities are told of these
    assert sampler.choose(torch.tensor([-1.0, -1.5, -1.2]), before=[0]) == 2 * chosen


@pytest.mark.parametrize(("last", "seen"), [(-1, {0, 1, 2}), (0, set()), (1, {2}), (2, {1, 2}), (9, {0, 1, 2})])
def test_the_repetition_penalty_looks_back_at_the_last_tokens(last: int, seen: set[int]) -> None:
    for token in range(4):
        logits = torch.full((4,), -torch.inf)
        logits[token], logits[3] = 3.0, 2.9
        sampler = Sampler(Sampling(repetition_penalty=2.0, repeat_last_n=last))
        assert sampler.choose(logits, [0, 1, 2]) == (3 if token in seen else token)


def test_an_answer_has_its_least_length() -> None:
    logits, sampler = torch.tensor([5.0, 1.0, 4.0]), Sampler(Sampling(min_tokens=3))
    chosen = [sampler.choose(logits, [9] * (2 + answered), answered, {0, 2}) for answered in range(5)]
    assert chosen == [1, 1, 1, 0, 0]
    only = torch.tensor([5.0, -torch.inf, 4.0])  # a grammar lets nothing else pass
    assert sampler.choose(only, [9, 9], 0, {0, 2}) == 0


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
        ({"typical_p": 1.5}, "typical-p must be from 0 to 1, got 1.5"),
        ({"xtc_probability": float("nan")}, "xtc-probability must be"),
        ({"repeat_last_n": -2}, "repeat-last-n must be from -1 to 1,073,741,824, got -2"),
        ({"dry_sequence_breakers": ("x",) * 33}, "at most 32 strings of 40 characters, got 33 of up to 1"),
        ({"dry_sequence_breakers": ("x" * 41,)}, "got 1 of up to 41"),
    ],
)
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        Sampling(**wrong)


def test_what_cannot_come_has_a_log_probability_that_json_can_say() -> None:
    told, likeliest = log_probabilities(torch.tensor([-torch.inf, 0.0]), 0, 2)
    assert (told, likeliest) == (IMPOSSIBLE, [(1, 0.0), (0, IMPOSSIBLE)])


# DRY


class Words:
    """A tokenizer whose tokens are the words of a list; a text is split into the longest ones."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def decode(self, tokens: Sequence[int], clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(self.words[token] for token in tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = []
        while text:
            word = max((word for word in self.words if text.startswith(word)), key=len)
            found.append(self.words.index(word))
            text = text[len(word) :]
        return found


LETTERS = Words("abc:")


def repetitions(before: Sequence[int], last_n: int, breakers: Sequence[str]) -> dict[int, int]:
    """Token → the longest sequence at the end of `before` that the token followed already, one letter a token: within
    the last tokens, and behind the last breaker."""
    text = LETTERS.decode(before)
    limit = len(before)
    ends = [(text.rfind(each), len(each)) for each in breakers if each in text]
    if ends:
        limit = len(text) - sum(max(ends))
    window = list(before) if last_n < 0 else list(before)[max(len(before) - last_n, 0) :]
    found: dict[int, int] = {}
    for place in range(len(window) - 1):
        length = 0
        while length <= place and window[place - length] == window[-1 - length]:
            length += 1
        token = window[place + 1]
        found[token] = max(found.get(token, 0), min(length, limit))
    return found


@settings(max_examples=400)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(0, 5),
    st.one_of(st.just(-1), st.integers(0, 20)),
    st.sampled_from([(), (":",), ("ab", "abc"), (":", "ca"), ("bca:", "a")]),
)
def test_dry_penalises_what_goes_on_with_a_repetition(
    text: list[int], answered: int, allowed: int, last_n: int, breakers: tuple[str, ...]
) -> None:
    """From call to call, and at once."""
    dry = Dry(0.8, 1.75, allowed, last_n, Breakers(breakers, LETTERS))
    for end in range(max(len(text) - answered, 1), len(text) + 1):
        before = text[:end]
        wanted = {
            token: 0.8 * 1.75 ** (length - allowed)
            for token, length in repetitions(before, last_n, breakers).items()
            if length >= allowed and LETTERS.words[token] not in breakers
        }
        assert dry.penalties(before) == pytest.approx(wanted)
        again = Dry(0.8, 1.75, allowed, last_n, Breakers(breakers, LETTERS))
        assert again.penalties(before) == pytest.approx(wanted)


def test_dry_follows_its_definition_on_the_example_of_llama_cpp() -> None:
    """a b c c b c y a b c: c would make four tokens of three, y three of two, b two of one."""
    dry = Dry(1.0, 2.0, 1, -1, Breakers((), None))
    assert dry.penalties([0, 1, 2, 2, 1, 2, 3, 0, 1, 2]) == {2: 4.0, 3: 2.0, 1: 1.0}


def test_a_breaker_is_found_in_tokens_that_overlap_it() -> None:
    tokenizer = Words(["a", "b", "x: ", "\nUS", "ER", ":", "\nU", "S"])
    breakers = Breakers((":", "USER:"), tokenizer)
    a, b, colon, us, er, last = 0, 1, 2, 3, 4, 5
    assert [breakers.breaks(token) for token in range(8)] == [False, False, True, False, False, True, False, False]
    assert breakers.tokens_behind([a, colon, b, a, b], 5) == 3
    assert breakers.tokens_behind([us, er, last, a], 4) == 1
    assert Breakers(("USER:",), tokenizer).tokens_behind([a, us, er, last, a, b], 6) == 2
    assert Breakers(("USER:",), tokenizer).tokens_behind([a, us, er, a, b], 5) is None
    assert Breakers(("USER:",), tokenizer).tokens_behind([us, er, last, *[a] * 9], 9) is None


def test_dry_turns_to_another_token() -> None:
    logits = torch.tensor([5.0, 4.9, 0.0])
    before = [2, 1, 0, 2, 1]
    sampling: dict[str, Any] = {"dry_multiplier": 1.0, "dry_sequence_breakers": ()}
    assert Sampler(Sampling(**sampling)).choose(logits, before, 3) == 1
    assert Sampler(Sampling()).choose(logits, before, 3) == 0
    assert Sampler(Sampling(**sampling, dry_allowed_length=3)).choose(logits, before, 3) == 0


def test_the_longest_repetition_does_not_overflow() -> None:
    before = [0, 1] * 3000
    for temperature in (0.0, 1e-30, 1.0):
        sampling = Sampling(
            temperature=temperature, seed=1, dry_multiplier=100.0, dry_base=100.0, dry_sequence_breakers=()
        )
        logits = torch.tensor([3.0, 0.0, -torch.inf])
        assert Sampler(sampling).choose(logits, before) == 1
    worst = Dry(100.0, 100.0, 2, -1, Breakers((), None)).penalties(before)
    assert numpy.isfinite(numpy.float32(worst[0]) / numpy.float32(1e-30))


# what a model says

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
