"""Where `tiermoe simulate` replays a row: the machine, the cache and the profile, as given or as swept."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.config import parse_cache
from tiermoe.errors import ConfigError
from tiermoe.lab.cli.traced import DRAWN, FROM_TRACE, TraceToReplay, refuse_undrawn, refuse_unread
from tiermoe.lab.measure.compare import Variant
from tiermoe.lab.simulate import (
    Machine,
    ReplaySettings,
    machine_of,
    replay,
    run_bits,
    settings_on,
    traced_machine,
)
from tiermoe.lab.simulate.profiles import borrowed, profile_of
from tiermoe.lab.simulate.synthetic import Synthetic
from tiermoe.lab.trace import Header
from tiermoe.offload.composition import Composition
from tiermoe.offload.presets import calibrated, compose

CACHE = "20%"
"""Size of the cache where none is given."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how rows are replayed: what was given beside what they name themselves."""

    options: Mapping[str, Any]  # values of the options of `simulate.SWEPT` that were given
    drive: str | None  # behind main memory, as --drive
    prefill_s: float | None  # compute time of a prompt token; None: as that of a decoded one
    cpu_expert_s: float | None  # time of an expert on a CPU beside the GPU; None: the machine's
    gather: float | None  # bytes a second at which neurons are gathered; None: `GATHER` times the link's
    lanes: int | None  # transfers at once; None: the machine's
    bits: int | None  # precision of the experts; None: the preset's
    profiles: Path | None  # folder of calibration profiles, or `FROM_TRACE`
    neurons: int | None  # of an expert, whose activity is drawn; None: the trace's
    seed: int

    def check(self, rows: Sequence[Variant]) -> None:
        """ConfigError for a place that is none, and for an option that no row reads."""
        values = {**self.options, **rows[0].options}
        if values.keys() & {"link", "machine"}:
            self.machine(values)
        if self.drive is not None and "ram" not in values:
            raise ConfigError(
                f"--drive {self.drive} fills main memory, and --ram does not say how much of it; give --ram 16GiB"
            )
        if self.prefill_s is not None and "compute" not in values:
            raise ConfigError("--prefill-compute needs --compute beside it; give both")
        compositions = []
        for row in rows:
            with contextlib.suppress(ConfigError):  # the row is listed with its reason
                compositions.append(compose(row.preset, row.set))
        refuse_unread(self.synthetic(values), compositions)
        if len({row.preset for row in rows}) == 1:
            composition = compose(rows[-1].preset, rows[-1].set)
            _refuse_unread_by(composition, self.gather is not None, self.cpu_expert_s is not None)

    def machine(self, values: Mapping[str, Any], header: Header | None = None) -> Machine:
        """The machine of a row. values: of the options of `simulate.SWEPT`, the row's own first. header: of the trace,
        whose own machine is taken if none is named."""
        if header is not None and header.costs is not None and not values.keys() & {"link", "machine"}:
            found = traced_machine(header.costs)
        else:
            found = machine_of(values.get("machine"), values.get("link"), self.drive)
        found = replace(found, processor=None) if "compute" in values else found
        return found if self.cpu_expert_s is None else replace(found, cpu=None)

    def settings(self, values: Mapping[str, Any], header: Header) -> ReplaySettings:
        """The settings of a row but its profile."""
        seconds = (values["compute"], self.prefill_s or values["compute"]) if "compute" in values else None
        cache = values.get("cache") or parse_cache(CACHE)
        found = settings_on(self.machine(values, header), header, cache, seconds, values.get("ram"))
        found = replace(found, lanes=self.lanes or found.lanes, bits=self.bits, seed=self.seed)
        if self.cpu_expert_s is not None:
            found = replace(found, cpu={run_bits(header): self.cpu_expert_s})
        return found if self.gather is None else replace(found, gather=1 / self.gather)

    def replay(self, row: Variant, recorded: TraceToReplay) -> dict[str, Any]:
        """The replay of a row. TiermoeError, with the reason, where it cannot be replayed."""
        composition, values = compose(row.preset, row.set), {**self.options, **row.options}
        synthetic = self.synthetic(values)
        refuse_undrawn(synthetic, row.set)
        trace, counted = recorded.drawn(synthetic, composition)
        header, origin = trace.header, ""
        settings = self.settings(values, header)
        if counted is not None and composition.needs_profile:
            profile, origin = recorded.profile(composition.profile, counted, settings, synthetic.recall)
            settings = replace(settings, profile=profile)
        elif (folder := self.profiles) is not None and folder != FROM_TRACE and (name := composition.profile):
            needed, path = composition.needs_profile, folder / f"{name}.json"
            composition, found = calibrated(composition, row.set, path, lambda: profile_of(folder, name, header))
            origin = "" if found is None else borrowed(found, header)
            settings = replace(settings, profile=found if needed else None)
        result = replay(trace, composition, settings, recorded.belady).as_dict()
        described = self.machine(values, header).described("ram" in values) | recorded.described(synthetic, composition)
        described |= {"profile": origin} if origin else {}
        return {**described, **result, "set": dict(row.set), "lossy": composition.lossy}

    def synthetic(self, values: Mapping[str, Any]) -> Synthetic:
        """What is drawn for a row. values: of the options of `simulate.SWEPT`."""
        return Synthetic(values.get("recall"), values.get("fallback"), self.neurons, self.seed)

    def described(self, results: Sequence[dict[str, Any]]) -> str:
        """What the rows were replayed on, for people."""
        swept = results[0].get("sweep")
        times = "as given" if "compute" in self.options else "as swept" if swept == "compute" else ""
        if swept in ("link", "machine"):
            return f"{swept}: as swept; computing times: {times or 'as the trace measured, or as of the processor'}"
        row = results[0]
        times = times or ("as of its processor" if "processor" in row else "as the trace measured")
        named = [f"{part}: {row[part]}" for part in ("machine", "link", "drive", "processor", "cpu") if part in row]
        return "; ".join(named) + f"; computing times: {times}"

    @staticmethod
    def assumed(results: Sequence[dict[str, Any]]) -> list[str]:
        """What rows replay that the trace does not hold: what is drawn, and profiles that are not its model's own."""
        lines = [f"{part.replace('_', ' ')}: {result[part]}" for part in DRAWN for result in results if part in result]
        profiles: dict[str, list[str]] = {}
        for result in results:
            if origin := result.get("profile"):
                profiles.setdefault(origin, []).append(result["preset"])
        lines += [f"profiles of {', '.join(dict.fromkeys(presets))}: {told}" for told, presets in profiles.items()]
        return list(dict.fromkeys(lines))


def _refuse_unread_by(composition: Composition, gather: bool, cpu_expert: bool) -> None:
    """ConfigError for an option that a preset does not read."""
    if gather and composition.unit != "neuron":
        raise ConfigError(f"preset {composition.name} gathers no neurons; leave --gather out, or use --set unit=neuron")
    if cpu_expert and composition.misses == "load":
        raise ConfigError(f"preset {composition.name} computes no misses; leave --cpu-expert out, or --set misses=cpu")
