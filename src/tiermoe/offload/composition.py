"""A composition: which experts run, in which precision, what is prefetched, what stays cached, in what unit.

A published system is one choice of each part (`lab/papers`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tiermoe.config import BITS, DENSE_BITS, QUANTIZERS, parse_size
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.offload.plugins import load_packages
from tiermoe.offload.policies.allotment import ALLOTMENTS
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.policies.neurons import DISK_GAP_BYTES
from tiermoe.offload.policies.precision import PRECISIONS
from tiermoe.offload.policies.prediction import PREDICTIONS
from tiermoe.offload.policies.routing import AdaptiveGating
from tiermoe.offload.policies.settings import Setting, declared, near, setting
from tiermoe.offload.profiles import Profile

POLICIES: dict[str, Mapping[str, Any]] = {"precision": PRECISIONS, "prefetch": PREDICTIONS, "cache": EVICTIONS}
"""The parts whose values are classes that declare settings of their own."""

NO_CACHE = ("none", "double")
"""Values of `cache` with room for what runs alone."""

NO_CHOICE = (*NO_CACHE, "all")
"""Values of `cache` that leave an eviction policy no choice."""

_FEWER_OR_OTHERS = ("half", "confident", "adaptive", "cached")  # routings that do not run the router's K


def _part(default: str, choices: Collection[str], **values: Any) -> Any:
    return setting(default, read=str, one_of=choices, **values)


def _is(part: str, *values: str) -> tuple[str, Callable[[Composition], bool]]:
    return part, lambda composition: getattr(composition, part) in values


def _is_not(part: str, value: str) -> tuple[str, Callable[[Composition], bool]]:
    return part, lambda composition: getattr(composition, part) != value


def _errs(composition: Composition) -> bool:
    """Whether the prediction may lack what the router chooses: an expert, one that it expected to be skipped, or
    neurons of one."""
    missed = composition.policy("prefetch").errs or composition.policy("precision").skips
    return composition.prefetch != "none" and (missed or composition.unit == "neuron")


def _absent(composition: Composition) -> bool:
    """Whether a loaded expert may be absent again, or is never loaded."""
    return composition.cache != "all" or composition.precision != "fixed" or composition.misses != "load"


def _evicts(composition: Composition) -> bool:
    """Whether a policy chooses what leaves."""
    return composition.cache in EVICTIONS


def _finds_some(composition: Composition) -> bool:
    """Whether an expert can be cached when its layer runs, if routing depends on that."""
    return composition.routing != "cached" or composition.cache not in NO_CACHE


def _known_before(composition: Composition) -> bool:
    """Whether there is a discarded pass to recall, if the prediction recalls one."""
    return composition.prefetch != "recalled" or composition.routing == "confident"


def _forgets(composition: Composition) -> bool:
    return getattr(composition.policy("cache"), "forgets", False)


def _size(given: Any) -> int:
    if given in ("0", 0):
        return 0
    try:
        return parse_size(str(given), "gap")
    except ConfigError:
        raise ValueError from None


def _share(given: Any) -> float | None:
    return None if given is None else float(given)


def _numbers(given: Any) -> tuple[float, ...]:
    several = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    numbers = tuple(map(float, several))
    if not numbers or not all(0 <= number < math.inf for number in numbers):
        raise ValueError
    return numbers


def _shares(given: Any) -> tuple[float, ...] | None:
    numbers = None if given is None else _numbers(given)
    if numbers and max(numbers) > 1:
        raise ValueError
    return numbers


def _one_or_more(given: Any) -> float | tuple[float, ...]:
    numbers = _numbers(given)
    return numbers if len(numbers) > 1 else numbers[0]


def _flag(given: Any) -> bool:
    return {"true": True, "false": False}[str(given).lower()]


@dataclass(frozen=True, slots=True)
class Composition:
    """One system: the name of each part, and its settings. `composition[name]` is the value of any part or setting,
    those that the chosen policies declare (`own`) included. A calibrated setting that is None is filled from the
    profile `profile` (`tiermoe calibrate`)."""

    name: str
    summary: str
    source: str = ""  # paper

    # parts

    # which experts run: 'all' K; 'half' the `little` of the largest weights; 'confident' these, and again with all K
    # if the likeliest next token has a probability of at most `gamma` (MoBiLE); 'adaptive' in decode as many as a
    # token needs (`policies.routing.AdaptiveGating`); 'cached' K that are moved towards cached ones in decode
    # (`policies.routing.CachePrior`); 'layer' all of the layer are fetched, routed or not (STI)
    routing: str = _part(
        "all", ("all", "half", "confident", "adaptive", "cached", "layer"), read_by=(("cache", _finds_some),)
    )
    precision: str = _part("fixed", PRECISIONS.keys())
    prefetch: str = _part(
        "none", PREDICTIONS.keys(), read_by=(("cache", _absent), ("routing", _known_before)), off=True
    )
    # when decode prefetches; prefill always does. 'measured': only if passes are measured to be faster for it
    # (`policies.prefetch_trial`), which by itself changes no token
    speculate: str = _part("always", ("always", "measured"), read_by=(_is_not("prefetch", "none"),), off=True)
    # eviction policy; 'none': room for one layer's K, 'double': for two layers' K (Pre-gated MoE), 'all': every expert
    # stays
    cache: str = _part("lru", ChainMap[str, Any](EVICTIONS, dict.fromkeys(NO_CHOICE)).keys())
    # 'pool' one for all layers, 'even' the same for each, 'by-use' more where experts are used most, 'shallow' all
    # experts of the layers below `boundary` first, 'expected-loads' so that fewest loads are expected; 'pool' too if
    # slots do not give every layer its K
    allotment: str = _part("pool", ALLOTMENTS.keys(), read_by=(("cache", _evicts),), off=True)
    # of the eviction policy: forgotten at each sequence, or kept for the model
    records: str = _part("model", ("model", "sequence"), read_by=(("cache", _forgets),), off=True)
    # what is loaded: 'neuron' the rows where |act(W1 x)| > `theta`, all above the share `upper_limit` (CORM)
    unit: str = _part("expert", ("expert", "neuron"))
    # where experts come from: the drive, or a store that main memory holds whole
    store: str = _part("disk", ("disk", "memory"))
    # of computing a layer: with the cached experts while the rest arrives, or when all have arrived (HOBBIT)
    start: str = _part("arrival", ("arrival", "together"))
    # CORM goes on with its prediction: with 'proceed' a token leaves out those of its experts that were not predicted
    # and are not cached, with 'predicted' the predicted experts stand in for them; 'reload' reads the router's own
    on_mispredict: str = _part("reload", ("reload", "proceed", "predicted"), read_by=(("prefetch", _errs),), off=True)
    # 'cpu': the CPU computes an expert that is missing in decode, from its copy in main memory, while the GPU computes
    # the cached ones (HOBBIT, section 4); prefill and prefetches load. 'measured': so many of a layer's misses that the
    # CPU ends when the loads of the others do, by what both have taken so far. Needs a GPU. Changes rounding alone, but
    # the place where an expert is computed then depends on what is cached, so it counts as lossy
    misses: str = _part("load", ("load", "cpu", "measured"))
    # predicted experts stay until their layer has run
    mask: bool = setting(True, read=_flag, kind="true or false", read_by=(_is_not("prefetch", "none"),), off=True)

    # settings

    profile: str = setting("", read=str)
    gamma: float = setting(0.7, low=0, high=1, read_by=(_is("routing", "confident"),))
    # experts of a little pass; None: K/2, rounded up
    little: int | None = setting(None, read=int, low=1, high=64, read_by=(_is("routing", "half", "confident"),))
    # of `AdaptiveGating`, the fields of these names
    threshold: float = setting(0.1, low=0, high=1e9, read_by=(_is("routing", "adaptive"),))
    sensitivity: float | tuple[float, ...] = setting(
        1.0, read=_one_or_more, kind="a number of at least 0, or one for each MoE layer like 1,0.5,0.5",
        read_by=(_is("routing", "adaptive"),),
    )  # fmt: skip
    # of `CachePrior`: `strength`, and the fields of these names
    prior: float | None = setting(None, low=0, high=4, calibrated=True, read_by=(_is("routing", "cached"),))
    always: int = setting(1, read=int, low=0, high=64, read_by=(_is("routing", "cached"),))
    untouched: int = setting(0, read=int, low=0, high=1 << 16, read_by=(_is("routing", "cached"),))
    most_moved: float = setting(1.0, low=0, high=1, read_by=(_is("routing", "cached"),))
    # settings that the chosen policies declare
    own: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    # only a copy in the very bits of a demand meets it, to measure what bits cost; no preset has it
    exact_bits: bool = field(default=False, kw_only=True)
    boundary: int | None = setting(
        None, read=int, low=0, high=1 << 16, calibrated=True, read_by=(_is("allotment", "shallow"),)
    )
    # of each MoE layer: the share of a token's experts that the next gate names, and the experts that a token runs, a
    # mean (`policies.allotment.expected_loads`)
    layer_recall: tuple[float, ...] | None = setting(
        None, read=_shares, kind="a share for each MoE layer like 0,0.8,0.9", calibrated=True,
        read_by=(_is("allotment", "expected-loads"),),
    )  # fmt: skip
    layer_uses: tuple[float, ...] | None = setting(
        None, read=lambda given: None if given is None else _numbers(given),
        kind="a number of at least 0 for each MoE layer like 2,1.9,1.5", calibrated=True,
        read_by=(_is("allotment", "expected-loads"),),
    )  # fmt: skip
    # slots of the cache for experts that are fetched, until their layer has run and the eviction policy says who stays
    # (Fate's cache list); 0: they take the place of others at once
    room: int = setting(0, read=int, low=0, high=1 << 16, read_by=(("cache", _evicts),), off=True)
    # share of the cache's bytes for a pool of low copies, in slots of their own size; 0: they take slots of high ones,
    # None: what follows from the precision (`with_low_share`)
    low_share: float | None = setting(
        0.0, read=_share, low=0, high=0.9, read_by=(_is_not("precision", "fixed"),), off=True
    )
    theta: float | None = setting(None, low=0, high=1e9, calibrated=True, read_by=(_is("unit", "neuron"),))
    upper_limit: float = setting(0.75, low=0, high=1, read_by=(_is("unit", "neuron"),))
    # bytes between two wanted neurons that are read through; None: what suits the store
    gap: int | None = setting(None, read=_size, kind="a size like 16KiB", read_by=(_is("unit", "neuron"),))
    # the engine's options of these names; None leaves them, and what a user gives comes first
    bits: int | None = setting(None, read=int, one_of=tuple(BITS))
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
        """The class that `part` names; None if it names none (`NO_CHOICE` of cache)."""
        return POLICIES[part].get(getattr(self, part))

    def options(self, part: str) -> dict[str, Any]:
        """The settings that the policy of `part` is made with besides its context; those without a value are absent."""
        return {name: self.own[name] for name in declared(self.policy(part)) if self.own.get(name) is not None}

    @property
    def gap_bytes(self) -> int:
        """Bytes between two wanted neurons that are read through: a drive takes as long for another read."""
        return self.gap if self.gap is not None else 0 if self.store == "memory" else DISK_GAP_BYTES

    @property
    def adaptive_gating(self) -> AdaptiveGating | None:
        """How many experts of a decoded token run, if not all K do."""
        return AdaptiveGating(self.threshold, self.sensitivity) if self.routing == "adaptive" else None

    @property
    def proceeds(self) -> bool:
        """Whether a layer goes on with what was predicted for it."""
        return self.on_mispredict != "reload"

    @property
    def low_copies_pass(self) -> bool:
        """Whether low copies serve the layer that they are loaded for and no later one."""
        return self.precision == "popularity" and self["mispredicted"] == "high"

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
        if self.proceeds:
            parts.append(f"on_mispredict={self.on_mispredict}")
        if self.misses != "load":
            parts.append(f"misses={self.misses}")
        return parts

    @property
    def tokens_by_residency(self) -> bool:
        """Whether what a token is computed with depends on which experts are resident, and so, if any are prefetched,
        on time: two runs may differ."""
        by_rule = self.routing == "cached" or self.precision in ("gate-score", "popularity")
        return by_rule or self.proceeds or self.misses == "measured"

    def exact(self) -> Composition:
        """The same composition with every lossy part off: the exact preset's tokens, bit for bit."""
        routing = "all" if self.routing in _FEWER_OR_OTHERS else self.routing
        prefetch = "next-gate" if self.prefetch in ("recalled", "recalled+next-gate", "neurons") else self.prefetch
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
            if declaration.setting.calibrated and values[name] is None and _is_read(name, self, known)
        ]

    @property
    def needs_profile(self) -> bool:
        """True if a setting is open or a part reads a calibrated table."""
        return bool(self.missing() or any(self.tables_read.values()))

    @property
    def tables_read(self) -> dict[str, str]:
        """Part → the calibrated table that its policy reads, '' if none."""
        return {part: getattr(self.policy(part), "reads_table", "") for part in POLICIES}

    @property
    def reads_weights(self) -> bool:
        """Whether a part looks at the gate weights of the experts that a router chose."""
        return self.routing == "adaptive" or any(
            getattr(self.policy(part), "reads_weights", False) for part in POLICIES
        )


class Declaration(NamedTuple):
    """One part or setting."""

    setting: Setting
    default: Any
    part: str = ""  # the part whose policies declare it; empty: a field of `Composition`
    values: tuple[str, ...] = ()  # those policies

    @property
    def read_by(self) -> tuple[tuple[str, Callable[[Composition], bool]], ...]:
        """(part, whether a composition with its value of the part reads this), for every part that matters."""
        if self.part:
            return ((self.part, lambda composition: getattr(composition, self.part) in self.values),)
        return self.setting.read_by


def declarations() -> dict[str, Declaration]:
    """Every part and setting by name: those of `Composition`, with the policies' in the place of `own`."""
    found: dict[str, Declaration] = {}
    ours = declared(Composition)
    for each in dataclasses.fields(Composition):
        if each.name in ours:
            found[each.name] = Declaration(*ours[each.name])
        elif each.name == "own":
            for part, policies in POLICIES.items():
                for value, policy in policies.items():
                    for name, (each_setting, default) in declared(policy).items():
                        others = found[name].values if name in found else ()
                        found[name] = Declaration(each_setting, default, part, (*others, value))
    return found


def _is_read(name: str, composition: Composition, known: Mapping[str, Declaration]) -> bool:
    """Whether something reads the part or setting `name`; `unread` says why not."""
    return all(reads(composition) and _is_read(part, composition, known) for part, reads in known[name].read_by)


def unread(
    name: str, composition: Composition, known: Mapping[str, Declaration] | None = None
) -> tuple[str, list[str]] | None:
    """Why the part or setting `name` does nothing in a composition: the part that would have to change, and its values
    with which something reads `name`, or would if no other part were in the way. None if it is read. known: all
    declarations, for callers that have them."""
    known = known or declarations()
    for part, reads in known[name].read_by:
        if not reads(composition):
            readers = (value for value in known[part].setting.one_of if reads(composition.having({part: value})))
            return part, list(readers)
        if further := unread(part, composition, known):
            return further
    return None


def parsed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Parts and settings by name, their values as text or not, as values. ConfigError for an unknown part or value, if
    no installed package has it either."""
    try:
        return _parsed(changes)
    except ConfigError:
        if not load_packages():
            raise
    return _parsed(changes)


def _parsed(changes: Mapping[str, Any]) -> dict[str, Any]:
    known = declarations()
    for name in changes:
        if name not in known:
            raise ConfigError(f"unknown part or setting '{name}'{near(name, known)}")
    return {name: known[name].setting.value(name, value) for name, value in changes.items()}


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
        wanted, default = known[name].setting, known[name].default
        if (wanted.off and value == default) or not (why := unread(name, result, known)):
            continue
        part, readers = why
        given = f"{name}={value}" if wanted.one_of else name
        raise ConfigError(
            f"{given} does nothing with {part}={getattr(result, part)}; it is read by {part}={' or '.join(readers)}"
        )
    return result


def filled(composition: Composition, profile: Profile | None) -> Composition:
    """The composition with its open settings from `profile`, if there is one; settings that have a value stay."""
    if profile is None:
        return composition
    names = composition.missing()
    if composition.precision == "table":
        names.append("quantizer")  # the bits of a table hold for the quantiser they were found for
    return composition.having(
        parsed({name: profile.settings[name] for name in names if profile.settings.get(name) is not None})
    )


def with_low_share(composition: Composition, layers: int) -> Composition:
    """The composition with the share of the cache for low copies that follows from its other settings, if it has
    none. layers: MoE layers of the model. Low copies for a prompt serve their own layer alone, since all are high in
    decode: they get their share of one layer's part of the cache."""
    if composition.low_share is None and composition.low_copies_pass:
        return composition.having({"low_share": composition["low_popularity"] / layers})
    return composition


def require_settings(composition: Composition, model: str) -> None:
    """ProfileError if calibrated settings are open, with the command that makes the calibration for `model`."""
    missing = composition.missing()
    if missing:
        made_for = composition.profile or "hobbit,edgemoe,fate,corm"
        raise ProfileError(
            f"preset {composition.name} has no {' and no '.join(missing)}; make them with tiermoe calibrate {model} "
            f"--text FILE --for {made_for}, or give them with --set {missing[0]}=…"
        )


def require_device(composition: Composition, device: str) -> None:
    """ConfigError if a device type ('cpu', 'cuda') cannot run a composition: misses=cpu is help for a GPU."""
    if composition.misses != "load" and device == "cpu":
        raise ConfigError(
            f"misses={composition.misses} computes on the CPU what a GPU lacks, and no GPU is in use; "
            f"use --set misses=load"
        )
    if device != "cpu" and (why := kept_from_gpus(composition)):
        raise ConfigError(f"{why}, or --device cpu")


def kept_from_gpus(composition: Composition) -> str:
    """Why a composition runs on CPUs alone, and what to do; empty if it does not."""
    return "gap is for neurons that a CPU reads from a drive; leave it out" if composition.gap is not None else ""
