"""Perplexity of a token sequence, scored the same way whatever engine gives the logits. Needs only numpy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
Surprisals = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Perplexity:
    """``value`` = exp(mean negative log-likelihood in nats); ``tokens`` is how many tokens were scored."""

    value: float
    tokens: int
    context: int
    stride: int


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(begin, end, first)``: the window ``[begin, end)`` scores the tokens ``[first, end)``.

    Every token but the first is scored once, except that ``stride == context`` leaves the first token of
    each window unscored: nothing stands before it. A window that is not the first gives the tokens that it
    scores at least ``context - stride`` tokens of context.
    """
    if not 0 < stride <= context or context < 2:
        raise ValueError(f"need 0 < stride <= context and context >= 2, not stride {stride}, context {context}")
    scored = 1
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        first = max(scored, begin + 1)
        if first < end:
            yield begin, end, first
        scored = end
        if end == length:
            return


def surprisals(logits_fn: Logits, ids: npt.NDArray[np.int64], context: int, stride: int) -> Iterator[Surprisals]:
    """Negative log-likelihoods, float64 nats, of the tokens that each window of ``ids`` (N,) scores: of ``context``
    tokens, one every ``stride``.

    ``logits_fn`` maps one window of token ids (T,) to the logits (T, vocabulary) after each of them. The
    log-likelihood is computed here, so that two engines differ by their logits alone.
    """
    for begin, end, first in windows(len(ids), context, stride):
        logits = logits_fn(ids[begin:end])[first - begin - 1 : end - begin - 1].astype(np.float64)
        target = ids[first:end]
        logits -= logits.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(logits).sum(axis=1))
        yield normaliser - logits[np.arange(len(target)), target]


def perplexity(logits_fn: Logits, ids: npt.NDArray[np.int64], context: int, stride: int) -> Perplexity:
    """Perplexity of ``ids`` (N,) in windows of ``context`` tokens that start every ``stride`` tokens."""
    total, count = 0.0, 0
    for found in surprisals(logits_fn, ids, context, stride):
        total += float(found.sum())
        count += len(found)
    if not count:
        raise ValueError(f"{len(ids)} tokens leave nothing to score: at least 2 are needed")
    return Perplexity(float(np.exp(total / count)), count, context, stride)
