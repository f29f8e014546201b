"""One evaluation from a checkpoint and a text: the 16-bit reference first, then the preset, never both in memory. How
good a preset's text is, and how fast it came: each window's prompt is read at once, as `generate()` would, and its
other tokens are fed one at a time, whatever the model would have said.

Many presets act while a model decodes, and on what happens to be cached (skipping, a lower precision on a miss, falling
back), so a forward pass over a whole window would not show what they cost. Every preset is fed the same tokens, so
speeds compare too. The distributions are kept as they come and scored after each window, outside the measured time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tiermoe import batch
from tiermoe.batch import Batch
from tiermoe.config import format_size, parse_size
from tiermoe.config import settings as make_settings
from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.engine.engine import engine_of
from tiermoe.engine.load import plan_for, start
from tiermoe.errors import BudgetError, ModelError
from tiermoe.measure import scoring
from tiermoe.measure.reference import Reference, opened_file, saved_file, temporary_file
from tiermoe.measure.scoring import TokenScores, summarise
from tiermoe.measure.windows import Shape, Windows, cut
from tiermoe.model.blueprint import Blueprint, inspect_model
from tiermoe.model.hub import load_tokenizer, resolve_model
from tiermoe.model.prepare_store import Progress, store_root

SCORING = "scoring"
"""What the progress of an evaluation's windows is called."""

_SHARED = ("memory", "device", "gpu_memory", "lanes", "threads", "store")
"""Options of the preset's engine that the reference's has too; its precision, chunk and cache are its own."""


def reserved_bytes(length: int, vocabulary: int, itemsize: int) -> int:
    """What scoring a window of `length` tokens holds beside the model: its logits, and rows being scored."""
    return length * vocabulary * itemsize + scoring.working_bytes(vocabulary)


@torch.inference_mode()
def write_reference(model: Any, windows: Windows, reference: Reference, progress: Progress) -> list[TokenScores]:
    """Appends the log-probabilities of each scored token to `reference`, which has its header, a window in one forward
    pass: an exact model's logits do not depend on its cache. Returns the windows' scores."""
    scores = []
    for done, window in enumerate(windows, 1):
        logits = prompt_logits(model, window[0].tolist())[-windows.shape.window - 1 : -1]
        for rows in scoring.row_blocks(len(logits)):
            reference.append(scoring.log_probabilities(logits[rows]))
        scores.append(scoring.score_tokens(logits.cpu(), windows.targets(window)))
        progress("scoring the 16-bit weights", done, len(windows.scored))
    return scores


def prompt_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits (n, vocabulary) of a loaded model, or of an engine, on a text's n tokens, read as a prompt."""
    engine = engine_of(model)
    cache = engine.new_cache(1, len(ids))
    return engine.step(Batch((batch.prompt(cache.open(), ids),)), cache, every=True)


def evaluate(model: Any, windows: Windows, reference: Reference | None, progress: Progress) -> dict[str, Any]:
    """Scores and speed of a loaded model on a text's windows, by the names that `--json` prints."""
    logits = torch.empty(windows.shape.window, model.config.vocab_size, dtype=model.dtype)
    decode_window(model, windows.warming[None], windows.shape.prompt, logits, PhaseCosts(), PhaseCosts())
    prefill, decode = PhaseCosts(), PhaseCosts()
    scores = []
    for index, window in enumerate(windows):
        decode_window(model, window, windows.shape.prompt, logits, prefill, decode)
        rows = reference.window(index) if reference is not None else None
        scores.append(scoring.score_tokens(logits, windows.targets(window), rows))
        progress(SCORING, index + 1, len(windows.scored))
    return {**_speed(model, prefill, decode), **scoring.summarise(scores)}


@torch.inference_mode()
def decode_window(
    model: Any, window: torch.Tensor, prompt: int, logits: torch.Tensor, prefill: PhaseCosts, decode: PhaseCosts
) -> None:
    """Feeds a window (1, n) to a model: `prompt` tokens in the engine's chunks, then one at a time but for the last.
    Writes the logits of each token after the prompt to `logits` (n - prompt, vocabulary), and adds to the phases."""
    engine = engine_of(model)
    ids = window[0].tolist()
    cache = engine.new_cache(1, len(ids))
    slab = cache.open()
    with prefill.measured(engine.snapshot, prompt):
        logits[0] = engine.step(Batch((batch.prompt(slab, ids[:prompt]),)), cache)[0]
    with decode.measured(engine.snapshot, len(logits) - 1):
        for row in range(1, len(logits)):
            at = prompt + row - 1
            logits[row] = engine.step(Batch((batch.decode(slab, at, ids[at]),)), cache)[0]


def _speed(model: Any, prefill: PhaseCosts, decode: PhaseCosts) -> dict[str, Any]:
    engine = engine_of(model)
    plan, stats, both = engine.plan, engine.stats(), prefill + decode
    return {
        "preset": engine.composition.name,
        "lossy": engine.lossy,
        "set": dict(engine.settings.set),
        "bits": engine.settings.bits_used,
        "dense_bits": engine.settings.dense_bits_used,
        "quantizer": engine.settings.quantizer_used,
        "cache_fraction": plan.experts / (plan.all_slots * plan.slot_bytes),
        "hit_rate": both.hit_rate,
        "prefill_hit_rate": prefill.hit_rate,
        "decode_hit_rate": decode.hit_rate,
        "prefill_tok_s": prefill.tok_s,
        "decode_tok_s": decode.tok_s,
        "bound_tok_s": decode.bound_tok_s(engine.bandwidth) if decode.bytes_read else 0.0,
        "bytes_read": both.bytes_read,
        "prefill_bytes_per_token": prefill.bytes_per_token,
        "bytes_per_token": decode.bytes_per_token,
        "wait_s": both.wait_s,
        "decode_wait_s": decode.wait_s,
        "fallback_ratio": stats["fallback_ratio"],
        "displaced_choices": decode.displaced_share,
        "moved_weight": decode.moved_share(len(engine.layers)),
        "other_budgets": [asdict(each) for each in engine.other_budgets(decode)],
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": stats["peak_memory_bytes"],
        "memory_budget_bytes": plan.budget,
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model, a text cut into windows, and the options of `tiermoe.load` for the preset to evaluate. Made by
    `prepare`, which finds what cannot work before anything is loaded."""

    blueprint: Blueprint
    windows: Windows
    options: dict[str, Any]
    store: Path

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
        options = {name: self.options[name] for name in _SHARED if name in self.options}
        options |= {"bits": 16, "context": self.windows.shape.length, "chunk": self.windows.shape.length}
        reference.begin()
        try:
            scores = self._on_model(
                options, lambda model: write_reference(model, self.windows, reference, progress), progress
            )
        except BudgetError as error:
            raise BudgetError(
                f"the 16-bit model that the scores are compared with does not fit: {error}. Or skip the comparison "
                f"with --reference none"
            ) from error
        named = summarise(scores)
        return {"perplexity_16bit": named["perplexity"], "perplexity_16bit_se": named["perplexity_se"]}

    def _on_model(self, options: dict[str, Any], use: Any, progress: Progress) -> Any:
        """What `use` makes of the model that `options` load. Its experts' memory is given back at once, the rest of it
        when the next model is loaded."""
        config, itemsize = self.blueprint.config, self.blueprint.dtype.itemsize
        reserve = reserved_bytes(self.windows.shape.length, config.vocab_size, itemsize)
        try:
            engine = start(self.blueprint, make_settings(**_without(options, reserve)), progress)
        except BudgetError as error:
            raise BudgetError(f"{error} (beside {format_size(reserve)} for the logits of a window)") from error
        try:
            return use(engine)
        finally:
            engine.close()

    def _conditions(self) -> dict[str, Any]:
        shape = self.windows.shape
        scored = shape.windows * shape.window
        return {"prompt": shape.prompt, "window": shape.window, "windows": shape.windows, "tokens": scored}


def prepare(model: str, text: str, shape: Shape, options: dict[str, Any]) -> Evaluation:
    """An evaluation whose model, preset, calibration and text were checked. Raises a TiermoeError that says what to do
    where one of them is not usable."""
    options = {**options, "context": shape.length}
    settings = make_settings(**options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, model, settings.store)
    _refuse_encoder_decoder(blueprint)
    shape.check_context(blueprint.max_context())
    windows = cut(load_tokenizer(directory), text, shape)
    plan_for(blueprint, settings)
    return Evaluation(blueprint, windows, options, store_root(blueprint, settings.store))


def _refuse_encoder_decoder(blueprint: Blueprint) -> None:
    if blueprint.family.encoder_decoder:
        raise ModelError(
            f"{blueprint.family.name} models answer a prompt rather than continue a text, so a text's perplexity says "
            f"nothing about them; evaluate a decoder-only model"
        )


def _without(options: dict[str, Any], reserve: int) -> dict[str, Any]:
    """The options with `reserve` bytes less in the budgets that are named (others are a share of what is free), from an
    empty cache."""
    named = {name: parse_size(options[name], name) for name in ("memory", "gpu_memory") if options.get(name)}
    return {**options, **{name: max(size - reserve, 1) for name, size in named.items()}, "warm": False}
