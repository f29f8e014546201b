"""What a paper evaluates: figures and tables of rows, each with the paper's value and the measure that gives ours, from
replays, evaluations and statistics of a trace, each made once (`Runs`); and the ladder of a system's parts, switched on
one after the other from the baseline of its paper up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tiermoe.config import CacheSize, parse_cache
from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.papers.statistics import windows
from tiermoe.lab.sizes import Sizes
from tiermoe.lab.trace import Header, Trace
from tiermoe.offload.composition import Composition, changed, parsed, unread
from tiermoe.offload.presets import compose
from tiermoe.offload.profiles import Profile

if TYPE_CHECKING:
    from tiermoe.lab.simulate import Result


@dataclass(frozen=True, slots=True)
class Ladder:
    """The parts of a preset in the order in which its paper switches them on."""

    baseline: str  # the preset without its parts, in words
    parts: tuple[tuple[str, Mapping[str, Any]], ...]  # (part, what `--set` switches it off), first switched on first
    beyond: Mapping[str, Any] = field(default_factory=dict)  # what the last parts change in the preset

    def steps(self, preset: Composition, given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """(part that is switched on, what `--set` changes in `preset`), the baseline first. given: parts and settings
        by name, which hold in every step that reads them. ConfigError as `changed` raises it."""
        changed(preset, {**self.beyond, **given})
        values = parsed(given)
        found = []
        for count in range(len(self.parts) + 1):
            changes = dict(self.beyond)
            for _, off in reversed(self.parts[count:]):  # where two parts share a setting, the earlier one decides
                changes |= off
            whole = preset.having(parsed(changes) | values)
            changes |= {name: value for name, value in values.items() if unread(name, whole) is None}
            found.append((self.parts[count - 1][0] if count else self.baseline, changes))
        return found


DEFAULT_LADDER = Ladder(
    "LRU, one pool",
    (
        ("eviction by next use", {"cache": "lru"}),
        ("slots by use", {"allotment": "pool"}),
        ("prefetch", {"prefetch": "none"}),
    ),
)
"""Of our `default`."""


KINDS = {
    "measured": "by the engine, on this machine",
    "replayed": "a trace on a virtual clock, whose costs are named",
    "counted": "in a trace",
    "given": "follows from what was put in: no evidence",
}
"""What a value of ours is."""


class Measure(Protocol):
    """How a value is had."""

    kind: ClassVar[str]  # of `KINDS`

    def value(self, runs: Runs) -> str:
        """Ours, as text. TiermoeError where `runs` lacks what it takes."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One value of a figure."""

    what: str
    paper: str  # the paper's value; empty where it is drawn and not printed
    ours: Measure
    moved: Mapping[str, Measure] = field(default_factory=dict)
    """What may be the cause of a difference, taken away → ours without it."""
    given: str = ""  # what ours follows from, if it could not have come out otherwise

    @property
    def kind(self) -> str:
        """Of `KINDS`."""
        return "given" if self.given else self.ours.kind

    def same_order(self, value: str) -> bool | None:
        """Whether a ratio of ours lies on the paper's side of 1; None if the paper has no ratio, or `value` is none.
        A paper that has ratios on both sides, or within 2 % of 1, has either order."""
        if not isinstance(self.ours, Ratio) or not (papers := _sides(self.paper)) or not (ours := _sides(value)):
            return None
        return 0 in papers or len(papers) > 1 or ours[0] in (0, papers[0])


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, a table or a section of a paper."""

    name: str  # like 'figure 13'
    title: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Paper:
    """What a paper evaluates, in its order."""

    name: str  # of the preset
    title: str
    figures: Sequence[Figure]
    missing: Mapping[str, str]  # name of a figure that cannot be had here → why


def _sides(text: str) -> list[int]:
    """On which side of 1 each number of a text lies: -1, 1, or 0 within 2 % of it, which 'above' and 'below' exclude;
    each side once."""
    found = []
    for word, number in re.findall(r"(above|below)? ?(\d*\.\d+|\d+)", text):
        near = 0 if not word else 1 if word == "above" else -1
        found.append(near if abs(float(number) - 1) <= 0.02 else 1 if float(number) > 1 else -1)
    return list(dict.fromkeys(found))


RATE = "the machine computes at the rate that this figure gives"
"""Why a row is given that `simulate.machines` takes a processor's rate from."""


def decoding(result: Result) -> float:
    """Tokens a second."""
    return result.metrics.decode.tok_s


def prompts(result: Result) -> float:
    """Tokens of a prompt a second."""
    return result.metrics.prefill.tok_s


def bytes_a_token(result: Result) -> float:
    """Read while decoding."""
    return result.metrics.decode.bytes_per_token


def hit_rate(result: Result) -> float:
    """The share of uses that found their expert in the cache."""
    return float(result.hit_rate or 0.0)


def waiting(result: Result) -> float:
    """The share of decoding that is spent waiting for loads."""
    return result.metrics.decode.wait_s / result.metrics.decode.seconds


BITS = 4
"""Of the experts of a side that names none and whose preset names none."""


@dataclass(frozen=True, slots=True)
class Side:
    """One composition in one precision."""

    preset: str
    changes: Mapping[str, str] = field(default_factory=dict)  # part or setting → value, as `--set` takes them
    bits: int | None = None  # of the experts; None: the preset's own, or 4
    share: str | None = None  # of the experts that are cached; None: the place's
    share_of: int | None = None  # bits of the experts that the share is of, where two sides have the same bytes
    cpu: float = 1.0  # how many times as fast the CPU computes an expert as the machine's

    def but(self, **changes: object) -> Side:
        """The same with other settings, and with another precision or share where these are named."""
        names = ("bits", "share", "share_of", "cpu")
        own: dict[str, Any] = {name: changes.pop(name) for name in names if name in changes}
        return replace(self, changes={**self.changes, **{name: str(value) for name, value in changes.items()}}, **own)


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides are replayed."""

    machine: str  # as `tiermoe simulate --machine` takes it
    share: str = "45%"  # of the experts that are cached
    sizes: Sizes | None = None  # of the paper's model; None: the trace's own
    seconds: tuple[float, float] | None = None  # of computing: a decoded token, a prompt's token; None: the machine's
    block: float | None = None  # seconds of a decoded token's layer over those of an expert at 16 bits on the link


Windows = tuple[int, int]
"""Tokens that a window of the text begins with, and tokens that are scored after them."""


@dataclass
class Runs:
    """Replays over one trace and evaluations of one model. recorded: the trace; None where none was given. profiles: a
    folder of calibrations (NAME.json), also those of a model that the traced one was widened from. evaluate: the object
    that `tiermoe eval --json` prints for a side; None where no model was given."""

    recorded: Trace | None
    profiles: Path | None = None
    evaluate: Callable[[Side, Windows], dict[str, Any]] | None = None
    borrowed: set[str] = field(default_factory=set)  # what to say of profiles of another checkpoint; '' of the trace's
    _replays: dict[str, Result] = field(default_factory=dict)
    _evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """ConfigError where none was given."""
        if self.recorded is None:
            raise ConfigError("needs a trace; give --trace FILE, which tiermoe trace makes")
        return self.recorded

    def evaluated(self, side: Side, windows: Windows, run: int = 0) -> dict[str, Any]:
        """A side's evaluation number `run`. ConfigError where no model was given."""
        if self.evaluate is None:
            raise ConfigError("needs an evaluation; give --model MODEL and --text FILE")
        if (name := repr((side, windows, run))) not in self._evaluations:
            self._evaluations[name] = self.evaluate(side, windows)
        return self._evaluations[name]

    def replayed(self, side: Side, place: Place) -> Result:
        """A side's replay at a place. TiermoeError where the trace, or a calibration, lacks what it takes."""
        if (name := repr((side, place))) not in self._replays:
            self._replays[name] = self._replay(side, place)
        return self._replays[name]

    def _replay(self, side: Side, place: Place) -> Result:
        from tiermoe.lab.simulate import machine_of, replay, settings_on
        from tiermoe.lab.simulate.costs import expert_bytes, resized

        trace, composition = self.trace, compose(side.preset, dict(side.changes))
        if place.sizes is not None:
            trace = Trace(resized(trace.header, place.sizes.expert, place.sizes.dense), trace.passes)
        machine = machine_of(place.machine, None, None)
        seconds = place.seconds
        if place.block is not None:
            expert_s = machine.link.latency + expert_bytes(trace.header, 0, 16) / machine.link.bandwidth
            token_s = place.block * expert_s * len(trace.header.experts)
            seconds = token_s, token_s / 10
        settings = settings_on(machine, trace.header, self._cache(side, place, trace.header), seconds)
        bits = side.bits or composition.bits or BITS
        if composition.prefetch == "percentile" and "window" not in side.changes:
            # the windows that Fate's calibration would find on the machine that is replayed
            timed = Trace(replace(trace.header, times=settings.times or trace.header.times), [])
            found = windows(timed, bits, settings.bandwidth, settings.latency)
            composition = composition.having({"window": tuple(found)})
        cpu = {precision: seconds / side.cpu for precision, seconds in settings.cpu.items()}
        settings = replace(settings, bits=bits, cpu=cpu, profile=self.profile(composition))
        return replay(trace, composition, settings)

    def profile(self, composition: Composition) -> Profile | None:
        """The calibration of a composition; None where it needs none, or no folder was given."""
        if self.profiles is None or not composition.needs_profile:
            return None
        from tiermoe.lab.simulate.profiles import borrowed, profile_of

        found = profile_of(self.profiles, composition.profile, self.trace.header)
        self.borrowed.add(borrowed(found, self.trace.header))
        return found

    def _cache(self, side: Side, place: Place, header: Header) -> CacheSize:
        from tiermoe.lab.simulate.costs import slot_sizes

        cache = parse_cache(side.share or place.share)
        if side.share_of is None or cache.fraction is None:
            return cache
        unit = slot_sizes(header, [side.share_of])[side.share_of]
        return CacheSize(nbytes=int(cache.fraction * sum(header.experts)) * unit)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of `ours` over that of `theirs`, both replayed in one place."""

    kind: ClassVar[str] = "replayed"
    ours: Side
    theirs: Side
    place: Place
    figure: Callable[[Result], float] = decoding

    def value(self, runs: Runs) -> str:
        ours, theirs = (self.figure(runs.replayed(side, self.place)) for side in (self.ours, self.theirs))
        return f"{ours / theirs:.2f}"

    def shares(self, *shares: str) -> dict[str, Measure]:
        """Other caches, by their names."""
        return {f"{share} cached": replace(self, place=replace(self.place, share=share)) for share in shares}


@dataclass(frozen=True, slots=True)
class Replayed:
    """A figure of one replay. form: of the figure, as `format` takes it."""

    kind: ClassVar[str] = "replayed"
    side: Side
    place: Place
    figure: Callable[[Result], float]
    form: str

    def value(self, runs: Runs) -> str:
        return format(self.figure(runs.replayed(self.side, self.place)), self.form)


@dataclass(frozen=True, slots=True)
class Counted:
    """A statistic of the trace, or one for each layer. form: of a number, as `format` takes it."""

    kind: ClassVar[str] = "counted"
    count: Callable[[Trace], float | Sequence[float | None]]
    form: str

    def value(self, runs: Runs) -> str:
        found = self.count(runs.trace)
        numbers = [found] if isinstance(found, int | float) else found
        if all(each is None for each in numbers):
            raise TraceError(f"the trace of {runs.trace.header.model} holds nothing of it; see tiermoe trace --help")
        return " ".join("-" if each is None else format(each, self.form) for each in numbers)


@dataclass(frozen=True, slots=True)
class Loss:
    """What an evaluation loses of perplexity against the checkpoint's own weights, with its standard error over the
    windows. Where tokens depend on time, the mean and the range of three runs: that error is not the spread of runs."""

    kind: ClassVar[str] = "measured"
    side: Side
    windows: Windows = (32, 256)

    def value(self, runs: Runs) -> str:
        composition = compose(self.side.preset, dict(self.side.changes))
        count = 3 if composition.tokens_by_residency and composition.prefetch != "none" else 1
        found = [runs.evaluated(self.side, self.windows, run) for run in range(count)]
        losses = [each["perplexity_loss"] for each in found]
        error = found[0]["perplexity_loss_se"]
        text = f"{fmean(losses):.2%}" if error is None else f"{fmean(losses):.2%} ± {error:.2%}"
        if count == 1:
            return text
        return f"{text} ({min(losses):.2%} to {max(losses):.2%} in {count} runs)"


def rungs(
    preset: Composition, ladder: Ladder, place: Place, papers: Sequence[str], blocks: Mapping[str, float] | None = None
) -> list[Row]:
    """A row for each part of a preset's ladder: decoding over the baseline, with the part and those before it. papers:
    the paper's ratios, one for each part. blocks: name → `Place.block` of other places."""
    steps = ladder.steps(preset, {})
    sides = [Side(preset.name, {name: str(value) for name, value in changes.items()}) for _, changes in steps]
    places = {name: replace(place, block=block) for name, block in (blocks or {}).items()}
    return [
        Row(f"with {part}", value, Ratio(side, sides[0], place),
            {name: Ratio(side, sides[0], other) for name, other in places.items()})
        for (part, _), side, value in zip(steps[1:], sides[1:], papers, strict=True)
    ]  # fmt: skip
