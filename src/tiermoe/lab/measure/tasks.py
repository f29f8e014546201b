"""Tasks that a bitwidth's loss is measured on: the perplexity of a text, or the ROUGE-2 of summaries. A task has items
(sequences, documents); the even and the odd items are two halves that have seen nothing of each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Protocol

import torch

from tiermoe.engine.engine import Engine, engine_of
from tiermoe.engine.generate import Report, generate
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.pairs import Pair
from tiermoe.lab.measure.scoring import total_nll
from tiermoe.lab.measure.texts import WindowShape, document_ids
from tiermoe.lab.papers.edgemoe import RelativeLoss

LEAST_ITEMS = 4
"""Items of a task at least: a half with fewer than two has no standard error."""


class Task(Protocol):
    """Items, and a metric of them."""

    @property
    def name(self) -> str:
        """Of the metric."""

    @property
    def tokens(self) -> int:
        """Of the longest pass, prompt and answer."""

    def values(self, model: Any) -> list[float]:
        """The metric of a loaded model, item by item."""

    def loss(self, values: Sequence[float], base: Sequence[float]) -> RelativeLoss:
        """How much worse `values` are than `base`, relative to `base`, with the standard error of the items'
        differences; error 0 of one item."""

    def halves(self) -> tuple[Task, Task]:
        """The items at even places, and those at odd ones. ConfigError for fewer than `LEAST_ITEMS`."""

    def digest(self) -> str:
        """Hash of all that the values depend on."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of `ids` (sequences, length) int64, each in one prefill pass; values are its logarithms. An
    encoder–decoder model reads the first half of a sequence and predicts the second."""

    ids: torch.Tensor
    name: str = "perplexity"

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    @torch.inference_mode()
    def values(self, model: Any) -> list[float]:
        """Each sequence's mean negative log-likelihood in nats, of all tokens that can be predicted."""
        found = []
        for sequence in self.ids:
            logits, targets = _predictions(model, sequence.to(model.device))
            found.append(total_nll(logits, targets) / len(targets))
        return found

    def loss(self, values: Sequence[float], base: Sequence[float]) -> RelativeLoss:
        return relative_loss([value - before for value, before in zip(values, base, strict=True)])

    def halves(self) -> tuple[Perplexity, Perplexity]:
        _require_items(len(self.ids), "sequences; raise --tokens, or lower --sequence")
        return Perplexity(self.ids[::2]), Perplexity(self.ids[1::2])

    def digest(self) -> str:
        return _digest(self.name, self.ids.to(torch.int64).numpy().tobytes())


def _predictions(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence (length,) → logits (n, vocabulary), and the tokens (n,) that they predict."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:]
    prompt, answer = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    shifted = torch.cat([ids.new_tensor([model.config.decoder_start_token_id]), answer[:-1]])
    return model(input_ids=prompt[None], decoder_input_ids=shifted[None]).logits[0], answer


class Rouge2:
    """ROUGE-2 F score of greedy summaries, mean over (document, summary) pairs. shape: tokens of a document that are
    read, and of a summary at most. ConfigError without the rouge-score package."""

    name = "rouge2"

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, shape: WindowShape) -> None:
        self._pairs, self._tokenizer, self._shape = list(pairs), tokenizer, shape
        rouge2("a b", "a b")  # refuses before a model is loaded where rouge-score is missing

    @property
    def tokens(self) -> int:
        return self._shape.length

    def values(self, model: Any) -> list[float]:
        """The score of each summary, from 0 to 1, higher is better."""
        made = summaries(engine_of(model), self._tokenizer, [document for document, _ in self._pairs], self._shape)
        return [rouge2(reference, summary) for (_, reference), (summary, _) in zip(self._pairs, made, strict=True)]

    def loss(self, values: Sequence[float], base: Sequence[float]) -> RelativeLoss:
        """ConfigError where the base is 0: nothing can be lost."""
        return rouge2_loss(values, base)

    def halves(self) -> tuple[Rouge2, Rouge2]:
        _require_items(len(self._pairs), "documents with summaries; give more")
        even, odd = (Rouge2(self._pairs[first::2], self._tokenizer, self._shape) for first in (0, 1))
        return even, odd

    def digest(self) -> str:
        texts = "\0".join(text for pair in self._pairs for text in pair)
        return _digest(self.name, f"{self._shape.prompt} {self._shape.window} {texts}".encode())


def summaries(
    engine: Engine, tokenizer: Any, documents: Sequence[str], shape: WindowShape
) -> Iterator[tuple[str, Report]]:
    """Greedy summaries of documents, each with the run's report. shape: tokens that are read and written at most."""
    for document in documents:
        ids = torch.tensor([document_ids(tokenizer, document, shape.prompt)])
        report = generate(engine, tokenizer, ids, Sampling(shape.window))
        yield tokenizer.decode(report.token_ids, skip_special_tokens=True), report


def rouge2(reference: str, summary: str) -> float:
    """ROUGE-2 F score of a summary, from 0 to 1. ConfigError without the rouge-score package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError(
            "ROUGE-2 is measured with the package rouge-score, which is not installed; install it with pip install "
            "'tiermoe[rouge]', or measure perplexity"
        ) from None
    return float(RougeScorer(["rouge2"], use_stemmer=True).score(reference, summary)["rouge2"].fmeasure)


def rouge2_loss(values: Sequence[float], base: Sequence[float]) -> RelativeLoss:
    """RelativeLoss of a mean ROUGE-2 beside `base` of the same documents. ConfigError where the base is 0."""
    before = fmean(base)
    if before <= 0:
        raise ConfigError(
            "the model's own summaries have a ROUGE-2 of 0, so no loss can be measured; give other documents, or "
            "measure perplexity"
        )
    kept = fmean(values) / before
    # to first order: the error of a ratio of means is that of the mean of these
    apart = [value - kept * own for value, own in zip(values, base, strict=True)]
    return RelativeLoss(1 - kept, standard_error(apart) / before)


def relative_loss(differences: Sequence[float]) -> RelativeLoss:
    """RelativeLoss of a perplexity, from each item's mean difference in nats; the error to first order."""
    mean = fmean(differences)
    return RelativeLoss(math.expm1(mean), math.exp(mean) * standard_error(differences))


def standard_error(values: Sequence[float]) -> float:
    """Of a mean; 0 of one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _require_items(count: int, instead: str) -> None:
    if count < LEAST_ITEMS:
        raise ConfigError(
            f"bitwidths are found on one half of what is given and judged on the other, each of at least "
            f"{LEAST_ITEMS // 2}: {LEAST_ITEMS} are needed, there are {count} {instead}"
        )


def _digest(name: str, content: bytes) -> str:
    return hashlib.sha256(name.encode() + b"\0" + content).hexdigest()[:16]
