"""What profiles are made from: a checkpoint, and the recording of a text, which is made once and kept."""

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
from tiermoe.decide.profiles import FOLDER
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.errors import ConfigError, TraceError
from tiermoe.families import Family
from tiermoe.measure.evaluate import reserved_bytes
from tiermoe.measure.sequences import Cut, cut
from tiermoe.measure.write_trace import MadeFrom, made_from, write_trace
from tiermoe.model.blueprint import Blueprint, inspect_model
from tiermoe.model.hub import load_tokenizer, resolve_model
from tiermoe.model.prepare_store import Progress, store_root
from tiermoe.systems.corm import LOW_SHARE
from tiermoe.trace.file import read_trace
from tiermoe.trace.schema import Trace

LEAST_TOKENS = 1024
"""Fewer say too little of how a model routes."""

TRACE = "calibration.trace"

METRICS = ("perplexity", "rouge2")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a calibration is for. tolerated_loss: of EdgeMoE's bitwidths in `metric` ('perplexity', or 'rouge2' of the
    summaries that belong to documents in `pairs`), which `bitwidth_quantizer` makes ('linear' is the paper's), and of
    MoBiLE's gamma in perplexity, unless that is to make the share `fallback_ratio` of the tokens fall back. processes:
    that measure the importance of experts side by side, None: one; `ray`: that Ray runs. cache: the one that will run,
    for HOBBIT's weights. usage_share: of a layer's experts, the least used ones that CORM has low. ConfigError for
    values that cannot be."""

    tolerated_loss: float = 0.05
    fallback_ratio: float | None = None
    metric: str = "perplexity"
    pairs: tuple[tuple[str, str], ...] = ()
    bitwidth_quantizer: str = "linear"
    processes: int | None = None
    ray: bool = False
    cache: str = "45%"
    usage_share: float = LOW_SHARE

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
        """Tells the pairs apart from others."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.pairs).encode())


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibrating starts from; made by `prepare`. ids: (sequences, length). `asked`: what else is wanted."""

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
    asked: Asked

    def trace(self, progress: Progress) -> Trace:
        """The recording of the text: the one that is kept, where it was made from the same."""
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
        """What `use` makes of an engine and its checkpoint, started with the settings of the calibration and `changes`:
        of the plain LRU preset's parts. logits: keep room for those of a whole sequence in a memory budget that is
        named. Nothing of the engine is left afterwards."""
        chunk = max(Settings().chunk, self.shape.sequence + 1)  # the text is read as it was cut
        options = {**self.options, "preset": "lru", "set": changes, "context": self.shape.sequence + 1, "warm": False}
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
        """The checkpoint, unloaded."""
        return inspect_model(self.directory, self.model, self.settings.store)

    @property
    def settings(self) -> Settings:
        return make_settings(**self.options)

    @property
    def cache(self) -> CacheSize:
        """The cache that will run."""
        return parse_cache(self.asked.cache)


def prepare(
    model: str,
    text_name: str,
    text: str,
    shape: Cut,
    options: dict[str, Any],
    asked: Asked = Asked(),
) -> Calibration:
    """A calibration whose model and text were checked. options: of `tiermoe.load`. Raises a TiermoeError that says
    what to do where one of them cannot be used."""
    if shape.sequences * shape.sequence < LEAST_TOKENS:
        raise ConfigError(
            f"{shape.sequences * shape.sequence:,} tokens in whole sequences of {shape.sequence:,} are too few to "
            f"calibrate from: at least {LEAST_TOKENS:,} are needed; raise --tokens"
        )
    settings = make_settings(**options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, model, settings.store)
    ids = cut(load_tokenizer(directory), text, shape, blueprint.max_context())
    return Calibration(
        directory, model, text, ids, shape, options, made_from(text_name, text, shape, settings),
        blueprint.checkpoint.fingerprint(), store_root(blueprint, settings.store), blueprint.family,
        asked,
    )  # fmt: skip
