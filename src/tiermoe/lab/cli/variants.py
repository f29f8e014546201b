"""Rows of `simulate` and `compare`: presets as they are, with one setting swept (--sweep), or with their parts switched
on one after the other (--ladder)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermoe.errors import ConfigError
from tiermoe.lab.cli.evaluate import COUNTERS
from tiermoe.lab.measure.compare import Measured, Variant, presets_asked
from tiermoe.lab.papers import LADDERS
from tiermoe.offload.composition import declarations, parsed
from tiermoe.offload.policies.settings import near
from tiermoe.offload.presets import OPTIONS, compose, preset_named

Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=V1,V2",
        help="A row for each value of one setting, like gamma=0.5,0.7: any that --set takes, and the options that are "
        "named above. Values that hold commas are parted by ';'.",
        show_default=False,
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(help="Draw the rows' speed and quality (simulate: hits) into this .svg file.", show_default=False),
]
Ladder = Annotated[
    bool,
    typer.Option(
        "--ladder",
        help="A row for each part of a preset, switched on one after the other in its paper's order: "
        f"{', '.join(LADDERS)}.",
    ),
]

Readers = Mapping[str, Callable[[str], Any]]
"""Option of a command that can be swept → what makes a value of its text, or raises ConfigError."""


def variants(
    presets: str,
    given: Mapping[str, Any],
    sweep: Sequence[str] | None,
    ladder: bool,
    options: Mapping[str, Any],
    swept: Readers,
) -> list[Variant]:
    """The variants to run. presets: 'all', or comma-separated names. given: parts and settings of --set. options:
    values of the command's own options; None where not given. swept: the options that --sweep can vary. ConfigError
    for what is unknown or contradicts itself; whether a preset reads a setting is not looked at."""
    if sweep and ladder:
        raise ConfigError("--sweep and --ladder exclude each other; give one of them")
    names = presets_asked(presets)
    if ladder:
        names = list(LADDERS) if presets.strip() == "all" else names
        held = {**given, **{name: options[name] for name in OPTIONS if options.get(name) is not None}}
        return [step for name in names for step in _steps(name, held)]
    if not sweep:
        return [Variant(name, given) for name in names]
    if len(sweep) > 1:
        raise ConfigError(
            "one --sweep at a time; fix the other setting with --set, and run once for each of its values"
        )
    name, is_option, values = _values(sweep[0], swept)
    if name in given and not is_option:
        raise ConfigError(f"--set {name} and --sweep {name} exclude each other; leave one out")
    if options.get(name) is not None and (is_option or name in OPTIONS):
        raise ConfigError(f"--{name.replace('_', '-')} and --sweep {name} exclude each other; leave one out")
    return [
        Variant(preset, given, {name: value}, point)
        if is_option
        else Variant(preset, {**given, name: value}, {}, point)
        for shown, value in values
        for point in [{"sweep": name, "value": shown}]
        for preset in names
    ]


def _steps(name: str, given: Mapping[str, Any]) -> Iterator[Variant]:
    preset = preset_named(name)
    if name not in LADDERS:
        raise ConfigError(f"preset {name} has no parts to switch on; --ladder takes {', '.join(LADDERS)}")
    for part, changes in LADDERS[name].steps(preset, given):
        yield Variant(name, changes, point={"part": part})


def _values(text: str, swept: Readers) -> tuple[str, bool, list[tuple[Any, Any]]]:
    """(name, whether it is an option rather than a setting, (value as it is shown, value) of each) of a --sweep."""
    name, _, listed = (each.strip() for each in text.partition("="))
    words = [word.strip() for word in listed.split(";" if ";" in listed else ",")]
    if not name or not all(words):
        raise ConfigError(f"--sweep {text} is not NAME=V1,V2; write it like --sweep gamma=0.5,0.7")
    known = declarations()
    is_setting = name in known and name != "profile"
    if name in swept and not (is_setting and all(word in known[name].setting.one_of for word in words)):
        read = [(word, swept[name](word)) for word in words]
        return name, True, list(dict.fromkeys((value if str(value) == word else word, value) for word, value in read))
    if not is_setting:
        raise ConfigError(f"unknown setting '{name}' to sweep{near(name, [*swept, *known])}")
    found = dict.fromkeys(parsed({name: word})[name] for word in words)
    return name, False, [(value, value) for value in found]


def check_settings(rows: Sequence[Variant]) -> None:
    """ConfigError where no row's preset takes the parts and settings that the row changes."""
    failures([Measured(row, error=_refusal(row)) for row in rows], "measured")


def _refusal(row: Variant) -> str | None:
    try:
        compose(row.preset, row.set)
    except ConfigError as error:
        return str(error)
    return None


def failures(rows: Sequence[Measured], done: str) -> list[str]:
    """'PRESET: reason' of those that could not be measured, with their places in the sweep or the ladder where others
    of the preset could. ConfigError where none could. done: 'measured' or 'replayed'."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            places = reasons.setdefault((row.variant.preset, row.error), [])
            places += [str(row.variant.point[name]) for name in ("value", "part") if name in row.variant.point]
    if all(row.error is not None for row in rows):
        preset, reason = next(iter(reasons))
        alone = len({row.variant.preset for row in rows}) == 1
        raise ConfigError(reason if alone else f"no preset could be {done}; {preset}: {reason}")
    measured = {row.variant.preset for row in rows if row.error is None}
    return [
        f"{preset} ({', '.join(places)}): {reason}" if places and preset in measured else f"{preset}: {reason}"
        for (preset, reason), places in reasons.items()
    ]


Column = tuple[str, Callable[[dict[str, Any]], str]]
"""(heading, function from a row's JSON object to the text of its cell)."""


def naming_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns that name the rows: the preset, with the value of a sweep or the part of a ladder."""
    first = rows[0]
    if "part" in first:
        return [("part", lambda row: _part(row) + _lossy(row))]
    swept: list[Column] = [(first["sweep"], lambda row: str(row["value"]))] if "sweep" in first else []
    return [("preset", lambda row: row["preset"] + _lossy(row)), *swept]


def ratio_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Decode speed over that of other rows, where there are any."""
    others = [name.removeprefix("decode_vs_") for row in rows for name in row if name.startswith("decode_vs_")]
    return [("/ " + other.replace("_", "-\n"), _ratio(f"decode_vs_{other}")) for other in dict.fromkeys(others)]


def _ratio(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[name]:.2f}" if name in row else ""


def counter_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """What parts of the presets did, of those counters that are not 0 in every row."""
    shown = {name: share for name, share in COUNTERS.items() if any(map(share, rows))}
    return [(name.replace(", ", ",\n").replace(" for", "\nfor"), _share(of)) for name, of in shown.items()]


def _share(of: Callable[[dict[str, Any]], float]) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{of(row):.1%}" if of(row) else ""


def _part(row: dict[str, Any]) -> str:
    """'fate: LoD, 16 bits' and '+ prefetch' below it."""
    starts = row["part"] == LADDERS[row["preset"]].baseline
    return f"{row['preset']}: {row['part']}" if starts else f"  + {row['part']}"


def _lossy(row: dict[str, Any]) -> str:
    return " *" if row["lossy"] else ""


def check_picture(picture: Path) -> None:
    """ConfigError where the picture cannot be drawn or written."""
    if picture.suffix != ".svg":
        raise ConfigError(f"the picture {picture} must be named .svg; a browser shows it and converts it")
    if not picture.absolute().parent.is_dir():
        raise ConfigError(f"the picture's folder {picture.parent} does not exist; make it first")
    from tiermoe.lab.bench.report import require_plots

    require_plots()


def write_picture(picture: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draws rows that were measured. ConfigError where the file cannot be written."""
    from tiermoe.lab.bench.report import compare_presets, sweep_curves

    labels = [_part(row) for row in rows] if "part" in rows[0] else ()
    drawing = sweep_curves(rows) if "sweep" in rows[0] else compare_presets(rows, labels)
    try:
        picture.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the picture {picture} cannot be written: {error.strerror}; name another file") from error
