"""What a program must answer to be measured, and what all of them are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tiermoe.bench.cases import Condition


class BenchEngine(Protocol):
    """One program, with one preset where it is ours."""

    @property
    def name(self) -> str: ...

    @property
    def preset(self) -> str | None: ...

    def missing(self) -> str | None:
        """Why it cannot run here and what to do; None: it can. Asked once, before anything is measured."""

    def takes(self, condition: Condition) -> bool:
        """Whether the condition says something about it."""

    def prepare(self, progress: Any) -> None:
        """Makes what its runs need and keeps: stores, files. progress: called with (what, done, total). Raises a
        TiermoeError with the reason why it can not."""

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        """One run in a fresh process on the token ids in a .npy file of (batch, prompt + output). Speeds in tokens per
        second: `prefill_tok_s`, `decode_tok_s` (None where nothing is decoded); `first_token_s` since the process was
        started; bytes: `peak_memory_bytes`, `cgroup_peak_bytes`; `limited`: whether the bound on memory was a real one.
        Raises CaseFailed with the reason."""


@dataclass(frozen=True, slots=True)
class Common:
    """What is the same for all engines: the checkpoint's `directory`, compute `threads`, seconds that one run may take,
    a folder for what is made while running, on a drive."""

    directory: Path
    threads: int
    timeout: float
    scratch: Path


def warm_tokens(condition: Condition) -> int:
    """How many tokens of each row run once before the clock starts, all engines alike: none in a cold start; the
    prompt; where memory has no bound, the output too, as everything is then resident."""
    if condition.start == "cold":
        return 0
    return condition.prompt + (condition.output if condition.memory is None else 0)


def files_to_drop(condition: Condition, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """`files` where they must not be in the page cache: in a cold start, and under a bound, to which cached pages do
    not count that another process has read."""
    return files if condition.start == "cold" or condition.memory is not None else ()
