"""Tokens with speculation beside tokens without, many of them: `python tests/equal_tokens.py --tokens 1000000`.

Families of every kind of attention and state, three sizes of the expert cache, greedy and sampled answers, one and
three at once. Guesses are the tokens that came without speculation, some of them replaced: random models repeat too
little for prompt lookup. Prints a table; the exit code is 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from native_experts import checkpoint
from serving import Counted, Letters
from small_engines import engine_of, tokens
from test_speculation import ALONE, FAMILIES, Eager, Informed, answers
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling

VERIFYING = {
    **{name: sizes for name, sizes in FAMILIES.items() if name not in ALONE},
    "glm4_moe": {"intermediate_size": 64},
}
CACHES = ("25%", "50%", "100%")
ANSWER = 180


def requests(seed: int, sampled: bool) -> list[Request]:
    """Three of them, whose prompts say things twice."""
    drawn = random.Random(seed)
    sampling = {"temperature": drawn.choice((0.3, 0.7, 1.0)), "seed": seed, "top_p": 0.9} if sampled else {}
    asked = []
    for at in range(3):
        said = tokens(12, 7 * seed + at)
        prompt = [*tokens(at, at + 9), *said * 3, *tokens(5, seed), *said]
        asked.append(Request(prompt, Sampling(max_tokens=ANSWER, repetition_penalty=1.0, **sampling)))
    return asked


def compared(engine: Any, most: int) -> tuple[int, int, int, int]:
    """(tokens, tokens in answers that differ, steps with speculation, steps without) until `most` tokens came."""
    plain, guessed = Counted(engine), Counted(engine)
    came = differing = seed = 0
    while came < most:
        sampled, rows = bool(seed % 2), 1 + 2 * (seed // 2 % 2)
        asked = requests(seed, sampled)
        without = answers(RequestLoop(plain, Letters(), rows, set()), asked)
        informed = Informed({tuple(each.ids): known for each, known in zip(asked, without, strict=True)}, seed)
        speculation = Eager(lambda _, informed=informed: informed)
        beside = answers(RequestLoop(guessed, Letters(), rows, set(), speculation=speculation), requests(seed, sampled))
        came += sum(map(len, beside))
        differing += sum(len(one) for one, other in zip(beside, without, strict=True) if one != other)
        seed += 1
    return came, differing, guessed.steps, plain.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of all families and caches together")
    args = parser.parse_args()
    share = -(-args.tokens // (len(VERIFYING) * len(CACHES)))
    wrong = total = 0
    print(f"{'family':14} {'cache':>6} {'tokens':>9} {'differ':>7} {'steps of those without':>24} {'seconds':>8}")
    for family, sizes in VERIFYING.items():
        with tempfile.TemporaryDirectory() as folder:
            directory = checkpoint(Path(folder), family, **sizes)
            for cache in CACHES:
                engine = engine_of(
                    directory, bits=4, dense_bits=4, chunk=64, batch=3, context=250, cache=cache, threads=1
                )
                assert engine.decoder.batch_invariant, f"{family} verifies no draft here: build the native kernels"
                began = time.perf_counter()
                came, differing, steps, alone = compared(engine, share)
                engine.close()
                took = time.perf_counter() - began
                print(f"{family:14} {cache:>6} {came:9,} {differing:7,} {steps / alone:24.2f} {took:8.0f}", flush=True)
                wrong, total = wrong + differing, total + came
    print(f"{total:,} tokens, {wrong:,} in answers that differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
