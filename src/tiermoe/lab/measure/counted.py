"""What a trace alone tells, without weights of a model: profiles of presets that are counted on it, and how often its
forecasts were right.

What is counted on one part of a trace is replayed on another (`parted`). What no trace tells is *given*, by the values
of this file, and `GIVEN` says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from tiermoe.errors import ProfileError, TraceError
from tiermoe.lab.papers import corm, fate, hobbit, statistics
from tiermoe.lab.papers.hobbit import MissPenalties
from tiermoe.lab.papers.statistics import routings
from tiermoe.lab.simulate import ReplaySettings, run_bits
from tiermoe.lab.simulate.synthetic import Recall
from tiermoe.lab.trace import Trace, frequencies
from tiermoe.offload.policies.prediction import count_paths, paths_to_json
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import Profile

LOW_SHARE = 0.32
"""Share of a layer's experts, the least used, that EdgeMoE's table has at 2 bits: what its search finds on
`models/stories-7m` (82 of 256, docs/systems.md). The paper's search measures losses, which no trace has."""

LOW_POPULARITY = 0.3
"""Share of a prompt's experts, the least popular, that Fate fetches at 2 bits: in its section 4.5 they serve 15 % of
the tokens. Its search measures losses too."""

THETA = 0.25
"""CORM's for Mixtral (section 2)."""

GIVEN = {
    "edgemoe": f"2 bits for each layer's {LOW_SHARE:.0%} least used experts",
    "fate": f"low_popularity {LOW_POPULARITY:g}",
    "corm": f"2 bits for each layer's {corm.LOW_SHARE:.0%} least used experts",
}
"""Profile → what is given in it, not measured."""


def parted(trace: Trace) -> tuple[Trace, Trace, str]:
    """(part to count on, part to replay, what they are): the even sequences and the odd ones; of a single sequence the
    first half of its decoded tokens, and its prompt with the other half. TraceError for too few tokens."""
    if len({passed.sequence for passed in trace.passes}) > 1:
        return *statistics.halves(trace), "counted on the even sequences, replayed on the odd ones"
    decoded = [number for number, passed in enumerate(trace.passes) if passed.phase == "decode"]
    if len(decoded) < 2:
        raise TraceError(
            f"the trace of {trace.header.model} has {len(decoded)} decoded tokens: too few to count profiles on one "
            f"half and to replay the other; give a longer trace, or --profiles FOLDER"
        )
    first = set(decoded[: len(decoded) // 2])
    counted, judged = (
        [passed for number, passed in enumerate(trace.passes) if (number in first) == inside]
        for inside in (True, False)
    )
    rest = len(decoded) - len(first)
    told = f"counted on the first {len(first)} decoded tokens, replayed on the prompt and the other {rest}"
    return replace(trace, passes=counted), replace(trace, passes=judged), told


def counted_profile(name: str, trace: Trace, settings: ReplaySettings, recall: Recall | None = None) -> Profile:
    """The profile `name` counted on a trace, for replays with these settings. recall: of forecasts that were drawn;
    None: the trace recorded its own, or has none. ProfileError for a preset whose profile takes more than routing."""
    if name not in COUNTED:
        raise ProfileError(f"a trace counts no profile of {name}; those of {', '.join(COUNTED)} can be counted")
    header = trace.header
    found, data = COUNTED[name](trace, settings, recall)
    return Profile(name, header.fingerprint, {}, found, data, header.model, header.experts, header.top_k)


Contents = tuple[dict[str, Any], dict[str, Any]]
"""Settings and data of a profile."""


def _hobbit(trace: Trace, settings: ReplaySettings, _: Recall | None) -> Contents:
    """Thresholds at the paper's shares, and the weights of the cache."""
    t1, t2 = hobbit.thresholds_of(trace)
    composition = PRESETS["hobbit"].having({"t1": t1, "t2": t2})
    found = MissPenalties(trace, composition, settings.bits or run_bits(trace.header), settings.cache).search()
    return {"t1": t1, "t2": t2, "weights": list(found.weights)}, {}


def _edgemoe(trace: Trace, settings: ReplaySettings, _: Recall | None) -> Contents:
    """Activation paths, frequencies, and a table of bits by usage."""
    upper = settings.bits or run_bits(trace.header)
    paths = paths_to_json(count_paths(routings(trace), PRESETS["edgemoe"]["path"]))
    table = corm.bits_by_usage(trace, upper, min(2, upper), LOW_SHARE)
    return {}, {"paths": paths, "frequencies": frequencies(trace), "table": table}


def _fate(trace: Trace, settings: ReplaySettings, recall: Recall | None) -> Contents:
    """The boundary, from the stated recall of drawn forecasts or from how right recorded ones are (1 without any: then
    EAP alone can read it), windows of the machine, and paths of one layer for EAP."""
    header = trace.header
    if recall is not None:
        boundary = fate.boundary(recall.accuracies(len(header.experts)))
    else:
        boundary = fate.boundary(fate.accuracies(trace)) if header.forecast_distances else 1
    timed = replace(trace, header=replace(header, times=settings.times or header.times))
    bits = settings.bits or run_bits(header)
    window = statistics.windows(timed, bits, settings.bandwidth, settings.latency)
    data = {"paths": paths_to_json(count_paths(routings(trace), 1)), "frequencies": frequencies(trace)}
    return {"boundary": boundary, "window": window, "low_popularity": LOW_POPULARITY}, data


def _corm(trace: Trace, settings: ReplaySettings, _: Recall | None) -> Contents:
    """Bits by usage."""
    preset = PRESETS["corm"]
    table = corm.bits_by_usage(trace, preset.bits or corm.BITS, preset["low_bits"], corm.LOW_SHARE)
    return {"theta": THETA}, {"table": table, "frequencies": frequencies(trace)}


COUNTED: dict[str, Callable[[Trace, ReplaySettings, Recall | None], Contents]] = {
    "hobbit": _hobbit, "edgemoe": _edgemoe, "fate": _fate, "corm": _corm,
}  # fmt: skip
"""Profile → what counts its settings and data on a trace."""


def measured_recall(trace: Trace, name: str) -> Recall:
    """How right the recorded forecasts of a trace are, by layer and distance. TraceError without any."""
    found = statistics.recalls(trace, trace, "next-gate")
    if not found:
        raise TraceError(
            f"the trace of {trace.header.model} ({name}) holds no forecasts, of which a recall could be measured; name "
            f"one that tiermoe trace made, or give a number"
        )
    points = tuple(
        tuple(share for (_, before), share in found.items() if before == distance)
        for distance in sorted({before for _, before in found})
    )
    quarter = [share for (_, before), share in statistics.recalls(trace, trace, "percentile").items() if before == 1]
    missed = 1 - fmean(points[0])
    return Recall(name, points, missed_twice=(1 - fmean(quarter)) / missed if missed else 0.0)
