"""What reading single neurons takes of a drive (CORM), by the order that they lie in, by bundles and by gaps.

    tiermoe trace MODEL --text A --out calibration.trace --neurons THETA
    tiermoe trace MODEL --text B --out evaluation.trace --neurons THETA
    python -m benchmarks.neuron_reads calibration.trace evaluation.trace --file FILE [--hidden 2048] [--loads 200]

Of loads drawn from the second trace (an expert and the neurons that were active): the bytes that are read beside those
of the whole expert, in how many reads, and how long that takes with O_DIRECT on FILE (larger than any cache in front of
the drive), beside reading as many whole experts, by turns. W1 is read first, as it must be: it says which neurons are
active. Orders: the checkpoint's; by activity on the first trace, most active first; 'ideal', each load's active neurons
in one piece, which no file can be for all tokens. Bundles: so many neurons as fill whole pages, read together.
--hidden: of the records; a small model's neurons then stand for those of a larger one. Prints JSON, and a table on
standard error.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.rounds import parser_of
from tiermoe.formats.expert_format import PAGE, align
from tiermoe.formats.neurons import neuron_format, record_place
from tiermoe.kernels.linear import machine_layout
from tiermoe.lab.papers.corm import neuron_recall
from tiermoe.lab.trace import Trace, read_trace
from tiermoe.offload.policies.neurons import Records
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, MoeLayer, Part, Segment

Expert = tuple[int, int]
GAPS = (0, 16 << 10, 64 << 10, 128 << 10)
MOST_BUNDLED = 16  # neurons


@dataclass(frozen=True)
class Layout:
    """How an expert's neurons lie behind its W1."""

    name: str
    order: dict[Expert, list[int]]  # expert → its neurons in the order that they lie in
    bundle: int  # neurons that lie together
    bundle_bytes: int
    gap: int  # bytes between two reads up to which one read takes both


def loads_of(trace: Trace) -> list[tuple[Expert, int]]:
    """Every decoded token's experts with their active neurons."""
    return [
        ((number, expert), active)
        for passed in trace.passes
        if passed.phase == "decode"
        for number, layer in enumerate(passed.layers)
        for expert, active in layer.neurons.items()
    ]


def by_activity(trace: Trace, neurons: int) -> dict[Expert, list[int]]:
    """Of each expert that was used, its neurons, most active first."""
    counts: dict[Expert, list[int]] = defaultdict(lambda: [0] * neurons)
    for expert, active in loads_of(trace):
        row = counts[expert]
        for neuron in range(neurons):
            row[neuron] += active >> neuron & 1
    return {expert: sorted(range(neurons), key=lambda neuron: (-row[neuron], neuron)) for expert, row in counts.items()}


def positions(active: int, order: list[int] | None, neurons: int) -> int:
    """The set in the order that the neurons lie in."""
    if order is None:
        return active
    return sum(1 << place for place, neuron in enumerate(order[:neurons]) if active >> neuron & 1)


def bundled(wanted: int, neurons: int, bundle: int) -> int:
    """The bundles that hold some of the wanted neurons."""
    mask = (1 << bundle) - 1
    return sum(1 << number for number in range(-(-neurons // bundle)) if wanted >> number * bundle & mask)


def spans(layout: Layout, expert: Expert, active: int, head: int, neurons: int) -> list[tuple[int, int]]:
    if layout.name.startswith("ideal"):
        wanted = (1 << active.bit_count()) - 1
    else:
        wanted = positions(active, layout.order.get(expert), neurons)
    count = -(-neurons // layout.bundle)
    records = Records(head, layout.bundle_bytes, count, align(head + count * layout.bundle_bytes, PAGE))
    return records.spans(bundled(wanted, neurons, layout.bundle), PAGE, layout.gap)


class Drive:
    """Reads parts of a file where they would lie: each expert at a place of its own."""

    def __init__(self, file: Path, extent: int) -> None:
        self._reader = ExtentReader()
        self._file, self._extent = str(file), extent
        self._places = os.path.getsize(file) // extent
        self._memory = aligned_memory(extent)
        self._random = random.Random(1)
        if self._places < 16:
            raise SystemExit(f"{file} has room for {self._places} experts of {extent:,} bytes; name a larger file")

    def seconds(self, parts: list[tuple[int, int]]) -> float:
        """That reading such parts of an expert takes, one after the other."""
        first = self._random.randrange(self._places) * self._extent // PAGE * PAGE
        began = time.perf_counter()
        for start, stop in parts:
            self._reader.read_part(Segment(self._file, first + start, stop - start, start), self._memory, KEY)
        return time.perf_counter() - began


KEY = ExpertKey(0, 0, 4)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    calibration, evaluation = read_trace(args.calibration), read_trace(args.evaluation)
    neurons = evaluation.header.neurons
    hidden = args.hidden
    layer = MoeLayer("l", 1, 1, (Part("gate_up_proj", (2 * neurons, hidden)), Part("down_proj", (hidden, neurons))))
    place = record_place(neuron_format(layer, args.bits, torch.bfloat16, machine_layout("cpu"), "hqq"))
    head, size = place.stored_at, place.record_bytes
    extent = align(head + neurons * size, PAGE) + MOST_BUNDLED * PAGE * neurons // 4
    fits = min(range(1, MOST_BUNDLED + 1), key=lambda count: (align(count * size, PAGE) / (count * size), count))
    active = by_activity(calibration, neurons)
    everything = loads_of(evaluation)
    chosen = random.Random(0).sample(everything, min(args.loads, len(everything)))
    drive = Drive(args.file, extent)
    whole = [(0, align(head + neurons * size, PAGE))]
    rows = []
    for name, order in (("checkpoint", {}), ("by activity", active), ("ideal", {})):
        for bundle, nbytes in ((1, size), (fits, align(fits * size, PAGE))):
            for gap in GAPS:
                layout = Layout(name, order, bundle, nbytes, gap)
                parts = [spans(layout, expert, wanted, head, neurons) for expert, wanted in chosen]
                mine = theirs = 0.0
                for each in parts:  # by turns
                    mine += drive.seconds([(0, head), *each])
                    theirs += drive.seconds(whole)
                read = [head + sum(stop - start for start, stop in each) for each in parts]
                rows.append(
                    {
                        "order": name, "bundle": bundle, "gap": gap, "bytes": fmean(read) / whole[0][1],
                        "reads": 1 + fmean(len(each) for each in parts), "time": mine / theirs,
                    }
                )  # fmt: skip
    shares = [wanted.bit_count() / neurons for _, wanted in everything]
    return {
        "command": " ".join(sys.argv),
        "neurons": neurons,
        "record_bytes": size,
        "head_share": head / whole[0][1],
        "active": fmean(shares),
        "named": neuron_recall(evaluation),
        "loads": len(chosen),
        "rows": rows,
    }


def show(found: dict[str, Any]) -> None:
    lines = ["| order | neurons together | gap, KiB | bytes | reads | time |", "|---|--:|--:|--:|--:|--:|"]
    for row in found["rows"]:
        lines.append(
            f"| {row['order']} | {row['bundle']} | {row['gap'] >> 10} | {row['bytes']:.2f} | {row['reads']:.1f} | "
            f"{row['time']:.2f} |"
        )
    print("\n".join(lines), file=sys.stderr)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--loads", type=int, default=200)
    found = measure(parser.parse_args())
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
