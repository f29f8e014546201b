"""What speculation gains and costs: answers that are known, decoded with guesses verified and without, by turns.

    python -m benchmarks.speculation MODEL [--memory none,700MiB] [--batch 1] [--rounds 5] [--tokens 300]

Cases: `edit`, a program's text again with a name changed and lines added; `quotes`, new sentences and twice as much of
the prompt by turns; `prose`, the text goes on. A grammar allows the answer's own token alone at each place, so that a
model of random weights writes it too. Prints one JSON object.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rounds import about, at_least_one, parser_of, print_table, shown
from tiermoe.engine.drafts import Lookup
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Grammar, Sampling
from tiermoe.engine.speculation import Speculation
from tiermoe.lab.bench.cases import DEFAULT_TEXT, alternating
from tiermoe.lab.bench.run_tiermoe import start_engine
from tiermoe.lab.bench.summary import spread
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.tokenizer import load_tokenizer

_PROGRAM = Path(__file__)
_NEW, _QUOTED = 30, 60  # tokens of a sentence of one's own, and of the quotation behind it


class Forced(Grammar):
    """The grammar of one answer."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at == len(self._answer)

    def restrict(self, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -math.inf).index_fill_(0, torch.tensor([self._answer[self._at]]), 0.0)

    def accept(self, token: int) -> None:
        self._at += 1


def cases(tokenizer: Any, tokens: int) -> dict[str, tuple[list[int], list[int]]]:
    """Case → (ids of its prompt, ids of its answer, at most `tokens`)."""
    program, text = _PROGRAM.read_text(), DEFAULT_TEXT.read_text()[: 40 * tokens]
    lines = program.replace("tokenizer", "vocabulary").splitlines()
    edited = "\n".join(line if at % 12 else f"{line}\n# step {at} of the program" for at, line in enumerate(lines))
    ids = {name: tokenizer(each).input_ids for name, each in (("old", program), ("new", edited), ("text", text))}
    story, quoted = ids["text"], list[int]()
    for at in range(0, tokens, _NEW + _QUOTED):
        quoted += story[3 * tokens + at :][:_NEW] + story[2 * at :][:_QUOTED]
    return {
        "edit": (ids["old"][: 2 * tokens], ids["new"][:tokens]),
        "quotes": (story[: 2 * tokens], quoted[:tokens]),
        "prose": (story[:tokens], story[tokens : 2 * tokens]),
    }


def tokens_a_second(engine: Any, tokenizer: Any, case: tuple[list[int], list[int]], batch: int, on: bool) -> float:
    """Of `batch` equal requests at once, from the first token of the last of them."""
    prompt, answer = case
    loop = RequestLoop(engine, tokenizer, batch, set(), speculation=Speculation(Lookup()) if on else None)
    for at in range(batch):  # another first token each: none finds the prefix of another
        loop.add(Request([at, *prompt], Sampling(max_tokens=len(answer)), grammar=Forced(answer)))
    given, first, began = 0, 0, 0.0
    while not loop.scheduler.idle:
        given += sum(len(piece.tokens) for piece in loop.step())
        if not began and loop.counts.prompt_tokens >= batch * len(prompt):
            first, began = given, time.perf_counter()
    return (given - first) / (time.perf_counter() - began)


def measured(engine: Any, tokenizer: Any, batch: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Case → tokens a second with and without, and their ratio."""
    found: dict[str, Any] = {}
    for name, case in cases(tokenizer, tokens).items():
        rates: dict[bool, list[float]] = {True: [], False: []}
        for _, on in alternating([True, False], rounds):
            rates[on].append(tokens_a_second(engine, tokenizer, case, batch, on))
        ratio = spread([on / off for on, off in zip(rates[True], rates[False], strict=True)])
        found[name] = {"on": spread(rates[True]), "off": spread(rates[False]), "ratio": ratio}
    return found


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("model")
    parser.add_argument("--memory", default="none", help="budgets, comma-separated; none: what is free")
    parser.add_argument("--batch", type=at_least_one, default=1)
    parser.add_argument("--tokens", type=at_least_one, default=300, help="of an answer")
    args = parser.parse_args()
    tokenizer, results = load_tokenizer(resolve_model(args.model)), {}
    for memory in args.memory.split(","):
        size = {} if memory == "none" else {"memory": memory}
        engine = start_engine(args.model, {"context": 4 * args.tokens, "batch": args.batch, **size})
        results[memory] = measured(engine, tokenizer, args.batch, args.rounds, args.tokens)
        engine.close()
    rows = [
        [memory, name, *(shown(case[key]) for key in ("off", "on", "ratio"))]
        for memory, found in results.items()
        for name, case in found.items()
    ]
    print_table(["memory", "case", "without, tok/s", "with", "ratio"], rows)
    print(json.dumps({**about(args.rounds), "results": results}))


if __name__ == "__main__":
    main()
