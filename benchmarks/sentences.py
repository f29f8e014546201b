"""Choices between two sentences by log-likelihood: PIQA and WinoGrande, of a preset beside the exact one.

    python -m benchmarks.sentences MODEL --piqa FOLDER --winogrande FILE [--preset nimble] [--cache 45%] [--count 500]

PIQA (valid.jsonl with valid-labels.lst): the goal is read as a prompt, each solution after it is decoded, and the
likelier one is the answer. WinoGrande (a .jsonl file of `context_options`, `continuation` and `gold`): each context is
a prompt, the continuation is decoded. What is decoded is fed token by token, as a lossy preset would generate it.
Prints, for each, the share that each preset got right, and the difference with its standard error, of pairs."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.rounds import parser_of
from tiermoe import batch
from tiermoe.batch import Batch
from tiermoe.config import settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.lab.measure.scoring import log_probabilities
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.tokenizers import load_tokenizer
from tiermoe.offload.presets import PRESETS

EXACT = "default"


@dataclass(frozen=True, slots=True)
class Question:
    """Two (prompt, answer); `right`: which of them."""

    choices: tuple[tuple[str, str], tuple[str, str]]
    right: int


def piqa(folder: Path) -> Iterator[Question]:
    labels = (folder / "valid-labels.lst").read_text().split()
    for line, label in zip((folder / "valid.jsonl").read_text().splitlines(), labels, strict=True):
        row = json.loads(line)
        goal = row["goal"]
        yield Question(((goal, " " + row["sol1"]), (goal, " " + row["sol2"])), int(label))


def winogrande(file: Path) -> Iterator[Question]:
    for line in file.read_text().splitlines():
        row = json.loads(line)
        first, second = ((context, " " + row["continuation"]) for context in row["context_options"])
        yield Question((first, second), row["gold"])


class Judge:
    """An engine that is asked which of two texts is likelier."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    @torch.inference_mode()
    def chosen(self, question: Question) -> int:
        first, second = (self._likelihood(prompt, answer) for prompt, answer in question.choices)
        return int(second > first)

    def _likelihood(self, prompt: str, answer: str) -> float:
        """Of the answer's tokens after the prompt, in nats."""
        read = self._tokenizer(prompt).input_ids
        fed = self._tokenizer(answer, add_special_tokens=False).input_ids
        engine, cache = self._engine, self._engine.new_cache(1, len(read) + len(fed))
        slab, total = cache.open(), 0.0
        logits = engine.step(Batch((batch.prompt(slab, read),)), cache)
        for number, token in enumerate(fed):
            total += float(log_probabilities(logits)[0, token])
            if number + 1 < len(fed):
                logits = engine.step(Batch((batch.decode(slab, len(read) + number, token),)), cache)
        return total


def answers(args: argparse.Namespace, preset: str, questions: Sequence[Question]) -> list[bool]:
    """Whether a preset got each right, one question after the other with the cache that the last one left."""
    given = {name: getattr(args, name) for name in ("cache", "memory", "bits", "threads") if getattr(args, name)}
    if PRESETS[preset].bits:  # of its own
        given.pop("bits")
    changes = dict(each.split("=", 1) for each in args.set) if preset != EXACT else {}
    blueprint = inspect_model(args.model, str(args.model))
    engine = start(blueprint, settings(preset=preset, set=changes, warm=False, **given))
    judge = Judge(engine, load_tokenizer(args.model))
    right = [judge.chosen(question) == question.right for question in questions]
    engine.close()
    return right


def compare(args: argparse.Namespace, questions: Sequence[Question]) -> dict[str, Any]:
    exact, other = (answers(args, preset, questions) for preset in (EXACT, args.preset))
    differences = [theirs - ours for ours, theirs in zip(exact, other, strict=True)]
    count, mean = len(differences), sum(differences) / len(differences)
    variance = sum((each - mean) ** 2 for each in differences) / (count - 1)
    return {
        "questions": count,
        EXACT: sum(exact) / count,
        args.preset: sum(other) / count,
        "difference": mean,
        "standard_error": math.sqrt(variance / count),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--piqa", type=Path)
    parser.add_argument("--winogrande", type=Path)
    parser.add_argument("--preset", default="nimble")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, for the preset")
    parser.add_argument("--cache", default="45%", help="one that leaves experts out: else nothing is lossy")
    parser.add_argument("--memory")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--count", type=int, default=500)
    args = parser.parse_args()
    for name, read in (("piqa", piqa), ("winogrande", winogrande)):
        if (where := getattr(args, name)) is not None:
            questions = list(read(where))[: args.count]
            print(json.dumps({"task": name, **compare(args, questions)}), flush=True)


if __name__ == "__main__":
    main()
