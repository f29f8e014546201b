"""Who leaves the cache. `EVICTIONS` is the one table of names."""

from collections.abc import Callable

from tiermoe.policy.eviction.arc import AdaptiveReplacement
from tiermoe.policy.eviction.belady import Belady
from tiermoe.policy.eviction.distance import DistanceByFrequency
from tiermoe.policy.eviction.fifo import FirstInFirstOut
from tiermoe.policy.eviction.fld import FarthestLayer
from tiermoe.policy.eviction.lfu import LeastFrequentlyUsed
from tiermoe.policy.eviction.lhu import LeastHighPrecisionUsed
from tiermoe.policy.eviction.lru import LeastRecentlyUsed
from tiermoe.policy.eviction.protocol import Eviction, EvictionContext
from tiermoe.policy.eviction.random_choice import RandomChoice
from tiermoe.policy.eviction.weighted import Weighted

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
