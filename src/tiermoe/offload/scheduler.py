"""The scheduler: a composition at work. What the router chose becomes demands, demands become experts in slots, and
what comes next is read ahead. The engine and the simulator run this very code, over a real and a virtual link.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tiermoe.metrics import ExpertCounts, PhaseMetrics
from tiermoe.offload.cache import SHARE_EVERY
from tiermoe.offload.loader import ExpertLoader
from tiermoe.offload.policies.eviction import Clock, Popularity
from tiermoe.offload.policies.eviction.base import Undoable
from tiermoe.offload.policies.precision import Precision
from tiermoe.offload.policies.prediction import Forecasts, Predictor
from tiermoe.offload.policies.prefetch_trial import PrefetchTrial
from tiermoe.offload.policies.routing import CachePrior
from tiermoe.offload.usage import Reuse, SizeCurve, Uses, merged, most_used, shares_of
from tiermoe.types import Demand, ExpertKey, Ready, Routed, Wanted

_LONG_ENOUGH = 16  # decoded tokens that say what others take
_WARMED_A_PASS = 64  # experts that the background has brought: 50 µs each if kernels are given their addresses


@dataclass(slots=True)
class Scheduler:
    """One model's layers under one composition.

    together: a layer computes when all its loads are there. whole_layer: every expert of a layer is fetched, routed or
    not; `experts` is how many each layer has, `top_k` how many of them a token uses. proceed: a decoding layer that was
    predicted leaves out the experts that were not, as far as they are not resident (CORM's misprediction); if nothing
    was predicted for it in its pass, or none of its experts, all come. substitutes: tokens use what was predicted
    instead (`as_predicted`), which whoever computes has to do. cpu_fallback: in decode, how many of a layer's misses
    are computed on the CPU and not loaded (HOBBIT, section 4, cooperative computing). settles: what has come stays, in
    the one precision there is, and nothing is predicted: if all that a token chose has come there is nothing to decide.
    trial: says which decode passes prefetch, by what they take from `begin_pass` to the end of the last layer; None:
    all do, as prefills always do. fills: whether the background may read experts into free slots, for it changes
    nothing but hits; `everything`: all of them fit. undoable: the eviction policies, if a decode pass may be discarded.
    placed: what the cache begins with if its policy is a static placement, most wanted first. reads_weights: eviction
    policies do, and are told of each layer's choices. prior: moves the choices of decoded tokens towards experts that
    are resident. exact: what is read and asked for does not depend on what is cached. `reuse` is counted since the
    beginning if exact and not all fits.
    """

    loader: ExpertLoader
    clock: Clock
    popularity: Popularity
    precision: Precision
    prediction: Predictor
    experts: list[int]
    top_k: list[int]
    fixed_bits: int
    mask: bool = True
    together: bool = False
    whole_layer: bool = False
    proceed: bool = False
    substitutes: bool = False
    cpu_fallback: Callable[[int], int] | None = None
    settles: bool = False
    predicts: bool = True
    trial: PrefetchTrial | None = None
    fills: bool = False
    everything: bool = False
    undoable: Sequence[Undoable] = ()
    placed: Sequence[Wanted] = ()
    reads_weights: bool = False
    prior: CachePrior | None = None
    exact: bool = True
    drafting: int = 0
    uses: Uses = field(init=False)  # tokens that each expert has served, as far as `record_hits` knows
    reuse: Reuse = field(init=False)
    _depth: int = field(init=False)  # layers of a pass that does not draft
    _any_copy_serves: bool = field(init=False)  # experts are loaded in one precision
    discarded: ExpertCounts = field(default_factory=ExpertCounts)
    _hits: list[tuple[int, Sequence[Sequence[int]]]] = field(default_factory=list)  # that policies have not learnt of
    _phase: str = "prefill"  # of the running pass
    computes_hits_at_once: bool = False
    """Whether a layer of the running pass all of whose experts are resident can be computed at once, and reported by
    `all_hit`, while no prefetch is pending (`ExpertLoader.uncommitted`): nothing is read ahead, and there is one
    precision."""
    predicting: bool = True  # the running pass asks the predictor, to prefetch or to watch it
    _prefetches: bool = True  # the running pass does
    _watches: bool = False  # the running pass does not, and compares what it would have read with what is chosen
    _named: dict[int, set[int]] = field(default_factory=dict)  # layer → absent experts, in a pass that watches
    _before_pass: ExpertCounts = field(default_factory=ExpertCounts)
    # layer → experts, the likeliest first, in the running pass
    _predicted: dict[int, dict[int, None]] = field(default_factory=dict)
    _earlier_uses: Sequence[Sequence[float]] = ()
    _unranked: int = 0  # tokens since uses were last counted together
    _pass_tokens: int = 0
    _repeats: bool = False  # the next pass, one that was discarded
    _began: float | None = None  # when the running pass did, if the trial measures it
    _waited: float = 0.0  # by then, for experts
    _took: tuple[float, float] | None = None  # by the last one, a token and a layer, until known not to be discarded

    def __post_init__(self) -> None:
        self.uses = Uses(self.experts)
        self.reuse = Reuse(self.experts)
        self._depth = len(self.experts) - self.drafting
        self._any_copy_serves = len(self.precision.loaded) == 1

    @property
    def prefetching(self) -> str:
        """What the trial has decided, with its figures; empty if there is none or it has not ended."""
        return str(self.trial or "")

    def fill(self, uses: Sequence[Sequence[float]]) -> None:
        """Begins to read experts into free slots, in the background: those that the prediction or the eviction policy
        says the cache begins with, else all of them if all fit, or those that earlier runs used most. uses: theirs, a
        row of experts for each layer; empty if nothing is known."""
        self._earlier_uses = uses
        if uses:
            self._count_together()
        first, bits = self.prediction.initial_experts() or self.placed, self.precision.predicted
        if first:
            self.loader.fill([ExpertKey(layer, expert, bits(layer, (), expert)) for layer, expert, _ in first])
        elif self.fills and (uses or self.everything):
            self.loader.fill(most_used(self.experts, self.fixed_bits, uses, self.everything))

    def new_sequence(self) -> None:
        """Another request begins: records that are kept per sequence are forgotten."""
        self.record_hits()
        self.clock.new_sequence()
        self.prediction.new_sequence()
        self.loader.cache.new_sequence()

    @contextlib.contextmanager
    def ruled_by(self, precision: Precision) -> Iterator[None]:
        """Passes within it ask for the bits that another rule says."""
        self.record_hits()
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.record_hits()
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

    def begin_pass(self, tokens: int, forecasts: Forecasts, phase: str, first: int = 0, resumed: bool = False) -> None:
        """A forward pass over `tokens` tokens begins (all rows of a batch counted). phase: 'prefill' or 'decode'.
        first: its first MoE layer, not 0 in a decoder after an encoder, nor in a pass that drafts. resumed: it goes on
        with that layer after other passes, or drafts, and its tokens are counted already."""
        self.record_hits()
        self.loader.collect()
        self.loader.report_warmed(_WARMED_A_PASS)
        self._before_pass = self.loader.counts.copy()
        self._phase, self._pass_tokens = phase, tokens
        self._predicted.clear()
        self.clock.advance(tokens, not resumed)
        drafts = first >= self._depth
        self._begin_timing(phase, drafts)
        for policy in self.undoable:
            policy.start() if phase == "decode" and not self._repeats else policy.keep()
        self._repeats = False
        self.uses.start_pass()
        self._unranked += 0 if resumed else tokens
        if self._unranked >= SHARE_EVERY:
            self._count_together()
        self._prefetches = self.predicts and not drafts and (self.trial is None or self._began is None or self.trial.on)
        self._watches = self.trial is not None and self._began is not None and self.trial.watching
        self._named.clear()
        self.predicting = self._prefetches or self._watches
        self.computes_hits_at_once = self._any_copy_serves and not (self.predicting or self.whole_layer)
        if self.predicting:
            self._prefetch(first - 1, forecasts)

    def discard_pass(self) -> None:
        """The last pass does not count: its hits and misses are kept apart, it used nothing, and its token is run again
        (MoBiLE)."""
        self.record_hits()
        counts = self.loader.counts
        self.discarded.add(counts.minus(self._before_pass))
        self.loader.counts = self._before_pass.copy()
        self.clock.token -= self._pass_tokens
        self._took = None
        self.uses.discard_pass()
        self.prediction.discard_pass()
        for policy in self.undoable:
            policy.undo()
        self._repeats = True

    def roll_back(self) -> None:
        """After a pass that was interrupted anywhere, when the link has dropped all that was under way: the next one
        begins as the first one does, but for what is resident (`ExpertLoader.roll_back`)."""
        self._hits.clear()
        self.loader.roll_back()
        self._began = self._took = None
        self._repeats = False
        self.new_sequence()

    def is_resident(self, layer: int) -> Callable[[int], bool]:
        """Whether an expert of the layer could be computed now, in the bits that would be asked for."""
        self.loader.recall()
        self.loader.collect()
        cache, precision = self.loader.cache, self.precision
        return lambda expert: cache.find(layer, expert, precision.predicted(layer, (), expert)) is not None

    @property
    def moves_choices(self) -> str:
        """The setting by which others run than the experts that a router chose; empty: none does."""
        if self.prior is not None:
            return "routing=cached"
        return "on_mispredict=predicted" if self.substitutes else ""

    def predicted(self, layer: int) -> list[int]:
        """The experts that were read ahead for a layer of the running pass, or would have been if they had not been
        here, the likeliest first; empty if nothing was predicted."""
        return [*self._predicted.get(layer, ())]

    def all_hit(self, layer: int, hits: int, chosen: Sequence[Sequence[int]]) -> None:
        """A layer was computed whose `hits` experts were all resident (`computes_hits_at_once`). chosen: they, by
        token, of which policies learn before they next decide; empty if nothing is decided any more (`settles`)."""
        self.loader.counts.hits += hits
        if chosen:
            self._hits.append((layer, chosen))
        if self._began is not None:
            self._end_timing(layer)

    def run_layer(self, routed: Routed, forecasts: Forecasts) -> Iterator[list[Ready]]:
        """Brings the experts that a layer's router chose (`ExpertLoader.run_layer`), in the precisions and as far as
        the composition wants them. What else is recorded of the layer is so once its loads have begun."""
        if self._hits:
            self.record_hits()
        layer, decoding = routed.layer, routed.phase == "decode"
        self.clock.layer = layer
        demands = self.precision.demands(routed)
        if self.reads_weights:
            self.loader.cache.routed(routed)
        if self.proceed and decoding:
            demands = self._as_predicted(layer, demands)
        if self.whole_layer:
            asked = {demand.expert for demand in demands}
            rest = (expert for expert in range(self.experts[layer]) if expert not in asked)
            demands += [Demand(expert, 0, self.fixed_bits) for expert in rest]
        if self.trial is not None and (named := self._named.get(layer)):
            self.trial.record_named(len(named), sum(demand.expert in named for demand in demands))
        groups = self.loader.run_layer(
            layer,
            demands,
            functools.partial(self._prefetch, layer, forecasts) if self.predicting else None,
            self.together,
            self.cpu_fallback if decoding else None,
            functools.partial(self._end_timing, layer) if self._began is not None else None,
        )
        self._record(routed, demands)
        return groups

    def record_hits(self) -> None:
        """Policies learn of the layers that `all_hit` has reported, as from `run_layer`. For the thread of the steps
        alone; others read `uses` and `size_curve` as they are."""
        if not self._hits:
            return
        hits, self._hits = self._hits, []
        for layer, chosen in hits:
            self.clock.layer = layer
            routed = Routed(layer, self._phase, chosen, [()] * len(chosen))
            demands = self.precision.demands(routed)
            self._record(routed, demands)
            self.loader.hit(layer, demands)

    def size_curve(self, slots: int, decode: PhaseMetrics) -> SizeCurve | None:
        """What decoding, which took `decode` with a cache of `slots` slots, says of other sizes; None if it was
        short, missed nothing, or read otherwise for what was cached."""
        rate = decode.counts.hit_rate
        if not self.exact or decode.tokens < _LONG_ENOUGH or rate is None or rate == 1:
            return None
        compute, wait = (seconds / decode.tokens for seconds in (decode.seconds - decode.wait_s, decode.wait_s))
        distances = tuple(map(float, self.reuse.distances))
        return SizeCurve(distances, float(self.reuse.first), slots, len(self.experts), 1 - rate, compute, wait)

    def _record(self, routed: Routed, demands: Sequence[Demand]) -> None:
        if self.predicts and routed.layer < self._depth:
            self.prediction.observe(routed)
        self.uses.record(routed.layer, demands)
        if self.exact and not self.everything:
            self.reuse.record(routed.layer, demands, routed.phase)

    def _count_together(self) -> None:
        """Eviction and shares of slots learn the uses of this run and the ones before it, if some are missing."""
        self._unranked = 0
        if self.everything:
            return
        uses = merged(self._earlier_uses, self.uses.counts)
        self.popularity.shares = shares_of(uses, self.top_k)
        self.loader.cache.follow(uses)

    def _begin_timing(self, phase: str, drafts: bool) -> None:
        if self.trial is None:
            return
        if self._took is not None:
            self.trial.record(*self._took)
            self._took = None
        self._began = self.loader.link.now() if phase == "decode" and not drafts else None
        self._waited = self.loader.waited_s

    def _end_timing(self, layer: int) -> None:
        """A layer of a pass that the trial measures has ended."""
        if self._began is not None and layer == self._depth - 1:
            elapsed = self.loader.link.now() - self._began
            computed = elapsed - (self.loader.waited_s - self._waited)
            self._took = elapsed / self._pass_tokens, computed / self._depth

    def _as_predicted(self, layer: int, demands: list[Demand]) -> list[Demand]:
        """Of a layer that was predicted, experts that were not and are not here are skipped, but never all."""
        predicted = self._predicted.get(layer)
        if predicted is None:
            return demands
        self.loader.recall()
        cache = self.loader.cache

        def runs(demand: Demand) -> bool:
            place = (layer, demand.expert, demand.bits)
            return demand.expert in predicted or bool(cache.find(*place) or cache.arriving(*place))

        if not any(map(runs, demands)):
            return demands
        return [demand if runs(demand) else Demand(demand.expert, demand.tokens, 0) for demand in demands]

    def _prefetch(self, layer: int, forecasts: Forecasts) -> None:
        loader, precision, prediction = self.loader, self.precision, self.prediction
        cache = loader.cache

        def bits_of(target: int, expert: int) -> int:
            ranked = prediction.ranking(target, forecasts) if precision.reads_forecasts else ()
            return precision.predicted(target, ranked, expert)

        def here(target: int, expert: int) -> bool:
            bits = bits_of(target, expert)
            there = cache.find(target, expert, bits) or cache.arriving(target, expert, bits)
            return there is not None or not bits  # what would be skipped need not come

        loader.recall()  # then it is known what is here
        loader.collect()
        named = []
        for target, expert, _ in prediction.candidates(layer, forecasts, here):
            bits = bits_of(target, expert)
            if bits:
                named.append(ExpertKey(target, expert, bits))
        if self._watches:
            first: dict[int, list[int]] = {}  # as many as a token uses: some predictors rank all
            for target, expert, _ in named:
                first.setdefault(target, []).append(expert)
            for target, experts in first.items():
                self._named[target] = {each for each in experts[: self.top_k[target]] if not here(target, each)}
        elif loader.prefetch(named, self.mask) and self.proceed:
            for key in named:
                self._predicted.setdefault(key.layer, {})[key.expert] = None
