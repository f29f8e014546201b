"""`tiermoe simulate`: presets, or eviction policies alone, replayed over a routing trace."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, spinner
from tiermoe.cli.terminal import Terminal
from tiermoe.config import BITS, CacheSize, format_size, parse_cache
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.offload.composition import Composition, declarations, parsed, unread
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.profiles import Profile, read_profile
from tiermoe.simulate import (
    GATHER,
    BeladyHits,
    EvictionRow,
    Machine,
    ReplaySettings,
    Result,
    all_evictions,
    compare_evictions,
    computed_times,
    expert_times,
    machine_of,
    parse_link,
    replay,
    run_bits,
    spread,
)
from tiermoe.systems import PRESETS, compose
from tiermoe.trace.file import Times, Trace, read_trace

TraceFile = Annotated[
    Path, typer.Argument(help="A routing trace: a file of `tiermoe trace`, or a route_trace CSV.", show_default=False)
]
Caches = Annotated[str, typer.Option(help="Cache sizes, like 20% or 10%,20%,3GiB.")]
Presets = Annotated[str | None, typer.Option(help="Presets to replay, like fate,lru, or all.")]
OnePreset = Annotated[
    str | None, typer.Option(help="One preset to replay; `tiermoe presets` lists them.", show_default="default")
]
Evictions = Annotated[
    str | None,
    typer.Option(help="Hit rates of eviction policies alone, like lru,arc, or all: one pool, no prefetch, no time."),
]
Link = Annotated[str | None, typer.Option(help="A bandwidth like 16GB/s, or pcie1, pcie3, pcie4, nvme, sata, sdcard.")]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="A machine of the papers, like rtx4090 or jetson-orin, or a computer.")
]
Ram = Annotated[
    str | None, typer.Option(help="Experts that main memory caches between a drive and a GPU, like 16GiB or 60%.")
]
Drive = Annotated[str | None, typer.Option(help="With --link and --ram: what main memory is filled from, as --link.")]
CpuExpert = Annotated[
    str | None, typer.Option(help="Time of a missing expert on a CPU beside the GPU, like 5ms (misses=cpu, measured).")
]
Gather = Annotated[
    str | None,
    typer.Option(help="Rate at which single neurons are gathered in memory, like 80GB/s. Default: 3 times the link's."),
]
Lanes = Annotated[int, typer.Option(help="Transfers that share the link at once.", min=1, max=64)]
Compute = Annotated[
    str | None, typer.Option(help="Compute time of a decoded token, like 20ms. Default: as the trace measured.")
]
PrefillCompute = Annotated[
    str | None, typer.Option(help="Compute time of a prompt token, like 5ms. Default: --compute.")
]
ExpertBits = Annotated[
    int | None,
    typer.Option(help="Precision of the experts. Default: the preset's, else that of the traced run."),
]
Profiles = Annotated[
    Path | None, typer.Option(help="Folder of calibration profiles (NAME.json) for the presets that need one.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of random choices.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a list of JSON objects instead of the table.")]

_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s)\s*")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Refused:
    """A preset that cannot be replayed on this trace with these options, and the reason."""

    preset: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return {"preset": self.preset, "refused": self.reason}


def simulate(
    trace: TraceFile,
    preset: OnePreset = None,
    presets: Presets = None,
    evictions: Evictions = None,
    cache: Caches = "20%",
    link: Link = None,
    machine: MachineName = None,
    ram: Ram = None,
    drive: Drive = None,
    lanes: Lanes = 1,
    set_: opt.Set = None,
    compute: Compute = None,
    prefill_compute: PrefillCompute = None,
    cpu_expert: CpuExpert = None,
    gather: Gather = None,
    bits: ExpertBits = None,
    profiles: Profiles = None,
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """Replay a routing trace without weights: speed of presets on a given link, or hit rates of eviction policies."""
    if sum(given is not None for given in (preset, presets, evictions)) > 1:
        raise ConfigError("--preset, --presets and --evictions exclude each other; give one of them")
    caches = [parse_cache(text) for text in cache.split(",")]
    changes = opt.changes(set_) or {}
    if evictions is not None:
        timed = {"link": link, "machine": machine, "ram": ram, "drive": drive, "compute": compute, "gather": gather}
        timed |= {"prefill-compute": prefill_compute, "cpu-expert": cpu_expert}
        given = {"bits": bits, "profiles": profiles, "lanes": None if lanes == 1 else lanes}
        _refuse_without_effect(timed | given, changes)
        with spinner("replaying"):
            rows = _evictions(read_trace(trace), evictions, caches, changes, seed)
        _print_json(rows) if as_json else _print_evictions(rows)
        return
    place = machine_of(machine, link, drive)
    if compute is not None:
        place = replace(place, processor=None)
    if cpu_expert is not None:
        place = replace(place, cpu=None)
    if drive is not None and ram is None:
        raise ConfigError(f"--drive {drive} fills main memory, and --ram does not say how much of it; give --ram 16GiB")
    if bits is not None and bits not in BITS:
        raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    names = _names(presets, list(PRESETS), "preset") if presets else [preset or "default"]
    if len(names) == 1:
        _refuse_unread_by(compose(names[0], changes), gather, cpu_expert)
    with spinner("replaying"):
        recorded = read_trace(trace)
        times = _times(recorded, compute, prefill_compute)
        if times is None and place.processor is not None:
            times = computed_times(recorded.header, place.processor)
        hop, behind = place.hops(ram is not None)
        settings = ReplaySettings(
            caches[0], hop.bandwidth, hop.latency, lanes, bits, times, seed=seed, copies=hop.copies,
            ram=parse_cache(ram) if ram else None, drive=behind, cpu=_cpu(recorded, place, cpu_expert),
            gather=1 / parse_link(gather, "gather").bandwidth if gather else GATHER / hop.bandwidth,
        )  # fmt: skip
        replays = _Replays(recorded, BeladyHits(recorded), settings, profiles, changes)
        results = [replays.result(name, size, keep_going=len(names) > 1) for size in caches for name in names]
    described = place.described(ram is not None)
    if as_json:
        print(json.dumps([described | result.as_dict() for result in results]))
    else:
        computed = "as given" if compute else "as of its processor" if times else "as the trace measured"
        _print_results(results, described, computed)


@dataclass(frozen=True, slots=True)
class _Replays:
    """Replays of presets over one trace on one machine."""

    trace: Trace
    belady: BeladyHits  # of the trace
    settings: ReplaySettings  # but the cache and the profile
    profiles: Path | None  # folder of calibration profiles
    changes: dict[str, str]  # part or setting of a preset → its value

    def result(self, name: str, cache: CacheSize, keep_going: bool) -> Result | Refused:
        """The replay of the preset `name`. A preset that cannot be replayed is `Refused` with keep_going, else its
        error is raised."""
        try:
            composition = compose(name, self.changes)
            profile = self._profile(composition)
            settings = replace(self.settings, cache=cache, profile=profile)
            return replay(self.trace, composition, settings, self.belady)
        except TiermoeError as error:
            if not keep_going:
                raise
            return Refused(name, str(error))

    def _profile(self, composition: Composition) -> Profile | None:
        if self.profiles is None or not composition.needs_profile:
            return None
        header = self.trace.header
        command = f"tiermoe calibrate {header.model} --text FILE --for {composition.profile}"
        return read_profile(self.profiles / f"{composition.profile}.json", header.fingerprint or None, command)


def _evictions(
    trace: Trace, evictions: str, caches: list[CacheSize], changes: dict[str, str], seed: int
) -> list[EvictionRow]:
    """Hit rates of the policies named in --evictions, a row for each policy and cache size."""
    settings = parsed(changes)
    names = _names(evictions, list(EVICTIONS), "eviction policy")
    names = all_evictions() if evictions == "all" else names
    _refuse_unread(settings, names)
    per_sequence = settings.pop("records", "model") == "sequence"
    return compare_evictions(trace, names, caches, settings, per_sequence, seed)


def _refuse_unread(settings: dict[str, Any], names: list[str]) -> None:
    """ConfigError for a setting that none of the eviction policies `names` reads."""
    known = declarations()
    for setting, value in settings.items():
        if known[setting].setting.off and value == known[setting].default:
            continue
        readers = [name for name in EVICTIONS if unread(setting, Composition(name, "", cache=name)) is None]
        if not set(readers) & set(names):
            raise ConfigError(
                f"{setting} does nothing with --evictions {','.join(names)}; it is read by {' and '.join(readers)}"
            )


def _refuse_without_effect(options: dict[str, Any], changes: dict[str, str]) -> None:
    """ConfigError for an option or setting that has no effect beside --evictions."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} has no effect on --evictions, which knows no time; leave it out")
    read = [*(name for name, declaration in declarations().items() if declaration.part == "cache"), "records"]
    for name in changes:
        if name not in read:
            raise ConfigError(f"--set {name} has no effect on --evictions; it takes {' and '.join(read)}")


def _names(text: str, known: list[str], what: str) -> list[str]:
    """Names separated by commas, or all that are known. ConfigError for an unknown one."""
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {what} '{name}'; known: {', '.join(known)}, or all")
    return names


def _times(trace: Trace, compute: str | None, prefill: str | None) -> Times | None:
    """Compute times of --compute and --prefill-compute; None: as the trace measured."""
    if compute is None:
        if prefill is not None:
            raise ConfigError("--prefill-compute needs --compute beside it; give both")
        return None
    return spread(trace.header, _seconds(compute), _seconds(prefill or compute))


def _cpu(trace: Trace, machine: Machine, expert: str | None) -> dict[int, float]:
    """Bits → seconds of an expert on the processor beside the one that computes layers: of --cpu-expert, else the
    machine's; empty where there is none."""
    if expert is not None:
        return {run_bits(trace.header): _seconds(expert)}
    return expert_times(trace.header, machine.cpu.rate) if machine.cpu is not None else {}


def _refuse_unread_by(composition: Composition, gather: str | None, cpu_expert: str | None) -> None:
    """ConfigError for an option that a preset does not read."""
    if gather is not None and composition.unit != "neuron":
        raise ConfigError(f"preset {composition.name} gathers no neurons; leave --gather out, or use --set unit=neuron")
    if cpu_expert is not None and composition.misses == "load":
        raise ConfigError(f"preset {composition.name} computes no misses; leave --cpu-expert out, or --set misses=cpu")


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is not a time; write it like 20ms, 800us or 0.5s")
    return float(match[1]) * _UNITS[match[2]]


def _print_json(rows: list[Any]) -> None:
    print(json.dumps([row.as_dict() for row in rows]))


def _print_evictions(rows: list[EvictionRow]) -> None:
    note("hit rate by cache size, one pool for all layers, no prefetch, decode after the prompt where there is one")
    fractions = list(dict.fromkeys(row.cache_fraction for row in rows))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("eviction")
    for fraction in fractions:
        table.add_column(f"{fraction:.1%}", justify="right")
    for name in dict.fromkeys(row.eviction for row in rows):
        table.add_row(name, *(f"{row.hit_rate:.3f}" for row in rows if row.eviction == name))
    if "belady" not in {row.eviction for row in rows}:
        best = {row.cache_fraction: row.belady_hit_rate for row in rows}
        table.add_row("belady", *(f"{best[fraction]:.3f}" for fraction in fractions))
    Terminal().print(table)


def _print_results(results: list[Result | Refused], described: dict[str, str], times: str) -> None:
    note("; ".join(f"{part}: {told}" for part, told in described.items()) + f"; computing times: {times}")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # as wide as 80 columns allow
    table.add_column("preset", no_wrap=True)
    for title in ("cache", "hits", "Belady", "tok/s", "bound", "of it", "prefill", "a token", "waited"):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        if isinstance(result, Result):
            table.add_row(*_cells(result))
    if table.row_count:
        Terminal().print(table)
    for refused in dict.fromkeys(result for result in results if isinstance(result, Refused)):
        note(f"left out {refused.preset}: {refused.reason}")


def _cells(result: Result) -> list[str]:
    return [
        result.preset,
        f"{result.cache_fraction:.1%}",
        f"{result.hit_rate:.1%}",
        f"{result.belady_hit_rate:.1%}",
        _number(result.decode_tok_s),
        _number(result.bound_tok_s),
        "" if result.bound_fraction is None else f"{result.bound_fraction:.0%}",
        _number(result.prefill_tok_s),
        "" if result.bytes_per_token is None else format_size(result.bytes_per_token),
        f"{result.wait_s:.1f} s",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
