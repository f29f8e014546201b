"""How right each predictor is, per layer and distance, on a text disjoint from the one it was calibrated on.

    tiermoe trace MODEL --text calibration.txt --out a.trace
    tiermoe trace MODEL --text held-out.txt --out b.trace
    python -m benchmarks.prediction a.trace b.trace

Prints a markdown table: of a decoded token's K experts the share that was named, beside K/E and beside always naming
the layer's K most frequent. `named`: how many experts were named.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from benchmarks.recall_table import RecallRow, recall_table
from tiermoe.trace.file import read_trace


def markdown(rows: list[RecallRow]) -> str:
    """One line per predictor and distance, one column per layer, and the mean over layers."""
    layers = sorted({row.layer for row in rows})
    lines = [
        "| predictor | distance | named | " + " | ".join(f"layer {layer}" for layer in layers) + " | mean |",
        "|---|" + "--:|" * (len(layers) + 3),
    ]
    groups: dict[tuple[str, int], list[RecallRow]] = defaultdict(list)
    for row in rows:
        groups[row.predictor, row.distance].append(row)
    first = {row.layer: row for row in rows}
    lines.append(_line("K/E", "", "", layers, {layer: row.uniform for layer, row in first.items()}))
    for (name, distance), found in groups.items():
        named = sum(row.named for row in found) / len(found)
        lines.append(_line(name, str(distance), f"{named:.1f}", layers, {row.layer: row.recall for row in found}))
    return "\n".join(lines)


def _line(name: str, distance: str, named: str, layers: list[int], values: dict[int, float]) -> str:
    cells = [f"{values[layer]:.3f}" if layer in values else "" for layer in layers]
    return f"| {name} | {distance} | {named} | " + " | ".join(cells) + f" | {sum(values.values()) / len(values):.3f} |"


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("calibration", type=Path)
    top.add_argument("held_out", type=Path)
    args = top.parse_args()
    calibration, held_out = read_trace(args.calibration), read_trace(args.held_out)
    if calibration.header.made_from.get("text_xxh3", 0) == held_out.header.made_from.get("text_xxh3", 1):
        top.error("both traces are of the same text; the held-out one must be of another")
    print(markdown(recall_table(calibration, held_out)))


if __name__ == "__main__":
    main()
