"""Activation paths (EdgeMoE, section 3.3.2): the predictor of experts that usually follow those of the previous layers,
how paths are counted, and how a profile keeps them; the predictors of layers that are routed by a hash of the token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tiermoe.errors import ConfigError, ProfileError
from tiermoe.offload.policies.prediction.base import (
    Available,
    Forecasts,
    LayerByLayer,
    PathKey,
    Paths,
    Predictor,
    Ranked,
)
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Routed, Wanted


@dataclass(eq=False)
class ActivationPath(Predictor):
    """Experts of the next layer by falling probability after the last `path` layers, the running one included
    (EdgeMoE, section 3.3.2; with one layer EAP of Fate, section 5.1). A path that was never seen falls back to a
    shorter one, then to the layer's frequencies.

    At most K are named ("1-3 experts each layer", says the paper of its models with K = 1): with several reads at once
    more would make the router's own choice wait.

    A path is one token's: a pass over several tokens names nothing. In an encoder, where all tokens are re-batched by
    expert, the whole next layer is named in order, the first one when a request begins (section 3.3.3: the initial
    buffer). For an encoder alone, which needs no paths, the cache begins with the experts of the highest frequency
    (section 3.3.3). ConfigError without a calibration."""

    path: int = setting(2, read=int, low=1, high=2)
    reads_table: ClassVar[str] = "paths"

    def __post_init__(self) -> None:
        if not self.context.paths and not self._encoder_alone:
            raise ConfigError(
                "prefetch=path needs activation paths and there are none; make them with tiermoe calibrate MODEL "
                "--text FILE, or take prefetch=next-gate"
            )
        self._active: dict[int, list[int]] = {}  # layer → the token's experts, in the running pass

    @property
    def _encoder_alone(self) -> bool:
        return self.context.encoder_layers == self.context.layers

    def initial_experts(self) -> list[Wanted]:
        if not self._encoder_alone:
            return []
        used = sorted((-times, place) for place, times in self.context.frequencies.items() if times > 0)
        return [Wanted(*place, -times) for times, place in used]

    def observe(self, routed: Routed) -> None:
        super().observe(routed)
        if self._active and routed.layer <= max(self._active):
            self._active.clear()  # another pass
        if self.tokens == 1 and routed.layer >= self.context.encoder_layers:
            self._active[routed.layer] = list(routed.tokens_per_expert())

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        target = layer + 1
        if target >= self.context.layers:
            return
        if target < self.context.encoder_layers:
            for expert in range(self.context.experts[target]):
                yield Wanted(target, expert, 1.0)
        elif layer in self._active:
            following = self._following(layer)
            total = sum(count for _, count in following)
            for expert, count in following[: self.context.top_k[target]]:
                yield Wanted(target, expert, count / total)

    def new_sequence(self) -> None:
        self._active.clear()

    def _following(self, layer: int) -> list[tuple[int, float]]:
        """Experts of the next layer with counts, falling; ties: lower index first."""
        known = self.context.paths.get(layer + 1, {})
        for length in range(self.path, 0, -1):
            path = range(layer - length + 1, layer + 1)
            if all(previous in self._active for previous in path):
                key = _path_key(self._active[previous] for previous in path)
                if key in known:
                    counts = ((expert, float(count)) for expert, count in known[key].items())
                    return sorted(counts, key=lambda seen: (-seen[1], seen[0]))
        return self.context.most_frequent(layer + 1)


def count_paths(routings: Iterable[Sequence[Sequence[int]]], order: int) -> dict[int, dict[PathKey, dict[int, int]]]:
    """Paths of 1 to `order` layers, counted over tokens: a longer path that was never seen can fall back to a shorter.
    routings: of each token the experts of every MoE layer (empty if the layer did not run: an encoder's layers for a
    decoder's token)."""
    counts: dict[int, dict[PathKey, dict[int, int]]] = {}
    for routing in routings:
        layers = _path_key(routing)
        for layer, chosen in enumerate(layers):
            for key in _paths_before(layers, layer, order) if chosen else ():
                following = counts.setdefault(layer, {}).setdefault(key, {})
                for expert in chosen:
                    following[expert] = following.get(expert, 0) + 1
    return counts


def paths_to_json(paths: Paths) -> dict[str, dict[str, dict[str, int]]]:
    """{"2": {"3,7|1,2": {"5": 12}}}: twelve tokens went through experts 3 and 7 of layer 0, 1 and 2 of layer 1, and 5
    of layer 2."""
    return {
        str(layer): {
            "|".join(",".join(map(str, experts)) for experts in key): {str(e): count for e, count in following.items()}
            for key, following in keys.items()
        }
        for layer, keys in paths.items()
    }


def paths_from_json(document: Any) -> dict[int, dict[PathKey, dict[int, int]]]:
    """The reverse of `paths_to_json`. ProfileError for any other document."""
    try:
        return {
            int(layer): {
                tuple(tuple(map(int, experts.split(","))) for experts in key.split("|")): {
                    int(expert): int(count) for expert, count in following.items()
                }
                for key, following in keys.items()
            }
            for layer, keys in document.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ProfileError(
            f"the profile's activation paths are damaged ({error}); make it again with tiermoe calibrate"
        ) from None


def _path_key(active: Iterable[Iterable[int]]) -> PathKey:
    """The key of the active experts of consecutive layers, oldest first."""
    return tuple(tuple(sorted(experts)) for experts in active)


def _paths_before(layers: PathKey, layer: int, order: int) -> Iterator[PathKey]:
    for length in range(1, min(order, layer) + 1):
        if not layers[layer - length]:
            return
        yield layers[layer - length : layer]


class HashRouted(LayerByLayer):
    """The experts of hash-routed layers (EdgeMoE, section 3.1; DeepSeek-V4's first layers), those of most tokens
    first, ties by index. ConfigError for a model without such layers."""

    errs: ClassVar[bool] = False
    from_the_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.context.hash_tables:
            raise ConfigError(
                "prefetch=hash needs layers that are routed by a hash of the token, and this model has none; take "
                "prefetch=next-gate"
            )

    def named(self, target: int, forecasts: Forecasts) -> Ranked:
        table = self.context.hash_tables.get(target)
        if table is None:
            return []
        counts = Counter(expert for token in forecasts.token_ids() for expert in table[token])
        return sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))


class HashThenPath(ActivationPath):
    """Hash-routed layers exactly, as `HashRouted` names them, the others by the activation path (EdgeMoE, sections 3.1
    and 3.3.2). ConfigError without either."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hash_routed = HashRouted(self.context)

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        if layer + 1 in self.context.hash_tables:
            yield from self._hash_routed.candidates(layer, forecasts, available)
        else:
            yield from super().candidates(layer, forecasts, available)
