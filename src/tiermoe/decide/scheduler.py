"""A composition at work: what the router chose becomes demands, demands become experts in slots, and what comes next is
read ahead. The engine and the simulator run this very code, over a real and a virtual link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tiermoe.decide.controller import Controller
from tiermoe.decide.counts import Counts
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.decide.eviction.undoable import Undoable
from tiermoe.decide.filling import Uses, merged, most_used
from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.decide.precision import Precision
from tiermoe.decide.prediction.protocol import Forecasts, Predictor
from tiermoe.decide.prefetch_trial import PrefetchTrial
from tiermoe.decide.reuse import Reuse, SizeCurve
from tiermoe.decide.routing import CachePrior
from tiermoe.decide.shares import EVERY
from tiermoe.types import Demand, ExpertKey, Ready, Routed

_LONG_ENOUGH = 16  # decoded tokens that say what others take
_TOLD_A_PASS = 64  # experts that the background has brought: 50 µs each where kernels are told of them


@dataclass(slots=True)
class Scheduler:
    """One model's layers under one composition.

    together: a layer computes when all its loads are there. whole_layer: every expert of a layer is fetched, routed or
    not; `experts` is how many each layer has. proceed: a decoding layer that was predicted leaves out the experts that
    were not, as far as they are not here (CORM's misprediction); where nothing was predicted for it in its pass, or
    none of its experts, all come. elsewhere: in decode, how many of a layer's misses are computed elsewhere and not
    loaded (HOBBIT, section 4, cooperative computing). settles: what has come stays, in the one precision there is, and
    nothing is predicted: where all that a token chose has come there is nothing to decide. trial: says which decode
    passes prefetch, by what they take from `begin_pass` to the end of the last layer; None: all do, as prefills always
    do. fills: whether the background may read experts into free slots, for it changes nothing but hits; `everything`:
    all of them fit. undoable: the eviction policies, where a decode pass may be discarded. prior: moves the choices of
    decoded tokens towards experts that are here. exact: what is read and asked for does not depend on what is cached.
    uses: counted since the beginning; `reuse` too, where exact and not all fits.
    """

    controller: Controller
    clock: Clock
    precision: Precision
    prediction: Predictor
    experts: list[int]
    fixed_bits: int
    mask: bool = True
    together: bool = False
    whole_layer: bool = False
    proceed: bool = False
    elsewhere: Callable[[int], int] | None = None
    settles: bool = False
    trial: PrefetchTrial | None = None
    fills: bool = False
    everything: bool = False
    undoable: Sequence[Undoable] = ()
    prior: CachePrior | None = None
    exact: bool = True
    reuse: Reuse = field(init=False)
    uses: Uses = field(init=False)
    discarded: Counts = field(default_factory=Counts)
    _before_pass: Counts = field(default_factory=Counts)
    _predicted: dict[int, set[int]] = field(default_factory=dict)  # layer → experts, in the running pass
    _earlier_uses: Sequence[Sequence[float]] = ()
    _unshared: int = 0  # tokens since slots were shared out
    _pass_tokens: int = 0
    _repeats: bool = False  # the next pass, one that was discarded
    _began: float | None = None  # when the running pass did, where the trial is told
    _waited: float = 0.0  # by then, for experts
    _took: tuple[float, float] | None = None  # by the last one, a token and a layer, until known not to be discarded

    def __post_init__(self) -> None:
        self.uses = Uses(self.experts)
        self.reuse = Reuse(self.experts)

    @property
    def prefetching(self) -> str:
        """What the trial has decided, with its figures; empty where there is none or it has not ended."""
        return str(self.trial or "")

    def fill(self, uses: Sequence[Sequence[float]]) -> None:
        """Begins to read experts into free slots, in the background: those that the prediction says the cache begins
        with, else all of them where all fit, or those that earlier runs used most. uses: theirs, a row of experts for
        each layer; empty where nothing is known."""
        self._earlier_uses = uses
        if uses:
            self._share_out()
        first, bits = self.prediction.first(), self.precision.predicted
        if first:
            self.controller.fill([ExpertKey(layer, expert, bits(layer, (), expert)) for layer, expert, _ in first])
        elif self.fills and (uses or self.everything):
            self.controller.fill(most_used(self.experts, self.fixed_bits, uses, self.everything))

    def new_sequence(self) -> None:
        """Another request begins: records that are kept per sequence are forgotten."""
        self.clock.new_sequence()
        self.prediction.new_sequence()
        self.controller.cache.new_sequence()

    @contextlib.contextmanager
    def ruled_by(self, precision: Precision) -> Iterator[None]:
        """Passes within it ask for the bits that another rule says."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before

    @contextlib.contextmanager
    def moved_by(self, strength: float) -> Iterator[None]:
        """Passes within it move choices by a prior of another strength."""
        before = self.prior
        assert before is not None
        self.prior = CachePrior(strength, before.always, before.untouched, before.most_moved)
        try:
            yield
        finally:
            self.prior = before

    def begin_pass(self, tokens: int, forecasts: Forecasts, phase: str, first: int = 0) -> None:
        """A forward pass over `tokens` tokens begins (all rows of a batch counted). phase: 'prefill' or 'decode'.
        first: its first MoE layer, not 0 in a decoder behind an encoder."""
        self.controller.collect()
        self.controller.tell(_TOLD_A_PASS)
        self._before_pass = self.controller.counts.copy()
        self._pass_tokens = tokens
        self._predicted.clear()
        self.clock.advance(tokens)
        self._begin_timing(phase)
        for policy in self.undoable:
            policy.begin() if phase == "decode" and not self._repeats else policy.keep()
        self._repeats = False
        self.uses.begin_pass()
        self._unshared += tokens
        if self._unshared >= EVERY:
            self._share_out()
        self._prefetch(first - 1, forecasts)

    def discard_pass(self) -> None:
        """The last pass does not count: its hits and misses are kept apart, it used nothing, and its token is run again
        (MoBiLE)."""
        counts = self.controller.counts
        passed = counts.minus(self._before_pass)
        self.discarded.add(passed)
        self.controller.counts = self._before_pass.copy()
        self.clock.token -= self._pass_tokens
        self._took = None
        self.uses.take_back()
        for policy in self.undoable:
            policy.undo()
        self._repeats = True

    def roll_back(self) -> None:
        """After a pass that was interrupted anywhere, when the link has dropped all that was under way: the next one
        begins as the first one does, but for what is resident (`Loads.roll_back`)."""
        self.controller.roll_back()
        self._began = self._took = None
        self._repeats = False
        self.new_sequence()

    def here(self, layer: int) -> Callable[[int], bool]:
        """Whether an expert of the layer could be computed now, in the bits that would be asked for."""
        self.controller.recall()
        self.controller.collect()
        cache, precision = self.controller.cache, self.precision
        return lambda expert: cache.find(layer, expert, precision.predicted(layer, (), expert)) is not None

    def run_layer(self, routed: Routed, forecasts: Forecasts) -> Iterator[list[Ready]]:
        """Yields the experts of a layer in groups, as they can be computed (`Controller.run_layer`)."""
        self.clock.layer = routed.layer
        self.prediction.observe(routed)
        demands = self._demands(routed)
        self.uses.note(routed.layer, demands)
        if self.exact and not self.everything:
            self.reuse.note(routed.layer, demands, routed.phase)

        def speculate() -> None:
            self._prefetch(routed.layer, forecasts)

        elsewhere = self.elsewhere if routed.phase == "decode" else None
        yield from self.controller.run_layer(routed.layer, demands, speculate, self.together, elsewhere)
        if self._began is not None and routed.layer == len(self.experts) - 1:
            elapsed = self.controller.link.now() - self._began
            computed = elapsed - (self.controller.waited_s - self._waited)
            self._took = elapsed / self._pass_tokens, computed / len(self.experts)

    def _share_out(self) -> None:
        """Slots follow the uses of this run and the ones before it, where they may move and some are missing."""
        self._unshared = 0
        if self.controller.cache.shared and not self.everything:
            self.controller.cache.follow(merged(self._earlier_uses, self.uses.counts))

    def size_curve(self, slots: int, decode: PhaseCosts) -> SizeCurve | None:
        """What decoding, which took `decode` with a cache of `slots` slots, says of other sizes; None where it was
        short, missed nothing, or read otherwise for what was cached."""
        rate = decode.counts.hit_rate
        if not self.exact or decode.tokens < _LONG_ENOUGH or rate is None or rate == 1:
            return None
        compute, wait = (seconds / decode.tokens for seconds in (decode.seconds - decode.wait_s, decode.wait_s))
        distances = tuple(map(float, self.reuse.distances))
        return SizeCurve(distances, float(self.reuse.first), slots, len(self.experts), 1 - rate, compute, wait)

    def _begin_timing(self, phase: str) -> None:
        if self.trial is None:
            return
        if self._took is not None:
            self.trial.note(*self._took)
            self._took = None
        self._began = self.controller.link.now() if phase == "decode" else None
        self._waited = self.controller.waited_s

    def _demands(self, routed: Routed) -> list[Demand]:
        demands = self.precision.demands(routed)
        if self.proceed and routed.phase == "decode":
            demands = self._as_predicted(routed.layer, demands)
        if self.whole_layer:
            asked = {demand.expert for demand in demands}
            rest = (expert for expert in range(self.experts[routed.layer]) if expert not in asked)
            demands += [Demand(expert, 0, self.fixed_bits) for expert in rest]
        return demands

    def _as_predicted(self, layer: int, demands: list[Demand]) -> list[Demand]:
        """Of a layer that was predicted, experts that were not and are not here are skipped, but never all."""
        predicted = self._predicted.get(layer)
        if predicted is None:
            return demands
        self.controller.recall()
        cache = self.controller.cache

        def runs(demand: Demand) -> bool:
            place = (layer, demand.expert, demand.bits)
            return demand.expert in predicted or bool(cache.find(*place) or cache.arriving(*place))

        if not any(map(runs, demands)):
            return demands
        return [demand if runs(demand) else Demand(demand.expert, demand.tokens, 0) for demand in demands]

    def _prefetch(self, layer: int, forecasts: Forecasts) -> None:
        if self.trial is not None and self._began is not None and not self.trial.on:
            return
        cache, precision = self.controller.cache, self.precision
        named: list[ExpertKey] = []

        def bits_of(target: int, expert: int) -> int:
            ranked = self.prediction.ranking(target, forecasts) if precision.reads_forecasts else ()
            return precision.predicted(target, ranked, expert)

        def here(target: int, expert: int) -> bool:
            bits = bits_of(target, expert)
            there = cache.find(target, expert, bits) or cache.arriving(target, expert, bits)
            return there is not None or not bits  # what would be skipped need not come

        def keys() -> Iterator[ExpertKey]:
            for wanted in self.prediction.candidates(layer, forecasts, here):
                bits = bits_of(wanted.layer, wanted.expert)
                if bits:
                    named.append(ExpertKey(wanted.layer, wanted.expert, bits))
                    yield named[-1]

        if self.controller.prefetch(keys(), self.mask) and self.proceed:
            for key in named:
                self._predicted.setdefault(key.layer, set()).add(key.expert)
