"""The first hour on a GPU: what is right on it, and how fast it is, in at most 25 minutes.

    python -m benchmarks.gpu [--minutes 25] [--resume gpu.json] [--steps copies,products]

Steps, in order of worth:

  machine    GPU, driver, versions, bus
  kernels    each kernel beside the decoded weights: formats, dtypes, shapes
  families   tokens of small random checkpoints beside the CPU's
  copies     GB/s by size, pinned and not, both ways; what an urgent copy waits behind a speculative one
  products   the kernels beside the memory's rate and torch's product in bfloat16
  layers     milliseconds a layer and synchronisations, with every expert resident and matrices that take no time
  papers     presets on shapes that fit: tokens a second, bytes moved, hits

Each figure is printed on standard error as it is measured. A step is a process with a time limit: one that fails, or
takes longer, keeps its rows and its error, and the next one runs. The file (--resume) is written after each step; steps
that it has without an error are not run again. The document is printed as one JSON object. `--device cpu --quick` runs
the same on a CPU and tiny shapes, which shows that the command works and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import STEPS, Row
from benchmarks.rounds import about, parser_of, say
from tiermoe.errors import ConfigError
from tiermoe.offload.cuda import resolve_device

ROOT = Path(__file__).resolve().parents[1]


def run_step(name: str, device: str, folder: Path, quick: bool, limit: float) -> dict[str, Any]:
    """The rows of a step in a process of its own, which has `limit` seconds; with `error` if it did not end well."""
    command = [sys.executable, "-m", "benchmarks.gpu_steps", name, device, str(folder), *(["quick"] if quick else [])]
    began, rows = time.monotonic(), list[Row]()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                rows.append(json.loads(line))
                say(f"{name}: {shown(rows[-1])}")
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        found = {"seconds": round(time.monotonic() - began, 1), "rows": rows}
        if code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"ended with code {code}"])[-1]
            found["error"] = f"took longer than {limit:.0f} s" if found["seconds"] >= limit else last
            say(f"{name}: {found['error']}")
    return found


def shown(row: Row) -> str:
    """'a token's 8 experts: gb_s 812, share_of_memory 0.71'."""
    figures = ((key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in row.items())
    return f"{row['what']}: " + ", ".join(f"{key} {value}" for key, value in figures if key != "what")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="in all; default 25")
    parser.add_argument("--resume", type=Path, default=Path("gpu.json"), help="the file; default gpu.json")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=list(STEPS), help="default: all")
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, which say nothing of speed")
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: a temporary one, of up to 20 GB")
    args = parser.parse_args()
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"there are {', '.join(STEPS)}, not {', '.join(sorted(unknown))}")
    try:
        resolve_device(args.device)
    except ConfigError as error:
        parser.error(str(error))
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu is for --quick alone: it measures no GPU")
    setting = {"device": args.device, "quick": args.quick}
    document = json.loads(args.resume.read_text()) if args.resume.exists() else {**about(1), **setting, "steps": {}}
    if {name: document[name] for name in setting} != setting:
        parser.error(f"{args.resume} was measured otherwise; name another file")
    until, steps = time.monotonic() + 60 * args.minutes, document["steps"]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name in args.steps:
            left = until - time.monotonic()
            if "error" in steps.get(name, {"error": ""}) and left > 0:
                steps[name] = run_step(name, args.device, Path(folder), args.quick, min(STEPS[name][1], left))
                half = args.resume.with_name(f".{args.resume.name}")
                half.write_text(json.dumps(document, indent=1) + "\n")
                os.replace(half, args.resume)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
