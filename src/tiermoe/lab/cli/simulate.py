"""`tiermoe simulate`: presets, or eviction policies alone, replayed over a routing trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, spinner
from tiermoe.cli.terminal import WIDE, Terminal
from tiermoe.config import BITS, CacheSize, format_size, parse_cache
from tiermoe.errors import ConfigError
from tiermoe.lab.cli.place import CACHE, Place
from tiermoe.lab.cli.traced import (
    FROM_TRACE,
    Fallback,
    Neurons,
    RecallOption,
    TraceToReplay,
    read_fallback,
    read_recall,
)
from tiermoe.lab.cli.variants import (
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
from tiermoe.lab.measure.compare import Measured, measure_all, ratios
from tiermoe.lab.simulate import (
    EvictionRow,
    all_evictions,
    compare_evictions,
    parse_link,
    run_bits,
)
from tiermoe.lab.trace import Header, Trace, read_trace
from tiermoe.offload.composition import Composition, declarations, parsed, unread
from tiermoe.offload.plugins import load_packages
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.presets import compose

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
Lanes = Annotated[
    int | None,
    typer.Option(
        help="Transfers that share the link at once.", min=1, max=64, show_default="1, or as the trace measured"
    ),
]
Compute = Annotated[
    str | None,
    typer.Option(help="Compute time of a decoded token, like 20ms. Default: the machine's, or as the trace measured."),
]
PrefillCompute = Annotated[
    str | None, typer.Option(help="Compute time of a prompt token, like 5ms. Default: --compute.")
]
ExpertBits = Annotated[
    int | None,
    typer.Option(help="Precision of the experts. Default: the preset's, else that of the traced run."),
]
Profiles = Annotated[
    Path | None,
    typer.Option(
        help="Folder of calibration profiles (NAME.json) for the presets that need one. from-trace: count them on half "
        "of the trace, and replay the other half."
    ),
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
    machine: MachineName = None,
    ram: Ram = None,
    drive: Drive = None,
    lanes: Lanes = None,
    set_: opt.Set = None,
    sweep: Sweep = None,
    ladder: Ladder = False,
    compute: Compute = None,
    prefill_compute: PrefillCompute = None,
    cpu_expert: CpuExpert = None,
    gather: Gather = None,
    bits: ExpertBits = None,
    profiles: Profiles = None,
    recall: RecallOption = None,
    fallback: Fallback = None,
    neurons: Neurons = None,
    seed: SeedOption = 0,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Replay a routing trace without weights: speed of presets on a given machine, or hit rates of eviction policies.

    Charged are loads, computing, and what deciding took the engine where
    the trace was made (tiermoe trace --costs); with --machine a layer's
    Python and launches, too.

    --sweep takes cache, link, machine, ram, compute, recall and fallback beside the settings of --set."""
    if sum(given is not None for given in (preset, presets, evictions)) > 1:
        raise ConfigError("--preset, --presets and --evictions exclude each other; give one of them")
    changes = opt.changes(set_) or {}
    given = {"cache": cache, "link": link, "machine": machine, "ram": ram, "compute": compute}
    given |= {"recall": recall, "fallback": fallback}
    other = {"drive": drive, "prefill-compute": prefill_compute, "cpu-expert": cpu_expert, "gather": gather}
    if evictions is not None:
        rows = {"sweep": sweep or None, "ladder": ladder or None, "picture": picture, "bits": bits}
        rows |= {"profiles": profiles, "neurons": neurons, "lanes": lanes}
        _refuse_without_effect({**given, "cache": None, **other, **rows}, changes)
        caches = [parse_cache(text) for text in (cache or CACHE).split(",")]
        with spinner("replaying"):
            found = _evictions(read_trace(trace), evictions, caches, changes, seed)
        print(json.dumps([asdict(row) for row in found])) if as_json else _print_evictions(found)
        return
    if cache is not None and "," in cache:
        if sweep or ladder:
            raise ConfigError(f"--{'ladder' if ladder else 'sweep'} takes one size of the cache; give one to --cache")
        sweep, cache = [f"cache={cache}"], None
    given["cache"] = cache
    chosen = variants(presets or preset or "default", changes, sweep, ladder, {**given, "bits": bits}, SWEPT)
    if bits is not None and bits not in BITS:
        raise ConfigError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    options = {name: SWEPT[name](text) for name, text in given.items() if text is not None}
    place = Place(
        options,
        drive,
        None if prefill_compute is None else _seconds(prefill_compute),
        None if cpu_expert is None else _seconds(cpu_expert),
        None if gather is None else parse_link(gather, "gather").bandwidth,
        lanes,
        bits,
        profiles,
        neurons,
        seed,
    )
    place.check(chosen)
    if picture is not None:
        check_picture(picture)
    with spinner("replaying"):
        recorded = TraceToReplay(read_trace(trace), profiles == FROM_TRACE)
        measured = measure_all(chosen, 1, lambda row: place.replay(row, recorded), lambda done, total: None)
    failed = failures(measured, "replayed")
    results = [_result(row, measured) for row in measured]
    _mark_alike(results, measured, bits, recorded.header)
    whole = [result for result in results if "refused" not in result]
    if as_json:
        print(json.dumps(results))
    else:
        _print_results(whole, failed, place)
    if picture is not None:
        write_picture(picture, whole)


def _result(row: Measured, rows: Sequence[Measured]) -> dict[str, Any]:
    """What `--json` prints of a row."""
    if row.error is not None:
        return {"preset": row.variant.preset, **row.variant.point, "refused": row.error}
    return {**row.rounds[0], **row.variant.point, **ratios(row, rows)}


_UNSEEN = ("quantizer", "dense_bits")
"""Settings that change no replay, unless the trace has the quantiser's sizes: it says of neither what bytes or times
follow from that."""


def _mark_alike(results: Sequence[dict[str, Any]], rows: Sequence[Measured], bits: int | None, header: Header) -> None:
    """Names in `same_as` the earlier preset that a row replays exactly as, since they differ in `_UNSEEN` alone. bits:
    of the experts, as given."""
    seen: list[tuple[dict[str, Any], str]] = []
    for result, row in zip(results, rows, strict=True):
        if row.error is not None:
            continue
        composition = compose(row.variant.preset, row.variant.set)
        own = composition.settings() | dict.fromkeys(_UNSEEN) | {"bits": bits or composition.bits or run_bits(header)}
        own |= {} if composition.needs_profile else {"profile": ""}
        own["quantizer"] = composition.quantizer if composition.quantizer in header.quantized_bytes else None
        own["point"] = row.variant.point
        other = next((preset for known, preset in seen if known == own and preset != row.variant.preset), None)
        if other is not None:
            result["same_as"] = other
        seen.append((own, row.variant.preset))


def _evictions(
    trace: Trace, evictions: str, caches: list[CacheSize], changes: dict[str, str], seed: int
) -> list[EvictionRow]:
    """Hit rates of the policies named in --evictions, a row for each policy and cache size."""
    settings = parsed(changes)
    known = all_evictions("weights" in trace.header.holds)
    names = known if evictions == "all" else [name.strip() for name in evictions.split(",")]
    for name in names:
        if name not in EVICTIONS and not (load_packages() and name in EVICTIONS):
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


def _link(text: str) -> str:
    parse_link(text)
    return text


SWEPT: dict[str, Callable[[str], Any]] = {
    "cache": parse_cache,
    "link": _link,
    "machine": str,
    "ram": parse_cache,
    "compute": _seconds,
    "recall": read_recall,
    "fallback": read_fallback,
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


def _print_results(results: list[dict[str, Any]], failed: list[str], place: Place) -> None:
    note(place.described(results))
    for line in place.assumed(results):
        note(line)
    same = [result for result in results if "same_as" in result]
    results = [result for result in results if "same_as" not in result]
    columns = _columns(results)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # as wide as 80 columns allow
    for index, (title, _) in enumerate(columns):
        table.add_column(title.replace("\n", ""), justify="right" if index else "left", no_wrap=True)
    for result in results:
        table.add_row(*(show(result) for _, show in columns))
    Terminal(piped=WIDE).print(table)
    if any(result["lossy"] for result in results):
        note("* lossy: may change what the model says")
    for result in same:
        note(
            f"left out {result['preset']}: a replay cannot tell it from {result['same_as']}; they differ in "
            f"{' or '.join(_UNSEEN)} alone, and the trace says of neither what bytes and times follow from that"
        )
    for line in failed:
        note(f"left out {line}")


def _columns(results: list[dict[str, Any]]) -> list[Column]:
    """The columns of the table, chosen so that its width fits 80 characters."""
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
