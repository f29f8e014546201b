"""The first hour on a GPU: what is right on it, and how fast it is, in at most 25 minutes.

    python -m benchmarks.gpu [--minutes 25] [--resume gpu.json] [--steps copies,products]
                             [--routing TRACE] [--llama-bench PATH] [--folder DIR]

Steps, in order of worth:

  machine          GPU, driver, versions, bus
  kernels          each kernel beside the decoded weights: formats, dtypes, shapes
  families         tokens of small random checkpoints beside the CPU's; of exact presets whatever the GPU caches
  copies           GB/s by size, pinned and not, both ways; what an urgent copy waits behind a speculative one
  products         the kernels beside the memory's rate and torch's product in bfloat16
  layers           milliseconds a layer and synchronisations, with every expert resident and matrices that take no time
  qwen3-30b-a3b    the papers' presets beside load on demand, LRU and the default, in 8, 12 and 16 GiB of the GPU:
                   tokens a second, bytes moved, hits
  llama.cpp        a GGUF file of that shape within the same memory, where there is llama-bench
  mixtral-8x7b, olmoe-1b-7b, qwen1.5-moe-a2.7b, deepseek-v2-lite, phi-3.5-moe
                   the presets on these: Mixtral and Phi-MoE with few layers, the others whole

Each figure is printed on standard error as it is measured, beside its aim. A step is a process with a time limit: one
that fails, or takes longer, keeps its rows and its error, and the next one runs. The file (--resume) is written after
each row: steps that it has without an error are not run again, nor are presets of a step that was interrupted. So
commands of at most ten minutes do too: `--minutes 9` three times, with `--folder` for what was written. The document is
printed as one JSON object.

Models have random weights. Their routers choose all but evenly, which no text does; `--routing` takes a recorded trace
(`tiermoe trace`) for a model of the trace's shape. Up to 45 GB lie on the drive. `--device cpu --quick` runs the same
on a CPU and tiny shapes, which shows that the command works and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_run import Row, Run
from benchmarks.gpu_steps import STEPS
from benchmarks.rounds import about, parser_of, say
from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.trace import read_trace
from tiermoe.offload.cuda import resolve_device

ROOT = Path(__file__).resolve().parents[1]
AIMS = {
    "ms_a_layer": "at most 0.15",
    "synchronisations_a_layer": "at most 1",
    "share_of_bus": "at least 0.9",
    "share_of_memory": "at least 0.7",
}


def run_step(name: str, run: Run, limit: float, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The rows of a step in a process of its own, which has `limit` seconds; with `error` if it did not end well.
    keep: called with what there is by now, after each row."""
    fields = json.dumps(vars(run), default=str)
    command = [sys.executable, "-m", "benchmarks.gpu_steps", name, fields]
    began, rows = time.monotonic(), {row["what"]: row for row in run.done}
    found: dict[str, Any] = {"rows": [*rows.values()], "error": "it was interrupted"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                rows[row["what"]] = row
                say(f"{name}: {shown(row)}")
                found["rows"] = [*rows.values()]
                keep(found)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        found["seconds"] = round(time.monotonic() - began, 1)
        del found["error"]
        if code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"ended with code {code}"])[-1]
            found["error"] = f"took longer than {limit:.0f} s" if found["seconds"] >= limit else last
            say(f"{name}: {found['error']}")
    keep(found)
    return found


def shown(row: Row) -> str:
    """'a token's 8 experts: gb_s 812, share_of_memory 0.71 (at least 0.7)'."""
    figures = []
    for key, value in row.items():
        if key != "what":
            text = f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            figures.append(f"{text} ({AIMS[key]})" if key in AIMS else text)
    return f"{row['what']}: " + ", ".join(figures)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="in all; default 25")
    parser.add_argument("--resume", type=Path, default=Path("gpu.json"), help="the file; default gpu.json")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=list(STEPS), help="default: all")
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, which say nothing of speed")
    parser.add_argument("--folder", type=Path, help="for models, of which one that is not done stays; default: a "
                        "temporary one")  # fmt: skip
    parser.add_argument("--routing", type=Path, help="a recorded trace that routers of its shape follow")
    parser.add_argument("--llama-bench", help="llama.cpp's program; default: that on the path")
    args = parser.parse_args()
    if unknown := set(args.steps) - set(STEPS):
        parser.error(f"there are {', '.join(STEPS)}, not {', '.join(sorted(unknown))}")
    llama_bench = shutil.which(args.llama_bench or "llama-bench")
    if args.llama_bench is not None and llama_bench is None:
        parser.error(f"--llama-bench {args.llama_bench} is no program")
    try:
        resolve_device(args.device)
        if args.routing is not None:
            read_trace(args.routing)
    except (ConfigError, TraceError) as error:
        parser.error(str(error))
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu is for --quick alone: it measures no GPU")
    setting = {"device": args.device, "quick": args.quick, "routing": args.routing and args.routing.name}
    document = json.loads(args.resume.read_text()) if args.resume.exists() else {**about(1), **setting, "steps": {}}
    if {name: document.get(name) for name in setting} != setting:
        parser.error(f"{args.resume} was measured otherwise; name another file")
    until, steps = time.monotonic() + 60 * args.minutes, document["steps"]

    def keep(name: str, found: dict[str, Any]) -> None:
        steps[name] = found
        half = args.resume.with_name(f".{args.resume.name}")
        half.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(half, args.resume)

    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.steps:
            before, left = steps.get(name, {"rows": [], "error": "it has not run"}), until - time.monotonic()
            if "error" in before and left > 0:
                for half in folder.glob(".writing-*"):  # of a step that was killed
                    shutil.rmtree(half)
                run = Run(args.device, args.quick, folder.resolve(), args.routing and args.routing.resolve(),
                          llama_bench and os.path.abspath(llama_bench), before["rows"])  # fmt: skip
                run_step(name, run, min(STEPS[name][1], left), functools.partial(keep, name))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
