"""The dictionary of activation paths: which experts follow which (EdgeMoE, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tiermoe.errors import ProfileError

PathKey = tuple[tuple[int, ...], ...]
"""The active experts of consecutive MoE layers, oldest layer first, ascending within a layer."""

Paths = Mapping[int, Mapping[PathKey, Mapping[int, int]]]
"""MoE layer → path through the layers before it → expert → number of tokens."""


def path_key(active: Iterable[Iterable[int]]) -> PathKey:
    """The key of the active experts of consecutive layers, oldest first."""
    return tuple(tuple(sorted(experts)) for experts in active)


def count_paths(routings: Iterable[Sequence[Sequence[int]]], order: int) -> dict[int, dict[PathKey, dict[int, int]]]:
    """Counts over tokens; each is given by its experts of every MoE layer (empty where it did not run: an encoder's
    layers for a decoder's token). Paths of 1 to `order` layers, so that a longer one that was never seen can fall back
    to a shorter."""
    counts: dict[int, dict[PathKey, dict[int, int]]] = {}
    for routing in routings:
        layers = path_key(routing)
        for layer, chosen in enumerate(layers):
            for key in _paths_before(layers, layer, order) if chosen else ():
                following = counts.setdefault(layer, {}).setdefault(key, {})
                for expert in chosen:
                    following[expert] = following.get(expert, 0) + 1
    return counts


def _paths_before(layers: PathKey, layer: int, order: int) -> Iterator[PathKey]:
    for length in range(1, min(order, layer) + 1):
        if not layers[layer - length]:
            return
        yield layers[layer - length : layer]


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
    """The reverse of `paths_to_json`; ProfileError where `document` is something else."""
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
