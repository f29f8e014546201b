"""Evaluation of a preset: how good what it says is beside the 16-bit weights, and how fast it came. Scored are the
likelihoods of a text or of documents' summaries (`Likelihoods`), or the ROUGE-2 of greedy summaries (`Summaries`).

The 16-bit reference runs first, then the preset, never both in memory. Each window's prompt is read at once, as
`generate()` would; the other tokens are fed one at a time, whatever the model would have said. Many presets act while a
model decodes, and on what is in the cache (skipping, a lower precision on a miss, falling back), so a forward pass over
a whole window would not show what they cost. Every preset is fed the same tokens, so speeds compare too. Logits are
scored after each window, outside the measured time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any, TypeVar

import torch

from tiermoe.batch import Batch, prompt
from tiermoe.config import format_size, parse_size
from tiermoe.config import settings as make_settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import plan_for, start
from tiermoe.errors import BudgetError, ConfigError, ModelError
from tiermoe.lab.measure.pairs import Pair, require_pairs
from tiermoe.lab.measure.scoring import (
    Reference,
    TokenScores,
    opened_file,
    saved_file,
    score_tokens,
    summarise,
    temporary_file,
    working_bytes,
)
from tiermoe.lab.measure.tasks import rouge2, rouge2_loss, standard_error, summaries
from tiermoe.lab.measure.texts import Feed, Windows, WindowShape, cut_pairs, cut_windows
from tiermoe.metrics import Metrics, named
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.prepare_store import Progress, store_root
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.platform.json_files import parse_json

METRICS = ("perplexity", "rouge2")

SCORING = "scoring"
"""Name of the progress over an evaluation's windows, or documents."""

_SHARED = ("memory", "device", "gpu_memory", "lanes", "threads", "store")
"""Options that the preset's engine and the reference's share; precision, chunk and cache differ."""

_ROUGE2 = "tiermoe ROUGE-2 1"
_LARGEST = 1 << 24  # bytes of a file of ROUGE-2 that is read

Found = TypeVar("Found")


def reserved_bytes(length: int, vocabulary: int, itemsize: int) -> int:
    """Bytes that scoring a window of `length` tokens takes beside the model: the logits, and rows being scored."""
    return length * vocabulary * itemsize + working_bytes(vocabulary)


def prompt_logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Logits (n, vocabulary) of n tokens, read as a prompt."""
    cache = engine.new_cache(1, len(ids))
    return engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)


def _no_logits(engine: Engine, tokens: int) -> torch.Tensor:
    """Memory for logits (tokens, vocabulary)."""
    return torch.empty(tokens, engine.config.vocab_size, dtype=engine.dtype)


@torch.inference_mode()
def feed_window(engine: Engine, window: torch.Tensor, prompt: int, logits: torch.Tensor, metrics: Metrics) -> None:
    """Feeds a window (n,) to an engine: `prompt` tokens in the engine's chunks, then one at a time but for the last.
    Writes the logits of each token after the prompt to `logits` (n - prompt, vocabulary), and adds to `metrics`."""
    feed = Feed(engine, window, prompt)
    with metrics.prefill.measured(engine.snapshot, prompt):
        logits[0] = feed.prompt()
    with metrics.decode.measured(engine.snapshot, len(logits) - 1):
        for row in range(1, len(logits)):
            logits[row] = feed.token(prompt + row - 1)


def settings_of(engine: Engine) -> dict[str, Any]:
    """The preset of an engine and its precision, by the names that `--json` prints."""
    return {
        "preset": engine.composition.name,
        "lossy": engine.lossy,
        "set": dict(engine.settings.set),
        "bits": engine.settings.bits_used,
        "dense_bits": engine.settings.dense_bits_used,
        "quantizer": engine.settings.quantizer_used,
        "kernels": engine.kernels,
    }


def speed_of(engine: Engine, metrics: Metrics) -> dict[str, Any]:
    """Settings and figures of a run, by the names that `--json` prints."""
    plan, decode = engine.plan, metrics.decode
    figures = named(
        engine.complete(metrics), "hit_rate", "prefill_hit_rate", "decode_hit_rate", "prefill_tok_s", "decode_tok_s",
        "bound_tok_s", "bytes_read", "prefill_bytes_per_token", "bytes_per_token", "wait_s", "decode_wait_s",
        "fallback_ratio", "displaced_share", "moved_weight_share", "peak_memory_bytes",
    )  # fmt: skip
    return {
        **settings_of(engine),
        "cache_fraction": plan.experts / (plan.all_slots * plan.slot_bytes),
        **figures,
        **metrics.total.expert_counts,
        **engine.service.unit.stats(),
        "decode_loads": sum(each.loads + each.speculative_loads for each in (decode.counts, decode.discarded)),
        "other_budgets": [asdict(each) for each in engine.other_budgets(decode)],
        "threads": torch.get_num_threads(),
        "memory_budget_bytes": plan.budget,
    }


@dataclass(frozen=True)
class Evaluation(ABC):
    """A model, what it is scored on, and a preset to evaluate. Made by `prepare`, which finds what cannot work before
    anything is loaded."""

    blueprint: Blueprint
    shape: WindowShape
    options: dict[str, Any]  # of `tiermoe.load`, with the context that the evaluation takes
    store: Path

    def run(self, reference: str, progress: Progress) -> dict[str, Any]:
        """Scores and speed of the preset. reference: '16bit' scores the checkpoint's own weights too, 'none' compares
        with nothing, anything else is a file that `save_reference` made."""
        with self._beside(reference, progress) as base:
            return self._on_model(self.options, lambda engine: self.score(engine, base, progress), progress)

    def save_reference(self, path: Path, progress: Progress) -> dict[str, Any]:
        """Scores the checkpoint's own weights alone and keeps in `path` what presets are compared with."""
        with saved_file(path) as (file, name):
            return self._write(file, name, progress)

    @contextlib.contextmanager
    def _beside(self, reference: str, progress: Progress) -> Iterator[Any]:
        """What `score` compares with; None: nothing."""
        if reference == "none":
            yield None
        elif reference == "16bit":
            with temporary_file(self.store) as (file, name):
                self._write(file, name, progress)
                yield self.read_reference(file, name)
        else:
            with opened_file(Path(reference)) as (file, name):
                yield self.read_reference(file, name)

    def _write(self, file: IO[bytes], name: str, progress: Progress) -> dict[str, Any]:
        shared = {each: self.options[each] for each in _SHARED if each in self.options}
        options = {"bits": 16, **shared, **self.options_of_16_bits}
        try:
            return self._on_model(options, lambda engine: self.write_reference(engine, file, name, progress), progress)
        except BudgetError as error:
            raise BudgetError(
                f"the 16-bit model that the scores are compared with does not fit: {error}. Or skip the comparison "
                f"with --reference none"
            ) from error

    def _on_model(self, options: dict[str, Any], use: Callable[[Engine], Found], progress: Progress) -> Found:
        """What `use` returns of an engine with `options`, an empty cache, and `reserve` bytes less in each named budget
        (others are a share of the free memory). Its experts' memory is given back at once, the rest when the next model
        is loaded."""
        budgets = {name: parse_size(options[name], name) for name in ("memory", "gpu_memory") if options.get(name)}
        less = {name: max(size - self.reserve, 1) for name, size in budgets.items()}
        try:
            engine = start(self.blueprint, make_settings(**{**options, **less, "warm": False}), progress)
        except BudgetError as error:
            raise BudgetError(f"{error} (beside {format_size(self.reserve)} for the logits of a window)") from error
        try:
            return use(engine)
        finally:
            engine.close()

    @property
    @abstractmethod
    def reserve(self) -> int:
        """Bytes that scoring takes beside the model."""

    @property
    def options_of_16_bits(self) -> dict[str, Any]:
        """Options of `tiermoe.load` for the checkpoint's own weights, beside those that are shared."""
        return {"context": self.shape.length}

    @abstractmethod
    def score(self, engine: Engine, base: Any, progress: Progress) -> dict[str, Any]:
        """Scores, speed and conditions, by the names that `--json` prints. base: of `read_reference`, or None."""

    @abstractmethod
    def write_reference(self, engine: Engine, file: IO[bytes], name: str, progress: Progress) -> dict[str, Any]:
        """Writes what a 16-bit engine scores to `file`, which people know as `name`; its scores and conditions."""

    @abstractmethod
    def read_reference(self, file: IO[bytes], name: str) -> Any:
        """What was written. ConfigError if it is of another checkpoint or of other texts."""


@dataclass(frozen=True)
class Likelihoods(Evaluation):
    """Perplexity, and KL divergence and same top-1 beside 16 bits, on windows: pieces of a text, or summaries behind
    their documents."""

    windows: Windows
    of_pairs: bool

    @property
    def reserve(self) -> int:
        return reserved_bytes(self.shape.length, self.blueprint.config.vocab_size, self.blueprint.dtype.itemsize)

    @property
    def options_of_16_bits(self) -> dict[str, Any]:
        chunk = {} if self.blueprint.family.encoder_decoder else {"chunk": self.shape.length}
        return {"context": self.shape.length, **chunk}

    def score(self, engine: Engine, base: Reference | None, progress: Progress) -> dict[str, Any]:
        buffer = _no_logits(engine, self.shape.window)
        warming, metrics, scores = self.windows.warming, Metrics(), list[TokenScores]()
        feed_window(engine, warming.ids, warming.prompt, buffer[: len(warming.targets)], Metrics())
        for index, window in enumerate(self.windows.scored):
            logits = buffer[: len(window.targets)]
            feed_window(engine, window.ids, window.prompt, logits, metrics)
            scores.append(score_tokens(logits, window.targets, None if base is None else base.window(index)))
            progress(SCORING, index + 1, len(self.windows.scored))
        return {**speed_of(engine, metrics), **summarise(scores), **self._conditions}

    @torch.inference_mode()
    def write_reference(self, engine: Engine, file: IO[bytes], name: str, progress: Progress) -> dict[str, Any]:
        """A window takes one forward pass: an exact model's logits do not depend on the cache. An encoder–decoder model
        is fed token by token, since a pass's length decides what its experts have room for."""
        reference, scores = self._reference(file, name), []
        for done, window in enumerate(self.windows.scored, 1):
            if self.blueprint.family.encoder_decoder:
                logits = _no_logits(engine, len(window.targets))
                feed_window(engine, window.ids, window.prompt, logits, Metrics())
            else:
                logits = prompt_logits(engine, window.ids.tolist())[window.prompt - 1 : -1]
            reference.append(logits)
            scores.append(score_tokens(logits.cpu(), window.targets))
            progress("scoring the 16-bit weights", done, len(self.windows.scored))
        found = summarise(scores)
        mean = {"perplexity_16bit": found["perplexity"], "perplexity_16bit_se": found["perplexity_se"]}
        return {**mean, **self._conditions}

    def _write(self, file: IO[bytes], name: str, progress: Progress) -> dict[str, Any]:
        self._reference(file, name).write_header()  # finds a full disk before anything is loaded
        return super()._write(file, name, progress)

    def read_reference(self, file: IO[bytes], name: str) -> Reference:
        reference = self._reference(file, name)
        reference.check()
        return reference

    def _reference(self, file: IO[bytes], name: str) -> Reference:
        fingerprint = self.blueprint.checkpoint.fingerprint()
        return Reference(file, name, fingerprint, self.windows, self.blueprint.config.vocab_size)

    @property
    def _conditions(self) -> dict[str, Any]:
        return {
            "prompt": self.shape.prompt,
            "window": self.shape.window,
            "documents" if self.of_pairs else "windows": len(self.windows.scored),
            "tokens": self.windows.tokens,
        }


@dataclass(frozen=True)
class Summaries(Evaluation):
    """The ROUGE-2 of greedy summaries. The first document only warms the cache."""

    pairs: Sequence[Pair]
    tokenizer: Any

    @property
    def reserve(self) -> int:
        return 0

    def score(self, engine: Engine, base: list[float] | None, progress: Progress) -> dict[str, Any]:
        found, values = self._summarised(engine, SCORING, progress)
        scores = _named("rouge2", values)
        if base is not None:
            loss = rouge2_loss(values, base)
            scores |= {**_named("rouge2_16bit", base), "rouge2_loss": loss.value, "rouge2_loss_se": loss.error}
        return {**found, **scores}

    def write_reference(self, engine: Engine, file: IO[bytes], name: str, progress: Progress) -> dict[str, Any]:
        found, values = self._summarised(engine, "summaries of the 16-bit weights", progress)
        file.write(json.dumps({**self._about, "values": values}).encode())
        conditions = {each: found[each] for each in ("prompt", "window", "documents", "tokens")}
        return {**_named("rouge2_16bit", values), **conditions}

    def read_reference(self, file: IO[bytes], name: str) -> list[float]:
        """The score of each summary of the 16-bit weights."""
        file.seek(0)
        try:
            found = parse_json(file.read(_LARGEST))
            values = [float(value) for value in found.pop("values")]
        except (ValueError, KeyError, TypeError, AttributeError):
            found, values = None, []
        if found != self._about:
            raise ConfigError(
                f"{name} holds no ROUGE-2 of this checkpoint's own summaries of these documents; make it again with "
                f"--save-reference {name}"
            )
        return values

    def _summarised(self, engine: Engine, what: str, progress: Progress) -> tuple[dict[str, Any], list[float]]:
        """Speed and conditions of a run over all documents, and the score of each summary but the first."""
        metrics, values, tokens = Metrics(), list[float](), 0
        made = summaries(engine, self.tokenizer, [document for document, _ in self.pairs], self.shape)
        for number, ((_, reference), (summary, report)) in enumerate(zip(self.pairs, made, strict=True)):
            if number:
                metrics.prefill.add(report.prefill, report.prefill.tokens)
                metrics.decode.add(report.decode, report.decode.tokens)
                values.append(rouge2(reference, summary))
                tokens += len(report.token_ids)
                progress(what, number, len(self.pairs) - 1)
        conditions = {"prompt": self.shape.prompt, "window": self.shape.window, "documents": len(self.pairs) - 1}
        return {**speed_of(engine, metrics), **conditions, "tokens": tokens}, values

    @property
    def _about(self) -> dict[str, Any]:
        """What the scores of the 16-bit weights depend on."""
        text = hashlib.sha256(json.dumps(list(self.pairs)).encode()).hexdigest()[:16]
        return {
            "format": _ROUGE2,
            "checkpoint": self.blueprint.checkpoint.fingerprint(),
            "prompt": self.shape.prompt,
            "window": self.shape.window,
            "text": text,
        }


def _named(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name: fmean(values), f"{name}_se": standard_error(values) if len(values) > 1 else None}


def prepare(
    model: str,
    material: str | Sequence[Pair],
    shape: WindowShape,
    options: dict[str, Any],
    metric: str = "perplexity",
) -> Evaluation:
    """Checks the model, preset, calibration and material of an evaluation: a text, or documents with their summaries.
    metric: of `METRICS`. A TiermoeError says what to do where one of them is not usable."""
    if metric not in METRICS:
        raise ConfigError(f"the metric '{metric}' is not known; {' and '.join(METRICS)} are")
    if metric == "rouge2":
        if isinstance(material, str):
            raise ConfigError(f"{metric} needs documents with their summaries; name a file of them with --pairs")
        rouge2("a b", "a b")  # refuses before a model is loaded where rouge-score is missing
    options = {**options, "context": shape.length}
    settings = make_settings(**options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, model, settings.store)
    if isinstance(material, str) and blueprint.family.encoder_decoder:
        raise ModelError(
            f"{blueprint.family.name} models answer a prompt rather than continue a text, so a text's perplexity says "
            f"nothing about them; give documents with their summaries by --pairs, or evaluate a decoder-only model"
        )
    shape.check_context(blueprint.max_context())
    plan_for(blueprint, settings)
    tokenizer = load_tokenizer(directory)
    found = blueprint, shape, options, store_root(blueprint, settings.store)
    if isinstance(material, str):
        return Likelihoods(*found, cut_windows(tokenizer, material, shape), of_pairs=False)
    if metric == "rouge2":
        return Summaries(*found, require_pairs(material)[: shape.windows + 1], tokenizer)
    windows = cut_pairs(tokenizer, material, shape, ends=blueprint.family.encoder_decoder)
    return Likelihoods(*found, windows, of_pairs=True)
