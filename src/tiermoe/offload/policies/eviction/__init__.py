"""Eviction policies: which expert leaves the cache. `EVICTIONS` is the one table of their names."""

from collections.abc import Callable

from tiermoe.offload.policies.eviction.activation import ActivationRatio
from tiermoe.offload.policies.eviction.arc import AdaptiveReplacement
from tiermoe.offload.policies.eviction.base import Clock, Eviction, EvictionContext, NextUse, Popularity, Undoable
from tiermoe.offload.policies.eviction.classic import (
    Belady,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    RandomChoice,
)
from tiermoe.offload.policies.eviction.decayed import DecayedCounts
from tiermoe.offload.policies.eviction.edgemoe import DistanceByFrequency
from tiermoe.offload.policies.eviction.hobbit import FarthestLayer, LeastHighPrecisionUsed, Weighted
from tiermoe.offload.policies.eviction.next_use import EstimatedNextUse
from tiermoe.offload.policies.eviction.recent_score import MinusRecentScore
from tiermoe.offload.policies.eviction.static import LastLayersStay, MostFrequentStay
from tiermoe.offload.policies.registry import Registry, with_methods

__all__ = ["EVICTIONS", "Clock", "Eviction", "EvictionContext", "NextUse", "Popularity", "Undoable"]

EVICTIONS = Registry[Callable[..., Eviction]]("EVICTIONS", with_methods(Eviction), {
    "random": RandomChoice,
    "fifo": FirstInFirstOut,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "lhu": LeastHighPrecisionUsed,
    "fld": FarthestLayer,
    "weighted": Weighted,
    "distance": DistanceByFrequency,
    "arc": AdaptiveReplacement,
    "next-use": EstimatedNextUse,
    "activation-ratio": ActivationRatio,
    "decayed": DecayedCounts,
    "recent-score": MinusRecentScore,
    "last-layers": LastLayersStay,
    "most-frequent": MostFrequentStay,
    "belady": Belady,
})  # fmt: skip
