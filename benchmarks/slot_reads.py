"""Reading whole experts from a store into slots, beside reading the same files from end to end.

    python -m benchmarks.slot_reads MODEL [--lanes 1,2,4,8] [--megabytes 256]

Experts are read in random order by the engine's own link: lanes, O_DIRECT or the page cache, each expert's checksum.
`sequential` is one thread that reads the files in blocks of 4 MiB and looks at nothing, like dd. `latency`: one expert
asked for and waited for, nothing else under way. The files are dropped from the page cache before every run. Ways
alternate; ratios are taken within a round. Prints one JSON object, and a table on standard error.
"""

import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table, rates, ratios, shown, timed
from tiermoe.bench.limit import drop_from_page_cache
from tiermoe.errors import TiermoeError
from tiermoe.kernels import machine_layout
from tiermoe.model.blueprint import inspect_model
from tiermoe.model.hub import resolve_model
from tiermoe.model.prepare_store import ensure_packed, open_or_create, store_root
from tiermoe.store.store import Store, precision_key
from tiermoe.tiers.disk import DiskLink, SlotFiller
from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.tiers.slots import HostSlots
from tiermoe.types import ExpertKey, Extent, Load

BLOCK = 4 << 20
SLOTS_A_LANE = 2
LATENCY = "latency of one expert"
ONE_BY_ONE = 32  # experts whose latency is taken in a round


class Experts:
    """The experts of a store in one precision, in random order."""

    def __init__(self, store: Store, key: str, seed: int) -> None:
        precision = store.precisions[key]
        self.bits = precision.bits
        self._extents = [layer.extents for layer in precision.layers]
        self._formats = [store.expert_format(key, layer) for layer in range(len(precision.layers))]
        self.keys = [
            ExpertKey(layer, expert, self.bits) for layer, row in enumerate(self._extents) for expert in range(len(row))
        ]
        random.Random(seed).shuffle(self.keys)
        self.slot_bytes = max(form.slot.nbytes for form in self._formats)
        segments = [segment for row in self._extents for extent in row for segment in extent.segments]
        self.files = sorted({Path(segment.file) for segment in segments})

    def extent(self, key: ExpertKey) -> Extent:
        """Where an expert lies."""
        return self._extents[key.layer][key.expert]

    def link(self, direct: bool, lanes: int) -> tuple[DiskLink, int]:
        """A link with slots of its own, and their number."""
        count = SLOTS_A_LANE * lanes
        filler = SlotFiller(ExtentReader(direct), self.extent, lambda key: self._formats[key.layer])
        return DiskLink(filler, HostSlots(count, self.slot_bytes), lanes), count


def through(link: DiskLink, slots: int, keys: Sequence[ExpertKey]) -> None:
    """Reads `keys`, as many at a time as there are slots. LoadError where one cannot be read."""
    waiting = iter(keys)
    for slot, key in zip(range(slots), waiting, strict=False):
        link.submit(Load(key, slot, urgent=True))
    for _ in keys:
        finished = link.wait()
        if finished.error is not None:
            raise finished.error
        key = next(waiting, None)
        if key is not None:
            link.submit(Load(key, finished.load.slot, urgent=True))


def sequential(files: Sequence[Path], nbytes: int, direct: bool) -> None:
    """Reads `nbytes` of the files, from the beginning of the first, from it again after the last."""
    memory, left = aligned_memory(BLOCK), nbytes
    for file in itertools.cycle(files):
        descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            offset, count = 0, BLOCK
            while left > 0 and count == BLOCK:
                count = os.preadv(descriptor, [memory], offset)
                offset, left = offset + count, left - count
        finally:
            os.close(descriptor)
        if left <= 0:
            return


def ways_to_open(file: Path) -> tuple[bool, ...]:
    """Direct and buffered, or buffered alone where the file system knows no O_DIRECT."""
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        return (False,)
    return True, False


def measure(experts: Experts, lanes: Sequence[int], nbytes: int, rounds: int) -> dict[str, Any]:
    """Speeds, latencies and ratios by way. nbytes: what one run reads, about."""
    ways = ways_to_open(experts.files[0])
    chosen = list(itertools.islice(itertools.cycle(experts.keys), _count(experts, nbytes)))
    total = sum(experts.extent(key).nbytes for key in chosen)
    links = {(direct, count): experts.link(direct, count) for direct in ways for count in lanes}
    singles = {direct: experts.link(direct, 1) for direct in ways}

    def reading(link: DiskLink, slots: int) -> Callable[[], None]:
        return lambda: through(link, slots, chosen)

    def one_by_one(link: DiskLink) -> Callable[[], None]:
        return lambda: [through(link, 1, [key]) for key in chosen[:ONE_BY_ONE]]  # type: ignore[return-value]

    calls = {_name(direct, count): reading(*link) for (direct, count), link in links.items()}
    calls |= {f"{LATENCY}, {_how(direct)}": one_by_one(link) for direct, (link, _) in singles.items()}
    for direct in ways:
        calls[f"sequential, {_how(direct)}"] = lambda direct=direct: sequential(experts.files, total, direct)
    try:
        seconds = timed(calls, rounds, lambda: drop_from_page_cache(experts.files))
    finally:
        for link, _ in [*links.values(), *singles.values()]:
            link.close()
    whole = {name: took for name, took in seconds.items() if not name.startswith(LATENCY)}
    single = min(ONE_BY_ONE, len(chosen))
    return {
        "experts": len(chosen), "bytes": total, "expert_bytes": experts.extent(chosen[0]).nbytes,
        "gb_s": {name: rates(took, total / 1e9) for name, took in whole.items()},
        "latency_us": {
            name: rates([1 / one for one in took], 1e6 / single) for name, took in seconds.items() if name not in whole
        },
        "ratios": {
            _name(direct, count): ratios(
                {name: whole[name] for name in (_name(direct, count), f"sequential, {_how(direct)}")},
                _name(direct, count),
            )
            for direct, count in links
        },
    }  # fmt: skip


def _count(experts: Experts, nbytes: int) -> int:
    return max(nbytes // experts.extent(experts.keys[0]).nbytes, 1)


def _how(direct: bool) -> str:
    return "direct" if direct else "buffered"


def _name(direct: bool, lanes: int) -> str:
    return f"{_how(direct)}, {lanes} lane{'s' if lanes > 1 else ''}"


def packed(model: str, bits: int, quantizer: str, store: Path | None, seed: int) -> Experts:
    """The experts of a model, packed first where they are not. TiermoeError for a model that cannot be."""
    blueprint = inspect_model(resolve_model(model), model)
    opened = open_or_create(blueprint, store_root(blueprint, store))
    ensure_packed(opened, blueprint, bits, quantizer)
    return Experts(opened, precision_key(bits, quantizer, machine_layout("cpu")), seed)


def tables(document: dict[str, Any]) -> None:
    """What people read."""
    rows = []
    for name, speed in document["gb_s"].items():
        beside = next(iter(document["ratios"].get(name, {}).values()), None)
        rows.append([name, f"{shown(speed)} GB/s", shown(beside)])
    rows += [[name, f"{shown(found)} us", ""] for name, found in document["latency_us"].items()]
    print_table(["", "speed or time", "/ sequential"], rows)


def main() -> None:
    parser = parser_of("benchmarks.slot_reads", __doc__, rounds=3)
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("--lanes", type=numbers, default=[1, 2, 4, 8], help="default 1,2,4,8")
    parser.add_argument("--bits", type=int, default=4, choices=(16, 8, 4, 2))
    parser.add_argument("--quantizer", default="hqq", choices=("hqq", "linear"))
    parser.add_argument("--store", type=Path, help="folder of the expert store (default: the user's cache folder)")
    parser.add_argument("--megabytes", type=at_least_one, default=256, help="MiB that one run reads (default 256)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        experts = packed(args.model, args.bits, args.quantizer, args.store, args.seed)
    except TiermoeError as error:
        parser.error(str(error))
    document = {**about(args.rounds), **measure(experts, args.lanes, args.megabytes << 20, args.rounds)}
    print(json.dumps(document))
    tables(document)


if __name__ == "__main__":
    main()
