"""What is measured: one case is an engine under one condition. Reading the command's lists, and their product."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiermoe.config import format_size, parse_size
from tiermoe.errors import ConfigError

OURS = "tiermoe"
LLAMA, TRANSFORMERS, ACCELERATE = "llama.cpp", "transformers", "accelerate"
PEERS = (LLAMA, TRANSFORMERS, ACCELERATE)
STARTS = ("warm", "cold")

_GROUP = re.compile(r"\s*(\d{1,7})\s*[xX]\s*(\d{1,7})\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """What all engines share: `memory` in bytes for the whole process (None: no bound, everything resident), tokens of
    `prompt` and `output` (0: the prompt alone), sequences run together, 'warm' or 'cold' `start`."""

    memory: int | None
    prompt: int
    output: int
    batch: int = 1
    start: str = "warm"

    @property
    def label(self) -> str:
        """'700 MiB, 16+32, batch 4, cold'."""
        parts = [self.budget, self.group, *([f"batch {self.batch}"] if self.batch > 1 else []), self.start]
        return ", ".join(parts)

    @property
    def budget(self) -> str:
        """'700 MiB', or 'resident'."""
        return "resident" if self.memory is None else format_size(self.memory)

    @property
    def group(self) -> str:
        """'16+32', or 'prompt 512'."""
        return f"{self.prompt}+{self.output}" if self.output else f"prompt {self.prompt}"


@dataclass(frozen=True, slots=True)
class Case:
    """An engine, with a preset where it is ours, under a condition."""

    engine: str
    preset: str | None
    condition: Condition

    @property
    def name(self) -> str:
        """The engine's, with the preset's in brackets."""
        return named(self.engine, self.preset)

    def as_dict(self) -> dict[str, Any]:
        """Engine, preset and condition, flat."""
        condition = asdict(self.condition)
        condition["memory_bytes"] = condition.pop("memory")
        return {"engine": self.engine, "preset": self.preset, **condition}


def named(engine: str, preset: str | None) -> str:
    """How people call an engine: 'llama.cpp', 'tiermoe (lru)'."""
    return engine if preset is None else f"{engine} ({preset})"


def conditions(
    budgets: Sequence[int | None],
    groups: Sequence[tuple[int, int]],
    prefill: Sequence[int],
    batches: Sequence[int],
    starts: Sequence[str],
) -> list[Condition]:
    """Every budget with every start, group and batch; prompts alone run in a batch of one."""
    found = []
    for memory in budgets:
        for start in starts:
            found += [Condition(memory, *group, batch, start) for group in groups for batch in batches]
            found += [Condition(memory, prompt, 0, 1, start) for prompt in prefill]
    return found


def budgets_asked(text: str | None) -> list[int | None]:
    """Bytes of '700MiB,450MiB,none'; None (no bound) for 'none' and where nothing is asked."""
    if text is None:
        return [None]
    return [None if word == "none" else parse_size(word, "memory") for word in _words(text, "memory", "700MiB,none")]


def groups_asked(text: str) -> list[tuple[int, int]]:
    """(prompt, output) of '16x32,128x128'; no group for 'none'."""
    if text.strip() == "none":
        return []
    found = []
    for word in _words(text, "groups", "16x32,128x128"):
        match = _GROUP.fullmatch(word)
        if match is None or not int(match[1]) or not int(match[2]):
            raise ConfigError(f"group '{word}' is not PROMPTxOUTPUT in tokens; write it like 16x32")
        found.append((int(match[1]), int(match[2])))
    return found


def numbers_asked(text: str | None, what: str) -> list[int]:
    """Whole numbers above 0 of '1,4,16'; none where nothing is asked."""
    if text is None:
        return []
    words = _words(text, what, "1,4,16")
    for word in words:
        if not word.isdigit() or not int(word):
            raise ConfigError(f"{what} '{word}' is not a whole number above 0; write it like 4 or 1,4,16")
    return [int(word) for word in words]


def starts_asked(text: str) -> list[str]:
    """Of 'warm,cold'."""
    return _known(_words(text, "start", "warm,cold"), STARTS, "start")


def peers_asked(text: str) -> list[str]:
    """'all', 'none', or names with commas."""
    if text.strip() in ("all", "none"):
        return list(PEERS) if text.strip() == "all" else []
    return _known(_words(text, "peers", "llama.cpp,transformers"), PEERS, "peer")


def _known(words: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown {what} '{word}'; there are {', '.join(known)}{hint}")
    return list(words)


def _words(text: str, what: str, example: str) -> list[str]:
    """The words of a list, each once."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ConfigError(f"--{what} names nothing; write it like --{what} {example}")
    return words


def alternating(engines: Sequence[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """(round, engine): each engine once a round, every other round backwards, so that a machine that slows down or
    speeds up favours none."""
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            yield number, engine
