"""Assembly: from a composition, a model's shape and slots to a scheduler over any link. The engine and the simulator
both come here. No files, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiermoe.config import CacheSize
from tiermoe.errors import ConfigError
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.composition import NO_CACHE, NO_CHOICE, Composition, require_settings
from tiermoe.offload.link import Link
from tiermoe.offload.loader import ExpertLoader
from tiermoe.offload.policies.allotment import ALLOTMENTS, Pool, Share, shallow_and_shared
from tiermoe.offload.policies.eviction import EVICTIONS, Clock, Eviction, EvictionContext, NextUse, Popularity
from tiermoe.offload.policies.eviction.base import Undoable
from tiermoe.offload.policies.precision import PRECISIONS, Precision, PrecisionContext
from tiermoe.offload.policies.prediction import PREDICTIONS, Future, HashTable, PredictionContext
from tiermoe.offload.policies.prefetch_trial import PrefetchTrial
from tiermoe.offload.policies.routing import CachePrior, MissCosts, misses_on_cpu
from tiermoe.offload.profiles import Tables
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import Wanted

_ALIKE = 1.2  # precisions whose slot sizes differ by at most this factor share one pool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The MoE layers of a model, in the order they run."""

    experts: Sequence[int]  # per layer
    top_k: Sequence[int]  # per layer
    encoder_layers: int = 0  # the first of them, in an encoder
    hash_tables: Mapping[int, HashTable] = field(default_factory=dict)  # of the layers that are routed by the token
    drafting: int = 0  # the last of them, of an MTP head: passes of their own, of which nothing is predicted

    @property
    def depth(self) -> int:
        """Layers of a pass that does not draft."""
        return len(self.experts) - self.drafting


class PrecisionSlots(NamedTuple):
    """Room for copies in any of `bits`."""

    bits: tuple[int, ...]
    slots: int  # of the largest of them
    # bytes of a copy in each of `bits`, if smaller copies leave their slots' bytes to others; empty: none does
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FutureTrace:
    """The future, which only a replay knows."""

    next_use: NextUse  # how far ahead the next use of a key lies
    future: Future  # the experts that a layer will choose in this pass


def precisions(composition: Composition, bits: int, table: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
    """The bits that experts are loaded in, highest first. bits: the engine's, if the composition names none.
    table: (layer, expert) → bits."""
    return _precision_rule(composition, PrecisionContext(composition.bits or bits, (), table)).loaded


def cache_bytes(composition: Composition, cache: CacheSize, shape: ModelShape, sizes: Mapping[int, int]) -> int:
    """Bytes of expert cache that are asked for; a share counts slots of the highest precision. sizes: precision →
    bytes of a slot."""
    unit, experts = sizes[max(sizes)], sum(shape.experts)
    if composition.cache in NO_CACHE:
        layers = 2 if composition.cache == "double" else 1
        return max(layers * max(shape.top_k) * unit, sum(sizes.values()))  # a slot of each precision in any case
    if composition.cache == "all":
        return experts * unit
    if cache.fraction is not None:
        return max(1, int(cache.fraction * experts)) * unit
    assert cache.nbytes is not None
    return cache.nbytes


class _Part(NamedTuple):
    """A part of a cache's bytes, for some precisions."""

    bits: tuple[int, ...]
    share: float  # of the bytes
    size: int  # bytes of a slot
    most: int  # slots that can be used


def divide(
    nbytes: int,
    composition: Composition,
    sizes: Mapping[int, int],
    table: Iterable[int],
    all_slots: int,
    least: int = 1,
    whole_slots: bool = False,
) -> list[PrecisionSlots]:
    """Slots of each precision in `nbytes` bytes of cache: `least` of each whatever they take, and at most as many as
    experts can use. sizes: precision → bytes of a slot. table: the bits of every expert, if there is such a table.
    all_slots: experts of the model. whole_slots: a slot's memory is one piece, as on a GPU.

    Precisions share all bytes, of which a copy takes its own (EdgeMoE, section 3.3.3: one budget), unless a composition
    keeps a share for low copies (HOBBIT, section 4: two caches). Of whole slots, they share those of the largest size,
    but with a table that says how often each precision occurs, each has slots of its own in the table's proportion,
    if sizes differ."""
    high, *lower = sorted(sizes, reverse=True)
    used = list(table) if composition.precision == "table" else []
    if lower and composition.low_share:
        low_size = max(sizes[bits] for bits in lower)
        parts = [
            _Part((high,), 1 - composition.low_share, sizes[high], all_slots),
            _Part(tuple(lower), composition.low_share, low_size, all_slots),
        ]
    elif not whole_slots and min(sizes.values()) < max(sizes.values()):
        size = max(sizes.values())
        most = -(-sum(sizes[bits] for bits in used) // size) if used else all_slots
        count = max(least, min(nbytes // size, most))
        return [PrecisionSlots((high, *lower), count, tuple(sizes[bits] for bits in (high, *lower)))]
    elif not used or max(sizes.values()) <= _ALIKE * min(sizes.values()):
        parts = [_Part((high, *lower), 1.0, max(sizes.values()), all_slots)]
    else:
        weights = {bits: used.count(bits) * size for bits, size in sizes.items()}
        total = sum(weights.values())
        parts = [_Part((bits,), weights[bits] / total, sizes[bits], used.count(bits)) for bits in (high, *lower)]
    counts = [max(least, min(int(nbytes * part.share // part.size), part.most)) for part in parts]
    while max(counts) > least and sum(count * part.size for count, part in zip(counts, parts, strict=True)) > nbytes:
        counts[counts.index(max(counts))] -= 1  # the largest gives to a precision that would have had too few
    return [PrecisionSlots(part.bits, count) for part, count in zip(parts, counts, strict=True)]


def assemble(
    composition: Composition,
    shape: ModelShape,
    slots: Sequence[PrecisionSlots],
    link: Link,
    bits: int,
    tables: Tables | None = None,
    future_trace: FutureTrace | None = None,
    seed: int = 0,
    miss_costs: Callable[[], MissCosts] | None = None,
    trial: Callable[[], PrefetchTrial] = PrefetchTrial,
) -> Scheduler:
    """A scheduler that runs `composition` over `link`. slots: as `divide` gives them. bits: the precision of 'fixed'
    and of high loads. seed: of random eviction. trial: makes the trial of prefetching, if the composition
    measures.

    ProfileError if settings are open. ConfigError for slots that the allotment cannot share out, and for parts that
    need tables, the future, hash tables or miss costs that are not given."""
    require_settings(composition, "MODEL")
    tables = tables or Tables()
    clock, popularity = Clock(), Popularity()
    loaded = sorted({precision for each in slots for precision in each.bits}, reverse=True)
    all_fit = sum(each.slots for each in slots) >= sum(shape.experts) and len(loaded) == 1
    room = 0 if all_fit else composition.room
    if room >= slots[0].slots:
        raise ConfigError(
            f"room={room} for experts that are fetched leaves nothing of {slots[0].slots} slots; give more memory, or "
            f"less room"
        )
    own = [slots[0]._replace(slots=slots[0].slots - room), *slots[1:]]
    undoable: list[Undoable] = []
    placed: list[Wanted] = []

    def evictions(pools: Sequence[Pool]) -> list[Eviction]:
        undoable.clear()
        placed.clear()
        spanning: dict[range, Eviction] = {}  # layers → policy of the pools of all precisions
        policies: list[Eviction] = []
        for pool in pools:
            policy = spanning.get(pool.layers)
            if policy is None:
                context = EvictionContext(
                    clock, pool.slots, len(shape.experts), room, encoder_layers=shape.encoder_layers,
                    high_bits=loaded[0], per_sequence=composition.records == "sequence",
                    next_use=future_trace.next_use if future_trace else None, seed=seed, popularity=popularity,
                    frequencies=tables.frequencies,
                )  # fmt: skip
                policy = _eviction(composition, shape, context, pool, len(loaded) == 1)
                if initial := getattr(policy, "initial_experts", None):
                    placed.extend(initial({layer: shape.experts[layer] for layer in pool.layers}))
                spans = getattr(type(policy), "spans_precisions", False)
                if composition.routing == "confident":
                    policy = Undoable(policy, context)
                    undoable.append(policy)
                if spans:
                    spanning[pool.layers] = policy
            policies.append(policy)
        return policies

    pools = ExpertCache(
        [pool for each in own for pool in _allotted(composition, shape, each, len(slots) == 1)],
        evictions,
        loaded,
        composition.exact_bits,
        _shared_sizes(slots),
        room,
    )
    on_cpu = _on_cpu(composition, miss_costs)
    prediction_context = PredictionContext(
        shape.depth, shape.experts[: shape.depth], shape.top_k[: shape.depth], paths=tables.paths,
        frequencies=tables.frequencies, hash_tables=shape.hash_tables,
        future=future_trace.future if future_trace else None,
        encoder_layers=shape.encoder_layers, little=composition.little,
    )  # fmt: skip
    predictor = PREDICTIONS[composition.prefetch](prediction_context, **composition.options("prefetch"))
    predicts = composition.prefetch != "none"
    if all_fit and not on_cpu:  # everything comes and nothing leaves: a prediction would save next to nothing
        predictor, predicts = PREDICTIONS["none"](prediction_context), False
    return Scheduler(
        ExpertLoader(pools, link, loaded[0]),
        clock,
        popularity,
        _precision_rule(composition, PrecisionContext(bits, shape.top_k, tables.bits)),
        predictor,
        list(shape.experts),
        list(shape.top_k),
        fixed_bits=bits,
        mask=composition.mask,
        together=composition.start == "together",
        whole_layer=composition.routing == "layer",
        proceed=composition.proceeds,
        substitutes=composition.on_mispredict == "predicted",
        cpu_fallback=on_cpu,
        predicts=predicts,
        # background reads change no token if no miss is skipped, computed on the CPU or read in part
        fills=len(loaded) == 1
        and composition.precision == "fixed"
        and composition.cache not in NO_CACHE
        and not composition.lossy,
        everything=all_fit,
        undoable=undoable,
        placed=placed,
        reads_weights=getattr(composition.policy("cache"), "reads_weights", False) and not all_fit,
        settles=all_fit and not on_cpu and composition.routing in ("all", "cached"),
        prior=_prior(composition),
        exact=not composition.lossy,
        trial=trial() if predicts and composition.speculate == "measured" else None,
        drafting=shape.drafting,
    )


def _shared_sizes(slots: Sequence[PrecisionSlots]) -> dict[int, int] | None:
    """Bits → bytes of a copy, if copies of several precisions share bytes."""
    return {bits: size for each in slots for bits, size in zip(each.bits, each.sizes, strict=False)} or None


def _precision_rule(composition: Composition, context: PrecisionContext) -> Precision:
    return PRECISIONS[composition.precision](context, **composition.options("precision"))


def _prior(composition: Composition) -> CachePrior | None:
    if composition.routing != "cached":
        return None
    assert composition.prior is not None
    return CachePrior(composition.prior, composition.always, composition.untouched, composition.most_moved)


def _on_cpu(composition: Composition, costs: Callable[[], MissCosts] | None) -> Callable[[int], int] | None:
    """Number of a layer's misses → how many the CPU computes; None: never any."""
    if composition.misses == "load":
        return None
    if composition.misses == "cpu":
        return lambda misses: misses
    if costs is None:
        raise ConfigError("misses=measured needs an engine that measures; use --set misses=load")
    return lambda misses: misses_on_cpu(misses, costs())


def _eviction(
    composition: Composition, shape: ModelShape, context: EvictionContext, pool: Pool, single: bool
) -> Eviction:
    """single: experts are loaded in one precision."""
    # if nothing or everything stays, no choice is left: the policy that costs least will do
    all_fit = pool.slots >= sum(shape.experts[i] for i in pool.layers) and not pool.kept
    policy = composition.policy("cache")
    # each pool's policy can be told, and names what it begins with
    own = getattr(policy, "reads_weights", False) or hasattr(policy, "initial_experts")
    if composition.cache in NO_CHOICE or (single and all_fit and not own):
        return EVICTIONS["fifo"](context)
    return EVICTIONS[composition.cache](context, **composition.options("cache"))


def _allotted(composition: Composition, shape: ModelShape, slots: PrecisionSlots, only: bool) -> list[Pool]:
    """The pools of `slots`. only: the cache is not divided by precision.

    Slots that do not give every layer its K (in a divided cache: one slot) are one pool, in which the running layer has
    its K; with shallow-first that is what the shallow layers leave. So are low copies that serve one layer alone."""
    no_choice = composition.cache in NO_CHOICE
    if not only and composition.low_copies_pass and composition["low_bits"] in slots.bits:
        no_choice = True
    needed = max(shape.top_k) if only else 1
    scarce = slots.slots < len(shape.experts) * needed
    allotment = "pool" if no_choice or scarce else composition.allotment
    pools = 1 if allotment == "pool" else len(shape.experts)
    minimum = max(1, min(max(shape.top_k), slots.slots // pools))
    divide_slots = ALLOTMENTS[allotment]
    if scarce and composition.allotment == "shallow" and not no_choice:
        minimum = min(needed, slots.slots)
        divide_slots = shallow_and_shared
    bits = None if only else frozenset(slots.bits)
    return divide_slots(
        Share(
            slots.slots, shape.experts, composition.boundary or 0, minimum, bits, composition.layer_recall or (),
            composition.layer_uses or (),
        )
    )  # fmt: skip
