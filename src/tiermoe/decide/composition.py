"""A composition: which experts run, in which precision, what comes next, what stays, in what unit.

A published system is one choice of each part (`tiermoe.systems`).
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tiermoe.config import BITS, DENSE_BITS, QUANTIZERS, parse_size
from tiermoe.decide.allotment import ALLOTMENTS
from tiermoe.decide.eviction import EVICTIONS
from tiermoe.decide.neurons import DISK_GAP_BYTES
from tiermoe.decide.precision import PRECISIONS
from tiermoe.decide.prediction import PREDICTIONS
from tiermoe.decide.settings import Setting, declared, near, setting
from tiermoe.errors import ConfigError

POLICIES: dict[str, Mapping[str, Any]] = {"precision": PRECISIONS, "prefetch": PREDICTIONS, "cache": EVICTIONS}
"""The parts whose values are classes, which declare settings of their own."""

_LITTLE = ("half", "confident")  # routings that have a pass of fewer experts
_RECALL = ("recalled", "recalled+next-gate")  # predictions that recall such a pass
_FEWER_OR_OTHERS = ("half", "confident", "cached")  # routings that do not run the router's K


def _part(default: str, choices: Collection[str], **told: Any) -> Any:
    return setting(default, read=str, one_of=choices, **told)


def _is(part: str, value: str) -> tuple[str, Callable[[Composition], bool]]:
    return part, lambda composition: getattr(composition, part) == value


def _predicts(composition: Composition) -> bool:
    return composition.prefetch != "none"


def _errs(composition: Composition) -> bool:
    """Whether what is predicted may lack what the router chooses: an expert, one that was thought to be skipped, or
    neurons of one."""
    missed = composition.policy("prefetch").errs or composition.policy("precision").skips
    return _predicts(composition) and (missed or composition.unit == "neuron")


def _absent(composition: Composition) -> bool:
    """Whether an expert that has come may be absent again, or never comes."""
    return composition.cache != "all" or composition.precision != "fixed" or composition.misses != "load"


def _finds_some(composition: Composition) -> bool:
    """Whether an expert can be here when its layer runs, where that is what decides."""
    return composition.routing != "cached" or composition.cache != "none"


def _known_before(composition: Composition) -> bool:
    """Whether there is a discarded pass to recall, where that is what predicts."""
    return composition.prefetch != "recalled" or composition.routing == "confident"


def _has_little(composition: Composition) -> bool:
    return composition.routing in _LITTLE


def _keeps(composition: Composition) -> bool:
    """Whether there is somebody to evict, and who stays is a choice."""
    return composition.cache in EVICTIONS


def _forgets(composition: Composition) -> bool:
    return getattr(composition.policy("cache"), "forgets", False)


def _several(composition: Composition) -> bool:
    """Whether experts are loaded in more than one precision."""
    return composition.precision != "fixed"


def _size(given: Any) -> int:
    if given in ("0", 0):
        return 0
    try:
        return parse_size(str(given), "gap")
    except ConfigError:
        raise ValueError from None


def _share(given: Any) -> float | None:
    return None if given is None else float(given)


def _flag(given: Any) -> bool:
    return {"true": True, "false": False}[str(given).lower()]


@dataclass(frozen=True, slots=True)
class Composition:
    """One system. The first fields name its parts, the others set them; what is None and calibrated is filled from the
    profile `profile` (`tiermoe calibrate`). `own`: settings that the chosen policies declare themselves (`POLICIES`).
    `composition[name]` is the value of any part or setting. `exact_bits`: a demand is met by a copy in its very bits
    alone, to measure what bits cost; no preset has it.

    routing: 'all' K experts; 'half' the `little` of the largest weights (None: K/2, rounded up); 'confident' these, and
    again with all where the likeliest next token has a probability of at most `gamma` (MoBiLE); 'cached' K that are
    moved towards what is here, in decode, by `prior` and up to `most_moved` of the gate weight, but the first
    `always`, and those of the first `untouched` MoE layers (Cache-Prior); 'layer' every expert of the layer is
    fetched, routed or not (STI). precision: `decide/precision.py`. prefetch: `decide/prediction/`.
    speculate: 'measured' prefetches in decode only where passes are measured to be faster for it, and goes on measuring
    (`decide/prefetch_trial.py`); prefill always prefetches. By itself it changes no token.
    cache: eviction policy (`decide/eviction/`); 'none' room for one layer's K, 'all' every expert stays. `records`:
    forgotten at each sequence or kept for the model.
    allotment: 'pool' one for all layers, 'even' the same for each, 'by-use' more where experts are used most,
    'shallow' all of the layers below `boundary` first;
    'pool' too where slots do not give every layer its K.
    `low_share`: of the cache's bytes, for a pool of low-precision copies, in slots of their own size; 0: they take
    those of high ones; None: what follows from the precision (`compose.with_low_share`).
    unit: 'expert', or 'neuron' where |act(W1 x)| > `theta` decides which rows are loaded, all above the share
    `upper_limit` (CORM). `gap`: bytes between two wanted ones that are read through; None: what suits the store.
    store: experts are read from 'disk', or copied from a store that is held in main memory whole ('memory').
    start: compute what is here while the rest arrives, or only when all is there ('together', HOBBIT).
    on_mispredict: 'proceed' runs a layer with the experts that were predicted (CORM).
    misses: 'cpu' computes an expert that is missing in decode on the CPU, from its copy in main memory, while the GPU
    computes what it has (HOBBIT, section 4); prefill and prefetches load. Needs a GPU. It changes rounding alone, but
    where an expert is computed then depends on what is cached, so it counts as lossy. 'measured' computes so many of a
    layer's misses on the CPU that these end when the loads of the others do, by what both have taken so far.
    mask: predicted experts are kept from eviction until their layer has run.
    bits, dense_bits, quantizer: the engine's options of these names, None leaves them; what a user gives comes first.
    """

    name: str
    summary: str
    source: str = ""

    routing: str = _part("all", ("all", "half", "confident", "cached", "layer"), read_by=(("cache", _finds_some),))
    precision: str = _part("fixed", PRECISIONS.keys())
    prefetch: str = _part(
        "none", PREDICTIONS.keys(), read_by=(("cache", _absent), ("routing", _known_before)), off=True
    )
    speculate: str = _part("always", ("always", "measured"), read_by=(("prefetch", _predicts),), off=True)
    cache: str = _part("lru", ChainMap[str, Any](EVICTIONS, {"none": None, "all": None}).keys())
    allotment: str = _part("pool", ALLOTMENTS.keys(), read_by=(("cache", _keeps),), off=True)
    records: str = _part("model", ("model", "sequence"), read_by=(("cache", _forgets),), off=True)
    unit: str = _part("expert", ("expert", "neuron"))
    store: str = _part("disk", ("disk", "memory"))
    start: str = _part("arrival", ("arrival", "together"))
    on_mispredict: str = _part("reload", ("reload", "proceed"), read_by=(("prefetch", _errs),), off=True)
    misses: str = _part("load", ("load", "cpu", "measured"))
    mask: bool = setting(True, read=_flag, kind="true or false", read_by=(("prefetch", _predicts),), off=True)

    profile: str = setting("", read=str)
    gamma: float = setting(0.7, low=0, high=1, read_by=(_is("routing", "confident"),))
    little: int | None = setting(None, read=int, low=1, high=64, read_by=(("routing", _has_little),))
    prior: float | None = setting(None, low=0, high=4, calibrated=True, read_by=(_is("routing", "cached"),))
    always: int = setting(1, read=int, low=0, high=64, read_by=(_is("routing", "cached"),))
    untouched: int = setting(0, read=int, low=0, high=1 << 16, read_by=(_is("routing", "cached"),))
    most_moved: float = setting(1.0, low=0, high=1, read_by=(_is("routing", "cached"),))
    own: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    exact_bits: bool = field(default=False, kw_only=True)
    boundary: int | None = setting(
        None, read=int, low=0, high=1 << 16, calibrated=True, read_by=(_is("allotment", "shallow"),)
    )
    low_share: float | None = setting(0.0, read=_share, low=0, high=0.9, read_by=(("precision", _several),), off=True)
    theta: float | None = setting(None, low=0, high=1e9, calibrated=True, read_by=(_is("unit", "neuron"),))
    upper_limit: float = setting(0.75, low=0, high=1, read_by=(_is("unit", "neuron"),))
    gap: int | None = setting(None, read=_size, kind="a size like 16KiB", read_by=(_is("unit", "neuron"),))
    bits: int | None = setting(None, read=int, one_of=BITS)
    dense_bits: int | None = setting(None, read=int, one_of=DENSE_BITS)
    quantizer: str | None = setting(None, read=str, one_of=QUANTIZERS)

    def __getitem__(self, name: str) -> Any:
        """The value of a part or setting. KeyError for a name that is none."""
        return self.settings()[name]

    def settings(self) -> dict[str, Any]:
        """Every part and setting by name."""
        own = dict(self.own)
        for part in POLICIES:
            own = {name: default for name, (_, default) in declared(self.policy(part)).items()} | own
        return {
            name: own.get(name, declaration.default) if declaration.part else getattr(self, name)
            for name, declaration in declarations().items()
        }

    def having(self, values: Mapping[str, Any]) -> Composition:
        """The same with other values of parts and settings, by name."""
        fields = {name: value for name, value in values.items() if name in self.__dataclass_fields__}
        own = {name: value for name, value in values.items() if name not in fields}
        return replace(self, own={**self.own, **own}, **fields)

    def policy(self, part: str) -> Any:
        """The class that `part` names; None where it names none ('none' and 'all' of cache)."""
        return POLICIES[part].get(getattr(self, part))

    def options(self, part: str) -> dict[str, Any]:
        """What the policy of `part` is made with beside its context: its settings, but for those that have no value."""
        return {name: self.own[name] for name in declared(self.policy(part)) if self.own.get(name) is not None}

    @property
    def gap_bytes(self) -> int:
        """What is read through between two neurons: single ones cost a drive as much as what lies between them."""
        return self.gap if self.gap is not None else 0 if self.store == "memory" else DISK_GAP_BYTES

    @property
    def lossy(self) -> list[str]:
        """The parts that can change tokens, as they would be set; empty: exact."""
        parts = []
        if self.routing in _FEWER_OR_OTHERS:
            parts.append(f"routing={self.routing}")
        if self.precision != "fixed":
            parts.append(f"precision={self.precision}")
        if self.unit == "neuron":
            parts.append("unit=neuron")
        if self.on_mispredict == "proceed":
            parts.append("on_mispredict=proceed")
        if self.misses != "load":
            parts.append(f"misses={self.misses}")
        return parts

    def exact(self) -> Composition:
        """The same composition with every lossy part off: the exact preset's tokens, bit for bit."""
        routing = "all" if self.routing in _FEWER_OR_OTHERS else self.routing
        prefetch = "next-gate" if self.prefetch in (*_RECALL, "neurons") else self.prefetch
        return replace(
            self, routing=routing, precision="fixed", prefetch=prefetch, low_share=0.0, unit="expert",
            on_mispredict="reload", misses="load",
        )  # fmt: skip

    def missing(self) -> list[str]:
        """Settings that a calibration must fill and has not."""
        values, known = self.settings(), declarations()
        return [
            name
            for name, declaration in known.items()
            if declaration.told.calibrated and values[name] is None and unread(name, self, known) is None
        ]

    @property
    def needs_profile(self) -> bool:
        """True where a setting is open or a part reads a calibrated table."""
        return bool(self.missing() or self.policy("precision").reads_table or self.policy("prefetch").reads_table)


class Declaration(NamedTuple):
    """One part or setting. `part`: whose policies have declared it, and `values` those that have; empty where it is
    `Composition`'s own."""

    told: Setting
    default: Any
    part: str = ""
    values: tuple[str, ...] = ()

    @property
    def read_by(self) -> tuple[tuple[str, Callable[[Composition], bool]], ...]:
        """(a part, whether a composition reads this as far as that part goes), of every part that matters."""
        if self.part:
            return ((self.part, lambda composition: getattr(composition, self.part) in self.values),)
        return self.told.read_by


def declarations() -> dict[str, Declaration]:
    """Every part and setting that there is: those of `Composition`, with the policies' in the place of `own`."""
    found: dict[str, Declaration] = {}
    ours = declared(Composition)
    for each in dataclasses.fields(Composition):
        if each.name in ours:
            found[each.name] = Declaration(*ours[each.name])
        elif each.name == "own":
            for part, policies in POLICIES.items():
                for value, policy in policies.items():
                    for name, (told, default) in declared(policy).items():
                        others = found[name].values if name in found else ()
                        found[name] = Declaration(told, default, part, (*others, value))
    return found


def unread(
    name: str, composition: Composition, known: Mapping[str, Declaration] | None = None
) -> tuple[str, list[str]] | None:
    """Why a part or setting does nothing in a composition: the part that would have to change, and its values with
    which something reads `name`, or would if no other part were in the way. None where it is read. known: all
    declarations, for who has them."""
    known = known or declarations()
    for part, reads in known[name].read_by:
        if not reads(composition):
            readers = (value for value in known[part].told.one_of if reads(composition.having({part: value})))
            return part, list(readers)
        if further := unread(part, composition, known):
            return further
    return None


def parsed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Parts and settings by name, their values as text or not, as values. ConfigError for an unknown part or value."""
    known = declarations()
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown part or setting '{name}'{near(name, known)}")
    return {name: known[name].told.value(name, value) for name, value in changes.items()}


def changed(composition: Composition, changes: Mapping[str, Any] | None = None) -> Composition:
    """A composition with parts and settings replaced: {'prefetch': 'none', 'gamma': '0.5'}, values also as text.
    ConfigError for an unknown part or value, for settings that do not go together, and for one that no part of the
    result reads."""
    values = parsed(changes or {})
    result = composition.having(values)
    for part in POLICIES:
        if check := getattr(result.policy(part), "check", None):
            check(result.settings())
    known = declarations()
    for name, value in values.items():
        told, default = known[name].told, known[name].default
        if (told.off and value == default) or not (why := unread(name, result, known)):
            continue
        part, readers = why
        given = f"{name}={value}" if told.one_of else name
        raise ConfigError(
            f"{given} does nothing with {part}={getattr(result, part)}; it is read by {part}={' or '.join(readers)}"
        )
    return result


def require_device(composition: Composition, device: str) -> None:
    """ConfigError where a device type ('cpu', 'cuda') cannot run a composition: misses=cpu is help for a GPU, whose
    kernels and copies know whole experts alone."""
    if composition.misses != "load" and device == "cpu":
        raise ConfigError(
            f"misses={composition.misses} computes on the CPU what a GPU lacks, and no GPU is in use; "
            f"use --set misses=load"
        )
    if composition.routing == "cached" and device != "cpu":
        raise ConfigError("routing=cached chooses by scores that are known on the CPU alone; use --device cpu")
    if composition.unit == "neuron" and device != "cpu":
        raise ConfigError("unit=neuron runs on the CPU alone; use --device cpu or --set unit=expert")
