"""`tiermoe calibrate`: a text and a checkpoint → the profiles of the presets that need one, beside its store.

The text is recorded once. The recording and each profile are kept as soon as they are whole, with what they were made
from, so an interrupted calibration goes on where it was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tiermoe.config import Settings
from tiermoe.config import settings as make_settings
from tiermoe.errors import ConfigError, ProfileError, TiermoeError, TraceError
from tiermoe.families import Family
from tiermoe.profiles import FOLDER, Profile, profile_path, read_profile, to_json
from tiermoe.runtime.blueprint import Blueprint, inspect_model
from tiermoe.runtime.evaluate import reserved_bytes
from tiermoe.runtime.load import load_blueprint
from tiermoe.runtime.prepare_store import Progress, store_root
from tiermoe.runtime.resolve import load_tokenizer, resolve_model
from tiermoe.runtime.sequences import Cut, cut
from tiermoe.runtime.write_trace import MadeFrom, made_from, write_trace
from tiermoe.store.atomic import write_atomically
from tiermoe.store.lock import exclusive
from tiermoe.trace import Trace
from tiermoe.trace_file import read_trace

LEAST_TOKENS = 1024
"""Fewer say too little of how a model routes."""

TRACE = "calibration.trace"


@dataclass(frozen=True, slots=True)
class Found:
    """A calibrated profile: `facts` are what was found, for people. kept: it was there already, made from the same."""

    name: str
    profile: Profile
    facts: dict[str, str]
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A profile that could not be made."""

    name: str
    error: TiermoeError


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibrating starts from; made by `prepare`. ids: (sequences, length). tolerated_loss: of perplexity, for
    EdgeMoE's bitwidths, which `bitwidth_quantizer` makes ('linear' is the paper's). processes: that measure the
    importance of experts side by side, None: one."""

    directory: Path
    model: str
    text: str
    ids: torch.Tensor
    shape: Cut
    options: dict[str, Any]
    made_from: MadeFrom
    fingerprint: str
    store: Path
    family: Family
    tolerated_loss: float = 0.05
    processes: int | None = None
    bitwidth_quantizer: str = "linear"

    def run(self, names: Sequence[str], progress: Progress, force: bool = False) -> list[Found | Failed]:
        """The profiles `names`, in order. force: make all anew, the recording too. What cannot be made of one profile
        does not keep the others from being made."""
        from tiermoe.runtime.calibrators import CALIBRATORS

        results: list[Found | Failed] = []
        with exclusive(self.store / FOLDER):
            if force:
                (self.store / FOLDER / TRACE).unlink(missing_ok=True)
            for name in names:
                calibrator = CALIBRATORS[name]
                kept = None if force else self._kept(name)
                try:
                    results.append(kept or self._make(name, calibrator, progress))
                except TiermoeError as error:
                    results.append(Failed(name, error))
        return results

    def trace(self, progress: Progress) -> Trace:
        """The recording of the text: the one that is kept, where it was made from the same."""
        path = self.store / FOLDER / TRACE
        try:
            trace = read_trace(path)
            if trace.header.made_from == self.made_from and trace.header.fingerprint == self.fingerprint:
                return trace
        except TraceError:
            pass
        self.on_model(
            {},
            lambda model, _: write_trace(
                path, model, self.ids, self.shape, self.made_from, progress, distances=(1,), little=False
            ),
            progress,
        )
        return read_trace(path)

    def on_model(
        self, changes: dict[str, Any], use: Callable[[Any, Blueprint], Any], progress: Progress, logits: bool = False
    ) -> Any:
        """What `use` makes of the model and its checkpoint, loaded with the settings of the calibration and `changes`:
        of the plain LRU preset's parts. logits: keep room for those of a whole sequence in a memory budget that is
        named. Nothing of the model is left afterwards."""
        chunk = max(Settings().chunk, self.shape.sequence + 1)  # the text is read as it was cut
        options = {**self.options, "preset": "lru", "set": changes, "context": self.shape.sequence + 1}
        blueprint = self.blueprint()
        if not self.family.encoder_decoder:
            options["chunk"] = chunk
        settings = make_settings(**options)
        if logits and settings.memory is not None:
            needed = reserved_bytes(self.shape.sequence, blueprint.config.vocab_size, blueprint.dtype.itemsize)
            settings = replace(settings, memory=max(settings.memory - needed, 1))
        model = load_blueprint(blueprint, settings, progress)
        try:
            return use(model, blueprint)
        finally:
            model.tiermoe.close()
            del model
            gc.collect()

    def blueprint(self) -> Blueprint:
        """The checkpoint, unloaded."""
        return inspect_model(self.directory, self.model)

    @property
    def settings(self) -> Settings:
        return make_settings(**self.options)

    def _kept(self, name: str) -> Found | None:
        try:
            profile = read_profile(profile_path(self.store, name), self.fingerprint, "")
        except ProfileError:
            return None
        if profile.made_from != self._profile_made_from(name):
            return None
        return Found(name, profile, profile.data.get("found", {}), kept=True)

    def _make(self, name: str, calibrator: Any, progress: Progress) -> Found:
        settings, data, facts = calibrator(self, progress)
        profile = Profile(name, self.fingerprint, self._profile_made_from(name), settings, {**data, "found": facts})
        write_atomically(profile_path(self.store, name), to_json(profile))
        return Found(name, profile, facts)

    def _profile_made_from(self, name: str) -> dict[str, Any]:
        return {**self.made_from, **(self._of_bitwidths() if name == "edgemoe" else {})}

    def _of_bitwidths(self) -> dict[str, float | str]:
        return {"tolerated_loss": self.tolerated_loss, "quantizer": self.bitwidth_quantizer}


def prepare(
    model: str,
    text_name: str,
    text: str,
    shape: Cut,
    options: dict[str, Any],
    tolerated_loss: float = 0.05,
    processes: int | None = None,
    bitwidth_quantizer: str = "linear",
) -> Calibration:
    """A calibration whose model and text were checked. options: of `tiermoe.load`. Raises a TiermoeError that says
    what to do where one of them cannot be used."""
    if shape.sequences * shape.sequence < LEAST_TOKENS:
        raise ConfigError(
            f"{shape.sequences * shape.sequence:,} tokens in whole sequences of {shape.sequence:,} are too few to "
            f"calibrate from: at least {LEAST_TOKENS:,} are needed; raise --tokens"
        )
    if not 0 < tolerated_loss < 1:
        raise ConfigError(f"tolerated-loss must be above 0% and below 100%, got {tolerated_loss:.3g}; write it like 5%")
    settings = make_settings(**options)
    make_settings(quantizer=bitwidth_quantizer)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, model)
    ids = cut(load_tokenizer(directory), text, shape, blueprint.max_context())
    return Calibration(
        directory, model, text, ids, shape, options, made_from(text_name, text, shape, settings),
        blueprint.checkpoint.fingerprint(), store_root(blueprint, settings.store), blueprint.family,
        tolerated_loss, processes, bitwidth_quantizer,
    )  # fmt: skip
