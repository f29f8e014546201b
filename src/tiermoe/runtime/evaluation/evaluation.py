"""One evaluation from a checkpoint and a text: the 16-bit reference first, then the preset, never both in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.config import format_size, parse_size
from tiermoe.config import settings as make_settings
from tiermoe.errors import BudgetError, ModelError
from tiermoe.runtime.blueprint import Blueprint, inspect_model
from tiermoe.runtime.evaluation.evaluate import evaluate, reserved_bytes, write_reference
from tiermoe.runtime.evaluation.reference import Reference, opened_file, saved_file, temporary_file
from tiermoe.runtime.evaluation.scoring import summarise
from tiermoe.runtime.evaluation.windows import Shape, Windows, cut
from tiermoe.runtime.load import plan_for, start
from tiermoe.runtime.prepare_store import Progress, store_root
from tiermoe.runtime.resolve import load_tokenizer, resolve_model

_SHARED = ("memory", "device", "gpu_memory", "lanes", "threads", "store")
"""Options of the preset's engine that the reference's has too; its precision, chunk and cache are its own."""


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
