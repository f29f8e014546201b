"""What a composition needs of a trace, and the refusal where it is not there."""

from __future__ import annotations

from collections.abc import Iterator

from tiermoe.errors import ConfigError, TraceError
from tiermoe.presets import Composition
from tiermoe.trace import Header

_GATES = ("next-gate", "stacked-gates", "percentile", "neurons")
_LITTLE = (("routing", "confident"), ("prefetch", "recalled"))


def require(composition: Composition, header: Header) -> None:
    """TraceError that names the preset and what the trace lacks; ConfigError for a part that no replay has."""
    if composition.misses == "cpu":
        raise ConfigError(f"preset {composition.name}: a replay has one processor; use --set misses=load")
    if composition.prefetch == "hash":
        raise TraceError(f"preset {composition.name} needs hash tables, which no trace holds; use --set prefetch=none")
    lacking = list(_lacking(composition, header))
    if lacking:
        raise TraceError(
            f"preset {composition.name} cannot be replayed: the trace of {header.model} holds no "
            f"{' and no '.join(lacking)}; make one that does with tiermoe trace, or switch the part off with --set"
        )


def _lacking(composition: Composition, header: Header) -> Iterator[str]:
    holds = header.holds
    gates = composition.prefetch in _GATES
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
