"""How tokens are chosen: what is asked for, and choosing the next one from logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ConfigError

_CANDIDATES = 256  # of which the nucleus is nearly always a part: sorting a whole vocabulary takes milliseconds
_MORE = 16  # times as many are looked at where they are too few
_COLDEST = 1e-30  # logits that are divided by less overflow; at it the likeliest token alone is drawn anyway
_LARGEST_BIAS = 100
IMPOSSIBLE = -9999.0
"""What is told as the log probability of a token that cannot come, as OpenAI does: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_p, top_k (0: all tokens), min_p (share of the likeliest
    token's probability that a token must have) and seed matter above it. presence_penalty is taken from the logits of
    tokens that the answer has, frequency_penalty once for each time; logit_bias is added to a token's logit. By
    repetition_penalty the logits of tokens that prompt or answer have are divided, or multiplied where they are
    negative; None: by the model's own. That, and what ends an answer, is as its generation_config.json says."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float | None = None

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
        """Whether the likeliest token is taken."""
        return self.temperature < _COLDEST


def sampling_for(config: Any, named: Mapping[str, Any], otherwise: Sampling) -> Sampling:
    """How a model's tokens are chosen: as `named`, else as the model's generation config says where it samples at all,
    else as `otherwise`. config: transformers' GenerationConfig or None; named: fields of `Sampling`. ConfigError where
    a value that is named would do nothing."""
    said = otherwise
    if config is not None and config.do_sample:
        said = replace(  # what the file leaves out restricts nothing
            otherwise,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else config.top_k,
        )
    sampling = replace(said, **named)
    idle = [name.replace("_", "-") for name in ("top_p", "top_k") if name in named]
    if idle and sampling.greedy:
        raise ConfigError(
            f"{' and '.join(idle)} would do nothing: at temperature 0 the likeliest token is taken; name a temperature "
            f"above 0 beside it"
        )
    return sampling


class Sampler:
    """Draws tokens by a `Sampling`; its random numbers are its own, so that a seed names an answer. penalty: for
    repetition, where the sampling has none."""

    def __init__(self, sampling: Sampling, penalty: float | None = None) -> None:
        self._sampling = sampling
        named = (sampling.repetition_penalty, penalty, 1.0)
        self._penalty = next(each for each in named if each is not None)
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, before: Sequence[int] = (), answered: int = 0) -> int:
        """logits (vocabulary) → a token. Greedy: the likeliest, of equal ones the first. before: the tokens that
        were there already, of which the last `answered` are the answer's."""
        with _one_thread():
            return self._chosen(logits, before, answered)

    def _chosen(self, logits: Tensor, before: Sequence[int], answered: int) -> int:
        sampling = self._sampling
        if self._penalty != 1 and before:
            logits = self._penalised(logits, before)
        if sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty:
            logits = self._biased(logits, before[len(before) - answered :])
        if sampling.greedy:
            return _likeliest(logits)
        probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
        if sampling.min_p:
            probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
        if sampling.top_k or sampling.top_p < 1:
            kept, tokens = self._nucleus(probabilities)
            return int(tokens[self._drawn(kept)])
        return self._drawn(probabilities)

    def _penalised(self, logits: Tensor, before: Sequence[int]) -> Tensor:
        logits = logits.float().clone()  # who asks for log probabilities is told those of the model's own
        there = torch.tensor(sorted(set(before)))
        values = logits[there]
        logits[there] = torch.where(values < 0, values * self._penalty, values / self._penalty)
        return logits

    def _biased(self, logits: Tensor, answer: Sequence[int]) -> Tensor:
        added = {token: float(bias) for token, bias in self._sampling.logit_bias.items()}
        for token, times in Counter(answer).items():
            taken = self._sampling.presence_penalty + times * self._sampling.frequency_penalty
            added[token] = added.get(token, 0.0) - taken
        logits = logits.float().clone()
        if added:
            logits[torch.tensor(list(added))] += torch.tensor(list(added.values()))
        return logits

    def _nucleus(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, falling, at most top_k, that together reach top_p; at least one."""
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

    def _drawn(self, weights: Tensor) -> int:
        """An index, by weights that need not sum to 1."""
        sums = weights.cumsum(0)
        at = torch.rand((), generator=self._random) * sums[-1]
        return min(int(torch.searchsorted(sums, at, right=True)), weights.numel() - 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on the calling thread alone: nothing here is faster on several, and threads that torch wakes stay awake for
    milliseconds, on cores that the next token needs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _likeliest(logits: Tensor) -> int:
    """The first of the largest logits. numpy finds it several times as fast as torch."""
    return int(logits.float().cpu().numpy().argmax())


def log_probabilities(logits: Tensor, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Of logits (vocabulary), as the model gives them: the token's log probability, and those of the `most` likeliest
    tokens, falling; `IMPOSSIBLE` at the least. In 64 bits: those of long texts are summed up."""
    with _one_thread():
        logs = torch.log_softmax(logits.double(), dim=-1)
        values, tokens = logs.topk(most)
        values, its = values.clamp(min=IMPOSSIBLE), logs[token].clamp(min=IMPOSSIBLE)
    return float(its), list(zip(tokens.tolist(), values.tolist(), strict=True))
