"""Who leaves the cache. `EVICTIONS` is the one table of names."""

from collections.abc import Callable

from tiermoe.decide.eviction.arc import AdaptiveReplacement
from tiermoe.decide.eviction.belady import Belady
from tiermoe.decide.eviction.distance import DistanceByFrequency
from tiermoe.decide.eviction.fifo import FirstInFirstOut
from tiermoe.decide.eviction.fld import FarthestLayer
from tiermoe.decide.eviction.lfu import LeastFrequentlyUsed
from tiermoe.decide.eviction.lhu import LeastHighPrecisionUsed
from tiermoe.decide.eviction.lru import LeastRecentlyUsed
from tiermoe.decide.eviction.protocol import Eviction, EvictionContext
from tiermoe.decide.eviction.random_choice import RandomChoice
from tiermoe.decide.eviction.weighted import Weighted

__all__ = ["EVICTIONS", "Eviction", "EvictionContext"]

EVICTIONS: dict[str, Callable[..., Eviction]] = {
    "random": RandomChoice,
    "fifo": FirstInFirstOut,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "lhu": LeastHighPrecisionUsed,
    "fld": FarthestLayer,
    "weighted": Weighted,
    "distance": DistanceByFrequency,
    "arc": AdaptiveReplacement,
    "belady": Belady,
}
