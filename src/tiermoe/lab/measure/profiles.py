"""Profiles of the presets that need one, beside the store: each made from the recording alone where that is enough,
else on an engine. A profile is kept as soon as it is whole, with what it was made from, so an interrupted calibration
goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tiermoe.engine.engine import Engine
from tiermoe.errors import ModelError, ProfileError, TiermoeError
from tiermoe.formats.neurons import neuron_layer
from tiermoe.formats.store_files import exclusive, write_atomically
from tiermoe.lab.measure.bitwidths import find_bitwidths
from tiermoe.lab.measure.calibrate import TRACE, Calibration
from tiermoe.lab.measure.evaluate import prompt_logits
from tiermoe.lab.measure.gamma import Gamma, find_gamma, find_gamma_for
from tiermoe.lab.measure.neurons import find_theta
from tiermoe.lab.measure.prior import TOLERATED as TOLERATED_BY_NIMBLE
from tiermoe.lab.measure.prior import Prior, find_prior
from tiermoe.lab.measure.scoring import total_nll
from tiermoe.lab.measure.tasks import Perplexity, Rouge2, Task
from tiermoe.lab.papers import corm, fate, hobbit, statistics
from tiermoe.lab.papers.hobbit import MissPenalties
from tiermoe.lab.papers.statistics import frequencies, halves, routings
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.tokenizers import load_tokenizer
from tiermoe.model.prepare_store import Progress
from tiermoe.offload.policies.precision import Popularity, PrecisionContext
from tiermoe.offload.policies.prediction import count_paths, paths_to_json
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import FOLDER, Profile, profile_path, read_profile, to_json

Contents = tuple[dict[str, Any], dict[str, Any], dict[str, str]]
"""Of a profile: settings, data, and facts for people."""

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Shares of the active experts that are tried at low precision (Fate)."""

TOLERATED = 0.01
"""Loss in perplexity that Fate's share stays below (section 4.5)."""

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
    settings, data, facts = CALIBRATORS[name](calibration, progress)
    made_from = _made_from(calibration, name)
    profile = Profile(name, calibration.fingerprint, made_from, settings, {**data, "found": facts})
    write_atomically(profile_path(calibration.store, name), to_json(profile))
    return MadeProfile(name, profile, facts)


def _made_from(calibration: Calibration, name: str) -> dict[str, Any]:
    """The recording, and the options that the profile depends on."""
    return {**calibration.made_from, **{field: getattr(calibration.options, field) for field in READS.get(name, ())}}


def calibrate_hobbit(calibration: Calibration, progress: Progress) -> Contents:
    """HOBBIT: thresholds, and the weights of the cache; found on the even sequences, judged on the odd ones."""
    _refuse_encoder_decoder(calibration, "hobbit")
    found_on, judged_on = halves(calibration.trace(progress))
    t1, t2 = hobbit.thresholds_of(found_on)
    split = hobbit.Split.of(judged_on, t1, t2)
    composition = PRESETS["hobbit"].having({"t1": t1, "t2": t2})
    bits, cache = calibration.settings.bits_used, calibration.cache
    penalties = MissPenalties(found_on, composition, bits, cache)
    found = penalties.search(lambda done, total: progress("weighing the cache", done, total))
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
    prompt = min(SUMMARY_PROMPT, longest - SUMMARY)
    return Rouge2(calibration.options.pairs, load_tokenizer(calibration.directory), prompt, SUMMARY)


def calibrate_mobile(calibration: Calibration, progress: Progress) -> Contents:
    """MoBiLE: gamma, from the tolerated loss, or from the share of fallbacks where one is given."""
    _refuse_encoder_decoder(calibration, "mobile")
    ratio = calibration.options.fallback_ratio

    def on_engine(engine: Engine, _: Blueprint) -> Gamma:
        find, goal = (find_gamma, calibration.options.tolerated_loss) if ratio is None else (find_gamma_for, ratio)
        prompt, ids = calibration.shape.prompt, calibration.ids
        return find(engine, ids, prompt, goal, lambda done, total: progress("decoding at a gamma", done, total))

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
    _refuse_encoder_decoder(calibration, "fate")
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
    _refuse_encoder_decoder(calibration, "corm")
    for layer in calibration.blueprint().layers:
        neuron_layer(layer)  # refuses before anything is measured
    preset = PRESETS["corm"]
    theta = calibration.on_engine(
        {},
        lambda engine, blueprint: find_theta(
            engine, blueprint, calibration.ids, corm.INACTIVE_SHARE,
            lambda done, total: progress("measuring neurons", done, total),
        ),
        progress,
    )  # fmt: skip
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
    _refuse_encoder_decoder(calibration, "nimble")
    preset, plain = PRESETS["nimble"].settings(), PRESETS["lru"].settings()

    def on_engine(engine: Engine, _: Blueprint) -> tuple[Prior, float]:
        found = find_prior(
            engine, calibration.ids, calibration.shape.prompt,
            lambda done, total: progress("moving choices", done, total),
        )  # fmt: skip
        return found, engine.plan.slots / engine.plan.all_slots

    changes = {name: value for name, value in preset.items() if value != plain[name] and name != "profile"}
    found, fraction = calibration.on_engine(changes, on_engine, progress, logits=True)
    judged = found.judged
    data = {"tried": [asdict(each) for each in found.tried], "judged": asdict(judged), "cache_fraction": fraction}
    error = "" if judged.error is None else f" ± {judged.error:.2%}"
    facts = {
        "prior": f"{found.strength:g} with {fraction:.0%} of the experts cached",
        "loss": f"{judged.loss:+.2%}{error} on text that it was not chosen on ({TOLERATED_BY_NIMBLE:.0%} tolerated)",
        "missed experts": f"{judged.misses:.0%} of the exact preset's",
    }
    return {"prior": found.strength}, data, facts


@torch.inference_mode()
def popularity_losses(
    engine: Engine, ids: torch.Tensor, low_bits: int, progress: Progress
) -> list[tuple[float, float]]:
    """(share, loss in perplexity) of each of `SHARES` in order, up to the first that loses `TOLERATED`: each sequence
    of `ids` (n, length) in one prefill pass, against all experts at high precision. The engine must have both
    precisions, and room for one layer's K experts alone: a cached high copy would serve a demand for a low one and hide
    the loss."""
    top_k = [layer.top_k for layer in engine.store.layers]
    losses: list[tuple[float, float]] = []
    base = 0.0
    for done, share in enumerate((0.0, *SHARES), 1):
        context = PrecisionContext(engine.settings.bits_used, top_k)
        with engine.scheduler.ruled_by(Popularity(context, low_bits=low_bits, low_popularity=share)):
            nll = _mean_nll(engine, ids)
        if not share:
            base = nll
        else:
            losses.append((share, math.expm1(nll - base)))
        progress("lowering unpopular experts", done, 1 + len(SHARES))
        if losses and losses[-1][1] >= TOLERATED:
            break
    progress("lowering unpopular experts", 1 + len(SHARES), 1 + len(SHARES))
    return losses


def _mean_nll(engine: Engine, ids: torch.Tensor) -> float:
    total = 0.0
    for sequence in ids:
        logits = prompt_logits(engine, sequence.tolist())[:-1].cpu()
        total += total_nll(logits, sequence[1:])
    return total / (len(ids) * (ids.shape[1] - 1))


def _refuse_encoder_decoder(calibration: Calibration, name: str) -> None:
    family = calibration.family
    if family.encoder_decoder:
        raise ModelError(f"preset {name} is made for decoder-only models, not {family.name}; calibrate edgemoe alone")


CALIBRATORS: dict[str, Callable[[Calibration, Progress], Contents]] = {
    "hobbit": calibrate_hobbit,
    "edgemoe": calibrate_edgemoe,
    "mobile": calibrate_mobile,
    "fate": calibrate_fate,
    "corm": calibrate_corm,
    "nimble": calibrate_nimble,
}


READS: dict[str, tuple[str, ...]] = {
    "hobbit": ("cache",),
    "edgemoe": ("tolerated_loss", "metric", "pairs_xxh3", "bitwidth_quantizer"),
    "mobile": ("tolerated_loss", "fallback_ratio"),
    "corm": ("usage_share",),
}
"""Preset → fields of `CalibrationOptions` that the profile depends on."""
