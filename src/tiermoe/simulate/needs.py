"""What a composition needs of a trace, and the refusal where it is not there."""

from __future__ import annotations

from collections.abc import Iterator

from tiermoe.decide.compose import tables
from tiermoe.decide.composition import Composition
from tiermoe.decide.profiles import Profile
from tiermoe.decide.routing import require_little
from tiermoe.errors import ConfigError, ProfileError, TraceError
from tiermoe.trace.schema import Header

_TABLES = {"bits": "table of bits per expert", "paths": "activation paths", "frequencies": "frequencies of experts"}
_LITTLE = (("routing", "confident"), ("prefetch", "recalled"), ("prefetch", "recalled+next-gate"))


def require(composition: Composition, header: Header) -> None:
    """TraceError that names the preset and what the trace lacks; ConfigError for a part that no replay has."""
    if composition.misses != "load":
        raise ConfigError(f"preset {composition.name}: a replay has one processor; use --set misses=load")
    if composition.routing == "cached":
        raise TraceError(
            f"preset {composition.name} chooses by the scores of all experts, and a trace holds those of the chosen "
            f"ones; use --set routing=all, or measure it with tiermoe eval"
        )
    if composition.prefetch in ("hash", "hash+path"):
        raise TraceError(f"preset {composition.name} needs hash tables, which no trace holds; use --set prefetch=none")
    if composition.routing in ("half", "confident"):
        require_little(composition.routing, composition.little, header.top_k)
    recorded = header.made_from.get("little")
    if composition.routing == "confident" and composition.little != recorded and "little" in header.holds:
        raise TraceError(
            f"preset {composition.name} has a little pass of {composition.little or 'K/2'} experts, and the trace of "
            f"{header.model} tells how sure one of {recorded or 'K/2'} was; make the trace again with tiermoe trace "
            f"--little-k"
        )
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
    lacking = list(open_)
    for part in ("precision", "prefetch"):
        table = composition.policy(part).reads_table
        if table and not getattr(found, table):
            lacking.append(f"{_TABLES[table]} ({part}={getattr(composition, part)})")
    if lacking:
        made_for = composition.profile or "hobbit,edgemoe,fate,corm"
        given = f", or the values with --set {open_[0]}=…" if open_ else ""
        raise ProfileError(
            f"preset {composition.name} has no {' and no '.join(lacking)}; make them with tiermoe calibrate {model} "
            f"--text FILE --for {made_for} and give the folder of the profiles with --profiles{given}"
        )


def _lacking(composition: Composition, header: Header) -> Iterator[str]:
    holds = header.holds
    gates = composition.policy("prefetch").asks_routers and composition.prefetch != "recalled"
    if gates and "forecasts" not in holds:
        yield f"forecasts (prefetch={composition.prefetch})"
    elif gates and (beyond := set(range(1, composition["ahead"] + 1)) - set(header.forecast_distances)):
        yield f"forecasts {max(beyond)} layers ahead (prefetch={composition.prefetch}, ahead={composition['ahead']})"
    if composition.prefetch == "percentile" and composition["popularity"] == "counts" and "counts" not in holds:
        yield "predicted counts of tokens (popularity=counts)"
    if composition.policy("precision").reads_weights and "weights" not in holds:
        yield f"gate weights (precision={composition.precision})"
    if composition.routing == "half" and "weights" not in holds:
        yield "gate weights (routing=half)"
    little = [f"{part}={value}" for part, value in _LITTLE if getattr(composition, part) == value]
    if little and "little" not in holds:
        yield f"little passes ({', '.join(little)})"
    if composition.unit == "neuron" and not ("neurons" in holds and header.neuron_bytes and header.neurons):
        yield "active neurons (unit=neuron)"
