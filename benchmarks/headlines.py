"""The papers' headlines beside a replay's: the paper's number, ours, and what moves ours.

    tiermoe trace W --text data/heldout.txt --out W.trace --tokens 512 --neurons THETA
    python -m benchmarks.headlines W.trace --profiles PROFILES [--only hobbit,sti]

A headline is one composition's speed over another's on the paper's machine, both replayed over the same trace with a
GPU's computing times: 2 ms a decoded token, .2 ms a prompt's, one lane. What moves it are the same two with one thing
changed. PROFILES: a folder of calibrations (NAME.json), also those of a model that the traced one was widened from;
THETA is corm's. What cannot be replayed says why. Prints a Markdown table, row by row.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiermoe.config import CacheSize, parse_cache
from tiermoe.errors import TiermoeError
from tiermoe.metrics import Metrics
from tiermoe.offload.composition import Composition
from tiermoe.offload.profiles import read_profile
from tiermoe.simulate import GATHER, BeladyHits, ReplaySettings, parse_link, replay, spread
from tiermoe.simulate.costs import run_bits, slot_sizes
from tiermoe.simulate.replay import Result
from tiermoe.systems import compose
from tiermoe.systems.fate import windows
from tiermoe.trace.file import Times, Trace, read_trace


@dataclass(frozen=True)
class Side:
    """One composition."""

    preset: str
    changes: Mapping[str, str] = field(default_factory=dict)  # what `--set` changes in it
    bits: int = 4
    share: str | None = None  # of the experts that are cached; None: the headline's
    share_of: int | None = None  # bits of the experts that the share is of, where two sides have the same bytes

    def but(self, **changes: object) -> Side:
        """The same with other parts, and with another precision or share where these are named."""
        own = {name: changes.pop(name) for name in ("bits", "share", "share_of") if name in changes}
        parts = {**self.changes, **{name: str(value) for name, value in changes.items()}}
        return replace(self, changes=parts, **own)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Setting:
    """What is compared, and where: `ours` over `theirs`."""

    ours: Side
    theirs: Side
    link: str
    phase: str = "decode"
    share: str = "45%"
    seconds: tuple[float, float] = (2e-3, 2e-4)  # of computing: a decoded token, a prompt's token

    def shares(self, *shares: str) -> dict[str, Setting]:
        """Other caches."""
        return {f"{share} cached": replace(self, share=share) for share in shares}


@dataclass(frozen=True)
class Headline:
    """A paper's claim."""

    system: str
    claim: str
    paper: str  # the paper's number
    setting: Setting  # ours of the claim
    moved: Mapping[str, Setting] = field(default_factory=dict)  # what is changed → the setting with that change


def headlines() -> list[Headline]:
    """In the order of the table."""
    return [*_hobbit(), *_edgemoe(), *_sti(), *_mobile(), *_fate(), *_corm()]


ON_DEMAND, GATES = Side("load-on-demand"), Side("mixtral-offload")


def _hobbit() -> list[Headline]:
    ours = Side("hobbit", {"low_bits": "4"}, 16)
    base = Setting(ours, GATES.but(bits=16), "pcie4")
    moved = {
        "t1=.5 t2=.75": replace(base, ours=ours.but(t1=0.5, t2=0.75)),
        "all but the first rank low": replace(base, ours=ours.but(t1=0, t2=0.99, low_share=0.5)),
        "8 + 2 bits beside 16 in the same bytes": replace(
            base,
            ours=Side("hobbit", {"low_bits": "2"}, 8, share_of=16),
            theirs=GATES.but(bits=16),
        ),
        **base.shares("25%", "60%"),
        "computing in 16 ms": replace(base, seconds=(16e-3, 2e-3)),
    }
    alone = ours.but(prefetch="none")
    exact = Side("hobbit", {"prefetch": "none", "precision": "fixed", "low_share": "0"}, 16)
    dynamic = Setting(alone, exact, "pcie4")
    fewer = Setting(alone.but(bits=4, low_bits=2), exact.but(bits=4), "pcie4")
    ahead = Setting(ours, alone, "pcie4")
    return [
        Headline("hobbit", "HOBBIT over `mixtral-offload`, PCIe 4.0, 16 + 4 bits", "3.2", base, moved),
        Headline("hobbit", "its dynamic loading alone", "1.19–1.57", dynamic, {"4 + 2 bits": fewer}),
        Headline("hobbit", "its prefetch with dynamic loading, decode", "1.05", ahead),
        Headline("hobbit", "the same, prefill", "1.10", replace(ahead, phase="prefill")),
    ]


def _edgemoe() -> list[Headline]:
    base = Setting(Side("edgemoe"), ON_DEMAND.but(bits=16), "sata", share="20%")
    slower = {f"computing in {seconds:g} s": replace(base, seconds=(seconds, seconds / 10)) for seconds in (0.1, 0.3)}
    same = Setting(Side("edgemoe"), Side("io-qexp"), "sata", share="20%")
    return [
        Headline("edgemoe", "EdgeMoE over IO-EXP at 16 bits, SSD, 20 % cached", "2.6–3.0", base, slower),
        Headline("edgemoe", "the same, SD card", "4.5–5.4", replace(base, link="sdcard"), _quarter_on_card(base)),
        Headline("edgemoe", "over IO-QEXP, SSD", "1.35–1.5", same, same.shares("25%")),
    ]


def _quarter_on_card(base: Setting) -> dict[str, Setting]:
    """A quarter cached, on the SD card."""
    return replace(base, link="sdcard").shares("25%")


def _sti() -> list[Headline]:
    """STI's preload buffer holds what it holds: LRU would keep nothing of what comes round in turns."""
    kept = Side("sti", {"cache": "belady"})
    base = Setting(Side("edgemoe"), Side("sti"), "sata", share="20%")
    moved = {
        "a buffer that keeps its shards": replace(base, theirs=kept),
        **{f"{share} of the shards in it": replace(base, theirs=kept.but(share=share)) for share in SHARDS},
        "shards at 2 bits": replace(base, theirs=Side("sti", {"cache": "belady", "bits": "2"})),
        "routed experts alone": replace(base, theirs=Side("sti", {"routing": "all", "prefetch": "none"})),
        "computing in .2 s": replace(base, seconds=(0.2, 0.02)),
    }
    return [Headline("sti", "over STI, SSD, 20 % cached", "1.1–2.8", base, moved)]


SHARDS = ("45%", "60%", "80%", "85%", "90%", "100%")


def _mobile() -> list[Headline]:
    def at(gamma: float, **changes: object) -> Side:
        return Side("mobile", {"gamma": str(gamma)}).but(**changes)

    base = Setting(at(0.7), ON_DEMAND, "pcie4")
    moved = {f"gamma {gamma:g}": replace(base, ours=at(gamma)) for gamma in (0.4, 0.2, 0.1)}
    moved["over `lru`, gamma .1"] = Setting(at(0.1), Side("lru"), "pcie4")
    gated = Setting(at(0.1, prefetch="recalled+next-gate"), ON_DEMAND, "pcie4")
    other = {"next gates alone": replace(gated, ours=at(0.1, prefetch="next-gate", ahead=1))}
    return [
        Headline("mobile", "MoBiLE over `load-on-demand`, PCIe 4.0", "1.57–1.72", base, moved),
        Headline("mobile", "with pre-gating, gamma .1", "1.92", gated, other),
        Headline("mobile", "over `mixtral-offload`, gamma .1", "1.28", Setting(at(0.1), GATES, "pcie4")),
    ]


def _fate() -> list[Headline]:
    ours = Side("fate")
    base = Setting(ours, ON_DEMAND, "pcie3")
    prompt = replace(base, phase="prefill")
    eap = Setting(ours, Side("eap"), "pcie3")
    wider = Side("eap", bits=8, share_of=4)

    def precise(setting: Setting, *widths: int) -> dict[str, Setting]:
        return {f"LoD at {bits} bits": replace(setting, theirs=ON_DEMAND.but(bits=bits)) for bits in widths}

    def eap_moved(setting: Setting) -> dict[str, Setting]:
        return {"EAP at 8 bits in the same bytes": replace(setting, theirs=wider), **setting.shares("60%", "80%")}

    slower = {f"computing in {ms} ms": replace(eap, seconds=(ms * 1e-3, ms * 1e-4)) for ms in (4, 16, 70)}
    at_once = {f"{most} read ahead at most": replace(eap, ours=ours.but(window=most)) for most in (1, 4)}
    eap_prompt = replace(eap, phase="prefill")
    return [
        Headline(
            "fate", "Fate over LoD, decode, PCIe 3.0", "4.1", base, base.shares("60%", "80%") | precise(base, 8, 16)
        ),
        Headline("fate", "the same, PCIe 1.0", "2.3", replace(base, link="pcie1")),
        Headline("fate", "over LoD, prefill", "4.5", prompt, precise(prompt, 8, 16) | prompt.shares("80%")),
        Headline("fate", "over EAP, decode", "2.2", eap, eap_moved(eap) | slower | at_once),
        Headline("fate", "over EAP, prefill", "1.9", eap_prompt, eap_moved(eap_prompt)),
    ]


def _corm() -> list[Headline]:
    ours = Side("corm")
    base = Setting(ours, ON_DEMAND, "pcie4")
    moved = {
        "on_mispredict=reload": replace(base, ours=ours.but(on_mispredict="reload")),
        "without prefetch": replace(base, ours=ours.but(prefetch="none")),
    }
    gates = Setting(ours, GATES, "pcie4")
    return [
        Headline("corm", "CORM over int4 on demand, PCIe 4.0", "1.92–2.09", base, moved),
        Headline("corm", "over `mixtral-offload`", "1.23–1.27", gates, gates.shares("25%", "60%")),
    ]


class Replays:
    """Sides over one trace, each replayed once in each place."""

    def __init__(self, trace: Trace, profiles: Path | None) -> None:
        self._trace = trace
        self._profiles = profiles
        self._known: dict[str, Result] = {}

    def ratio(self, setting: Setting) -> float:
        """How much faster `ours` is."""
        ours, theirs = (self._speed(side, setting) for side in (setting.ours, setting.theirs))
        return ours / theirs

    def _speed(self, side: Side, setting: Setting) -> float:
        place = repr((side, setting.link, setting.share, setting.seconds))
        if place not in self._known:
            self._known[place] = self._replayed(side, setting)
        return self._known[place].metrics.by_phase[setting.phase].tok_s

    def _replayed(self, side: Side, setting: Setting) -> Result:
        trace, machine = self._trace, parse_link(setting.link)
        composition, profile = compose(side.preset, dict(side.changes)), None
        if composition.needs_profile and self._profiles is not None:
            command = f"tiermoe calibrate {trace.header.model} --text FILE --for {composition.profile}"
            profile = read_profile(self._profiles / f"{composition.profile}.json", None, command)
        times = spread(trace.header, *setting.seconds)
        if composition.prefetch == "percentile" and "window" not in side.changes:
            composition = with_windows(composition, trace, times, machine.bandwidth)
        settings = ReplaySettings(
            self._cache(side, setting), machine.bandwidth, machine.latency, bits=composition.bits or side.bits,
            times=times, profile=profile, copies=machine.copies, gather=GATHER / machine.bandwidth,
        )  # fmt: skip
        return replay(trace, composition, settings, _Unasked(trace))

    def _cache(self, side: Side, setting: Setting) -> CacheSize:
        cache, header = parse_cache(side.share or setting.share), self._trace.header
        if side.share_of is None or cache.fraction is None:
            return cache
        unit = slot_sizes(header, [side.share_of])[side.share_of]
        return CacheSize(nbytes=int(cache.fraction * sum(header.experts)) * unit)


def with_windows(composition: Composition, trace: Trace, times: Times, bandwidth: float) -> Composition:
    """Fate's composition with the windows that its calibration would find on the machine that is replayed."""
    timed = Trace(replace(trace.header, times=times), [])
    return composition.having({"window": tuple(windows(timed, run_bits(trace.header), bandwidth))})


class _Unasked(BeladyHits):
    """Nobody looks at Belady's hits here, which take their time."""

    def of(self, slots: int, bits: int) -> Metrics:
        return Metrics()


def row(headline: Headline, replays: Replays) -> str:
    """A line of the table; what cannot be replayed says why."""
    ours = _told(headline.setting, replays)
    moved = "; ".join(f"{what}: {_told(setting, replays)}" for what, setting in headline.moved.items())
    return f"| {headline.claim} | {headline.paper} | {ours} | {moved} |"


def _told(setting: Setting, replays: Replays) -> str:
    try:
        return f"{replays.ratio(setting):.2f}"
    except TiermoeError as error:
        return f"not replayed ({error})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--only", default="", help="systems, like hobbit,sti")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else []
    replays = Replays(read_trace(args.trace), args.profiles)
    print("| headline | paper | ours | what moves it |\n|---|--:|--:|---|")
    for headline in headlines():
        if not wanted or headline.system in wanted:
            print(row(headline, replays), flush=True)


if __name__ == "__main__":
    main()
