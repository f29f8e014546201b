"""Sampling: the parameters of a request, the next token from logits, and log probabilities."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from tiermoe.engine.dry import Breakers, Dry
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.model.tokenizer import Tokenizer
from tiermoe.platform.threads import torch_threads

_CANDIDATES = 256  # tokens that reach a share are nearly always among so many: sorting a vocabulary takes milliseconds
_MORE = 16  # times as many are looked at where they are too few
_COLDEST = 1e-30  # logits divided by less overflow; at this temperature only the likeliest token is drawn anyway
_LARGEST_BIAS = 100
IMPOSSIBLE = -9999.0
"""Log probability of a token that cannot come, as OpenAI gives it: JSON has no infinity."""
_MANY = 1 << 30  # tokens: more than any context has


class Truncation(ABC):
    """A rule for which tokens may be drawn, by a number: the field of `Sampling` that has the rule's name in
    `TRUNCATIONS`, else the entry of that name in `Sampling.own`, which a request gives as any other field."""

    off: ClassVar[float]  # with this number all tokens may be drawn
    least: ClassVar[float]  # number
    largest: ClassVar[float]  # number

    @abstractmethod
    def kept(self, probabilities: Tensor, value: float, top_k: int) -> Tensor:
        """Probabilities (vocabulary) with 0 for tokens that are not to be drawn; their sum need not be 1. top_k: only
        so many of the likeliest are drawn afterwards; 0: all."""


class MinP(Truncation):
    """Tokens of at least this share of the likeliest token's probability."""

    off, least, largest = 0, 0, 1

    def kept(self, probabilities: Tensor, value: float, top_k: int) -> Tensor:
        return probabilities.masked_fill(probabilities < value * probabilities.max(), 0)


class TypicalP(Truncation):
    """`typical`."""

    off, least, largest = 1, 0, 1

    def kept(self, probabilities: Tensor, value: float, top_k: int) -> Tensor:
        return typical(probabilities, value, top_k)


TRUNCATIONS: dict[str, Truncation] = {"typical_p": TypicalP(), "min_p": MinP()}
"""Rules by name, in the order in which they are applied."""
RANGES: dict[str, tuple[float, float]] = {
    **{name: (rule.least, rule.largest) for name, rule in TRUNCATIONS.items()},
    **dict.fromkeys(("xtc_probability", "xtc_threshold"), (0, 1)),
    **dict.fromkeys(("top_n_sigma", "dry_multiplier"), (0, 100)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2)),
    **dict.fromkeys(("min_tokens", "dry_allowed_length"), (0, _MANY)),
    **dict.fromkeys(("repeat_last_n", "dry_penalty_last_n"), (-1, _MANY)),
    "repetition_penalty": (0.01, 100), "dry_base": (1, 100),
}  # fmt: skip
"""Field of `Sampling` → its least and its largest value."""
MOST_BREAKERS, LONGEST_BREAKER = 32, 40
"""Sequence breakers of a request, and characters of one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request. ConfigError if a value is out of range."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0: greedy; then no value matters that says how tokens are drawn
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int | None = None
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest token's
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the answer has
    frequency_penalty: float = 0.0  # the same, once for each time that the answer has the token
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id → what is added to its logit
    repetition_penalty: float | None = None
    """Divides the positive logits of tokens in prompt and answer, and multiplies the negative ones; None: the value of
    the model's generation_config.json."""
    repeat_last_n: int = -1  # tokens at the end of prompt and answer that it looks at; -1: all
    min_tokens: int = 0  # of an answer, before a token may end it
    typical_p: float = 1.0  # share of the probability that is drawn from, nearest to the expected surprise; 1: all
    top_n_sigma: float = 0.0  # standard deviations below the largest logit that a logit may have; 0: any
    xtc_probability: float = 0.0  # of leaving the top choices out (XTC), at each token
    xtc_threshold: float = 0.1  # least probability of a top choice
    dry_multiplier: float = 0.0  # of the penalties for going on with a repeated sequence (`Dry`); 0: none
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    own: Mapping[str, float] = field(default_factory=dict)  # numbers of rules in `TRUNCATIONS` that are no field here

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"top-p must be from 0, the likeliest token alone, to 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (all tokens) or more, got {self.top_k}")
        for name, (least, largest) in RANGES.items():
            _check_range(name, getattr(self, name), least, largest)
        for name, value in self.own.items():
            if name not in TRUNCATIONS:
                raise ConfigError(f"unknown sampling field '{name}'; leave it out")
            _check_range(name, value, TRUNCATIONS[name].least, TRUNCATIONS[name].largest)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be from -2^63 to 2^64 - 1, got {self.seed}")
        wrong = [bias for bias in self.logit_bias.values() if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS]
        if wrong:
            raise ConfigError(f"logit-bias must be from -{_LARGEST_BIAS} to {_LARGEST_BIAS}, got {wrong[0]}")
        breakers = self.dry_sequence_breakers
        if len(breakers) > MOST_BREAKERS or any(len(each) > LONGEST_BREAKER for each in breakers):
            raise ConfigError(
                f"dry-sequence-breakers must be at most {MOST_BREAKERS} strings of {LONGEST_BREAKER} characters, got "
                f"{len(breakers)} of up to {max(map(len, breakers))}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _COLDEST

    @property
    def truncations(self) -> list[tuple[Truncation, float]]:
        """The rules that leave tokens out, with their numbers."""
        rules = [(rule, getattr(self, name, self.own.get(name, rule.off))) for name, rule in TRUNCATIONS.items()]
        return [(rule, value) for rule, value in rules if value != rule.off]


def _check_range(name: str, value: float | None, least: float, largest: float) -> None:
    if value is not None and not least <= value <= largest:
        raise ConfigError(f"{name.replace('_', '-')} must be from {least:g} to {largest:,}, got {value}")


def sampling_for(config: Any, named: Mapping[str, Any], otherwise: Sampling) -> Sampling:
    """Sampling parameters of a model: those in `named`, else those of its generation config where that samples at all,
    else `otherwise`. config: transformers' GenerationConfig or None; named: fields of `Sampling`. ConfigError if a
    named value would do nothing."""
    chosen = otherwise
    if config is not None and config.do_sample:
        chosen = replace(  # a value that the file leaves out restricts nothing
            otherwise,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else config.top_k,
        )
    sampling = replace(chosen, **named)
    idle = [name.replace("_", "-") for name in ("top_p", "top_k", "min_p") if name in named]
    if idle and sampling.greedy:
        raise ConfigError(
            f"{' and '.join(idle)} would do nothing: at temperature 0 the likeliest token is taken; name a temperature "
            f"above 0 beside it"
        )
    return sampling


def end_tokens(config: Any) -> set[int]:
    """Token ids that end an answer, from transformers' GenerationConfig."""
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, list | tuple) else {int(ends)}


class Sampler:
    """Chooses the tokens of one answer. Its random numbers are its own, so that a seed determines the answer.

    penalty: the model's repetition penalty, for a sampling without one. tokenizer: of sequence breakers."""

    def __init__(self, sampling: Sampling, penalty: float | None = None, tokenizer: Tokenizer | None = None) -> None:
        self._sampling = sampling
        self._greedy = sampling.greedy
        self._truncations = sampling.truncations
        self._dry: Dry | None = None
        if sampling.dry_multiplier:
            self._dry = Dry(
                sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, sampling.dry_penalty_last_n,
                Breakers(sampling.dry_sequence_breakers, tokenizer),
            )  # fmt: skip
        penalised = sampling.presence_penalty or sampling.frequency_penalty or self._dry
        self._biased = bool(sampling.logit_bias or penalised)
        penalties = (sampling.repetition_penalty, penalty, 1.0)
        self._penalty = next(each for each in penalties if each is not None)
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, before: Sequence[int] = (), answered: int = 0, ends: Collection[int] = ()) -> int:
        """The next token, from logits (vocabulary) in main memory. Greedy: the likeliest, of equal ones the first.

        before: tokens of prompt and answer so far; the last `answered` of them are the answer's. ends: tokens that end
        an answer. What is chosen depends on these, on the seed and on how many tokens were chosen before."""
        with torch_threads(1):
            if answered < self._sampling.min_tokens and ends:
                logits = _without(logits, ends)
            if self._penalty != 1 and before:
                logits = self._with_repetition_penalty(logits, before)
            if self._biased:
                logits = self._with_bias(logits, before, answered)
            if self._greedy:
                return int(logits.float().numpy().argmax())  # several times as fast as torch's
            return self._draw(logits)

    def _with_repetition_penalty(self, logits: Tensor, before: Sequence[int]) -> Tensor:
        last = self._sampling.repeat_last_n
        seen = torch.tensor(sorted(set(before if last < 0 else before[max(len(before) - last, 0) :])), dtype=torch.long)
        logits = logits.float().clone()  # log probabilities are reported from the model's own logits
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * self._penalty, values / self._penalty)
        return logits

    def _with_bias(self, logits: Tensor, before: Sequence[int], answered: int) -> Tensor:
        """Logits with the bias, the presence penalty, the frequency penalty and DRY's."""
        added = {token: float(bias) for token, bias in self._sampling.logit_bias.items()}
        for token, times in Counter(before[len(before) - answered :]).items():
            taken = self._sampling.presence_penalty + times * self._sampling.frequency_penalty
            added[token] = added.get(token, 0.0) - taken
        if self._dry is not None:
            for token, taken in self._dry.penalties(before).items():
                added[token] = added.get(token, 0.0) - taken
        logits = logits.float().clone()
        if added:
            logits[torch.tensor(list(added))] += torch.tensor(list(added.values()))
        return logits

    def _draw(self, logits: Tensor) -> int:
        """A random token: top_n_sigma, temperature, `TRUNCATIONS`, top_k and top_p, XTC."""
        sampling, logits = self._sampling, logits.float()
        if sampling.top_n_sigma:
            logits = within_sigma(logits, sampling.top_n_sigma)
        probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
        for rule, value in self._truncations:
            probabilities = rule.kept(probabilities, value, sampling.top_k)
        weights, tokens = probabilities, None
        if sampling.top_k or sampling.top_p < 1:
            weights, tokens = nucleus(probabilities, sampling.top_k, sampling.top_p)
        if sampling.xtc_probability and float(self._random_number()) <= sampling.xtc_probability:
            weights = without_top_choices(weights, sampling.xtc_threshold)
        index = self._draw_index(weights)
        return index if tokens is None else int(tokens[index])

    def _draw_index(self, weights: Tensor) -> int:
        """A random index, by weights that need not sum to 1."""
        sums = weights.cumsum(0)
        at = self._random_number() * sums[-1]
        return min(int(torch.searchsorted(sums, at, right=True)), weights.numel() - 1)

    def _random_number(self) -> Tensor:
        """The next random number of the answer, at least 0 and below 1."""
        return torch.rand((), generator=self._random)


def _without(logits: Tensor, ends: Collection[int]) -> Tensor:
    """Logits without these tokens, unless nothing else may come."""
    others = logits.float().clone()
    others[torch.tensor(list(ends))] = -torch.inf
    return others if bool((others > -torch.inf).any()) else logits


class Grammar:
    """Grammar of one answer: the tokens that may come next, by llguidance's `matcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        """Whether the answer is whole: only its end may follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def restrict(self, logits: Tensor) -> Tensor:
        """Logits (vocabulary), in main memory, with minus infinity for each token that must not come next. TiermoeError
        if finding these tokens exceeds llguidance's limits of a step."""
        # by hand: llguidance.torch has torch compile a kernel while the server answers. That needs a compiler, and with
        # torch held to AVX2 the kernel let other tokens pass.
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
        self._check()
        allowed = numpy.unpackbits(bits, bitorder="little", count=len(logits))
        return logits.float().masked_fill(torch.from_numpy(allowed == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """Goes on after the token that was chosen. TiermoeError as in `restrict`."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TiermoeError(
                f"the JSON schema or grammar cannot be followed any further: {own_words(self._matcher.get_error())}"
            )


def own_words(error: str) -> str:
    """llguidance's message in one line, without its own suffix."""
    return " ".join(error.removesuffix("<non-verbose/>").split())


def log_probabilities(logits: Tensor, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Log probability of `token`, and (token, log probability) of the `most` likeliest tokens, falling; at least
    `IMPOSSIBLE`. logits (vocabulary): the model's own, in main memory. In 64 bits, since those of long texts
    are added up."""
    with torch_threads(1):
        logs = torch.log_softmax(logits.double(), dim=-1)
        values, tokens = logs.topk(most)
        values, chosen = values.clamp(min=IMPOSSIBLE), logs[token].clamp(min=IMPOSSIBLE)
    return float(chosen), list(zip(tokens.tolist(), values.tolist(), strict=True))


# truncation: which tokens may be drawn, by their probabilities. Definitions: llama.cpp, src/llama-sampling.cpp
# (`llama_sampler_top_n_sigma_apply`, `llama_sampler_typical_apply`, `llama_sampler_top_p_apply`,
# `llama_sample_xtc_apply`). There they see probabilities at temperature 1, here those at the request's temperature.


def within_sigma(logits: Tensor, n: float) -> Tensor:
    """Logits (vocabulary), with minus infinity for those more than n standard deviations below the largest. Tang et
    al., "Top-nσ: Not All Logits Are You Need", 2024. Possible tokens alone count."""
    possible = logits[logits > -torch.inf]
    return logits.masked_fill(logits < possible.max() - n * possible.std(correction=0), -torch.inf)


def typical(probabilities: Tensor, share: float, top_k: int) -> Tensor:
    """Probabilities (vocabulary) of tokens whose surprise is nearest to the entropy, as many as have more than `share`
    together, and 0 for others; their sum is 1. Meister et al., "Locally Typical Sampling", 2023. top_k: only so many of
    the likeliest count; 0: all."""
    if 0 < top_k < probabilities.numel():
        probabilities = _alone(probabilities, probabilities.topk(top_k).indices)
    surprise = -probabilities.log()
    entropy = torch.special.entr(probabilities).sum()
    return _alone(probabilities, _reaching(-(surprise - entropy).abs(), probabilities, share, more=True))


def nucleus(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the likeliest tokens, falling: at most top_k (0: any number), as many as have the share
    top_p of the probability of those, at least one. probabilities (vocabulary)."""
    if not top_k:
        tokens = _reaching(probabilities, probabilities, top_p)
        return probabilities[tokens], tokens
    kept, tokens = probabilities.topk(min(top_k, probabilities.numel()))
    if top_p < 1:
        reached = int(torch.searchsorted(kept.cumsum(0), top_p * kept.sum())) + 1
        kept, tokens = kept[:reached], tokens[:reached]
    return kept, tokens


def without_top_choices(weights: Tensor, threshold: float) -> Tensor:
    """Weights without those whose share is at least `threshold`, but for the smallest of them. p-e-w, "Exclude Top
    Choices (XTC)", text-generation-webui, pull request 6335, 2024."""
    shares = weights / weights.sum()
    above = ((shares >= threshold) & (shares > 0)).nonzero().squeeze(1)
    if len(above) < 2:
        return weights
    smallest = above[shares[above].argmin()]
    return weights.index_fill(0, above[above != smallest], 0)


def _reaching(order: Tensor, probabilities: Tensor, share: float, more: bool = False) -> Tensor:
    """Ids of tokens, by falling `order`, as many as have the probability `share` together, at least one. more: as have
    more than that."""
    count = 0
    while True:
        count = min(_MORE * count or _CANDIDATES, order.numel())
        tokens = order.topk(count).indices
        sums = probabilities[tokens].cumsum(0)
        reached = int(torch.searchsorted(sums, torch.tensor(share), right=more)) + 1
        if reached <= count or count == order.numel():
            return tokens[:reached]


def _alone(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The probabilities of these tokens, and 0 for others; their sum is 1."""
    kept = torch.zeros_like(probabilities)
    kept[tokens] = probabilities[tokens]
    return kept / kept.sum()
