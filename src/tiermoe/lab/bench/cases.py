"""What is measured: a case is an engine under a condition, fed with a text. Reading the command's lists, their product,
and the stretches of the text that every engine is fed."""

from __future__ import annotations

import difflib
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiermoe.config import format_size, parse_size
from tiermoe.errors import ConfigError, PromptError

OURS = "tiermoe"
LLAMA, TRANSFORMERS, ACCELERATE = "llama.cpp", "transformers", "accelerate"
PEERS = (LLAMA, TRANSFORMERS, ACCELERATE)
STARTS = ("warm", "cold")

DEFAULT_TEXT = Path(__file__).parents[4] / "data" / "heldout.txt"
"""The held-out text of a source tree; an installed package has none."""
RANDOM = "random"
"""Named in place of a text: token ids drawn at random, where a model has no tokenizer or none of its own."""

_GROUP = re.compile(r"\s*(\d{1,7})\s*[xX]\s*(\d{1,7})\s*")
_DRAWN = 1 << 18  # random token ids


@dataclass(frozen=True, slots=True)
class Condition:
    """What all engines share."""

    memory: int | None  # bytes for the whole process; None: no bound, everything resident
    prompt: int  # tokens
    output: int  # tokens; 0: the prompt alone
    batch: int = 1  # sequences run together
    start: str = "warm"  # 'warm' or 'cold'

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

    @property
    def warm_tokens(self) -> int:
        """How many tokens of each row run once before the clock starts, all engines alike: none in a cold start; the
        prompt; where memory has no bound, the output too, as everything is then resident."""
        if self.start == "cold":
            return 0
        return self.prompt + (self.output if self.memory is None else 0)

    def files_to_drop(self, files: tuple[Path, ...]) -> tuple[Path, ...]:
        """`files` where they must not be in the page cache: in a cold start, and under a bound, to which cached pages
        do not count that another process has read."""
        return files if self.start == "cold" or self.memory is not None else ()


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


@dataclass(slots=True)
class Measured:
    """A case's result in each round that was run, or why the case has none."""

    case: Case
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What `tiermoe bench` was asked for."""

    model: str  # a directory or a hub id
    text: str | None  # what is fed; None: token ids drawn at random
    conditions: Sequence[Condition]
    presets: Sequence[str]  # of ours
    peers: Sequence[str]
    options: dict[str, Any]  # of `tiermoe.load`, but memory, threads and preset
    rounds: int
    threads: int
    timeout: float  # seconds of one run
    gguf: Path | None = None  # the model for llama.cpp
    peer_python: str = sys.executable
    out: Path | None = None  # the file of finished runs

    def check(self) -> None:
        """ConfigError for what cannot be measured."""
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, got {self.rounds}")
        if self.timeout <= 0:
            raise ConfigError(f"timeout must be above 0 seconds, got {self.timeout:g}")
        if not self.conditions:
            raise ConfigError("no prompts: --groups none needs --prefill with lengths, like --prefill 512")
        if not self.presets and not self.peers:
            raise ConfigError("no engine: --presets none and --peers none leave nothing to measure; name one of them")
        if self.gguf is not None and not self.gguf.is_file():
            raise ConfigError(
                f"the GGUF {self.gguf} is no file; name one that exists, or leave llama.cpp out with --peers"
            )


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


def alternating(engines: Sequence[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """(round, engine): each engine once a round, every other round backwards, so that a machine that slows down or
    speeds up favours none."""
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            yield number, engine


def parse_budgets(text: str | None) -> list[int | None]:
    """Bytes of '700MiB,450MiB,none'; None (no bound) for 'none' and where nothing is asked."""
    if text is None:
        return [None]
    return [None if word == "none" else parse_size(word, "memory") for word in _words(text, "memory", "700MiB,none")]


def parse_groups(text: str) -> list[tuple[int, int]]:
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


def parse_numbers(text: str | None, what: str) -> list[int]:
    """Whole numbers above 0 of '1,4,16'; none where nothing is asked."""
    if text is None:
        return []
    words = _words(text, what, "1,4,16")
    for word in words:
        if not word.isdigit() or not int(word):
            raise ConfigError(f"{what} '{word}' is not a whole number above 0; write it like 4 or 1,4,16")
    return [int(word) for word in words]


def parse_starts(text: str) -> list[str]:
    """Of 'warm,cold'."""
    return _known(_words(text, "start", "warm,cold"), STARTS, "start")


def parse_peers(text: str) -> list[str]:
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


def text_file(chosen: Path | None) -> Path:
    """The text to read. ConfigError where none was named and the source tree's is not there."""
    if chosen is None and not DEFAULT_TEXT.exists():
        raise ConfigError(
            f"no text to feed the engines; name a UTF-8 file of some ten thousand words with --text, or draw token ids "
            f"with --text {RANDOM}"
        )
    return chosen or DEFAULT_TEXT


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the whole text, without added special ones."""
    tokenizer.model_max_length = 1 << 60  # the text is cut afterwards
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def random_ids(vocabulary: int) -> list[int]:
    """Token ids of the whole vocabulary, the same ones each time."""
    draw = random.Random(0)
    return [draw.randrange(vocabulary) for _ in range(_DRAWN)]


def check_lengths(conditions: Sequence[Condition], tokens: int, context: int | None) -> None:
    """PromptError for a condition that the text, of so many tokens, or the model's context is too short for."""
    for condition in conditions:
        length = condition.prompt + condition.output
        if context is not None and length > context:
            raise PromptError(
                f"{condition.group} is {length} tokens, the model's context has {context}; ask for shorter groups"
            )
        if length * condition.batch > tokens:
            raise PromptError(
                f"{condition.group} in a batch of {condition.batch} takes {length * condition.batch} tokens of text, "
                f"this one has {tokens}; name a longer one with --text, or ask for shorter groups or smaller batches"
            )


def rows(ids: Sequence[int], condition: Condition) -> list[list[int]]:
    """Token ids (batch, prompt + output): stretches that begin at equal distances in the text."""
    length = condition.prompt + condition.output
    step = len(ids) // condition.batch
    return [list(ids[row * step : row * step + length]) for row in range(condition.batch)]
