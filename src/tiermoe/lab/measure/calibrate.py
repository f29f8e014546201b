"""What `tiermoe calibrate` starts from: a checkpoint, and the recording of a text, which is made once and kept."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.config import CacheSize, Settings, parse_cache
from tiermoe.config import settings as make_settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.measure.evaluate import reserved_bytes
from tiermoe.lab.measure.record import MadeFrom, made_from, write_trace
from tiermoe.lab.measure.summaries import METRICS
from tiermoe.lab.measure.texts import SequenceShape, cut_sequences
from tiermoe.lab.papers.corm import LOW_SHARE
from tiermoe.lab.trace import Trace, read_trace
from tiermoe.model.families.family import Family
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.prepare_store import Progress, store_root
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.profiles import FOLDER

LEAST_TOKENS = 1024
"""Of a text: fewer tokens say too little of how a model routes."""

TRACE = "calibration.trace"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What a calibration is for. ConfigError for values that cannot be."""

    tolerated_loss: float = 0.05  # of EdgeMoE's bitwidths in `metric`; of MoBiLE's gamma in perplexity
    fallback_ratio: float | None = None  # share of the tokens that MoBiLE's gamma makes fall back; None: by the loss
    metric: str = "perplexity"  # or 'rouge2'
    pairs: tuple[tuple[str, str], ...] = ()  # (document, summary) for 'rouge2'
    bitwidth_quantizer: str = "linear"  # makes EdgeMoE's bitwidths; 'linear' is the paper's
    processes: int | None = None  # that measure the importance of experts side by side; None: one
    ray: bool = False  # Ray runs the processes
    cache: str = "45%"  # of the runs that HOBBIT's weights are for
    usage_share: float = LOW_SHARE  # of a layer's experts, the least used ones that CORM has low

    def __post_init__(self) -> None:
        if not 0 < self.tolerated_loss < 1:
            raise ConfigError(
                f"tolerated-loss must be above 0% and below 100%, got {self.tolerated_loss:.3g}; write it like 5%"
            )
        if self.fallback_ratio is not None and not 0 <= self.fallback_ratio <= 1:
            raise ConfigError(f"fallback-ratio must be from 0% to 100%, got {self.fallback_ratio:.3g}")
        if not 0 <= self.usage_share <= 1:
            raise ConfigError(f"usage-share must be from 0% to 100%, got {self.usage_share:.3g}")
        if self.metric not in METRICS:
            raise ConfigError(f"metric must be one of {', '.join(METRICS)}, got '{self.metric}'")
        if (self.metric == "rouge2") != bool(self.pairs):
            raise ConfigError(
                "--metric rouge2 compares summaries with those of --pairs FILE, and nothing else does: give both or "
                "none"
            )
        make_settings(quantizer=self.bitwidth_quantizer, cache=self.cache)

    @property
    def pairs_xxh3(self) -> str:
        """Digest of the pairs: a profile that was made with other pairs is made again."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.pairs).encode())


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model and a text that were checked; made by `prepare`."""

    directory: Path  # of the checkpoint
    model: str  # as the user named it
    ids: torch.Tensor  # (sequences, length) int64: the text's tokens
    shape: SequenceShape
    load_options: dict[str, Any]  # of `tiermoe.load`
    made_from: MadeFrom  # what the recording is made from
    fingerprint: str  # of the checkpoint
    store: Path
    family: Family
    options: CalibrationOptions

    def trace(self, progress: Progress) -> Trace:
        """The recording of the text: the kept one where it was made from the same, else a new one."""
        path = self.store / FOLDER / TRACE
        try:
            trace = read_trace(path)
            if trace.header.made_from == self.made_from and trace.header.fingerprint == self.fingerprint:
                return trace
        except TraceError:
            pass
        self.on_engine(
            {},
            lambda engine, _: write_trace(
                path, engine, self.ids, self.shape, self.made_from, progress, distances=(1,), little=False
            ),
            progress,
        )
        return read_trace(path)

    def on_engine(
        self, changes: dict[str, Any], use: Callable[[Engine, Blueprint], Any], progress: Progress, logits: bool = False
    ) -> Any:
        """Starts an engine with the calibration's settings and `changes` of the plain LRU preset's parts, calls `use`
        with the engine and its checkpoint, and returns what `use` returns. logits: keep room for the logits of a whole
        sequence in a named memory budget. Nothing of the engine is left afterwards."""
        chunk = max(Settings().chunk, self.shape.sequence + 1)  # the text is read as it was cut
        options = {
            **self.load_options,
            "preset": "lru",
            "set": changes,
            "context": self.shape.sequence + 1,
            "warm": False,
        }
        blueprint = self.blueprint()
        if not self.family.encoder_decoder:
            options["chunk"] = chunk
        settings = make_settings(**options)
        if logits and settings.memory is not None:
            needed = reserved_bytes(self.shape.sequence, blueprint.config.vocab_size, blueprint.dtype.itemsize)
            settings = replace(settings, memory=max(settings.memory - needed, 1))
        engine = start(blueprint, settings, progress)
        try:
            return use(engine, blueprint)
        finally:
            engine.close()
            del engine
            gc.collect()

    def blueprint(self) -> Blueprint:
        """The checkpoint, before it is loaded."""
        return inspect_model(self.directory, self.model, self.settings.store)

    @property
    def settings(self) -> Settings:
        return make_settings(**self.load_options)

    @property
    def cache(self) -> CacheSize:
        """The cache of the runs that the profiles are for."""
        return parse_cache(self.options.cache)


def prepare(
    model: str,
    text_name: str,
    text: str,
    shape: SequenceShape,
    load_options: dict[str, Any],
    options: CalibrationOptions = CalibrationOptions(),
) -> Calibration:
    """Checks the model and the text of a calibration. load_options: of `tiermoe.load`. A TiermoeError says what to do
    where one of them cannot be used."""
    if shape.sequences * shape.sequence < LEAST_TOKENS:
        raise ConfigError(
            f"{shape.sequences * shape.sequence:,} tokens in whole sequences of {shape.sequence:,} are too few to "
            f"calibrate from: at least {LEAST_TOKENS:,} are needed; raise --tokens"
        )
    settings = make_settings(**load_options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, model, settings.store)
    ids = cut_sequences(load_tokenizer(directory), text, shape, blueprint.max_context())
    return Calibration(
        directory, model, ids, shape, load_options, made_from(text_name, text, shape, settings),
        blueprint.checkpoint.fingerprint(), store_root(blueprint, settings.store), blueprint.family, options,
    )  # fmt: skip
