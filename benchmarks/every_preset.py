"""Every preset on one model, on the real engine: what each did with its experts.

    python -m benchmarks.every_preset MODEL --text FILE [--cache 45%] [--tokens 32] [--presets hobbit,fate]

Calibrates what has not been calibrated (EdgeMoE's low experts are the least used ones: a search of bitwidths measures
every expert of the model by itself), then reads a prompt and decodes with each preset in turn, each with an empty
cache. Prints a table on standard error and one JSON object; the exit code is 1 where a preset failed or did not do what
it is for. A preset that the model has nothing for says why and is no failure. No weights need to be trained:
`benchmarks.random_model` writes the shapes of the models that the papers measure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tiermoe
from benchmarks.rounds import at_least_one, parser_of, print_table
from tiermoe.errors import TiermoeError
from tiermoe.formats.store_files import write_atomically
from tiermoe.lab.measure.calibrate import Calibration, prepare
from tiermoe.lab.measure.compare import presets_asked
from tiermoe.lab.measure.profiles import FailedProfile, make_profiles
from tiermoe.lab.measure.texts import SequenceShape
from tiermoe.lab.papers.corm import bits_by_usage
from tiermoe.lab.papers.statistics import frequencies, routings
from tiermoe.offload.policies.prediction import count_paths, paths_to_json
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import Profile, profile_path, to_json

PROMPT = 16
"""Tokens that are read."""
CALIBRATION = SequenceShape(tokens=1024, prompt=PROMPT, sequence=128)
"""What is read of the text."""
_CALIBRATED = ("hobbit", "fate", "corm")
_COUNTS = ("hits", "misses", "low_loads", "speculative_loads", "skipped", "displaced")
MOVES: dict[str, tuple[str, ...]] = {
    "hobbit": ("low_loads", "speculative_loads"),
    "fate": ("speculative_loads",),
    "mixtral-offload": ("speculative_loads",),
    "sti": ("speculative_loads",),
    "frugal": ("skipped",),
    "nimble": ("displaced",),
}
"""Preset → counts that must move beside hits and misses where some experts are cached."""
SETTINGS: dict[str, dict[str, Any]] = {"nimble-3bit": {"quantizer": "nonlinear"}}
"""Preset → options of its own; gptq would be calibrated on a text first."""


def calibrate(model: str, text: Path, names: Sequence[str], options: dict[str, Any]) -> dict[str, str]:
    """Makes the calibrations that presets need and that are not there; calibration → why it could not be made."""
    needed = [name for name in _CALIBRATED if name in {PRESETS[each].profile for each in names}]
    if not needed and "edgemoe" not in names:
        return {}
    calibration = prepare(model, text.name, text.read_text(encoding="utf-8"), CALIBRATION, options)
    made = make_profiles(calibration, needed, lambda *_: None)
    if "edgemoe" in names:
        bitwidths_by_use(calibration)
    return {each.name: str(each.error) for each in made if isinstance(each, FailedProfile)}


def bitwidths_by_use(calibration: Calibration) -> None:
    """Writes EdgeMoE's profile with 2 bits for the least used experts and 4 for the others."""
    trace = calibration.trace(lambda *_: None)
    table, paths = bits_by_usage(trace, bits=4, low_bits=2), paths_to_json(count_paths(routings(trace), 2))
    data = {"paths": paths, "frequencies": frequencies(trace), "table": table}
    profile = Profile("edgemoe", calibration.fingerprint, calibration.made_from, {"quantizer": "linear"}, data)
    write_atomically(profile_path(calibration.store, "edgemoe"), to_json(profile))


def run(model: str, preset: str, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """What a preset did in a prompt and `tokens` greedy tokens: counts, bytes read, tokens per second."""
    with tiermoe.load(model, preset=preset, warm=False, **options) as (loaded, _):
        engine, before = loaded.tiermoe, loaded.tiermoe.snapshot()
        ids = torch.arange(3, 3 + PROMPT)[None]
        made = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        used = engine.snapshot().since(before)
        counts = {name: getattr(used.counts, name) + getattr(used.discarded, name) for name in _COUNTS}
        return {
            "preset": preset,
            "top_k": max(layer.top_k for layer in engine.store.layers),
            "lossy": engine.lossy,
            **counts,
            "fallback_ratio": engine.stats()["fallback_ratio"],
            "bytes_read": used.bytes_read,
            "tok_s": tokens / used.seconds,
            "answer": made[0, -tokens:].tolist(),
        }


def failures(rows: Sequence[dict[str, Any]], cached: bool) -> list[str]:
    """What the rows do not show that they should. cached: whether room is for some experts and not for all."""
    found = [f"{row['preset']}: {row['error']}" for row in rows if "error" in row and not _has_nothing(row["error"])]
    for row in rows:
        if "error" in row:
            continue
        everything = row["preset"] == "io-free"
        expected = ["hits"] if everything else ["misses", "bytes_read"]
        few = row["preset"] in ("frugal", "nimble") and row["top_k"] <= 2  # a token's two best are never given up
        expected += MOVES.get(row["preset"], ()) if cached and not few else ()
        found += [f"{row['preset']}: no {name}" for name in expected if not row[name]]
    return found


def _has_nothing(error: str) -> bool:
    """Whether an error says that a preset is not for the family: an encoder's, or a router that ranks no experts."""
    return any(
        words in error for words in ("does not apply to", "made for decoder-only", "needs the scores of all experts")
    )


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: value for name in ("memory", "store", "threads") if (value := getattr(args, name)) is not None}
    names, rows = presets_asked(args.presets), []
    failed = calibrate(args.model, args.text, names, options)
    for name in names:
        try:
            if reason := failed.get(PRESETS[name].profile or ""):
                raise TiermoeError(reason)
            rows.append(run(args.model, name, args.tokens, {**options, "cache": args.cache, **SETTINGS.get(name, {})}))
        except TiermoeError as error:
            rows.append({"preset": name, "error": str(error)})
    shown = ("preset", *_COUNTS, "bytes_read")
    print_table(shown, [tuple(str(row.get(name, "")) for name in shown) for row in rows])
    return {"model": args.model, "cache": args.cache, "rows": rows, "failures": failures(rows, args.cache != "all")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="a text to calibrate on")
    parser.add_argument("--presets", default="all", help="names with commas; default all")
    parser.add_argument("--cache", default="45%", help="the expert cache; default 45%%")
    parser.add_argument("--tokens", type=at_least_one, default=32, help="tokens to decode; default 32")
    parser.add_argument("--memory")
    parser.add_argument("--store")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    try:
        result = evaluate(args)
    except TiermoeError as error:
        parser.exit(2, f"error: {error}\n")
    print(json.dumps(result))
    for each in result["failures"]:
        print(each, file=sys.stderr)
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
