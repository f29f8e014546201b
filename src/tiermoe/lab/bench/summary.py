"""What was measured and on what: the machine, medians, spread and ratios as one flat object for each case, and the
columns of its tables."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tiermoe import __version__
from tiermoe.config import format_size
from tiermoe.lab.bench.cases import OURS, Case, Condition, Measured, named
from tiermoe.lab.bench.child import CannotLimit, memory_group
from tiermoe.platform.bandwidth import last_cache_bytes
from tiermoe.platform.machine import fields_of, installed_version, processors, total_memory

_PACKAGES = ("torch", "transformers", "accelerate", "numpy")
_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
_GIT_S = 10  # seconds that git may take
_LEAST = 1 << 30  # bytes of the cgroup that is tried

SPEEDS = ("decode_tok_s", "prefill_tok_s")
NUMBERS = (
    "first_token_s", "load_s", "peak_memory_bytes", "cgroup_peak_bytes", "bytes_per_token",
    "device_bytes_per_token", "hit_rate",
    "belady_hit_rate", "bound_tok_s", "own_bound_tok_s", "compute_bound_tok_s", "fraction_of_bound",
    "fraction_of_own_bound", "token_ms", "compute_ms", "wait_ms", "framework_ms", "weight_bytes_per_pass",
    "link_bandwidth", "slots", "all_experts", "dense_bytes", "planned_bytes",
)  # fmt: skip
"""Of a run; a case has their medians."""
_KEPT = ("limited", "limit_missing", "lossy", "kernels", "bits", "note", "version", "gguf", "lanes", "direct_io")


def describe_machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, versions, and whether memory can be bounded (`no_limit`: why
    not)."""
    info = fields_of(Path("/proc/cpuinfo"))
    flags = set(info.get("flags", "").split())
    no_limit = None
    try:
        with memory_group(_LEAST):
            pass
    except CannotLimit as error:
        no_limit = str(error)
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "cores": processors(),
        "last_cache_bytes": last_cache_bytes(),
        "memory_bytes": total_memory(),
        "swap_bytes": int(fields_of(Path("/proc/meminfo")).get("SwapTotal", "0").split()[0]) * 1024,
        "system": platform.platform(),
        "python": platform.python_version(),
        "tiermoe": __version__,
        "commit": commit(),
        **{package: version for package in _PACKAGES if (version := installed_version(package))},
        "no_limit": no_limit,
    }


def commit() -> str:
    """The commit of the checkout that this package runs from, with '+' if files differ from it; empty for an installed
    package."""
    root = Path(__file__).resolve().parents[4]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def summarise(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """One object per case, in the order of `rows`; None stands for what it has not. Speeds are {median, low, high,
    all}; `ratios`, of ours, peer → decode and prefill as {median, low, high} of the ratios within a round, so that what
    slows a whole round down does not count; `error`: why a case has no figures."""
    peers: dict[Condition, list[Measured]] = {}
    for row in rows:
        if row.case.engine != OURS:
            peers.setdefault(row.case.condition, []).append(row)
    return [_summary(row, peers.get(row.case.condition, [])) for row in rows if row.rounds or row.error]


def _summary(row: Measured, peers: Sequence[Measured]) -> dict[str, Any]:
    runs = [row.rounds[number] for number in sorted(row.rounds)]
    summary: dict[str, Any] = {**row.case.as_dict(), "rounds": len(runs)}
    for name in SPEEDS:
        summary[name] = spread([run[name] for run in runs if run.get(name)], every=True)
    for name in NUMBERS:
        values = [run[name] for run in runs if run.get(name) is not None]
        summary[name] = median(values) if values else None
    for name in _KEPT:
        summary[name] = runs[-1].get(name) if runs else None
    summary["limited"] = bool(runs) and all(run.get("limited") for run in runs)
    ours = row.case.engine == OURS
    summary["ratios"] = {peer.case.engine: _ratios(row, peer) for peer in peers if peer.rounds} if ours else {}
    return {**summary, "error": row.error}


def spread(values: Sequence[float], every: bool = False) -> dict[str, Any] | None:
    """{median, low, high}, with the values themselves as `all`; None for no values."""
    if not values:
        return None
    found: dict[str, Any] = {"median": median(values), "low": min(values), "high": max(values)}
    return {**found, "all": list(values)} if every else found


def _ratios(mine: Measured, theirs: Measured) -> dict[str, Any]:
    shared = sorted(mine.rounds.keys() & theirs.rounds.keys())
    pairs = [(mine.rounds[number], theirs.rounds[number]) for number in shared]
    return {
        name.removesuffix("_tok_s"): spread([a[name] / b[name] for a, b in pairs if a.get(name) and b.get(name)])
        for name in SPEEDS
    }


def case_of(summary: dict[str, Any]) -> Case:
    """The case that a summary is of."""
    shared = {name: summary[name] for name in ("prompt", "output", "batch", "start")}
    return Case(summary["engine"], summary["preset"], Condition(summary["memory_bytes"], **shared))


Column = tuple[str, Callable[[dict[str, Any]], str]]
"""Heading, and the text of a case: empty where it has nothing to say."""


def figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases that have figures."""
    return [case for case in document["cases"] if not case["error"]]


def split_up(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Those whose time per token is known in parts: ours."""
    return [case for case in figures(document) if case["token_ms"] is not None]


def _shared() -> list[Column]:
    return [
        ("engine", lambda case: named(case["engine"], case["preset"])),
        ("memory", _memory),
        ("tokens", lambda case: case_of(case).condition.group),
        ("batch", lambda case: str(case["batch"])),
        ("start", lambda case: case["start"]),
    ]


def speeds(document: dict[str, Any]) -> list[Column]:
    """Heading and text of every column of the first table; a text is empty where a case has nothing to say."""
    peers = list(dict.fromkeys(peer for case in document["cases"] for peer in case["ratios"]))
    return [
        *_shared(),
        ("decode tok/s", lambda case: _speed(case["decode_tok_s"])),
        *((f"/ {peer}", _ratio(peer, "decode")) for peer in peers),
        ("prefill tok/s", lambda case: _speed(case["prefill_tok_s"])),
        *((f"/ {peer}", _ratio(peer, "prefill")) for peer in peers),
        ("first token", lambda case: "" if case["first_token_s"] is None else f"{case['first_token_s']:.1f} s"),
        ("peak", lambda case: size(case["peak_memory_bytes"])),
    ]


def spent() -> list[Column]:
    """The columns of the second table."""
    return [
        *_shared(),
        ("ms a token", lambda case: number(case["token_ms"])),
        ("compute", lambda case: number(case["compute_ms"])),
        ("waiting", lambda case: number(case["wait_ms"])),
        ("framework", lambda case: number(case["framework_ms"])),
        ("bound tok/s", lambda case: number(case["bound_tok_s"])),
        ("reached", lambda case: share(case["fraction_of_bound"])),
        ("own misses", lambda case: share(case["fraction_of_own_bound"])),
        ("hits", lambda case: share(case["hit_rate"])),
        ("Belady's", lambda case: share(case["belady_hit_rate"])),
        ("read a token", lambda case: size(case["bytes_per_token"])),
        ("link", lambda case: "" if case["link_bandwidth"] is None else f"{size(case['link_bandwidth'])}/s"),
    ]


def issue_rows(document: dict[str, Any]) -> list[str]:
    """A line for an issue report of each case: machine, file, memory, speed, bytes, hits, version."""
    machine, model = document["machine"], document["model"]["name"]
    if Path(model).exists():
        model = Path(model).name  # where it lies is nobody's business
    version = f"tiermoe {machine['tiermoe']}" + (f" ({machine['commit']})" if machine["commit"] else "")
    lines = []
    for case in document["cases"]:
        if case["error"]:
            lines.append(f"not measured: {failure(case)}")
            continue
        threads, whole = machine["threads"], case_of(case)
        named_kernels = f", {case['kernels']}" if case["kernels"] else ""
        parts = [
            f"{machine['cpu']}, {machine['cores']} cores, {threads} threads{named_kernels}",
            model + (f", {case['bits']} bits" if case["bits"] else ""),
            f"{whole.name}, {whole.condition.label}",
            f"peak {size(case['peak_memory_bytes'])}",
            f"{_speed(case['decode_tok_s'] or case['prefill_tok_s'])} tok/s, rounds: {case['rounds']}",
        ]
        if case["bytes_per_token"] is not None:
            parts += [f"{case['bytes_per_token'] / 1e6:.2f} MB a token", f"hits {share(case['hit_rate'])}"]
        lines.append("; ".join([*parts, version]))
    return lines


def notes(document: dict[str, Any]) -> list[str]:
    """What the figures hold for, what was not measured, and why."""
    machine = document["machine"]
    lines = [
        f"[{machine['cpu']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}; threads: "
        f"{machine['threads']}; rounds: {document['rounds']}, of which medians and ranges; memory "
        f"{machine['memory_bandwidth'] / 1e9:.1f} GB/s; kernels: {_kernels(document)}]",
        *(f"not measured: {failure(case)}" for case in document["cases"] if case["error"]),
    ]
    for case in document["cases"]:
        if case["note"]:
            lines.append(f"{heading(case)}: {case['note']}")
    missing = {case["limit_missing"] for case in document["cases"] if case["limit_missing"]}
    lines += [f"memory was not bounded: {reason}" for reason in sorted(missing)]
    return lines


def _kernels(document: dict[str, Any]) -> str:
    """What computed our own cases; '-' where there are none."""
    return " and ".join(dict.fromkeys(filter(None, (case.get("kernels") for case in document["cases"])))) or "-"


def failure(case: dict[str, Any]) -> str:
    """A case without figures, and why."""
    return f"{heading(case)}: {case['error']}"


def heading(case: dict[str, Any]) -> str:
    """Engine and condition in words."""
    whole = case_of(case)
    return f"{whole.name}, {whole.condition.label}"


def _memory(case: dict[str, Any]) -> str:
    """The budget; with a star where it was not a bound on the process."""
    return case_of(case).condition.budget + ("" if case["memory_bytes"] is None or case["limited"] else " *")


def _speed(speed: dict[str, Any] | None) -> str:
    """'52.1 (51.8–52.9)'."""
    return "" if speed is None else f"{number(speed['median'])} ({number(speed['low'])}–{number(speed['high'])})"


def number(value: float | None) -> str:
    """With three digits or so: 406, 52.1, 2.44."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(peer: str, phase: str) -> Callable[[dict[str, Any]], str]:
    def show(case: dict[str, Any]) -> str:
        ratio = case["ratios"].get(peer, {}).get(phase)
        return "" if ratio is None else f"{number(ratio['median'])}x"

    return show


def share(value: float | None) -> str:
    """A share in percent."""
    return "" if value is None else f"{value:.0%}"


def size(value: float | None) -> str:
    """Bytes."""
    return "" if value is None else format_size(value)
