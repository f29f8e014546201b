"""What a layer's decisions cost, for one token: no weights, and a link that has every expert at once.

    python -m benchmarks.controller [--layers 24 --experts 64 --top-k 6 --share 0.5] [--policies lru,arc]

Measured is all that is decided for a layer (`tiermoe.offload.scheduler`, as the engine calls it): demands, what is
here, whom to evict, bookkeeping. `resident`: a slot for every expert; `misses`: slots for a share of them, so that
experts are loaded and leave. Experts are drawn at random, the same for every policy; nothing is prefetched. Prints
one JSON object, and a table on standard error.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rounds import about, at_least_one, parser_of, print_table, rates, shown, timed
from tiermoe.lab.simulate.link import InstantLink
from tiermoe.metrics import ExpertCounts
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import Routed

BITS = 4
POLICIES = [name for name in EVICTIONS if name != "belady"]  # its choices need the future
_EVEN = (0.25, 0.25, 0.25, 0.25)


class NoForecasts:
    """What a prediction would ask of the model; none is made here."""

    def ranked(self, layer: int) -> Sequence[Any]:
        raise AssertionError("nothing predicts here")


def tokens(count: int, layers: int, experts: int, top_k: int, seed: int) -> list[list[Routed]]:
    """The layers of `count` tokens, experts drawn without replacement."""
    chance = random.Random(seed)
    weights = [[1 / top_k] * top_k]
    return [
        [Routed(layer, "decode", [chance.sample(range(experts), top_k)], weights) for layer in range(layers)]
        for _ in range(count)
    ]


def scheduler(policy: str, layers: int, experts: int, top_k: int, slots: int) -> Scheduler:
    """One pool of `slots` under a policy, without prefetch."""
    composition = Composition(policy, "", cache=policy, own={"weights": _EVEN})
    shape = ModelShape((experts,) * layers, (top_k,) * layers, 0)
    return assemble(composition, shape, [PrecisionSlots((BITS,), slots)], InstantLink(lambda _: 1), BITS)


def decide(made: Scheduler, passes: Sequence[Sequence[Routed]]) -> Callable[[], None]:
    """All decisions of some tokens."""
    nothing: Any = NoForecasts()

    def run() -> None:
        for layers in passes:
            made.begin_pass(1, nothing, "decode")
            for routed in layers:
                for _ in made.run_layer(routed, nothing):
                    pass

    return run


def measure(args: Any) -> dict[str, Any]:
    """The document that is printed; times in microseconds a layer."""
    every = args.layers * args.experts
    caches = {"resident": every, "misses": max(int(args.share * every), args.top_k)}
    passes = tokens(args.tokens, args.layers, args.experts, args.top_k, args.seed)
    runs = {
        (cache, policy): scheduler(policy, args.layers, args.experts, args.top_k, slots)
        for cache, slots in caches.items()
        for policy in args.policies
    }
    for made in runs.values():
        decide(made, passes)()
        made.loader.counts = ExpertCounts()  # what comes first misses in any cache
    seconds = timed({json.dumps(key): decide(made, passes) for key, made in runs.items()}, args.rounds)
    sizes = {name: getattr(args, name) for name in ("layers", "experts", "top_k", "tokens", "seed")}
    return {
        **about(args.rounds), **sizes, "slots": caches,
        "rows": [_row(*key, made, seconds[json.dumps(key)], args) for key, made in runs.items()],
    }  # fmt: skip


def _row(cache: str, policy: str, made: Scheduler, seconds: Sequence[float], args: Any) -> dict[str, Any]:
    counts = made.loader.counts
    return {
        "cache": cache,
        "policy": policy,
        "us_a_layer": rates([1 / one for one in seconds], 1e6 / (args.tokens * args.layers)),
        "hit_rate": counts.hits / (counts.hits + counts.misses),
    }


def parse_policies(text: str) -> list[str]:
    """Of POLICIES. ValueError for an unknown one."""
    words = text.split(",")
    if set(words) - set(POLICIES):
        raise ValueError(f"{text}: there are {', '.join(POLICIES)}")
    return words


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    sizes = {"layers": 24, "experts": 64, "top-k": 6, "tokens": 64}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least_one, default=default, help=f"default {default}")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that has slots (default 0.5)")
    parser.add_argument("--policies", type=parse_policies, default=POLICIES, help="default " + ",".join(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.top_k > args.experts or not 0 < args.share <= 1:
        parser.error("--top-k is at most --experts, and --share above 0 and at most 1")
    document = measure(args)
    print(json.dumps(document))
    head = ["cache", "policy", "us a layer", "hits"]
    print_table(
        head,
        [[row["cache"], row["policy"], shown(row["us_a_layer"]), f"{row['hit_rate']:.0%}"] for row in document["rows"]],
    )


if __name__ == "__main__":
    main()
