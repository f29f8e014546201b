"""What each part of each system is worth: the whole preset against the preset without the part, in one run.

    python -m benchmarks.parts MODEL --text FILE --cache 45% [--presets hobbit,fate] [--rounds 3] [-- EVAL OPTIONS]

Every variant runs `tiermoe eval` in a process of its own, round after round, every other round backwards. Printed are
medians, and the ratio whole / without with its least and most over the rounds: above 1 the part makes decoding faster.
"""

import json
import platform
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks.rounds import parser_of
from tiermoe.errors import TiermoeError
from tiermoe.lab.measure.compare import Measured, Variant, measure_all

WITHOUT: dict[str, dict[str, list[str]]] = {
    "default": {
        "prefetch": ["prefetch=none"],
        "eviction (LRU instead)": ["cache=lru"],
        "evenly (one pool instead)": ["allotment=pool"],
    },
    "hobbit": {
        "mixed precision": ["precision=fixed", "low_share=0"],
        "prefetch": ["prefetch=none"],
        "weighted cache (LRU instead)": ["cache=lru"],
        "waiting for all loads": ["start=arrival"],
    },
    "edgemoe": {
        "bitwidths": ["precision=fixed", "prefetch=path", "bits=4"],
        "activation paths": ["prefetch=none"],
        "eviction score (LRU instead)": ["cache=lru"],
    },
    "mobile": {
        "K/2 first": ["routing=all", "prefetch=none"],
        "prefetch from the little pass": ["prefetch=none"],
    },
    "fate": {
        "2 bits for unpopular experts": ["precision=fixed"],
        "prefetch": ["prefetch=none"],
        "ARC (LRU instead)": ["cache=lru"],
        "shallow first (even instead)": ["allotment=even"],
    },
    "corm": {
        "neurons": ["unit=expert", "prefetch=next-gate"],
        "prefetch": ["prefetch=none"],
        "mixed precision by usage": ["precision=fixed"],
        "main memory (a drive instead)": ["store=disk"],
    },
}  # fmt: skip
"""Preset → part → what `--set` takes it out."""

WHOLE = "all parts"


def variants(presets: list[str], extra: dict[str, list[str]]) -> list[Variant]:
    """The whole preset first, then without each part. extra: settings of a preset that all its variants share."""
    found = []
    for preset in presets:
        for part, without in {WHOLE: [], **WITHOUT[preset]}.items():
            pairs = (change.partition("=") for change in [*extra.get(preset, []), *without])
            changes = {name: value for name, _, value in pairs}
            found.append(Variant(preset, changes, point={"without": part}))
    return found


def measured(chosen: list[Variant], rounds: int, words: list[str]) -> list[Measured]:
    def measure(variant: Variant) -> dict[str, Any]:
        changes = [word for name, value in variant.set.items() for word in ("--set", f"{name}={value}")]
        return eval_in_process([*words, "--preset", variant.preset, *changes])

    def progress(done: int, total: int) -> None:
        print(f"{done}/{total}", file=sys.stderr, flush=True)

    return measure_all(chosen, rounds, measure, progress)


def eval_in_process(words: list[str]) -> dict[str, Any]:
    """Runs `tiermoe eval WORDS --json` in a process of its own. TiermoeError with the reason where it fails."""
    command = [sys.executable, "-m", "tiermoe", "eval", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TiermoeError(f"{done.stderr.strip().rpartition(chr(10))[2]} (its process ended with {done.returncode})")
    result: dict[str, Any] = json.loads(done.stdout)[0]
    return result


def rows(results: list[Measured]) -> list[dict[str, Any]]:
    """One object per variant; `ratio` is [median, least, most] of whole / without in decode tokens per second."""
    wholes = {each.variant.preset: each for each in results if each.variant.point["without"] == WHOLE}
    table = []
    for result in results:
        variant, whole = result.variant, wholes[result.variant.preset]
        row: dict[str, Any] = {"preset": variant.preset, **variant.point, "set": dict(variant.set)}
        if result.error is not None:
            table.append(row | {"error": result.error})
            continue
        for key in ("decode_tok_s", "prefill_tok_s", "decode_hit_rate", "bytes_per_token", "perplexity", "kl"):
            values = [one[key] for one in result.rounds if key in one]
            row |= {key: median(values)} if values else {}
        for key, name in (("decode_tok_s", "ratio"), ("prefill_tok_s", "prefill_ratio")):
            pairs = zip(whole.rounds, result.rounds, strict=False)
            ratios = sorted(mine[key] / theirs[key] for mine, theirs in pairs)
            row[name] = [median(ratios), ratios[0], ratios[-1]] if ratios else None
        table.append(row)
    return table


def markdown(table: list[dict[str, Any]]) -> str:
    """The rows as a table for docs/systems.md."""
    lines = [
        "| preset | without | decode tok/s | decode: whole / without | prefill: whole / without | hits | MB a token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        if "error" in row:
            lines.append(f"| {row['preset']} | {row['without']} | {row['error']} | | | | |")
            continue
        cells = [row["preset"], "-" if row["without"] == WHOLE else row["without"], f"{row['decode_tok_s']:.1f}"]
        cells.append("{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]) if row["ratio"] else "")
        cells.append("{:.2f} ({:.2f} to {:.2f})".format(*row["prefill_ratio"]) if row["prefill_ratio"] else "")
        cells += [f"{row['decode_hit_rate']:.1%}", f"{row['bytes_per_token'] / 1e6:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and behind it. argparse gives the first positional argument all there are."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--cache", default="45%")
    parser.add_argument("--presets", default=",".join(WITHOUT))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--with", dest="shared", action="append", default=[], help="PRESET:NAME=VALUE for all variants")
    own, options = _split(sys.argv[1:])
    args = parser.parse_args(own)
    extra: dict[str, list[str]] = {}
    for text in args.shared:
        preset, _, change = text.partition(":")
        extra.setdefault(preset, []).append(change)
    chosen = variants(args.presets.split(","), extra)
    words = [args.model, "--text", args.text, "--cache", args.cache, *options]
    table = rows(measured(chosen, args.rounds, words))
    print(json.dumps({"machine": platform.platform(), "command": sys.argv, "rows": table}))
    print(markdown(table), file=sys.stderr)


if __name__ == "__main__":
    main()
