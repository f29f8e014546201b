"""What a bitwidth's loss is measured on: the perplexity of a text, or the ROUGE-2 of summaries."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tiermoe.errors import ConfigError
from tiermoe.measure.scoring import log_probabilities, row_blocks


class Task(Protocol):
    """`name`: of the metric. `tokens`: of the longest pass, prompt and answer."""

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    def value(self, model: Any) -> float:
        """The metric of a loaded model."""

    def loss(self, value: float, base: float) -> float:
        """How much worse `value` is than `base`, relative to it: 0.05 for 5 %."""

    def digest(self) -> str:
        """Differs between tasks whose values differ."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of `ids` (sequences, length) int64, each in one prefill pass; `value` is its logarithm. An encoder–decoder model
    reads the first half of a sequence and is asked for the second."""

    ids: torch.Tensor
    name: str = "perplexity"

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    @torch.inference_mode()
    def value(self, model: Any) -> float:
        """Mean negative log-likelihood in nats of the tokens that can be predicted."""
        total, count = 0.0, 0
        for sequence in self.ids:
            logits, targets = _predictions(model, sequence.to(model.device))
            for rows in row_blocks(len(targets)):
                total -= float(log_probabilities(logits[rows]).gather(-1, targets[rows, None]).sum())
            count += len(targets)
        return total / count

    def loss(self, value: float, base: float) -> float:
        return math.expm1(value - base)

    def digest(self) -> str:
        return _digest(self.name, self.ids.to(torch.int64).numpy().tobytes())


def _predictions(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, vocabulary) and the tokens (n,) that came, of a sequence (length,)."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:]
    prompt, answer = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    shifted = torch.cat([ids.new_tensor([model.config.decoder_start_token_id]), answer[:-1]])
    return model(input_ids=prompt[None], decoder_input_ids=shifted[None]).logits[0], answer


class Rouge2:
    """The ROUGE-2 F score of greedy summaries of at most `answer` tokens, mean over (document, summary) pairs. prompt:
    tokens of a document that are read. ConfigError without pairs or without the rouge-score package."""

    name = "rouge2"

    def __init__(self, pairs: Sequence[tuple[str, str]], tokenizer: Any, prompt: int = 512, answer: int = 64) -> None:
        if not pairs:
            raise ConfigError("ROUGE-2 needs at least one document with its summary, there is none; give some")
        self._pairs = list(pairs)
        self._tokenizer = tokenizer
        self._prompt, self._answer = prompt, answer
        self._score("a b", "a b")  # says what is missing before a model is loaded

    @property
    def tokens(self) -> int:
        return self._prompt + self._answer

    @torch.inference_mode()
    def value(self, model: Any) -> float:
        """From 0 to 1, higher is better."""
        return sum(self._score(reference, self._summary(model, text)) for text, reference in self._pairs) / len(
            self._pairs
        )

    def loss(self, value: float, base: float) -> float:
        """ConfigError where the base is 0: nothing can be lost."""
        if base <= 0:
            raise ConfigError(
                "the model's own summaries have a ROUGE-2 of 0, so no loss can be measured; give other documents, or "
                "measure perplexity"
            )
        return 1 - value / base

    def digest(self) -> str:
        texts = "\0".join(text for pair in self._pairs for text in pair)
        return _digest(self.name, f"{self._prompt} {self._answer} {texts}".encode())

    def _summary(self, model: Any, text: str) -> str:
        read = self._tokenizer(text, return_tensors="pt", truncation=True, max_length=self._prompt)
        ids = read.input_ids.to(model.device)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self._answer, do_sample=False, num_beams=1
        )
        answer = made[0] if model.config.is_encoder_decoder else made[0, ids.shape[1] :]
        summary: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return summary

    @staticmethod
    def _score(reference: str, summary: str) -> float:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError:
            raise ConfigError(
                "ROUGE-2 is measured with the package rouge-score, which is not installed; install it with "
                "pip install 'tiermoe[rouge]', or measure perplexity"
            ) from None
        return float(RougeScorer(["rouge2"], use_stemmer=True).score(reference, summary)["rouge2"].fmeasure)


def _digest(name: str, content: bytes) -> str:
    return hashlib.sha256(name.encode() + b"\0" + content).hexdigest()[:16]
