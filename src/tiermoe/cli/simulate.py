"""`tiermoe simulate`: presets, or eviction policies alone, replayed over a routing trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, spinner
from tiermoe.cli.terminal import Terminal
from tiermoe.cli.variants import (
    Column,
    Ladder,
    Picture,
    Sweep,
    check_picture,
    failures,
    naming_columns,
    ratio_columns,
    variants,
    write_picture,
)
from tiermoe.config import BITS, CacheSize, format_size, parse_cache
from tiermoe.errors import ConfigError
from tiermoe.measure.compare import Measured, Variant, measure_all, ratios
from tiermoe.offload.composition import Composition, declarations, parsed, unread
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.profiles import Profile, read_profile
from tiermoe.simulate import (
    LINKS,
    BeladyHits,
    EvictionRow,
    NamedLink,
    ReplaySettings,
    all_evictions,
    compare_evictions,
    parse_link,
    replay,
    spread,
)
from tiermoe.systems import compose
from tiermoe.trace.file import Trace, read_trace

_WIDE = 120  # columns of a table that goes to a file or a pipe
CACHE = "20%"
"""Size of the cache where none is given."""

TraceFile = Annotated[
    Path, typer.Argument(help="A routing trace: a file of `tiermoe trace`, or a route_trace CSV.", show_default=False)
]
Caches = Annotated[str | None, typer.Option(help="Cache sizes, like 20% or 10%,20%,3GiB.", show_default=CACHE)]
Presets = Annotated[str | None, typer.Option(help="Presets to replay, like fate,lru, or all.")]
OnePreset = Annotated[
    str | None, typer.Option(help="One preset to replay; `tiermoe presets` lists them.", show_default="default")
]
Evictions = Annotated[
    str | None,
    typer.Option(help="Hit rates of eviction policies alone, like lru,arc, or all: one pool, no prefetch, no time."),
]
Link = Annotated[str | None, typer.Option(help="A bandwidth like 16GB/s, or pcie1, pcie3, pcie4, nvme, sata, sdcard.")]
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


def simulate(
    trace: TraceFile,
    preset: OnePreset = None,
    presets: Presets = None,
    evictions: Evictions = None,
    cache: Caches = None,
    link: Link = None,
    lanes: Lanes = 1,
    set_: opt.Set = None,
    sweep: Sweep = None,
    ladder: Ladder = False,
    compute: Compute = None,
    prefill_compute: PrefillCompute = None,
    bits: ExpertBits = None,
    profiles: Profiles = None,
    seed: SeedOption = 0,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Replay a routing trace without weights: speed of presets on a given link, or hit rates of eviction policies.

    --sweep takes cache, link and compute beside the settings of --set."""
    if sum(given is not None for given in (preset, presets, evictions)) > 1:
        raise ConfigError("--preset, --presets and --evictions exclude each other; give one of them")
    changes = opt.changes(set_) or {}
    if evictions is not None:
        timed = {"link": link, "compute": compute, "prefill-compute": prefill_compute, "bits": bits}
        rows = {"sweep": sweep or None, "ladder": ladder or None, "picture": picture}
        others = {"profiles": profiles, "lanes": None if lanes == 1 else lanes}
        _refuse_without_effect({**timed, **rows, **others}, changes)
        caches = [parse_cache(text) for text in (cache or CACHE).split(",")]
        with spinner("replaying"):
            found = _evictions(read_trace(trace), evictions, caches, changes, seed)
        print(json.dumps([row.as_dict() for row in found])) if as_json else _print_evictions(found)
        return
    if cache is not None and "," in cache:
        if sweep or ladder:
            raise ConfigError(f"--{'ladder' if ladder else 'sweep'} takes one size of the cache; give one to --cache")
        sweep, cache = [f"cache={cache}"], None
    given = {"cache": cache, "link": link, "compute": compute}
    chosen = variants(presets or preset or "default", changes, sweep, ladder, {**given, "bits": bits}, SWEPT)
    if link is None and "link" not in chosen[0].options:
        raise ConfigError(f"how fast is the link? give --link 16GB/s, or a name: {', '.join(LINKS)}")
    if bits is not None and bits not in BITS:
        raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if prefill_compute is not None and compute is None and "compute" not in chosen[0].options:
        raise ConfigError("--prefill-compute needs --compute beside it; give both")
    if picture is not None:
        check_picture(picture)
    options = {name: SWEPT[name](text) for name, text in given.items() if text is not None}
    prefill_s = None if prefill_compute is None else _seconds(prefill_compute)
    with spinner("replaying"):
        recorded = read_trace(trace)
        replays = _Replays(recorded, BeladyHits(recorded), options, prefill_s, lanes, bits, profiles, seed)
        measured = measure_all(chosen, 1, replays.replay, lambda done, total: None)
    failed = failures(measured, "replayed")
    results = [_result(row, measured) for row in measured]
    whole = [result for result in results if "refused" not in result]
    if as_json:
        print(json.dumps(results))
    else:
        _print_results(whole, failed, options)
    if picture is not None:
        write_picture(picture, whole)


def _result(row: Measured, rows: Sequence[Measured]) -> dict[str, Any]:
    """What `--json` prints of a row."""
    if row.error is not None:
        return {"preset": row.variant.preset, **row.variant.point, "refused": row.error}
    return {**row.rounds[0], **row.variant.point, **ratios(row, rows)}


@dataclass(frozen=True, slots=True)
class _Replays:
    """Replays over one trace."""

    trace: Trace
    belady: BeladyHits  # of the trace
    options: Mapping[str, Any]  # values of the options in `SWEPT` that were given
    prefill_s: float | None  # compute time of a prompt token; None: as that of a decoded one
    lanes: int  # transfers at once
    bits: int | None  # precision of the experts; None: the preset's
    profiles: Path | None  # folder of calibration profiles
    seed: int

    def replay(self, row: Variant) -> dict[str, Any]:
        """The replay of a row. TiermoeError, with the reason, where it cannot be replayed."""
        composition = compose(row.preset, row.set)
        options = {**self.options, **row.options}
        machine: NamedLink = options["link"]
        times = None  # as the trace measured
        if "compute" in options:
            times = spread(self.trace.header, options["compute"], self.prefill_s or options["compute"])
        settings = ReplaySettings(
            options.get("cache") or parse_cache(CACHE), machine.bandwidth, machine.latency, self.lanes, self.bits,
            times, self._profile(composition), seed=self.seed, copies=machine.copies,
        )  # fmt: skip
        result = replay(self.trace, composition, settings, self.belady).as_dict()
        return {**result, "set": dict(row.set), "lossy": composition.lossy}

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
    names = all_evictions() if evictions == "all" else [name.strip() for name in evictions.split(",")]
    for name in names:
        if name not in EVICTIONS:
            raise ConfigError(f"unknown eviction policy '{name}'; known: {', '.join(EVICTIONS)}, or all")
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
            raise ConfigError(
                f"--{name} has no effect on --evictions, which counts hits at the sizes of --cache; leave it out"
            )
    read = [*(name for name, declaration in declarations().items() if declaration.part == "cache"), "records"]
    for name in changes:
        if name not in read:
            raise ConfigError(f"--set {name} has no effect on --evictions; it takes {' and '.join(read)}")


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text)
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is not a time; write it like 20ms, 800us or 0.5s")
    return float(match[1]) * _UNITS[match[2]]


def _prompt(text: str) -> None:
    raise ConfigError(
        "a trace has the prompts that it was recorded with; make one of each length: tiermoe trace --prompt"
    )


SWEPT: dict[str, Callable[[str], Any]] = {
    "cache": parse_cache,
    "link": parse_link,
    "compute": _seconds,
    "prompt": _prompt,
}
"""Option → what makes a value of its text."""


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


def _print_results(results: list[dict[str, Any]], failed: list[str], options: Mapping[str, Any]) -> None:
    machine: NamedLink | None = options.get("link")
    named = f"{machine.name}, {machine.bandwidth / 1e9:g} GB/s ({machine.source})" if machine else "as swept"
    swept = results[0].get("sweep") == "compute"
    times = "as given" if "compute" in options else "as swept" if swept else "as the trace measured"
    note(f"link: {named}; computing times: {times}")
    columns = _columns(results)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # as wide as 80 columns allow
    for index, (title, _) in enumerate(columns):
        table.add_column(title.replace("\n", ""), justify="right" if index else "left", no_wrap=True)
    for result in results:
        table.add_row(*(show(result) for _, show in columns))
    Terminal(piped=_WIDE).print(table)
    if any(result["lossy"] for result in results):
        note("* lossy: may change what the model says")
    for line in failed:
        note(f"left out {line}")


def _columns(results: list[dict[str, Any]]) -> list[Column]:
    """Those that 80 columns have room for beside what names the rows."""
    ladder, alone = "part" in results[0], not results[0].keys() & {"part", "sweep"}
    size: Column = ("cached", _cell("cache_fraction", ".1%"))
    bounds: list[Column] = [("bound", _cell("bound_tok_s", ".2f")), ("of it", _cell("bound_fraction", ".0%"))]
    return [
        *naming_columns(results),
        *([] if ladder else [size]),
        ("hits", _cell("hit_rate", ".1%")),
        *([] if ladder else [("Belady", _cell("belady_hit_rate", ".1%"))]),
        ("tok/s", _cell("decode_tok_s", ".2f")),
        *(ratio_columns(results) if ladder else bounds if alone else bounds[:1]),
        ("prefill", _cell("prefill_tok_s", ".2f")),
        ("a token", lambda row: "" if row["bytes_per_token"] is None else format_size(row["bytes_per_token"])),
        *([("waited, s", _cell("wait_s", ".1f"))] if alone else []),
    ]


def _cell(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    """The figure `name` in the format `form`; empty where there is none."""
    return lambda row: "" if row[name] is None else f"{row[name]:{form}}"
