"""Samplers of llama.cpp: sigma, typical, XTC, DRY, the window of the repetition penalty, and least lengths. The
references are the definitions, token by token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.engine.dry import Breakers, Dry
from tiermoe.engine.sampling import Sampler, Sampling, nucleus, typical, within_sigma, without_top_choices
from tiermoe.errors import ConfigError

LOGITS = torch.tensor([2.0, 1.5, 0.5, -1.0, -4.0, -torch.inf])
VALUES = st.lists(st.integers(-60, 60), min_size=2, max_size=40, unique=True)
"""Tenths of logits; no two are equal, since of equal ones any may be kept."""


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


def test_typical_leaves_out_a_token_that_is_too_likely() -> None:
    probabilities = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])  # an entropy of 1.5: surprises of .7 and 2.3
    assert typical(probabilities, 0.45, 0).nonzero().squeeze(1).tolist() == [0]
    flat = torch.tensor([0.3, *[0.01] * 70])  # 3.6: 1.2 and 4.6
    assert float(typical(flat, 0.5, 0)[0]) == 0


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


def drawn(count: int = 3000, **named: Any) -> dict[int, float]:
    """How often each token is drawn."""
    sampler = Sampler(Sampling(temperature=1.0, seed=1, **named))
    found = Counter(sampler.choose(LOGITS) for _ in range(count))
    return {token: times / count for token, times in sorted(found.items())}


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ({"top_n_sigma": 0.75}, [0, 1, 2]),  # the five have a standard deviation of 2.16
        ({"typical_p": 0.3}, [1]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, [2, 3, 4]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1, "top_k": 3}, [2]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.5, "top_p": 0.8}, [0, 1]),
    ],
)
def test_each_draws_from_what_it_keeps(named: dict[str, Any], kept: list[int]) -> None:
    shares = LOGITS[kept].exp() / LOGITS[kept].exp().sum()
    wanted = dict(zip(kept, shares.tolist(), strict=True))
    assert drawn(**named) == pytest.approx({token: share for token, share in wanted.items() if share > 1e-3}, abs=0.03)


def test_xtc_comes_by_chance() -> None:
    likeliest = torch.softmax(LOGITS, 0)[:2].sum().item()
    found = drawn(xtc_probability=0.4)
    assert found[0] + found[1] == pytest.approx(0.6 * likeliest, abs=0.03)


def test_what_is_off_takes_no_random_number() -> None:
    off = {"typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0, "xtc_threshold": 0.5, "dry_base": 3.0}
    plain, other = Sampler(Sampling(temperature=1.0, seed=4)), Sampler(Sampling(temperature=1.0, seed=4, **off))
    assert [plain.choose(LOGITS) for _ in range(50)] == [other.choose(LOGITS) for _ in range(50)]


# repetition and length


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


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"typical_p": 1.5}, "typical-p must be from 0 to 1, got 1.5"),
        ({"xtc_probability": float("nan")}, "xtc-probability must be"),
        ({"dry_base": 0.5}, "dry-base must be from 1 to 100, got 0.5"),
        ({"repeat_last_n": -2}, "repeat-last-n must be from -1 to 1,073,741,824, got -2"),
        ({"dry_sequence_breakers": ("x",) * 33}, "at most 32 strings of 40 characters, got 33 of up to 1"),
        ({"dry_sequence_breakers": ("x" * 41,)}, "got 1 of up to 41"),
    ],
)
def test_what_is_out_of_range_is_refused(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        Sampling(**wrong)


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
