"""The section "Counted" of docs/life-of-a-token.md: how long the ways through the engine are, counted with
`sys.setprofile`. `python tests/calls_document.py` writes it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tiermoe
from tiermoe.batch import Batch, decode, prompt
from tiermoe.cli.main import main
from tiermoe.native import _native

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "life-of-a-token.md"
SHIPPED = ROOT / "models" / "stories-7m"
OWN = str(Path(tiermoe.__file__).parent) + "/"
PROMPT = "Once upon a time there was"
TOKENS = 100  # decoded: so many before counting begins, and so many that are counted

INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}
"""Frames before Python 3.12, which do not count."""

ASIDE = ("offload/policies/", "offload/usage.py", "engine/forecasts.py", "types.py", "formats/")
"""Files whose objects decide, count or are values: a missing expert does not pass through them."""

HEADING = "## Counted\n"


class Ways:
    """A profiler of the package's own functions.

    `calls`: all of them. `frames`: what is reached → the most frames from the function `first` on, up to the one that
    calls the kernel ('run' in one piece, 'compute' in parts) or gives a forecast. `misses`, `objects`: of MoE layers
    with one miss that had no hits to report for others, their calls, and what took part in them → how often."""

    def __init__(self, first: str = "Engine.step") -> None:
        self.calls = 0
        self.frames = Counter[str]()
        self.misses = Counter[int]()
        self.objects = Counter[int]()
        self._first = first
        self._layer: FrameType | None = None  # the running one, and what happened in it
        self._called = Counter[str]()
        self._owners = set[int]()
        self._reads = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        owner = getattr(argument, "__self__", None) if event == "c_call" else None
        if isinstance(owner, _native.MoeBlock) and argument.__name__ in ("run", "compute"):
            self._reached(argument.__name__, frame)
        elif isinstance(owner, _native.IOThreads) and argument.__name__ == "submit":
            self._reads += 1
        elif event == "call" and is_own(frame):
            self._call(frame)
        elif event == "return" and frame is self._layer:
            self._layer = None
            if self._reads == 1 and not self._called["Scheduler.record_hits"]:
                self.misses[self._called.total()] += 1
                self.objects[len(self._owners) + 1] += 1  # and the native threads

    def _call(self, frame: FrameType) -> None:
        name = frame.f_code.co_qualname
        self.calls += 1
        if name == "MoELayer.block":
            self._layer, self._called, self._owners, self._reads = frame, Counter(), set(), 0
        elif name == "Forecaster.ranked":
            self._reached("forecast", frame)
        self._called[name] += 1
        owner = frame.f_locals.get("self")
        if owner is not None and not frame.f_code.co_filename.removeprefix(OWN).startswith(ASIDE):
            self._owners.add(id(owner))

    def _reached(self, what: str, frame: FrameType | None) -> None:
        frames = 0
        while frame is not None:
            frames += is_own(frame)
            if frame.f_code.co_qualname == self._first:
                self.frames[what] = max(self.frames[what], frames)
                return
            frame = frame.f_back


def is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OWN) and frame.f_code.co_name not in INLINED


@contextlib.contextmanager
def watched(ways: Ways) -> Iterator[Ways]:
    before = sys.getprofile()
    sys.setprofile(ways)
    try:
        yield ways
    finally:
        sys.setprofile(before)


def decoded(**options: Any) -> Ways:
    """The ways of `TOKENS` tokens that the shipped model decodes greedily. options: of `tiermoe.load`. Four reads at
    once: to learn how many takes a few calls more every 32 reads, more or fewer as the drive is."""
    loaded, tokenizer = tiermoe.load(SHIPPED, memory="4GiB", context=1024, warm=False, device="cpu", lanes=4, **options)
    engine = loaded.tiermoe
    cache = engine.new_cache(1, 1024)
    row = prompt(cache.open(), tokenizer(PROMPT).input_ids)
    ways = Ways()
    for counts in (False, True):
        with watched(ways) if counts else contextlib.nullcontext():
            for _ in range(TOKENS):
                token = int(engine.step(Batch((row,)), cache)[0].argmax())
                row = decode(row.slab, row.end, token)
    engine.close()
    return ways


def commanded() -> Ways:
    """The ways of `tiermoe run`."""
    before, sys.argv = sys.argv, ["tiermoe", "run", str(SHIPPED), PROMPT, "--max-tokens", "4", "--memory", "4GiB"]
    ways = Ways("run")
    try:
        with watched(ways), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = before
    return ways


def counts() -> dict[str, int]:
    """What is counted → how many."""
    resident, cached = decoded(cache="100%"), decoded(cache="45%", set={"prefetch": "none"})
    ahead = decoded(cache="45%", set={"speculate": "always"})
    return {
        "calls of our own Python functions for a decoded token, all experts in memory": resident.calls // TOKENS,
        "the same with 45 % of the experts cached, without prefetching": cached.calls // TOKENS,
        "calls in a MoE layer with one miss": max(cached.misses, key=cached.misses.__getitem__),
        "objects that take part in it": max(cached.objects, key=cached.objects.__getitem__),
        "frames from `run` to the kernel for a resident token, it included": commanded().frames["run"] + 1,
        "frames from `Engine.step` to the kernel for a missing expert, it included": cached.frames["compute"] + 1,
        "frames from `Engine.step` to a forecast": ahead.frames["forecast"],
    }


def table(found: dict[str, int]) -> str:
    return "\n".join(["| | |", "|---|--:|", *(f"| {what} | {count} |" for what, count in found.items())])


def written() -> dict[str, int]:
    """What the page says."""
    section = FILE.read_text().split(HEADING)[1]
    return {what: int(count) for what, count in re.findall(r"^\| (.+) \| (\d+) \|$", section, re.MULTILINE)}


if __name__ == "__main__":
    head, section = FILE.read_text().split(HEADING)
    before, _, after = section.partition("| | |\n")
    rest = after.split("\n\n", 1)[1]
    FILE.write_text(f"{head}{HEADING}{before}{table(counts())}\n\n{rest}")
