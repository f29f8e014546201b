"""The trace that `tiermoe simulate` replays: as it was recorded, or with parts that are drawn, and in two halves if
profiles are counted on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermoe.errors import ConfigError
from tiermoe.lab.cli.calibrate import parse_percent
from tiermoe.lab.measure.counted import GIVEN, counted_profile, measured_recall, parted
from tiermoe.lab.simulate import BeladyHits, ReplaySettings
from tiermoe.lab.simulate.synthetic import RECALLS, Recall, Synthetic, completed, parse_recall
from tiermoe.lab.trace import Trace, read_trace
from tiermoe.offload.composition import Composition
from tiermoe.offload.profiles import Profile

FROM_TRACE = Path("from-trace")
"""The value of --profiles that counts them on the trace."""

RecallOption = Annotated[
    str | None,
    typer.Option(
        "--recall",
        help="Simulate forecasts that name this share of a token's experts: 0.9 (falls with the distance), "
        f"0.96,0.9,0.9 (one, two, three layers ahead), a paper's ({', '.join(RECALLS)}), or that of a trace's own "
        "forecasts: FILE.",
        show_default=False,
    ),
]
Fallback = Annotated[
    str | None,
    typer.Option(
        help="Simulate little passes after which this share of the tokens falls back, like 21% (MoBiLE).",
        show_default=False,
    ),
]
Neurons = Annotated[
    int | None,
    typer.Option(help="Simulate active neurons of experts that have so many, the model's moe_intermediate_size (CORM).",
                 show_default=False),
]  # fmt: skip


def read_recall(text: str) -> Recall:
    """The value of --recall. ConfigError out of range, TraceError for a file that is no trace with forecasts."""
    found = parse_recall(text)
    if found is not None:
        return found
    if not Path(text).exists():
        raise ConfigError(
            f"--recall {text} is neither a number from 0 to 1, numbers with commas, one of {', '.join(RECALLS)}, nor "
            f"the file of a trace"
        )
    return measured_recall(read_trace(Path(text)), text)


def read_fallback(text: str) -> float:
    """The value of --fallback. ConfigError for what is no share."""
    share = parse_percent("fallback", text)
    if not 0 <= share <= 1:
        raise ConfigError(f"--fallback must be from 0% to 100%, got {text}; write it like 21%")
    return share


_FIXED = {"fallback": ("gamma", "--fallback 21%"), "neurons": ("theta", "--neurons")}
"""What is drawn → the setting that then has no effect, and what decides in its place."""

_READ: dict[str, tuple[str, Callable[[Composition], bool]]] = {
    "recall": ("forecasts", lambda each: each.policy("prefetch").asks_routers and each.prefetch != "recalled"),
    "fallback": ("little_passes", lambda each: each.routing == "confident" or each.prefetch.startswith("recalled")),
    "neurons": ("neurons", lambda each: each.unit == "neuron"),
}
"""What is drawn → its name in `--json`, and whether a composition reads it."""

DRAWN = [name for name, _ in _READ.values()]


def refuse_undrawn(synthetic: Synthetic, changes: Mapping[str, Any]) -> None:
    """ConfigError for a setting that decides nothing in what is drawn."""
    for kind, (setting, option) in _FIXED.items():
        if getattr(synthetic, kind) is not None and setting in changes:
            raise ConfigError(
                f"{setting} decides nothing in simulated {_name(kind)}, of which {option} says how many; leave one out"
            )


def refuse_unread(synthetic: Synthetic, compositions: Iterable[Composition]) -> None:
    """ConfigError for an option whose parts no composition reads."""
    compositions = list(compositions)
    for kind, (_, reads) in _READ.items():
        if getattr(synthetic, kind) is not None and not any(map(reads, compositions)):
            raise ConfigError(f"--{kind} simulates {_name(kind)}, and no preset that is named reads any; leave it out")


def _name(kind: str) -> str:
    return _READ[kind][0].replace("_", " ")


class TraceToReplay:
    """A trace with what rows ask to be drawn or counted, each made once. counts: whether profiles are counted on one
    half of it, so that the other is replayed."""

    def __init__(self, trace: Trace, counts: bool) -> None:
        self.header = trace.header
        self._trace = trace
        self._counts = counts
        self._drawn: dict[tuple[Synthetic, int], tuple[Trace, Trace | None]] = {}
        self._profiles: dict[tuple[str, int, str], Profile] = {}
        counted_on = parted(trace) if counts else None
        self._parts = counted_on[2] if counted_on else ""
        self.belady = BeladyHits(counted_on[1] if counted_on else trace)  # what is drawn changes no choice

    def drawn(self, synthetic: Synthetic, composition: Composition) -> tuple[Trace, Trace | None]:
        """(trace to replay, half to count on, None where nothing is counted). TiermoeError where it cannot be drawn."""
        reads_recall = synthetic.recall is not None and _READ["recall"][1](composition)
        ahead = composition["ahead"] if reads_recall else 1
        reach = synthetic.recall.reach(ahead) if synthetic.recall is not None else 0
        if (key := (synthetic, reach)) not in self._drawn:
            whole = completed(self._trace, synthetic, ahead) if synthetic.any else self._trace
            counted, replayed = parted(whole)[:2] if self._counts else (None, whole)
            self._drawn[key] = replayed, counted
        return self._drawn[key]

    def profile(
        self, name: str, counted: Trace, settings: ReplaySettings, recall: Recall | None
    ) -> tuple[Profile, str]:
        """A profile that is counted on `counted`, and what it is. ProfileError for one that takes more than a trace."""
        key = name, id(counted), repr(settings)  # `_drawn` keeps what is counted on
        if key not in self._profiles:
            self._profiles[key] = counted_profile(name, counted, settings, recall)
        given = f"; given: {GIVEN[name]}" if name in GIVEN else ""
        return self._profiles[key], f"{self._parts}{given}"

    def described(self, synthetic: Synthetic, composition: Composition) -> dict[str, str]:
        """What is drawn of what a composition reads."""
        told = synthetic.described(self._trace.header)
        return {part: told[part] for part, reads in _READ.values() if part in told and reads(composition)}
