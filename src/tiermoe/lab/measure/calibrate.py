"""What `tiermoe calibrate` makes: the recording of a text, made once and kept, and profiles of the presets that need
one, each from the recording alone or on an engine. A profile is kept as soon as it is whole, with what it was made
from, so an interrupted calibration goes on."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.config import Settings, parse_cache
from tiermoe.config import settings as make_settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.errors import ConfigError, ModelError, ProfileError, TiermoeError, TraceError
from tiermoe.formats.neurons import neuron_layer
from tiermoe.formats.store_files import exclusive, write_atomically
from tiermoe.lab.measure.bitwidths import find_bitwidths
from tiermoe.lab.measure.evaluate import METRICS, reserved_bytes
from tiermoe.lab.measure.neurons import find_theta
from tiermoe.lab.measure.record import MadeFrom, made_from, write_trace
from tiermoe.lab.measure.searches import (
    TOLERATED,
    Gamma,
    Prior,
    find_gamma,
    find_gamma_for,
    find_prior,
    popularity_losses,
)
from tiermoe.lab.measure.tasks import Perplexity, Rouge2, Task
from tiermoe.lab.measure.texts import SequenceShape, WindowShape, cut_sequences
from tiermoe.lab.papers import corm, fate, hobbit, statistics
from tiermoe.lab.papers.corm import LOW_SHARE
from tiermoe.lab.papers.hobbit import MissPenalties
from tiermoe.lab.papers.later import adapmoe, fiddler
from tiermoe.lab.papers.statistics import halves, routings
from tiermoe.lab.trace import Trace, frequencies, read_trace
from tiermoe.model.families.family import Family
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.prepare_store import Progress, store_root
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.policies.prediction import count_paths, paths_to_json
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import FOLDER, Profile, profile_path, read_profile, to_json

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


Contents = tuple[dict[str, Any], dict[str, Any], dict[str, str]]
"""Of a profile: settings, data, and facts for people."""

SUMMARY_PROMPT, SUMMARY = 512, 64
"""At most so many tokens of a document are read, and written for its summary."""


@dataclass(frozen=True, slots=True)
class MadeProfile:
    """A calibrated profile."""

    name: str
    profile: Profile
    facts: dict[str, str]  # what was found, for people
    kept: bool = False  # it was there already, made from the same


@dataclass(frozen=True, slots=True)
class FailedProfile:
    """A profile that could not be made."""

    name: str
    error: TiermoeError


def make_profiles(
    calibration: Calibration, names: Sequence[str], progress: Progress, force: bool = False
) -> list[MadeProfile | FailedProfile]:
    """Makes the profiles `names`, in order. force: all anew, the recording too. A profile that cannot be made does not
    keep the others from being made."""
    results: list[MadeProfile | FailedProfile] = []
    with exclusive(calibration.store / FOLDER, progress):
        if force:
            (calibration.store / FOLDER / TRACE).unlink(missing_ok=True)
        for name in names:
            kept = None if force else _kept(calibration, name)
            try:
                results.append(kept or _make(calibration, name, progress))
            except TiermoeError as error:
                results.append(FailedProfile(name, error))
    return results


def _kept(calibration: Calibration, name: str) -> MadeProfile | None:
    try:
        profile = read_profile(profile_path(calibration.store, name), calibration.fingerprint, "")
    except ProfileError:
        return None
    if profile.made_from != _made_from(calibration, name):
        return None
    return MadeProfile(name, profile, profile.data.get("found", {}), kept=True)


def _make(calibration: Calibration, name: str, progress: Progress) -> MadeProfile:
    if calibration.family.encoder_decoder and name != "edgemoe":
        family = calibration.family.name
        raise ModelError(f"preset {name} is made for decoder-only models, not {family}; calibrate edgemoe alone")
    settings, data, facts = CALIBRATORS[name](calibration, progress)
    made_from = _made_from(calibration, name)
    blueprint = calibration.blueprint()
    shape = [layer.experts for layer in blueprint.layers], [layer.top_k for layer in blueprint.layers]
    data = {**data, "found": facts}
    profile = Profile(name, calibration.fingerprint, made_from, settings, data, blueprint.name, *shape)
    write_atomically(profile_path(calibration.store, name), to_json(profile))
    return MadeProfile(name, profile, facts)


def _made_from(calibration: Calibration, name: str) -> dict[str, Any]:
    """The recording, and the options that the profile depends on."""
    return {**calibration.made_from, **{field: getattr(calibration.options, field) for field in READS.get(name, ())}}


def calibrate_hobbit(calibration: Calibration, progress: Progress) -> Contents:
    """HOBBIT: thresholds, and the weights of the cache; found on the even sequences, judged on the odd ones."""
    found_on, judged_on = halves(calibration.trace(progress))
    t1, t2 = hobbit.thresholds_of(found_on)
    split = hobbit.Split.of(judged_on, t1, t2)
    composition = PRESETS["hobbit"].having({"t1": t1, "t2": t2})
    bits, cache = calibration.settings.bits_used, parse_cache(calibration.options.cache)
    penalties = MissPenalties(found_on, composition, bits, cache)
    found = penalties.search(partial(progress, "weighing the cache"))
    judged = MissPenalties(judged_on, composition, bits, cache).judge(found.weights)
    settings = {"t1": t1, "t2": t2, "weights": list(found.weights)}
    names = ("penalty", "lru_penalty", "lfu_penalty")
    data = {name: getattr(judged, name) for name in names} | {f"found_{name}": getattr(found, name) for name in names}
    facts = {
        "t1, t2": f"{t1:.4g}, {t2:.4g} ({split.high:.0%} high, {split.low:.0%} low, {split.skipped:.0%} skipped)",
        "weights": ", ".join(f"{weight:g}" for weight in found.weights) + f" with {calibration.options.cache} cached",
        "miss penalty": f"{judged.over_lru:+.1%} beside LRU, {judged.over_lfu:+.1%} beside LFU on other text "
        f"({found.over_lru:+.1%} and {found.over_lfu:+.1%} where they were found)",
    }
    return settings, data, facts


def calibrate_edgemoe(calibration: Calibration, progress: Progress) -> Contents:
    """EdgeMoE: activation paths over two layers, frequencies, and a bitwidth per expert."""
    trace = calibration.trace(progress)
    paths, used = count_paths(routings(trace), 2), frequencies(trace)
    del trace  # the search takes memory too
    quantizer, settings = calibration.options.bitwidth_quantizer, calibration.settings
    resume = calibration.store / "profiles" / f"edgemoe-importance-{quantizer}.json"
    bitwidths = find_bitwidths(
        calibration.blueprint(),
        replace(settings, quantizer=quantizer, dense_bits=settings.dense_bits or PRESETS["edgemoe"].dense_bits),
        _task(calibration),
        calibration.options.tolerated_loss,
        progress,
        calibration.options.processes,
        resume,
        calibration.options.ray,
    )
    table = bitwidths["table"]
    data = {"paths": paths_to_json(paths), "frequencies": used, **bitwidths}
    kinds = sorted({bits for row in table for bits in row})
    counts = ", ".join(f"{sum(row.count(bits) for row in table)} experts at {bits} bits" for bits in kinds)
    facts = {
        "paths": f"{sum(map(len, paths.values())):,}",
        "bitwidths": counts,
        "loss": f"{bitwidths['loss']:.2%} ± {bitwidths['loss_error']:.2%} of {bitwidths['metric']} on text that the "
        f"search has not seen, {calibration.options.tolerated_loss:.2%} tolerated",
    }
    return {"quantizer": quantizer}, data, facts


def _task(calibration: Calibration) -> Task:
    """The task that bitwidths are measured on."""
    if calibration.options.metric == "perplexity":
        return Perplexity(calibration.ids)
    longest = calibration.blueprint().max_context() or SUMMARY_PROMPT + SUMMARY
    shape = WindowShape(min(SUMMARY_PROMPT, longest - SUMMARY), SUMMARY, SUMMARY)
    return Rouge2(calibration.options.pairs, load_tokenizer(calibration.directory), shape)


def calibrate_mobile(calibration: Calibration, progress: Progress) -> Contents:
    """MoBiLE: gamma, from the tolerated loss, or from the share of fallbacks where one is given."""
    ratio = calibration.options.fallback_ratio

    def on_engine(engine: Engine, _: Blueprint) -> Gamma:
        find, goal = (find_gamma, calibration.options.tolerated_loss) if ratio is None else (find_gamma_for, ratio)
        prompt, ids = calibration.shape.prompt, calibration.ids
        return find(engine, ids, prompt, goal, partial(progress, "decoding at a gamma"))

    found: Gamma = calibration.on_engine({"routing": "confident", "gamma": 1.0}, on_engine, progress)
    data = {
        "fallback_ratio": found.ratio, "loss": found.loss.value, "loss_error": found.loss.error,
        "tokens": found.tokens, "tried": [[gamma, *values] for gamma, values in sorted(found.tried.items())],
    }  # fmt: skip
    asked = (
        f"{calibration.options.tolerated_loss:.2%} tolerated" if ratio is None else f"{ratio:.0%} fallbacks asked for"
    )
    facts = {
        "gamma": f"{found.gamma:g} ({asked})",
        "fallbacks": f"{found.ratio:.0%} of the tokens that the model writes",
        "loss": f"{found.loss.value:.2%} ± {found.loss.error:.2%} of perplexity, of {found.tokens:,} tokens",
    }
    return {"gamma": found.gamma}, data, facts


def calibrate_fate(calibration: Calibration, progress: Progress) -> Contents:
    """Fate: boundary, windows, and the share of low-precision experts in prefill; paths of one layer for EAP."""
    low_bits = PRESETS["fate"]["low_bits"]

    def on_engine(engine: Engine, _: Blueprint) -> tuple[list[tuple[float, float]], float]:
        return popularity_losses(engine, calibration.ids, low_bits, progress), engine.service.bandwidth

    losses, bandwidth = calibration.on_engine(
        {
            "precision": "popularity",
            "low_popularity": 0.0,
            "low_bits": low_bits,
            "cache": "none",
            "prefetch": PRESETS["fate"].prefetch,
            "window": 0,  # predicted popularity decides who is low
        },
        on_engine,
        progress,
        logits=True,
    )
    trace = calibration.trace(progress)  # after the engine is gone: it takes memory too
    accuracy = fate.accuracies(trace)
    windows = statistics.windows(trace, calibration.settings.bits_used, bandwidth)
    settings = {
        "boundary": fate.boundary(accuracy),
        "window": windows,
        "low_popularity": fate.largest_share(losses, TOLERATED),
    }
    data = {
        "paths": paths_to_json(count_paths(routings(trace), 1)), "frequencies": frequencies(trace),
        "accuracies": accuracy, "losses": losses, "bandwidth": bandwidth,
    }  # fmt: skip
    facts = {
        "boundary": f"{settings['boundary']} (next gate right: " + " ".join(f"{share:.0%}" for share in accuracy) + ")",
        "window": f"{' '.join(map(str, windows))} at {bandwidth / 1e6:,.0f} MB/s",
        "low_popularity": f"{settings['low_popularity']:g} ("
        + ", ".join(f"{share:g}: {loss:+.2%}" for share, loss in losses)
        + ")",
    }
    return settings, data, facts


def calibrate_corm(calibration: Calibration, progress: Progress) -> Contents:
    """CORM: bits per expert by usage, and theta."""
    for layer in calibration.blueprint().layers:
        neuron_layer(layer)  # refuses before anything is measured
    preset = PRESETS["corm"]
    theta = calibration.on_engine(
        {},
        lambda engine, blueprint: find_theta(
            engine, blueprint, calibration.ids, corm.INACTIVE_SHARE, partial(progress, "measuring neurons")
        ),
        progress,
    )
    trace = calibration.trace(progress)
    table = corm.bits_by_usage(trace, preset.bits or corm.BITS, preset["low_bits"], calibration.options.usage_share)
    usage = corm.low_usage(trace, table)
    data = {"table": table, "active_share": theta.active_share, "frequencies": frequencies(trace)}
    active = theta.active_share
    facts = {
        "theta": f"{theta.theta:.4g} (active in a layer: {min(active):.0%} to {max(active):.0%})",
        "low precision": f"{calibration.options.usage_share:.0%} of the experts, {usage:.1%} of their uses",
    }
    return {"theta": theta.theta}, data, facts


def calibrate_nimble(calibration: Calibration, progress: Progress) -> Contents:
    """Nimble: the prior of the routing, for the memory that the calibration is given."""
    preset, plain = PRESETS["nimble"].settings(), PRESETS["lru"].settings()

    def on_engine(engine: Engine, _: Blueprint) -> tuple[Prior, float]:
        found = find_prior(engine, calibration.ids, calibration.shape.prompt, partial(progress, "moving choices"))
        return found, engine.plan.slots / engine.plan.all_slots

    changes = {name: value for name, value in preset.items() if value != plain[name] and name != "profile"}
    found, fraction = calibration.on_engine(changes, on_engine, progress, logits=True)
    judged = found.judged
    data = {"tried": [asdict(each) for each in found.tried], "judged": asdict(judged), "cache_fraction": fraction}
    error = "" if judged.error is None else f" ± {judged.error:.2%}"
    facts = {
        "prior": f"{found.strength:g} with {fraction:.0%} of the experts cached",
        "loss": f"{judged.loss:+.2%}{error} on text that it was not chosen on ({TOLERATED:.0%} tolerated)",
        "missed experts": f"{judged.misses:.0%} of the exact preset's",
    }
    return {"prior": found.strength}, data, facts


def calibrate_adapmoe(calibration: Calibration, progress: Progress) -> Contents:
    """AdapMoE: how often the next gate is right, and how many experts run, in each layer."""
    trace, gating = calibration.trace(progress), PRESETS["adapmoe"].adaptive_gating
    assert gating is not None
    recall, uses = fate.accuracies(trace), adapmoe.uses(trace, gating)
    facts = {
        "next gate right": " ".join(f"{share:.0%}" for share in recall),
        "experts that run": " ".join(f"{count:.2f}" for count in uses) + f" at threshold {gating.threshold:g}",
    }
    return {"layer_recall": recall, "layer_uses": uses}, {}, facts


def calibrate_fiddler(calibration: Calibration, progress: Progress) -> Contents:
    """Fiddler: how many tokens each expert served."""
    trace = calibration.trace(progress)
    facts = {"the most used": f"half of the experts have {fiddler.served(trace, 0.5):.0%} of the uses"}
    return {}, {"frequencies": frequencies(trace)}, facts


CALIBRATORS: dict[str, Callable[[Calibration, Progress], Contents]] = {
    "hobbit": calibrate_hobbit,
    "edgemoe": calibrate_edgemoe,
    "mobile": calibrate_mobile,
    "fate": calibrate_fate,
    "corm": calibrate_corm,
    "nimble": calibrate_nimble,
    "adapmoe": calibrate_adapmoe,
    "fiddler": calibrate_fiddler,
}


READS: dict[str, tuple[str, ...]] = {
    "hobbit": ("cache",),
    "edgemoe": ("tolerated_loss", "metric", "pairs_xxh3", "bitwidth_quantizer"),
    "mobile": ("tolerated_loss", "fallback_ratio"),
    "corm": ("usage_share",),
}
"""Preset → fields of `CalibrationOptions` that the profile depends on."""
