"""How long a short request waits for its first token while a long prompt is read, and what a second turn computes.

    python -m benchmarks.latency MODEL [--prompt-tokens 1500] [--serve-options "--memory 700MiB"]

One `tiermoe serve MODEL`. In every round it reads a long prompt alone; a chunk's time is the part of that which a chunk
has of it. Then it reads another one, and once that is under way a short one comes: the seconds until its first token,
also in chunks. Then a conversation: a prompt, and the same with as many tokens more, of which only those may be
computed. Every prompt is another stretch of the text, so that nothing of it is there already. Prints one JSON object.
"""

import argparse
import asyncio
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rounds import about, at_least_one, parser_of, print_table, shown
from benchmarks.serving import serving
from tiermoe.config import Settings
from tiermoe.errors import TiermoeError
from tiermoe.lab.bench.cases import DEFAULT_TEXT, Condition, check_lengths, rows
from tiermoe.lab.bench.child import CaseFailed
from tiermoe.lab.bench.session import Subject
from tiermoe.lab.bench.summary import spread
from tiermoe.platform.machine import processors

SHORT = 16  # tokens of a short prompt, and of a turn
_UNDER_WAY = 0.25  # of a chunk's time after which a short one comes
_LOADING_S = 600


async def first_token_s(http: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    """Seconds until the first token of the answer to a prompt."""
    began = time.perf_counter()
    asked = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "stream": True}
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                if "error" in json.loads(line[5:]):
                    raise CaseFailed(line)
                return time.perf_counter() - began
    raise CaseFailed(f"no answer: status {response.status_code}")


async def waited(address: str, prompts: Sequence[list[int]], chunks: int) -> dict[str, float]:
    """Of two long prompts, each of so many chunks, and a short one: the figures of a round."""
    alone, long, short = prompts
    async with httpx.AsyncClient(base_url=address, timeout=None) as http:
        chunk_s = await first_token_s(http, alone) / chunks
        reading = asyncio.create_task(first_token_s(http, long))
        await asyncio.sleep(_UNDER_WAY * chunk_s)
        first_s = await first_token_s(http, short)
        beside = not reading.done()
        await reading
    if not beside:
        raise CaseFailed("the long prompt was read before the short one came; raise --prompt-tokens")
    return {"chunk_s": chunk_s, "first_token_s": first_s, "in_chunks": first_s / chunk_s}


def computed(address: str, first: Sequence[int], more: Sequence[int]) -> int:
    """Tokens of a second turn's prompt that were not there from the first one: `more` are new."""
    with httpx.Client(base_url=address, timeout=None) as http:
        for prompt in (first, [*first, *more]):
            asked = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0}
            usage = http.post("/v1/completions", json=asked).json()["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def measure(address: str, ids: Sequence[int], length: int, chunk: int, rounds: int) -> dict[str, Any]:
    """The figures of a server at an address. PromptError where `ids` are too few."""
    condition = Condition(None, length, 0, 3 * rounds)
    check_lengths([condition], len(ids), None)
    stretches = rows(ids, condition)
    found, turns = [], []
    for number in range(rounds):
        alone, long, other = stretches[number::rounds]
        found.append(asyncio.run(waited(address, [alone, long, other[-SHORT:]], math.ceil(length / chunk))))
        turns.append(computed(address, other[: -2 * SHORT], other[-2 * SHORT : -SHORT]))
    return {**{name: spread([each[name] for each in found]) for name in found[0]}, "second_turn_computes": turns}


def latency(args: argparse.Namespace) -> dict[str, Any]:
    subject = Subject(str(args.model), args.text.read_text())
    with serving([args.model, *args.serve_options, "--chunk", args.chunk], _LOADING_S) as server:
        found = measure(server.address, subject.ids, args.prompt_tokens, args.chunk, args.rounds)
    asked = {"model": subject.name, "prompt_tokens": args.prompt_tokens, "chunk": args.chunk, "new_tokens": SHORT}
    return {**asked, **about(args.rounds, processors()), **found}


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=1500, help="of a long prompt; default 1500")
    parser.add_argument("--chunk", type=at_least_one, default=Settings().chunk, help="tokens that are read at once")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="UTF-8 file that prompts are cut from")
    parser.add_argument("--serve-options", type=shlex.split, default=[], help="more of tiermoe serve's, in one word")
    args = parser.parse_args()
    if args.prompt_tokens <= 2 * SHORT:
        parser.error(f"a long prompt has more than {2 * SHORT} tokens")
    try:
        result = latency(args)
    except TiermoeError as error:
        sys.exit(f"latency: {error}")
    names = ("chunk_s", "first_token_s", "in_chunks")
    turns = " ".join(map(str, result["second_turn_computes"]))
    print_table([*names, f"computed of {SHORT} new"], [[*(shown(result[name]) for name in names), turns]])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
