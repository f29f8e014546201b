"""llama.cpp's own benchmark program, `llama-bench`, with the experts of some layers in main memory."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tiermoe.config import MIB, format_size
from tiermoe.errors import BudgetError
from tiermoe.formats.gguf_file import open_gguf
from tiermoe.lab.bench.child import CaseFailed

RESERVE = 1 << 30
"""Bytes of a budget for what is no weight: keys and values, and the buffers of a prompt's step with its logits."""
TIMEOUT_S = 120.0


def experts_on_cpu(file: Path, budget: int) -> int:
    """The fewest layers, the first ones, whose experts stay in main memory so that all other weights, and `RESERVE`
    bytes, are within `budget` bytes of a GPU. llama.cpp keeps the embedding in main memory. BudgetError if the dense
    layers alone are too much."""
    needed, experts = RESERVE, dict[int, int]()
    for name, tensor in open_gguf(file).tensors.items():
        if found := re.match(r"blk\.(\d+)\..*_exps\.", name):
            experts[int(found[1])] = experts.get(int(found[1]), 0) + tensor.nbytes
        elif name != "token_embd.weight":
            needed += tensor.nbytes
    if needed > budget:
        raise BudgetError(
            f"{format_size(budget)} of the GPU are too little for llama.cpp: the layers without experts, and "
            f"{format_size(RESERVE)} beside them, need {-(-needed // MIB)} MiB"
        )
    on_cpu = max(experts, default=-1) + 1
    for layer in sorted(experts, reverse=True):
        needed += experts[layer]
        if needed > budget:
            break
        on_cpu = layer
    return on_cpu


def run_llama_bench(program: str, file: Path, on_cpu: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of `tokens` decoded ones, and of a prompt, the means of three rounds. on_cpu: layers whose
    experts are in main memory. A program that knows a cache for experts keeps none: it would take memory of the GPU
    besides. CaseFailed if the program fails."""
    words = ["-m", file, "-ngl", 99, "-ncmoe", on_cpu, "-p", prompt, "-n", tokens, "-r", 3, "-o", "json"]
    try:
        if "--moe-cache" in _output(program, "--help"):
            words += ["--moe-cache", "off"]
        cases = json.loads(_output(program, *words))
        speed = {bool(case["n_gen"]): case["avg_ts"] for case in cases}
        return {"tok_s": speed[True], "prompt_tok_s": speed[False], "build": cases[0]["build_commit"]}
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        raise CaseFailed(f"{program} cannot be used: {type(error).__name__} {error}") from error


def _output(program: str, *words: object) -> str:
    done = subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise CaseFailed(f"{program} ended with code {done.returncode}: {last}")
    return done.stdout
