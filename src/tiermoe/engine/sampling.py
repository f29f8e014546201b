"""Sampling: the parameters of a request, the next token from logits, and log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.platform.threads import torch_threads

_CANDIDATES = 256  # the nucleus is nearly always a part of them: sorting a whole vocabulary takes milliseconds
_MORE = 16  # times as many candidates are looked at where they are too few
_COLDEST = 1e-30  # logits divided by less overflow; at this temperature only the likeliest token is drawn anyway
_LARGEST_BIAS = 100
IMPOSSIBLE = -9999.0
"""Log probability of a token that cannot come, as OpenAI gives it: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request. ConfigError where a value is out of range."""

    max_tokens: int = 256
    temperature: float = 0.0  # 0: greedy; the following four matter above 0 only
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

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min-p must be from 0 to 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name.replace('_', '-')} must be from -2 to 2, got {getattr(self, name)}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be from -2^63 to 2^64 - 1, got {self.seed}")
        wrong = [bias for bias in self.logit_bias.values() if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS]
        if wrong:
            raise ConfigError(f"logit-bias must be from -{_LARGEST_BIAS} to {_LARGEST_BIAS}, got {wrong[0]}")
        if self.repetition_penalty is not None and not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(f"repetition-penalty must be from 0.01 to 100, got {self.repetition_penalty}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _COLDEST


def sampling_for(config: Any, named: Mapping[str, Any], otherwise: Sampling) -> Sampling:
    """Sampling parameters of a model: those in `named`, else those of its generation config where that samples at all,
    else `otherwise`. config: transformers' GenerationConfig or None; named: fields of `Sampling`. ConfigError where a
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
    idle = [name.replace("_", "-") for name in ("top_p", "top_k") if name in named]
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

    penalty: the model's repetition penalty, for a sampling without one."""

    def __init__(self, sampling: Sampling, penalty: float | None = None) -> None:
        self._sampling = sampling
        self._greedy = sampling.greedy
        self._biased = bool(sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty)
        penalties = (sampling.repetition_penalty, penalty, 1.0)
        self._penalty = next(each for each in penalties if each is not None)
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, before: Sequence[int] = (), answered: int = 0) -> int:
        """The next token, from logits (vocabulary). Greedy: the likeliest, of equal ones the first.

        before: tokens of prompt and answer so far; the last `answered` of them are the answer's."""
        with torch_threads(1):
            if self._penalty != 1 and before:
                logits = self._with_repetition_penalty(logits, before)
            if self._biased:
                logits = self._with_bias(logits, before[len(before) - answered :])
            if self._greedy:
                return int(logits.float().cpu().numpy().argmax())  # several times as fast as torch's
            return self._draw(logits)

    def _with_repetition_penalty(self, logits: Tensor, before: Sequence[int]) -> Tensor:
        logits = logits.float().clone()  # log probabilities are reported from the model's own logits
        seen = torch.tensor(sorted(set(before)))
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * self._penalty, values / self._penalty)
        return logits

    def _with_bias(self, logits: Tensor, answer: Sequence[int]) -> Tensor:
        """Logits with the bias, the presence penalty and the frequency penalty."""
        added = {token: float(bias) for token, bias in self._sampling.logit_bias.items()}
        for token, times in Counter(answer).items():
            taken = self._sampling.presence_penalty + times * self._sampling.frequency_penalty
            added[token] = added.get(token, 0.0) - taken
        logits = logits.float().clone()
        if added:
            logits[torch.tensor(list(added))] += torch.tensor(list(added.values()))
        return logits

    def _draw(self, logits: Tensor) -> int:
        """A random token, by temperature, min_p, top_k and top_p."""
        sampling = self._sampling
        probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
        if sampling.min_p:
            probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
        if not sampling.top_k and sampling.top_p == 1:
            return self._draw_index(probabilities)
        weights, tokens = self._nucleus(probabilities)
        return int(tokens[self._draw_index(weights)])

    def _nucleus(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and ids of the likeliest tokens, falling: at most top_k, as many as reach top_p, at least
        one."""
        most = min(self._sampling.top_k or probabilities.numel(), probabilities.numel())
        kept, tokens = probabilities.topk(min(most, _CANDIDATES))
        if self._sampling.top_p < 1:
            wanted = self._sampling.top_p * (1.0 if not self._sampling.top_k else float(kept.sum()))
            while len(kept) < most and float(kept.sum()) < wanted:
                kept, tokens = probabilities.topk(min(most, _MORE * len(kept)))
            reached = int(torch.searchsorted(kept.cumsum(0), torch.tensor(wanted))) + 1
            kept, tokens = kept[:reached], tokens[:reached]
        elif len(kept) < most:
            kept, tokens = probabilities.topk(most)
        return kept, tokens

    def _draw_index(self, weights: Tensor) -> int:
        """A random index, by weights that need not sum to 1."""
        sums = weights.cumsum(0)
        at = torch.rand((), generator=self._random) * sums[-1]
        return min(int(torch.searchsorted(sums, at, right=True)), weights.numel() - 1)


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
        """Logits (vocabulary) with minus infinity for each token that must not come next. TiermoeError where finding
        these tokens exceeds llguidance's limits of a step."""
        # by hand: llguidance.torch has torch compile a kernel while the server answers. That needs a compiler, and with
        # torch held to AVX2 the kernel let other tokens pass.
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
        self._check()
        allowed = numpy.unpackbits(bits, bitorder="little", count=len(logits))
        return logits.float().masked_fill(torch.from_numpy(allowed == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """Goes on behind the token that was chosen. TiermoeError as in `restrict`."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TiermoeError(
                f"the JSON schema cannot be followed any further: {own_words(self._matcher.get_error())}"
            )


def own_words(error: str) -> str:
    """llguidance's message in one line, without its own suffix."""
    return " ".join(error.removesuffix("<non-verbose/>").split())


def log_probabilities(logits: Tensor, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Log probability of `token`, and (token, log probability) of the `most` likeliest tokens, falling; at least
    `IMPOSSIBLE`. logits (vocabulary): the model's own. In 64 bits, since those of long texts are added up."""
    with torch_threads(1):
        logs = torch.log_softmax(logits.double(), dim=-1)
        values, tokens = logs.topk(most)
        values, chosen = values.clamp(min=IMPOSSIBLE), logs[token].clamp(min=IMPOSSIBLE)
    return float(chosen), list(zip(tokens.tolist(), values.tolist(), strict=True))
