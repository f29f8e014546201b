"""Medians, spread and ratios of what was run: one flat object for each case."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tiermoe.bench.cases import OURS, Case, Condition
from tiermoe.bench.measure import Measured

SPEEDS = ("decode_tok_s", "prefill_tok_s")
NUMBERS = (
    "first_token_s", "load_s", "peak_memory_bytes", "cgroup_peak_bytes", "bytes_per_token",
    "device_bytes_per_token", "hit_rate",
    "belady_hit_rate", "bound_tok_s", "own_bound_tok_s", "compute_bound_tok_s", "fraction_of_bound",
    "fraction_of_own_bound", "token_ms", "compute_ms", "wait_ms", "framework_ms", "weight_bytes_per_pass",
    "link_bandwidth", "slots", "all_experts", "dense_bytes", "planned_bytes",
)  # fmt: skip
"""Of a run; a case has their medians."""
_KEPT = ("limited", "limit_missing", "lossy", "note", "version", "gguf", "lanes", "direct_io")


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
