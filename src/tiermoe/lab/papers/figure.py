"""What a paper evaluates: figures and tables of rows, each with the paper's value and the measure that gives ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from tiermoe.errors import TraceError
from tiermoe.lab.papers.runs import Place, Runs, Side
from tiermoe.lab.systems import LADDERS
from tiermoe.offload.presets import PRESETS

if TYPE_CHECKING:
    from tiermoe.lab.simulate import Result
    from tiermoe.lab.trace.file import Trace


class Measure(Protocol):
    """How a value is had."""

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


OF_FIGURE = "{} (how fast the machines compute is of this figure)"
"""Title of a figure that `simulate.machines` takes a processor's rate from."""


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


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of `ours` over that of `theirs`, both replayed in one place."""

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

    def slower(self, *seconds: float) -> dict[str, Measure]:
        """Slower computing, in seconds of a decoded token, by its names."""
        return {
            f"computing in {1000 * each:g} ms": replace(self, place=replace(self.place, seconds=(each, each / 10)))
            for each in seconds
        }


@dataclass(frozen=True, slots=True)
class Replayed:
    """A figure of one replay. form: of the figure, as `format` takes it."""

    side: Side
    place: Place
    figure: Callable[[Result], float]
    form: str

    def value(self, runs: Runs) -> str:
        return format(self.figure(runs.replayed(self.side, self.place)), self.form)


@dataclass(frozen=True, slots=True)
class Counted:
    """A statistic of the trace, or one for each layer. form: of a number, as `format` takes it."""

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
    """What an evaluation loses of perplexity against the checkpoint's own weights, with its standard error."""

    side: Side

    def value(self, runs: Runs) -> str:
        found = runs.evaluated(self.side)
        lost, error = found["perplexity_loss"], found["perplexity_loss_se"]
        return f"{lost:.2%}" if error is None else f"{lost:.2%} ± {error:.2%}"


def rungs(system: str, place: Place, papers: Sequence[str]) -> list[Row]:
    """A row for each part of a system's ladder: decoding over the baseline, with the part and those before it.
    papers: the paper's ratios, one for each part."""
    steps = LADDERS[system].steps(PRESETS[system], {})
    sides = [Side(system, {name: str(value) for name, value in changes.items()}) for _, changes in steps]
    return [
        Row(f"with {part}", value, Ratio(side, sides[0], place))
        for (part, _), side, value in zip(steps[1:], sides[1:], papers, strict=True)
    ]
