"""What a composition needs of a trace, and the refusal where it is not there."""

from __future__ import annotations

from collections.abc import Iterator

from tiermoe.compose import tables
from tiermoe.errors import ConfigError, ProfileError, TraceError
from tiermoe.policy.prediction import asks_routers
from tiermoe.presets import Composition
from tiermoe.profiles import Profile
from tiermoe.trace import Header

_LITTLE = (("routing", "confident"), ("prefetch", "recalled"))


def require(composition: Composition, header: Header) -> None:
    """TraceError that names the preset and what the trace lacks; ConfigError for a part that no replay has."""
    if composition.misses != "load":
        raise ConfigError(f"preset {composition.name}: a replay has one processor; use --set misses=load")
    if composition.prefetch == "hash":
        raise TraceError(f"preset {composition.name} needs hash tables, which no trace holds; use --set prefetch=none")
    lacking = list(_lacking(composition, header))
    if lacking:
        raise TraceError(
            f"preset {composition.name} cannot be replayed: the trace of {header.model} holds no "
            f"{' and no '.join(lacking)}; make one that does with tiermoe trace, or switch the part off with --set"
        )


def require_calibration(composition: Composition, profile: Profile | None, model: str) -> None:
    """ProfileError that names the preset and what a calibration has not given it. `composition` is filled from it."""
    found = tables(profile)
    open_ = composition.missing()
    needs = {
        "table of bits per expert (precision=table)": composition.precision == "table" and not found.bits,
        "activation paths (prefetch=path)": composition.prefetch == "path" and not found.paths,
        "frequencies of experts (prefetch=frequent)": composition.prefetch == "frequent" and not found.frequencies,
    }
    lacking = [*open_, *(name for name, needed in needs.items() if needed)]
    if lacking:
        made_for = composition.profile or "hobbit,edgemoe,fate,corm"
        given = f", or the values with --set {open_[0]}=…" if open_ else ""
        raise ProfileError(
            f"preset {composition.name} has no {' and no '.join(lacking)}; make them with tiermoe calibrate {model} "
            f"--text FILE --for {made_for} and give the folder of the profiles with --profiles{given}"
        )


def _lacking(composition: Composition, header: Header) -> Iterator[str]:
    holds = header.holds
    gates = asks_routers(composition.prefetch) and composition.prefetch != "recalled"
    if gates and "forecasts" not in holds:
        yield f"forecasts (prefetch={composition.prefetch})"
    elif gates and (beyond := set(range(1, composition.ahead + 1)) - set(header.forecast_distances)):
        yield f"forecasts {max(beyond)} layers ahead (prefetch={composition.prefetch}, ahead={composition.ahead})"
    if composition.precision == "gate-score" and "weights" not in holds:
        yield "gate weights (precision=gate-score)"
    if composition.routing == "half" and "weights" not in holds:
        yield "gate weights (routing=half)"
    little = [f"{part}={value}" for part, value in _LITTLE if getattr(composition, part) == value]
    if little and "little" not in holds:
        yield f"little passes ({', '.join(little)})"
    if composition.unit == "neuron" and not ("neurons" in holds and header.neuron_bytes and header.neurons):
        yield "active neurons (unit=neuron)"
