"""From logits to scores: perplexity, KL divergence and same-top-1 against a reference, with standard errors.

The text is scored in windows of equal length. A score is the mean over all tokens; its standard error is that of the
mean of the windows' means (their standard deviation, n - 1, over sqrt(n)): tokens of one window are not independent,
windows that lie apart nearly are. The error of a perplexity, exp of a mean, is the perplexity times that of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_ROWS = 4  # tokens scored at once: few, since each row holds the whole vocabulary in float64 several times


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of each token of a window, all (n,) float64: `nll` and `kl` in nats, `same_top1` 0 or 1. `reference_nll`,
    `kl` and `same_top1` are None where there is no reference."""

    nll: torch.Tensor
    reference_nll: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    same_top1: torch.Tensor | None = None


class Rows(Protocol):
    """Log-probabilities (n, vocabulary) of which a few rows are taken at a time: a tensor, or a file that is longer
    than memory."""

    def __getitem__(self, rows: slice, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Score:
    """A mean and its standard error; the error is None where there is one window."""

    value: float
    error: float | None


def row_blocks(rows: int) -> Iterator[slice]:
    """Slices of a few rows that cover `rows` of them."""
    return (slice(begin, min(begin + _ROWS, rows)) for begin in range(0, rows, _ROWS))


def working_bytes(vocabulary: int) -> int:
    """The most that scoring takes beside the logits: a few rows in float64, six times (logits, exponentials, both
    log-probabilities, the terms of the divergence and their sum's copy)."""
    return 6 * 8 * _ROWS * vocabulary


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Logits (n, vocabulary) of any floating dtype → log-probabilities, float64."""
    return torch.log_softmax(logits.double(), dim=-1)


def score_tokens(logits: torch.Tensor, targets: torch.Tensor, reference: Rows | None = None) -> TokenScores:
    """Scores of n next-token distributions.

    logits: (n, vocabulary), any floating dtype. targets: (n,) int64, the tokens that came. reference: the
    log-probabilities (n, vocabulary) of the model to compare with, any floating dtype.
    """
    blocks = [
        _score_block(logits[rows], targets[rows], None if reference is None else reference[rows])
        for rows in row_blocks(len(targets))
    ]
    return join(blocks)


def _score_block(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None) -> TokenScores:
    ours = log_probabilities(logits)
    nll = _nll(ours, targets)
    if reference is None:
        return TokenScores(nll)
    theirs = reference.double()
    return TokenScores(nll, _nll(theirs, targets), kl_divergence(theirs, ours), same_top1(theirs, ours))


def _nll(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -log_probs.gather(-1, targets[:, None])[:, 0]


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) in nats, (n,), of log-probabilities (n, vocabulary). What the reference gives no
    probability adds nothing, also where the other gives it none."""
    terms = reference.exp() * (reference - other)
    return torch.where(reference.isneginf(), 0.0, terms).sum(-1)


def same_top1(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """1 where both take the same token for the likeliest (the first of equal ones), else 0: (n,) float64."""
    return (reference.argmax(-1) == other.argmax(-1)).double()


def join(parts: list[TokenScores]) -> TokenScores:
    """The scores of several runs of tokens as one."""

    def joined(name: str) -> torch.Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    nll = joined("nll")
    assert nll is not None
    return TokenScores(nll, joined("reference_nll"), joined("kl"), joined("same_top1"))


def mean_over_windows(windows: list[torch.Tensor]) -> Score:
    """Mean of windows of equally many tokens, with its standard error."""
    means = torch.stack([window.mean() for window in windows])
    error = float(means.std(correction=1)) / math.sqrt(len(means)) if len(means) > 1 else None
    return Score(float(means.mean()), error)


def exp_of(score: Score) -> Score:
    """exp of a mean: a perplexity of a mean negative log-likelihood, with the error to first order."""
    value = math.exp(score.value)
    return Score(value, None if score.error is None else value * score.error)


def summarise(windows: list[TokenScores]) -> dict[str, float | None]:
    """The scores of all windows by name, each followed by its standard error `NAME_se`.

    perplexity; and beside a reference perplexity_16bit, perplexity_loss (perplexity / perplexity_16bit - 1, its error
    from the windows' differences, which the text's own variation does not widen), kl and same_top1.
    """
    nll = [window.nll for window in windows]
    scores = {"perplexity": exp_of(mean_over_windows(nll))}
    reference = [window.reference_nll for window in windows if window.reference_nll is not None]
    if reference:
        ratio = exp_of(mean_over_windows([a - b for a, b in zip(nll, reference, strict=True)]))
        scores |= {
            "perplexity_16bit": exp_of(mean_over_windows(reference)),
            "perplexity_loss": Score(ratio.value - 1, ratio.error),
            "kl": mean_over_windows([window.kl for window in windows if window.kl is not None]),
            "same_top1": mean_over_windows([window.same_top1 for window in windows if window.same_top1 is not None]),
        }
    named: dict[str, float | None] = {}
    for name, score in scores.items():
        named |= {name: score.value, f"{name}_se": score.error}
    return named
