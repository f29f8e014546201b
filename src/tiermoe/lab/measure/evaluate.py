"""Evaluation of a preset on a text: how good its distributions are and how fast they came. The 16-bit reference is
scored first, then the preset, never both in memory. Each window's prompt is read at once, as `generate()` would; the
other tokens are fed one at a time, whatever the model would have said. A window is a piece of a text, or a document and
its summary.

Many presets act while a model decodes, and on what is in the cache (skipping, a lower precision on a miss, falling
back), so a forward pass over a whole window would not show what they cost. Every preset is fed the same tokens, so
speeds compare too. Logits are scored after each window, outside the measured time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiermoe.batch import Batch, prompt
from tiermoe.config import format_size, parse_size
from tiermoe.config import settings as make_settings
from tiermoe.engine.engine import Engine, engine_of
from tiermoe.engine.load import plan_for, start
from tiermoe.errors import BudgetError, ModelError
from tiermoe.lab.measure.pairs import Pair
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
from tiermoe.lab.measure.texts import Feed, Windows, WindowShape, cut_pairs, cut_windows
from tiermoe.metrics import Metrics, named
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.prepare_store import Progress, store_root
from tiermoe.model.tokenizer import load_tokenizer

SCORING = "scoring"
"""Name of the progress over an evaluation's windows."""

_SHARED = ("memory", "device", "gpu_memory", "lanes", "threads", "store")
"""Options that the preset's engine and the reference's share; precision, chunk and cache differ."""


def reserved_bytes(length: int, vocabulary: int, itemsize: int) -> int:
    """Bytes that scoring a window of `length` tokens takes beside the model: the logits, and rows being scored."""
    return length * vocabulary * itemsize + working_bytes(vocabulary)


@torch.inference_mode()
def write_reference(model: Any, windows: Windows, reference: Reference, progress: Progress) -> list[TokenScores]:
    """Appends the log-probabilities of each scored token to `reference`, whose header is written, and returns the
    windows' scores. A window takes one forward pass: an exact model's logits do not depend on the cache. An
    encoder–decoder model is fed token by token, since a pass's length decides what its experts have room for."""
    scores = []
    for done, window in enumerate(windows.scored, 1):
        if model.config.is_encoder_decoder:
            logits = _no_logits(model, len(window.targets))
            feed_window(model, window.ids, window.prompt, logits, Metrics())
        else:
            logits = prompt_logits(model, window.ids.tolist())[window.prompt - 1 : -1]
        reference.append(logits)
        scores.append(score_tokens(logits.cpu(), window.targets))
        progress("scoring the 16-bit weights", done, len(windows.scored))
    return scores


def prompt_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits (n, vocabulary) of a loaded model, or of an engine, on n tokens, read as a prompt."""
    engine = engine_of(model)
    cache = engine.new_cache(1, len(ids))
    return engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)


def evaluate(model: Any, windows: Windows, reference: Reference | None, progress: Progress) -> dict[str, Any]:
    """Scores and speed of a loaded model on windows of a text, by the names that `--json` prints."""
    buffer = _no_logits(model, windows.shape.window)
    feed_window(model, windows.warming.ids, windows.warming.prompt, buffer[: len(windows.warming.targets)], Metrics())
    metrics, scores = Metrics(), []
    for index, window in enumerate(windows.scored):
        logits = buffer[: len(window.targets)]
        feed_window(model, window.ids, window.prompt, logits, metrics)
        rows = reference.window(index) if reference is not None else None
        scores.append(score_tokens(logits, window.targets, rows))
        progress(SCORING, index + 1, len(windows.scored))
    return {**speed_of(engine_of(model), metrics), **summarise(scores)}


def _no_logits(model: Any, tokens: int) -> torch.Tensor:
    """Memory for logits (tokens, vocabulary)."""
    return torch.empty(tokens, model.config.vocab_size, dtype=model.dtype)


@torch.inference_mode()
def feed_window(model: Any, window: torch.Tensor, prompt: int, logits: torch.Tensor, metrics: Metrics) -> None:
    """Feeds a window (n,) to a model: `prompt` tokens in the engine's chunks, then one at a time but for the last.
    Writes the logits of each token after the prompt to `logits` (n - prompt, vocabulary), and adds to `metrics`."""
    snapshot, feed = engine_of(model).snapshot, Feed(model, window, prompt)
    with metrics.prefill.measured(snapshot, prompt):
        logits[0] = feed.prompt()
    with metrics.decode.measured(snapshot, len(logits) - 1):
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
    }


def speed_of(engine: Engine, metrics: Metrics) -> dict[str, Any]:
    """Settings and figures of a run, by the names that `--json` prints."""
    plan = engine.plan
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
        "other_budgets": [asdict(each) for each in engine.other_budgets(metrics.decode)],
        "threads": torch.get_num_threads(),
        "memory_budget_bytes": plan.budget,
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model, a text cut into windows, and a preset to evaluate. Made by `prepare`, which finds what cannot work
    before anything is loaded."""

    blueprint: Blueprint
    windows: Windows
    options: dict[str, Any]  # of `tiermoe.load`
    store: Path
    of_pairs: bool = False  # windows are summaries behind their documents

    def run(self, reference: str, progress: Progress) -> dict[str, Any]:
        """Scores and speed of the preset. reference: '16bit' scores the checkpoint's own weights too, 'none' compares
        with nothing, anything else is a file that `save_reference` made."""
        with self._reference(reference, progress) as rows:
            result = self._on_model(self.options, lambda model: evaluate(model, self.windows, rows, progress), progress)
        return {**result, **self._conditions()}

    def save_reference(self, path: Path, progress: Progress) -> dict[str, Any]:
        """Scores the checkpoint's own weights alone and keeps their log-probabilities in `path`."""
        with saved_file(path) as (file, name):
            return {**self._write(self._reference_in(file, name), progress), **self._conditions()}

    @contextlib.contextmanager
    def _reference(self, reference: str, progress: Progress) -> Iterator[Reference | None]:
        if reference == "none":
            yield None
        elif reference == "16bit":
            with temporary_file(self.store) as (file, name):
                made = self._reference_in(file, name)
                self._write(made, progress)
                yield made
        else:
            with opened_file(Path(reference)) as (file, name):
                found = self._reference_in(file, name)
                found.check()
                yield found

    def _reference_in(self, file: Any, name: str) -> Reference:
        fingerprint = self.blueprint.checkpoint.fingerprint()
        return Reference(file, name, fingerprint, self.windows, self.blueprint.config.vocab_size)

    def _write(self, reference: Reference, progress: Progress) -> dict[str, Any]:
        reference.write_header()
        with comparing_with_16_bits():
            scores = self._on_model(
                self._options_of_16_bits(),
                lambda model: write_reference(model, self.windows, reference, progress),
                progress,
            )
        named = summarise(scores)
        return {"perplexity_16bit": named["perplexity"], "perplexity_16bit_se": named["perplexity_se"]}

    def _options_of_16_bits(self) -> dict[str, Any]:
        length = self.windows.shape.length
        chunk = {} if self.blueprint.family.encoder_decoder else {"chunk": length}
        return {**options_of_16_bits(self.options), "context": length, **chunk}

    def _on_model(self, options: dict[str, Any], use: Any, progress: Progress) -> Any:
        config, itemsize = self.blueprint.config, self.blueprint.dtype.itemsize
        reserve = reserved_bytes(self.windows.shape.length, config.vocab_size, itemsize)
        return on_model(self.blueprint, options, use, progress, reserve)

    def _conditions(self) -> dict[str, Any]:
        shape = self.windows.shape
        return {
            "prompt": shape.prompt,
            "window": shape.window,
            "documents" if self.of_pairs else "windows": len(self.windows.scored),
            "tokens": self.windows.tokens,
        }


def options_of_16_bits(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `tiermoe.load` for the checkpoint's own weights, beside a preset with these `options`."""
    return {"bits": 16, **{name: options[name] for name in _SHARED if name in options}}


@contextlib.contextmanager
def comparing_with_16_bits() -> Iterator[None]:
    """Context in which a budget that the 16-bit model exceeds names the way out."""
    try:
        yield
    except BudgetError as error:
        raise BudgetError(
            f"the 16-bit model that the scores are compared with does not fit: {error}. Or skip the comparison with "
            f"--reference none"
        ) from error


def on_model(blueprint: Blueprint, options: dict[str, Any], use: Any, progress: Progress, reserve: int) -> Any:
    """Starts an engine with `options`, calls `use` with it and returns what `use` returns. The experts' memory is given
    back at once, the rest when the next model is loaded. reserve: bytes of logits beside the model."""
    try:
        engine = start(blueprint, make_settings(**_without(options, reserve)), progress)
    except BudgetError as error:
        raise BudgetError(f"{error} (beside {format_size(reserve)} for the logits of a window)") from error
    try:
        return use(engine)
    finally:
        engine.close()


def prepare(model: str, material: str | Sequence[Pair], shape: WindowShape, options: dict[str, Any]) -> Evaluation:
    """Checks the model, preset, calibration and material of an evaluation: a text, or documents with their summaries. A
    TiermoeError says what to do where one of them is not usable."""
    found = inspected(model, shape, options, continues=isinstance(material, str))
    if isinstance(material, str):
        windows = cut_windows(found.tokenizer, material, shape)
    else:
        windows = cut_pairs(found.tokenizer, material, shape, ends=found.blueprint.family.encoder_decoder)
    return Evaluation(found.blueprint, windows, found.options, found.store, not isinstance(material, str))


class Inspected(NamedTuple):
    """A model that is to be evaluated."""

    blueprint: Blueprint
    tokenizer: Any
    options: dict[str, Any]  # of `tiermoe.load`, with the context that the evaluation takes
    store: Path


def inspected(model: str, shape: WindowShape, options: dict[str, Any], continues: bool = False) -> Inspected:
    """Looks a model up and plans its memory with `options`. continues: it must be one that continues a text. A
    TiermoeError says what to do where they are not usable."""
    options = {**options, "context": shape.length}
    settings = make_settings(**options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, model, settings.store)
    if continues:
        _refuse_encoder_decoder(blueprint)
    shape.check_context(blueprint.max_context())
    plan_for(blueprint, settings)
    return Inspected(blueprint, load_tokenizer(directory), options, store_root(blueprint, settings.store))


def _refuse_encoder_decoder(blueprint: Blueprint) -> None:
    if blueprint.family.encoder_decoder:
        raise ModelError(
            f"{blueprint.family.name} models answer a prompt rather than continue a text, so a text's perplexity says "
            f"nothing about them; give documents with their summaries by --pairs, or evaluate a decoder-only model"
        )


def _without(options: dict[str, Any], reserve: int) -> dict[str, Any]:
    """The options with `reserve` bytes less in each named budget (others are a share of the free memory), and an empty
    cache."""
    named = {name: parse_size(options[name], name) for name in ("memory", "gpu_memory") if options.get(name)}
    return {**options, **{name: max(size - reserve, 1) for name, size in named.items()}, "warm": False}
