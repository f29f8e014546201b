"""Runs: what the measures of figures are taken from, each replay and each evaluation once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiermoe.config import CacheSize, parse_cache
from tiermoe.errors import ConfigError
from tiermoe.lab.simulate import BeladyHits, ReplaySettings, Result, machine_of, replay, run_bits, settings_on
from tiermoe.lab.simulate.costs import slot_sizes
from tiermoe.lab.systems.fate import windows
from tiermoe.lab.trace.file import Trace
from tiermoe.metrics import Metrics
from tiermoe.offload.composition import Composition
from tiermoe.offload.presets import compose
from tiermoe.offload.profiles import Profile, profile_of


@dataclass(frozen=True, slots=True)
class Side:
    """One composition in one precision."""

    preset: str
    changes: Mapping[str, str] = field(default_factory=dict)  # part or setting → value, as `--set` takes them
    bits: int = 4
    share: str | None = None  # of the experts that are cached; None: the place's
    share_of: int | None = None  # bits of the experts that the share is of, where two sides have the same bytes

    def but(self, **changes: object) -> Side:
        """The same with other settings, and with another precision or share where these are named."""
        own: dict[str, Any] = {name: changes.pop(name) for name in ("bits", "share", "share_of") if name in changes}
        return replace(self, changes={**self.changes, **{name: str(value) for name, value in changes.items()}}, **own)


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides are replayed."""

    machine: str  # as `tiermoe simulate --machine` takes it
    share: str = "45%"  # of the experts that are cached
    seconds: tuple[float, float] | None = None  # of computing: a decoded token, a prompt's token; None: the machine's


@dataclass
class Runs:
    """Replays over one trace and evaluations of one model. recorded: the trace; None where none was given. profiles: a
    folder of calibrations (NAME.json), also those of a model that the traced one was widened from. evaluate: the object
    that `tiermoe eval --json` prints for a side; None where no model was given."""

    recorded: Trace | None
    profiles: Path | None = None
    evaluate: Callable[[Side], dict[str, Any]] | None = None
    _replays: dict[str, Result] = field(default_factory=dict)
    _evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """ConfigError where none was given."""
        if self.recorded is None:
            raise ConfigError("needs a trace; give --trace FILE, which tiermoe trace makes")
        return self.recorded

    def evaluated(self, side: Side) -> dict[str, Any]:
        """A side's evaluation. ConfigError where no model was given."""
        if self.evaluate is None:
            raise ConfigError("needs an evaluation; give --model MODEL and --text FILE")
        if (name := repr(side)) not in self._evaluations:
            self._evaluations[name] = self.evaluate(side)
        return self._evaluations[name]

    def replayed(self, side: Side, place: Place) -> Result:
        """A side's replay at a place. TiermoeError where the trace, or a calibration, lacks what it takes."""
        if (name := repr((side, place))) not in self._replays:
            self._replays[name] = self._replay(side, place)
        return self._replays[name]

    def _replay(self, side: Side, place: Place) -> Result:
        trace, composition = self.trace, compose(side.preset, dict(side.changes))
        machine = machine_of(place.machine, None, None)
        settings = settings_on(machine, trace.header, self._cache(side, place), place.seconds)
        if composition.prefetch == "percentile" and "window" not in side.changes:
            composition = _with_windows(composition, trace, settings)
        settings = replace(settings, bits=composition.bits or side.bits, profile=self.profile(composition))
        return replay(trace, composition, settings, _NoBelady(trace))

    def profile(self, composition: Composition) -> Profile | None:
        """The calibration of a composition; None where it needs none, or no folder was given."""
        if self.profiles is None or not composition.needs_profile:
            return None
        return profile_of(self.profiles, composition.profile, self.trace.header.model, None)

    def _cache(self, side: Side, place: Place) -> CacheSize:
        cache, header = parse_cache(side.share or place.share), self.trace.header
        if side.share_of is None or cache.fraction is None:
            return cache
        unit = slot_sizes(header, [side.share_of])[side.share_of]
        return CacheSize(nbytes=int(cache.fraction * sum(header.experts)) * unit)


def _with_windows(composition: Composition, trace: Trace, settings: ReplaySettings) -> Composition:
    """Fate's composition with the windows that its calibration would find on the machine that is replayed."""
    timed = Trace(replace(trace.header, times=settings.times or trace.header.times), [])
    return composition.having({"window": tuple(windows(timed, run_bits(trace.header), settings.bandwidth))})


class _NoBelady(BeladyHits):
    """Nobody looks at Belady's hits here, which take their time."""

    def of(self, slots: int, bits: int) -> Metrics:
        return Metrics()
