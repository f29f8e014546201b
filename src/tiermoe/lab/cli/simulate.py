"""`tiermoe simulate`: presets, or eviction policies alone, replayed over a routing trace."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from tiermoe.lab.cli.traced import (
    DRAWN,
    FROM_TRACE,
    Fallback,
    Neurons,
    RecallOption,
    TraceToReplay,
    read_fallback,
    read_recall,
    refuse_undrawn,
    refuse_unread,
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
from tiermoe.lab.measure.compare import Measured, Variant, measure_all, ratios
from tiermoe.lab.simulate import (
    EvictionRow,
    Machine,
    NamedLink,
    ReplaySettings,
    all_evictions,
    compare_evictions,
    machine_of,
    parse_link,
    replay,
    run_bits,
    settings_on,
)
from tiermoe.lab.simulate.profiles import borrowed, profile_of
from tiermoe.lab.simulate.synthetic import Synthetic
from tiermoe.lab.trace import Header, Trace, read_trace
from tiermoe.offload.composition import Composition, declarations, parsed, unread
from tiermoe.offload.plugins import load_packages
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.presets import compose

CACHE = "20%"
"""Size of the cache where none is given."""

TRACED = "traced"
"""Name of the link that a trace's own costs have."""

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
    lanes: Lanes = 1,
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

    --sweep takes cache, link, machine, ram, compute, recall and fallback beside the settings of --set."""
    if sum(given is not None for given in (preset, presets, evictions)) > 1:
        raise ConfigError("--preset, --presets and --evictions exclude each other; give one of them")
    changes = opt.changes(set_) or {}
    given = {"cache": cache, "link": link, "machine": machine, "ram": ram, "compute": compute}
    given |= {"recall": recall, "fallback": fallback}
    other = {"drive": drive, "prefill-compute": prefill_compute, "cpu-expert": cpu_expert, "gather": gather}
    if evictions is not None:
        rows = {"sweep": sweep or None, "ladder": ladder or None, "picture": picture, "bits": bits}
        rows |= {"profiles": profiles, "neurons": neurons, "lanes": None if lanes == 1 else lanes}
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
    place = _Place(
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
"""Settings that change no replay: no trace says what bytes or times follow from them."""


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
        own["point"] = row.variant.point
        other = next((preset for known, preset in seen if known == own and preset != row.variant.preset), None)
        if other is not None:
            result["same_as"] = other
        seen.append((own, row.variant.preset))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and how rows are replayed: what was given beside what they name themselves."""

    options: Mapping[str, Any]  # values of the options in `SWEPT` that were given
    drive: str | None  # behind main memory, as --drive
    prefill_s: float | None  # compute time of a prompt token; None: as that of a decoded one
    cpu_expert_s: float | None  # time of an expert on a CPU beside the GPU; None: the machine's
    gather: float | None  # bytes a second at which neurons are gathered; None: `GATHER` times the link's
    lanes: int  # transfers at once
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
        """The machine of a row. values: of the options in `SWEPT`, the row's own first. header: of the trace, whose own
        link is taken if none is named."""
        if header is not None and header.costs is not None and not values.keys() & {"link", "machine"}:
            found = Machine(
                "this", NamedLink(TRACED, header.costs.bandwidth, header.costs.latency, "as the trace measured")
            )
        else:
            found = machine_of(values.get("machine"), values.get("link"), self.drive)
        found = replace(found, processor=None) if "compute" in values else found
        return found if self.cpu_expert_s is None else replace(found, cpu=None)

    def settings(self, values: Mapping[str, Any], header: Header) -> ReplaySettings:
        """The settings of a row but precision, profile, lanes and seed."""
        seconds = (values["compute"], self.prefill_s or values["compute"]) if "compute" in values else None
        cache = values.get("cache") or parse_cache(CACHE)
        found = settings_on(self.machine(values, header), header, cache, seconds, values.get("ram"))
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
        settings = replace(self.settings(values, header), lanes=self.lanes, bits=self.bits, seed=self.seed)
        if self.profiles is not None and composition.needs_profile:
            if counted is not None:
                profile, origin = recorded.profile(composition.profile, counted, settings, synthetic.recall)
            else:
                profile = profile_of(self.profiles, composition.profile, header)
                origin = borrowed(profile, header)
            settings = replace(settings, profile=profile)
        machine = self.machine(values, header)
        if header.costs is not None and machine.link.name == TRACED:
            settings = replace(settings, lanes=header.costs.lanes)
            if composition.store == "memory" and header.costs.memory:
                settings = replace(settings, bandwidth=header.costs.memory, latency=0.0)
        result = replay(trace, composition, settings, recorded.belady).as_dict()
        described = machine.described("ram" in values) | recorded.described(synthetic, composition)
        described |= {"profile": origin} if origin else {}
        return {**described, **result, "set": dict(row.set), "lossy": composition.lossy}

    def synthetic(self, values: Mapping[str, Any]) -> Synthetic:
        """What is drawn for a row. values: of the options in `SWEPT`."""
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


def _refuse_unread_by(composition: Composition, gather: bool, cpu_expert: bool) -> None:
    """ConfigError for an option that a preset does not read."""
    if gather and composition.unit != "neuron":
        raise ConfigError(f"preset {composition.name} gathers no neurons; leave --gather out, or use --set unit=neuron")
    if cpu_expert and composition.misses == "load":
        raise ConfigError(f"preset {composition.name} computes no misses; leave --cpu-expert out, or --set misses=cpu")


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


def _print_results(results: list[dict[str, Any]], failed: list[str], place: _Place) -> None:
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
