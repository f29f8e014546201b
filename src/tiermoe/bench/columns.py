"""The columns of a measurement's tables and the words beside them, for terminals and reports alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiermoe.bench.cases import named
from tiermoe.bench.summary import case_of
from tiermoe.config import format_size

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


def notes(document: dict[str, Any]) -> list[str]:
    """What the figures hold for, what was not measured, and why."""
    machine = document["machine"]
    lines = [
        f"[{machine['cpu']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}; threads: "
        f"{machine['threads']}; rounds: {document['rounds']}, of which medians and ranges; memory "
        f"{machine['memory_bandwidth'] / 1e9:.1f} GB/s]",
        *(f"not measured: {failure(case)}" for case in document["cases"] if case["error"]),
    ]
    for case in document["cases"]:
        if case["note"]:
            lines.append(f"{heading(case)}: {case['note']}")
    missing = {case["limit_missing"] for case in document["cases"] if case["limit_missing"]}
    lines += [f"memory was not bounded: {reason}" for reason in sorted(missing)]
    return lines


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
