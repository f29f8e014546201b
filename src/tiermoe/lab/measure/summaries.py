"""Evaluation of a preset by what it writes: the ROUGE-2 of greedy summaries beside those of the 16-bit weights, and
their speed. `prepare` chooses between this evaluation and the one of likelihoods (`evaluate`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tiermoe.engine.generate import generate
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import ConfigError
from tiermoe.lab.measure import evaluate
from tiermoe.lab.measure.evaluate import (
    SCORING,
    Evaluation,
    comparing_with_16_bits,
    inspected,
    on_model,
    options_of_16_bits,
    speed_of,
)
from tiermoe.lab.measure.pairs import Pair, require_pairs
from tiermoe.lab.measure.scoring import opened_file, saved_file
from tiermoe.lab.measure.tasks import rouge2, rouge2_loss, standard_error
from tiermoe.lab.measure.texts import WindowShape, document_ids
from tiermoe.metrics import Metrics
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.prepare_store import Progress
from tiermoe.platform.json_files import parse_json

METRICS = ("perplexity", "rouge2")
_FORMAT = "tiermoe ROUGE-2 1"
_LARGEST = 1 << 24  # bytes of a reference that is read


@dataclass(frozen=True, slots=True)
class SummaryEvaluation:
    """A model, documents with their summaries, and a preset to evaluate. The first document only warms the cache."""

    blueprint: Blueprint
    pairs: Sequence[Pair]
    shape: WindowShape  # tokens of a document that are read, and of a summary that are written, at most
    tokenizer: Any
    options: dict[str, Any]  # of `tiermoe.load`

    def run(self, reference: str, progress: Progress) -> dict[str, Any]:
        """Scores and speed of the preset. reference: '16bit' lets the checkpoint's own weights write too, 'none'
        compares with nothing, anything else is a file that `save_reference` made."""
        base = self._reference(reference, progress)
        speed, values = self._on_model(self.options, SCORING, progress)
        scores = _named("rouge2", values)
        if base is not None:
            loss = rouge2_loss(values, base)
            scores |= {**_named("rouge2_16bit", base), "rouge2_loss": loss.value, "rouge2_loss_se": loss.error}
        return {**speed, **scores, **self._conditions(speed["tokens"])}

    def save_reference(self, path: Path, progress: Progress) -> dict[str, Any]:
        """Lets the checkpoint's own weights write, and keeps the scores of their summaries in `path`."""
        with saved_file(path) as (file, _):
            speed, values = self._of_16_bits(progress)
            file.write(json.dumps({**self._about(), "values": values}).encode())
        return {**_named("rouge2_16bit", values), **self._conditions(speed["tokens"])}

    def _reference(self, reference: str, progress: Progress) -> list[float] | None:
        """The score of each summary of the 16-bit weights. ConfigError where a file holds others'."""
        if reference == "none":
            return None
        if reference == "16bit":
            return self._of_16_bits(progress)[1]
        with opened_file(Path(reference)) as (file, name):
            content = file.read(_LARGEST)
        try:
            found = parse_json(content)
            values = [float(value) for value in found.pop("values")]
        except (ValueError, KeyError, TypeError, AttributeError):
            found, values = None, []
        if found != self._about():
            raise ConfigError(
                f"{name} holds no ROUGE-2 of this checkpoint's own summaries of these documents; make it again with "
                f"--save-reference {name}"
            )
        return values

    def _of_16_bits(self, progress: Progress) -> tuple[dict[str, Any], list[float]]:
        with comparing_with_16_bits():
            options = {**options_of_16_bits(self.options), "context": self.shape.length}
            return self._on_model(options, "summaries of the 16-bit weights", progress)

    def _on_model(self, options: dict[str, Any], what: str, progress: Progress) -> tuple[dict[str, Any], list[float]]:
        found: tuple[dict[str, Any], list[float]] = on_model(
            self.blueprint, options, lambda engine: self._write(engine, what, progress), progress, 0
        )
        return found

    def _write(self, engine: Any, what: str, progress: Progress) -> tuple[dict[str, Any], list[float]]:
        """Figures of a run over all documents, and the score of each summary but the first."""
        metrics, values, tokens = Metrics(), [], 0
        for number, (document, reference) in enumerate(self.pairs):
            ids = document_ids(self.tokenizer, document, self.shape.prompt)
            report = generate(engine, self.tokenizer, torch.tensor([ids]), Sampling(self.shape.window))
            if number:
                metrics.prefill.add(report.prefill, report.prefill.tokens)
                metrics.decode.add(report.decode, report.decode.tokens)
                summary = self.tokenizer.decode(report.token_ids, skip_special_tokens=True)
                values.append(rouge2(reference, summary))
                tokens += len(report.token_ids)
                progress(what, number, len(self.pairs) - 1)
        return {**speed_of(engine, metrics), "tokens": tokens}, values

    def _conditions(self, tokens: int) -> dict[str, Any]:
        return {
            "prompt": self.shape.prompt,
            "window": self.shape.window,
            "documents": len(self.pairs) - 1,
            "tokens": tokens,
        }

    def _about(self) -> dict[str, Any]:
        """What the scores of the 16-bit weights depend on."""
        text = hashlib.sha256(json.dumps(list(self.pairs)).encode()).hexdigest()[:16]
        return {
            "format": _FORMAT,
            "checkpoint": self.blueprint.checkpoint.fingerprint(),
            "prompt": self.shape.prompt,
            "window": self.shape.window,
            "text": text,
        }


def _named(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name: fmean(values), f"{name}_se": standard_error(values) if len(values) > 1 else None}


def prepare(
    model: str, material: str | Sequence[Pair], metric: str, shape: WindowShape, options: dict[str, Any]
) -> Evaluation | SummaryEvaluation:
    """Checks the model, preset, calibration and material of an evaluation: a text, or documents with their summaries.
    metric: of `METRICS`. A TiermoeError says what to do where one of them is not usable."""
    if metric == "perplexity":
        return evaluate.prepare(model, material, shape, options)
    if metric not in METRICS or isinstance(material, str):
        raise ConfigError(
            f"the metric '{metric}' is not known; {' and '.join(METRICS)} are"
            if metric not in METRICS
            else f"{metric} needs documents with their summaries; name a file of them with --pairs"
        )
    rouge2("a b", "a b")  # refuses before a model is loaded where rouge-score is missing
    pairs = require_pairs(material)[: shape.windows + 1]
    found = inspected(model, shape, options)
    return SummaryEvaluation(found.blueprint, pairs, shape, found.tokenizer, found.options)
