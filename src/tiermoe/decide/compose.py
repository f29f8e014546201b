"""A composition made ready to run: its parts assembled into a scheduler over any link. The engine and the simulator
both come here. Pure: no files, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiermoe.config import CacheSize
from tiermoe.decide.allotment import ALLOTMENTS, Pool, Share, shallow_and_shared
from tiermoe.decide.composition import Composition, parsed
from tiermoe.decide.controller import Controller
from tiermoe.decide.eviction import EVICTIONS, Eviction, EvictionContext
from tiermoe.decide.eviction.protocol import Clock, NextUse
from tiermoe.decide.eviction.undoable import Undoable
from tiermoe.decide.link import Link
from tiermoe.decide.misses import MissCosts, computed_elsewhere
from tiermoe.decide.pools import Pools
from tiermoe.decide.precision import PRECISIONS, Precision, PrecisionContext
from tiermoe.decide.prediction import PREDICTIONS, Paths, PredictionContext, paths_from_json
from tiermoe.decide.prediction.protocol import Future, HashTable
from tiermoe.decide.prefetch_trial import PrefetchTrial
from tiermoe.decide.profiles import Profile
from tiermoe.decide.routing import CachePrior
from tiermoe.decide.scheduler import Scheduler
from tiermoe.errors import ConfigError, ProfileError

_ALIKE = 1.2  # slots of two precisions are one pool where the larger is at most so much larger


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Experts and experts per token of each MoE layer, in the order they run; the first `encoder_layers` are an
    encoder's. `hash_tables`: of the layers that are routed by the token alone."""

    experts: Sequence[int]
    top_k: Sequence[int]
    encoder_layers: int = 0
    hash_tables: Mapping[int, HashTable] = field(default_factory=dict)


class PrecisionSlots(NamedTuple):
    """Slots for copies in any of `bits`."""

    bits: tuple[int, ...]
    slots: int


class _Share(NamedTuple):
    """Of a cache's bytes the `part` for copies in any of `bits`, in slots of `size`, of which `most` can be used."""

    bits: tuple[int, ...]
    part: float
    size: int
    most: int


@dataclass(frozen=True, slots=True)
class Tables:
    """What a profile measured, by (layer, expert): bits, and the share or number of tokens; and activation paths."""

    bits: Mapping[tuple[int, int], int] = field(default_factory=dict)
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    paths: Paths = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Foresight:
    """What only a replay knows: when a key is asked for next, and what a layer of this pass will choose."""

    next_use: NextUse
    future: Future


def filled(composition: Composition, profile: Profile | None) -> Composition:
    """The composition with its open settings from a profile; what is set already stays."""
    if profile is None:
        return composition
    names = composition.missing()
    if composition.precision == "table":
        names.append("quantizer")  # the bits of a table hold for the quantiser they were found for
    return composition.having(
        parsed({name: profile.settings[name] for name in names if profile.settings.get(name) is not None})
    )


def with_low_share(composition: Composition, layers: int) -> Composition:
    """The composition with the share of the cache for low copies that follows from its own settings, where none is
    given. Low copies that come for a prompt's layer serve that layer and no later one, since all are high in decode:
    of one layer's part of the cache, their share of its experts."""
    if composition.low_share is None and _passing(composition):
        return composition.having({"low_share": composition["low_popularity"] / layers})
    return composition


def _passing(composition: Composition) -> bool:
    """Whether low copies serve the layer that they come for and no later one."""
    return composition.precision == "popularity" and composition["mispredicted"] == "high"


def require_settings(composition: Composition, model: str) -> None:
    """ProfileError where a calibration must fill settings and has not; names the command that makes it for `model`."""
    missing = composition.missing()
    if missing:
        made_for = composition.profile or "hobbit,edgemoe,fate,corm"
        raise ProfileError(
            f"preset {composition.name} has no {' and no '.join(missing)}; make them with tiermoe calibrate {model} "
            f"--text FILE --for {made_for}, or give them with --set {missing[0]}=…"
        )


def tables(profile: Profile | None) -> Tables:
    """The tables of a profile's data: 'table' and 'frequencies' hold a row of experts per layer (or layer → row),
    'paths' is `paths_to_json`'s."""
    data = profile.data if profile else {}
    return Tables(
        _by_expert(data.get("table")), _by_expert(data.get("frequencies")), paths_from_json(data.get("paths", {}))
    )


def precisions(composition: Composition, bits: int, table: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
    """The bits that experts are loaded in, highest first; `bits`: the engine's, where the composition has no other."""
    return _rule(composition, PrecisionContext(composition.bits or bits, (), table)).loaded


def cache_bytes(composition: Composition, cache: CacheSize, shape: ModelShape, sizes: Mapping[int, int]) -> int:
    """Bytes of expert cache that are asked for; a share counts slots of the highest precision. sizes: precision →
    bytes of a slot."""
    unit, experts = sizes[max(sizes)], sum(shape.experts)
    if composition.cache == "none":
        return max(max(shape.top_k) * unit, sum(sizes.values()))  # a slot of each precision in any case
    if composition.cache == "all":
        return experts * unit
    if cache.fraction is not None:
        return max(1, int(cache.fraction * experts)) * unit
    assert cache.nbytes is not None
    return cache.nbytes


def divide(
    nbytes: int,
    composition: Composition,
    sizes: Mapping[int, int],
    table: Iterable[int],
    all_slots: int,
    least: int = 1,
) -> list[PrecisionSlots]:
    """Slots of each precision in `nbytes` bytes of cache, `least` of each whatever they take, and at most as many as
    experts can be there. sizes: precision → bytes of a slot. table: the bits of every expert, where there is such a
    table.

    Precisions share slots of the largest, with two exceptions: where the composition keeps a share for low copies
    (HOBBIT, section 4: two caches), and where a table says how often each precision occurs and their sizes differ: then
    each has slots of its own, in the table's proportion."""
    high, *lower = sorted(sizes, reverse=True)
    used = list(table) if composition.precision == "table" else []
    if lower and composition.low_share:
        low_size = max(sizes[bits] for bits in lower)
        shares = [
            _Share((high,), 1 - composition.low_share, sizes[high], all_slots),
            _Share(tuple(lower), composition.low_share, low_size, all_slots),
        ]
    elif not used or max(sizes.values()) <= _ALIKE * min(sizes.values()):
        shares = [_Share((high, *lower), 1.0, max(sizes.values()), all_slots)]
    else:
        weights = {bits: used.count(bits) * size for bits, size in sizes.items()}
        total = sum(weights.values())
        shares = [_Share((bits,), weights[bits] / total, sizes[bits], used.count(bits)) for bits in (high, *lower)]
    counts = [max(least, min(int(nbytes * share.part // share.size), share.most)) for share in shares]
    while max(counts) > least and sum(count * share.size for count, share in zip(counts, shares, strict=True)) > nbytes:
        counts[counts.index(max(counts))] -= 1  # a precision that would have had too few takes them from the largest
    return [PrecisionSlots(share.bits, count) for share, count in zip(shares, counts, strict=True)]


def assemble(
    composition: Composition,
    shape: ModelShape,
    slots: Sequence[PrecisionSlots],
    link: Link,
    bits: int,
    found: Tables | None = None,
    foresight: Foresight | None = None,
    seed: int = 0,
    miss_costs: Callable[[], MissCosts] | None = None,
    trial: Callable[[], PrefetchTrial] = PrefetchTrial,
) -> Scheduler:
    """A scheduler that runs `composition` over `link`. bits: the precision of 'fixed' and of high loads. slots: as
    `divide` gives them. Raises ProfileError where settings are open, ConfigError for slots that the allotment cannot
    share out and for parts that need tables, foresight, hash tables or miss costs that are not given. trial: makes the
    trial of prefetching, where the composition measures (what it assumes at first)."""
    require_settings(composition, "MODEL")
    found = found or Tables()
    clock = Clock()
    loaded = sorted({precision for share in slots for precision in share.bits}, reverse=True)
    undoable: list[Undoable] = []

    def evictions(pools: Sequence[Pool]) -> list[Eviction]:
        undoable.clear()
        shared: dict[range, Eviction] = {}

        def eviction(pool: Pool) -> Eviction:
            if pool.layers in shared:
                return shared[pool.layers]
            context = _eviction_context(composition, shape, pool, clock, loaded[0], found, foresight, seed)
            policy = made = _eviction(composition, shape, context, pool, len(loaded) == 1)
            if composition.routing == "confident":
                made = Undoable(policy, context)
                undoable.append(made)
            if getattr(type(policy), "spans_precisions", False):
                shared[pool.layers] = made
            return made

        return [eviction(pool) for pool in pools]

    pools = Pools(
        [pool for share in slots for pool in _allotted(composition, shape, share, len(slots) == 1)],
        evictions,
        loaded,
        composition.exact_bits,
    )
    held = sum(share.slots for share in slots) >= sum(shape.experts) and len(loaded) == 1
    elsewhere = _elsewhere(composition, miss_costs)
    prediction = _prediction_context(composition, shape, found, foresight)
    predictor = PREDICTIONS[composition.prefetch](prediction, **composition.options("prefetch"))
    predicts = composition.prefetch != "none"
    if held and not elsewhere:  # where all comes and nothing leaves, a prediction would save next to nothing
        predictor, predicts = PREDICTIONS["none"](prediction), False
    return Scheduler(
        Controller(pools, link, loaded[0]),
        clock,
        _rule(composition, PrecisionContext(bits, shape.top_k, found.bits)),
        predictor,
        list(shape.experts),
        fixed_bits=bits,
        mask=composition.mask,
        together=composition.start == "together",
        whole_layer=composition.routing == "layer",
        proceed=composition.on_mispredict == "proceed",
        elsewhere=elsewhere,
        fills=_fills(composition, loaded),
        everything=held,
        undoable=undoable,
        settles=held and not elsewhere and composition.routing in ("all", "cached"),
        prior=_prior(composition),
        exact=not composition.lossy,
        trial=trial() if predicts and composition.speculate == "measured" else None,
    )


def _prior(composition: Composition) -> CachePrior | None:
    if composition.routing != "cached":
        return None
    assert composition.prior is not None
    return CachePrior(composition.prior, composition.always, composition.untouched, composition.most_moved)


def _fills(composition: Composition, loaded: Sequence[int]) -> bool:
    """Whether what the background reads can be of use and changes no token: not where a miss may be skipped, computed
    elsewhere or read in part."""
    return (
        len(loaded) == 1 and composition.precision == "fixed" and composition.cache != "none" and not composition.lossy
    )


def _elsewhere(composition: Composition, costs: Callable[[], MissCosts] | None) -> Callable[[int], int] | None:
    """How many of a layer's misses are computed elsewhere; None: none ever."""
    if composition.misses == "load":
        return None
    if composition.misses == "cpu":
        return lambda misses: misses
    if costs is None:
        raise ConfigError("misses=measured needs an engine that measures; use --set misses=load")
    return lambda misses: computed_elsewhere(misses, costs())


def _allotted(composition: Composition, shape: ModelShape, share: PrecisionSlots, only: bool) -> list[Pool]:
    """The pools of one precision. Slots that do not give every layer room for its K are one pool, in which the running
    layer has them all; shallow-first, that is what the shallow layers leave. Where the cache is divided by precision,
    so are those that do not go round the layers, and those of low copies that serve one layer."""
    kept = composition.cache in ("none", "all")
    if not only and _passing(composition) and composition["low_bits"] in share.bits:
        kept = True
    needed = max(shape.top_k) if only else 1
    scarce = share.slots < len(shape.experts) * needed
    allotment = "pool" if kept or scarce else composition.allotment
    pools = 1 if allotment == "pool" else len(shape.experts)
    minimum = max(1, min(max(shape.top_k), share.slots // pools))
    bits = None if only else frozenset(share.bits)
    if scarce and composition.allotment == "shallow" and not kept:
        minimum = min(needed, share.slots)
        return shallow_and_shared(Share(share.slots, shape.experts, composition.boundary or 0, minimum, bits))
    return ALLOTMENTS[allotment](Share(share.slots, shape.experts, composition.boundary or 0, minimum, bits))


def _eviction_context(
    composition: Composition,
    shape: ModelShape,
    pool: Pool,
    clock: Clock,
    high_bits: int,
    found: Tables,
    foresight: Foresight | None,
    seed: int,
) -> EvictionContext:
    return EvictionContext(
        clock,
        pool.slots,
        len(shape.experts),
        encoder_layers=shape.encoder_layers,
        high_bits=high_bits,
        per_sequence=composition.records == "sequence",
        next_use=foresight.next_use if foresight else None,
        seed=seed,
        frequencies=found.frequencies,
    )


def _eviction(
    composition: Composition, shape: ModelShape, context: EvictionContext, pool: Pool, single: bool
) -> Eviction:
    # where nothing or everything stays, no choice is left: the policy that costs least will do
    held = pool.slots >= sum(shape.experts[i] for i in pool.layers) and not pool.kept
    if composition.cache in ("none", "all") or (single and held):
        return EVICTIONS["fifo"](context)
    return EVICTIONS[composition.cache](context, **composition.options("cache"))


def _rule(composition: Composition, context: PrecisionContext) -> Precision:
    return PRECISIONS[composition.precision](context, **composition.options("precision"))


def _prediction_context(
    composition: Composition, shape: ModelShape, found: Tables, foresight: Foresight | None
) -> PredictionContext:
    return PredictionContext(
        len(shape.experts),
        shape.experts,
        shape.top_k,
        paths=found.paths,
        frequencies=found.frequencies,
        hash_tables=shape.hash_tables,
        future=foresight.future if foresight else None,
        encoder_layers=shape.encoder_layers,
        little=composition.little,
    )


def _by_expert(rows: Any) -> dict[tuple[int, int], Any]:
    layers = rows.items() if isinstance(rows, Mapping) else enumerate(rows or ())
    return {(int(layer), expert): value for layer, row in layers for expert, value in enumerate(row)}
