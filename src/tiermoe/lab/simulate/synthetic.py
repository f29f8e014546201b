"""Synthetic parts of a trace: forecasts, little passes and active neurons, drawn with a stated recall, share of
fallbacks and number of neurons, for traces that hold routing alone. What is drawn follows from the seed.

A forecast names as many experts as the token uses, so that its precision is its recall."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.simulate.costs import RECALL, run_bits
from tiermoe.lab.trace import Header, LayerTrace, Little, Pass, Trace, frequencies
from tiermoe.offload.policies.prediction.percentile import count_above

REACH = 3
"""Layers ahead that are forecast at least, where a recall says how it falls (HOBBIT looks so far)."""

QUARTER = 75.0
"""The percentile above which Fate prefetches."""

MISSED_TWICE = (1 - 0.9715) / (1 - 0.788)
"""Share of the experts that the first K lack which the experts above `QUARTER` lack as well (Fate, sections 3 and 4.2:
78.8 % are among the first K, 97.15 % above the percentile)."""

RECALLED = 0.8
"""Share of a token's experts that its little pass names (MoBiLE, section III-B: more than 80 %)."""

ACTIVE = 0.45
"""Share of an expert's neurons that are active (CORM, section 2: theta = .25 makes 55 % of Mixtral's inactive)."""

PERSISTENCE = 0.09
"""How much likelier a neuron is active if it was so at the expert's use before: measured on `models/stories-7m`, .50
against .41."""

_MOST_NEURONS = 1 << 17
_DIGITS = 10  # binary ones, of a probability


@dataclass(frozen=True, slots=True)
class Recall:
    """How many of a token's K experts the router of a later layer names on the input of an earlier one."""

    name: str  # as it was given
    points: tuple[tuple[float, ...], ...]
    """Distance less 1 → recall from the shallowest layer that is predicted to the deepest, evenly spaced; in between it
    is interpolated."""
    falls: bool = False  # beyond the distances of `points`: the first one's to the power of the distance
    missed_twice: float = MISSED_TWICE

    def of(self, distance: int, depth: float) -> float:
        """At a depth from 0, the shallowest layer that is predicted, to 1, the deepest."""
        if distance > len(self.points):
            return float(_at(self.points[0], depth) ** distance)
        return _at(self.points[distance - 1], depth)

    def accuracies(self, layers: int) -> list[float]:
        """Of each layer by the one before it; 0 for the first, which nothing predicts."""
        return [0.0, *(self.of(1, index / max(layers - 2, 1)) for index in range(layers - 1))]

    def reach(self, ahead: int) -> int:
        """Layers ahead to forecast for presets that look `ahead`. ConfigError if it is known of fewer."""
        if self.falls:
            return max(REACH, ahead)
        if ahead > len(self.points):
            raise ConfigError(
                f"--recall {self.name} is of {len(self.points)} layers ahead, and the preset looks {ahead} ahead; give "
                f"{ahead} numbers, one that falls by itself, or --set ahead={len(self.points)}"
            )
        return len(self.points)

    @property
    def told(self) -> str:
        """For people: the mean over depths at each distance."""
        reach = range(1, max(REACH, len(self.points)) + 1 if self.falls else len(self.points) + 1)
        means = (sum(self.of(distance, step / 100) for step in range(101)) / 101 for distance in reach)
        return ", ".join("1" if mean == 1 else f"{mean:.2f}".lstrip("0") for mean in means)


RECALLS = {
    "fate": Recall("fate", ((0.788,),), falls=True),
    "hobbit": Recall("hobbit", ((0.96,), (0.90,), (0.90,))),
    "corm": Recall("corm", ((0.75, 0.90, 0.90),), falls=True),
}
"""Of the papers: Fate's table 1; HOBBIT's figure 7-(b), of the first expert, here of all K; CORM's section 4 and figure
5-(a), lower layers .75, middle and upper ones up to .90."""


def parse_recall(text: str) -> Recall | None:
    """The recall of a name of `RECALLS`, of a number from 0 to 1 or 0% to 100%, which falls with the distance, or of a
    number for each distance, with commas. None for what is none of these: a file. ConfigError out of range."""
    if text in RECALLS:
        return RECALLS[text]
    try:
        numbers = [float(word[:-1]) / 100 if word.endswith("%") else float(word) for word in text.split(",")]
    except ValueError:
        return None
    for number in numbers:
        if not 0 <= number <= 1:
            raise ConfigError(f"--recall must be from 0 to 1, got {number:g}; write it like 0.9, or 0.96,0.9,0.9")
    return Recall(text, tuple((number,) for number in numbers), falls=len(numbers) == 1)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What is drawn. It takes the place of what a trace recorded of the same kind."""

    recall: Recall | None = None  # of forecasts; None: none are drawn
    fallback: float | None = None  # share of the decoded tokens whose little pass is not enough; None: likewise
    neurons: int | None = None  # of an expert; None: likewise
    seed: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is drawn."""
        return any(each is not None for each in (self.recall, self.fallback, self.neurons))

    def described(self, header: Header) -> dict[str, str]:
        """What is drawn for a trace, for people and `--json`."""
        found, holds = {}, header.holds
        if self.recall is not None:
            instead = ", in the place of recorded ones" if "forecasts" in holds else ""
            found["forecasts"] = f"simulated, recall {self.recall.told} by layers ahead{instead}"
        if self.fallback is not None:
            instead = ", in the place of recorded ones" if "little" in holds else ""
            found["little_passes"] = f"simulated, {self.fallback:.0%} fall back, recall {_short(RECALLED)}{instead}"
        if self.neurons is not None:
            instead = ", in the place of recorded ones" if "neurons" in holds else ""
            found["neurons"] = (
                f"simulated, {ACTIVE:.0%} of {self.neurons:,} active, recall {_short(RECALL)}, persistence "
                f"{_short(PERSISTENCE)}{instead}"
            )
        return found


def completed(trace: Trace, synthetic: Synthetic, ahead: int = 1) -> Trace:
    """The trace with the parts that `synthetic` draws. ahead: layers that a preset looks ahead. ConfigError for a
    recall of fewer, and for neurons that the experts' bytes cannot be; TraceError for an encoder's trace."""
    header = trace.header
    if header.encoder_layers:
        raise TraceError(
            f"the trace of {header.model} has an encoder, whose routers forecast nothing; leave --recall, --fallback "
            f"and --neurons out"
        )
    popularity, passes = _popularity(trace), trace.passes
    if synthetic.fallback is not None:
        passes = list(_with_little(passes, popularity, synthetic.fallback, synthetic.seed))
        made_from = {name: value for name, value in header.made_from.items() if name != "little"}
        header = replace(header, holds=header.holds | {"little"}, made_from=made_from)
    if (recall := synthetic.recall) is not None:
        reach = recall.reach(ahead)
        passes = list(_with_forecasts(passes, popularity, recall, reach, synthetic.seed))
        held = header.holds | {"forecasts", "counts"}
        header = replace(header, holds=held, forecast_distances=tuple(range(1, reach + 1)))
    if synthetic.neurons is not None:
        passes = list(_with_neurons(passes, synthetic.neurons, synthetic.seed))
        header = _with_neuron_bytes(header, synthetic.neurons)
    return Trace(header, passes)


def _popularity(trace: Trace) -> list[dict[int, float]]:
    """Layer → expert → tokens that it served, and one more."""
    return [{expert: count + 1.0 for expert, count in enumerate(row)} for row in frequencies(trace)]


def _with_forecasts(
    passes: Sequence[Pass], popularity: Sequence[Mapping[int, float]], recall: Recall, reach: int, seed: int
) -> Iterator[Pass]:
    """Each pass with forecasts of the next `reach` layers, a little pass with those of its own choices."""
    for number, passed in enumerate(passes):
        chance = random.Random(f"forecasts {seed} {number}")
        layers = _forecast(chance, passed.layers, popularity, recall, reach, passed.phase)
        little = passed.little
        if little is not None:
            of_little = _forecast(chance, little.layers, popularity, recall, reach, passed.phase)
            little = replace(little, layers=of_little)
        yield replace(passed, layers=layers, little=little)


def _forecast(
    chance: random.Random, layers: Sequence[LayerTrace], popularity: Sequence[Mapping[int, float]], recall: Recall,
    reach: int, phase: str,
) -> list[LayerTrace]:  # fmt: skip
    last = len(layers) - 1
    made = [replace(layer, forecasts={}, counts={}) for layer in layers]
    for index, layer in enumerate(made):
        for distance in range(1, min(reach, last - index) + 1):
            target = index + distance
            share = recall.of(distance, index / max(last - distance, 1))
            missed_twice = recall.missed_twice if phase == "decode" else None
            rankings = _rankings(chance, layers[target], popularity[target], share, missed_twice)
            if layer.experts and rankings:
                layer.forecasts[distance] = _summed(rankings)
                if phase == "prefill":
                    tokens = [[(expert, 1.0) for expert, _ in ranking] for ranking in rankings]
                    layer.counts[distance] = _summed(tokens)
    return made


def _summed(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Experts with the sums of their weights over tokens, most first."""
    if len(rankings) == 1:
        return list(rankings[0])
    sums: dict[int, float] = {}
    for ranking in rankings:
        for expert, weight in ranking:
            sums[expert] = sums.get(expert, 0.0) + weight
    return sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))


def _rankings(
    chance: random.Random, layer: LayerTrace, popularity: Mapping[int, float], recall: float, missed_twice: float | None
) -> list[list[tuple[int, float]]]:
    """Each token's ranking of the experts of `layer`, as a forecast has it; see `_ranking`."""
    tokens = zip(layer.experts, layer.weights, strict=True)
    return [_ranking(chance, *token, popularity, recall, missed_twice) for token in tokens]


def _ranking(
    chance: random.Random, chosen: Sequence[int], weights: Sequence[float], popularity: Mapping[int, float],
    recall: float, missed_twice: float | None,
) -> list[tuple[int, float]]:  # fmt: skip
    """K experts, of which the share `recall` are the token's own; then, unless `missed_twice` is None, those above
    `QUARTER` with most of the own ones that the first K lack, and as many more as a recorder keeps.

    The lower an own expert ranks, the likelier it is missed: expert i of K in proportion to 2 i - 1 (on
    `models/stories-7m` .98, .90, .77 and .55 are named). An expert that is named wrongly is drawn by its popularity and
    has the weight of the one whose place it takes."""
    k = len(chosen)
    ranks = sorted(range(k), key=lambda rank: -weights[rank])
    pool = {expert: count for expert, count in popularity.items() if expert not in chosen}
    misses = min(sum(chance.random() >= recall for _ in chosen), len(pool))
    missed = _drawn(chance, {rank: 2.0 * place + 1 for place, rank in enumerate(ranks)}, misses)
    near = kept = 0
    if missed_twice is not None:
        near = max(count_above(QUARTER, len(popularity)) - k, 0)
        kept = max(2 * k, -(-len(popularity) // 4) + 1)
    others = _drawn(chance, pool, misses + max(near, kept - k))
    wrong, others = dict(zip(missed, others, strict=False)), others[misses:]
    named = [wrong.get(rank, chosen[rank]) for rank in ranks]
    late = [chosen[rank] for rank in missed if near and chance.random() >= (missed_twice or 0.0)][:near]
    middle = late + others[: near - len(late)]
    chance.shuffle(middle)
    tail = (middle + others[near - len(late) :])[: max(near, kept - k)]
    least = min(weights)
    return [(expert, weights[rank]) for expert, rank in zip(named, ranks, strict=True)] + [
        (expert, least * (1 - place / (len(tail) + 1))) for place, expert in enumerate(tail, 1)
    ]


def _drawn(chance: random.Random, weights: Mapping[int, float], count: int) -> list[int]:
    """`count` different keys, drawn one after the other in proportion to their weights; all if they are fewer."""
    if not count:
        return []
    # whose exponential clock of that rate rings first is drawn first
    return sorted(weights, key=lambda key: chance.expovariate(weights[key]))[:count]


def _with_little(
    passes: Sequence[Pass], popularity: Sequence[Mapping[int, float]], fallback: float, seed: int
) -> Iterator[Pass]:
    """Each decoded token with a little pass whose routers name the share `RECALLED` of the token's experts, the first
    layer's all of them, since both passes begin with the same token. Its confidence is 0 or 1, so that the share falls
    back at any gamma between."""
    chance = random.Random(f"little {seed}")
    decoded = [number for number, passed in enumerate(passes) if passed.phase == "decode"]
    unsure = set(chance.sample(decoded, round(fallback * len(decoded))))
    for number, passed in enumerate(passes):
        if passed.phase != "decode":
            yield passed
            continue
        layers = []
        for index, layer in enumerate(passed.layers):
            rankings = _rankings(chance, layer, popularity[index], RECALLED if index else 1.0, None)
            experts = [[expert for expert, _ in ranking] for ranking in rankings]
            layers.append(LayerTrace(experts, [[weight for _, weight in ranking] for ranking in rankings]))
        yield replace(passed, little=Little(0.0 if number in unsure else 1.0, layers))


def _with_neurons(passes: Sequence[Pass], neurons: int, seed: int) -> Iterator[Pass]:
    """Passes over one token with each expert's active neurons, and with those that the layer before names, as many, of
    which `RECALL` are right."""
    chance = random.Random(f"neurons {seed}")
    stays, comes = ACTIVE + PERSISTENCE * (1 - ACTIVE), ACTIVE * (1 - PERSISTENCE)
    wrong = ACTIVE * (1 - RECALL) / (1 - ACTIVE)
    before: dict[tuple[int, int], int] = {}
    for passed in passes:
        if passed.phase != "decode" or passed.size != 1:
            yield passed
            continue
        layers = []
        for index, layer in enumerate(passed.layers):
            active, named = {}, {}
            for expert in {expert for chosen in layer.experts for expert in chosen}:
                known = before.get((index, expert))
                if known is None:
                    now = _neurons(chance, ACTIVE, neurons)
                else:
                    now = known & _neurons(chance, stays, neurons) | ~known & _neurons(chance, comes, neurons)
                before[index, expert] = active[expert] = now
                named[expert] = now & _neurons(chance, RECALL, neurons) | ~now & _neurons(chance, wrong, neurons)
            layers.append(replace(layer, neurons=active, named=named))
        yield replace(passed, layers=layers)


def _neurons(chance: random.Random, share: float, neurons: int) -> int:
    """A set of neurons, each of which is in it with the probability `share`, to `_DIGITS` binary digits."""
    found, digits = 0, round(share * (1 << _DIGITS))
    for digit in range(_DIGITS):
        drawn = chance.getrandbits(neurons)
        found = found | drawn if digits >> digit & 1 else found & drawn
    return found


def _with_neuron_bytes(header: Header, neurons: int) -> Header:
    """The header with a third of an expert's bytes for W1, the rest for its neurons: three matrices of one shape.
    `made_from` has no theta: any is taken, and changes nothing."""
    nbytes = header.expert_bytes[run_bits(header)][0]
    if not 1 <= neurons <= min(_MOST_NEURONS, nbytes):
        raise ConfigError(
            f"--neurons {neurons:,} of an expert of {nbytes:,} bytes cannot be; give the model's moe_intermediate_size"
        )
    made_from = {name: value for name, value in header.made_from.items() if name != "theta"}
    third = nbytes // 3
    return replace(
        header, holds=header.holds | {"neurons"}, head_bytes=third, neuron_bytes=max((nbytes - third) // neurons, 1),
        neurons=neurons, neuron_slot_bytes={}, made_from=made_from,
    )  # fmt: skip


def _at(points: Sequence[float], depth: float) -> float:
    place = depth * (len(points) - 1)
    low = min(int(place), len(points) - 1)
    high = min(low + 1, len(points) - 1)
    return points[low] + (place - low) * (points[high] - points[low])


def _short(share: float) -> str:
    return f"{share:.2f}".lstrip("0")
