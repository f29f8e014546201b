"""Tokens a second of a server with several clients: `tiermoe serve MODEL` without options, and llama-server.

    python -m benchmarks.throughput MODEL --gguf F.gguf --llama-server PATH [--clients 1,4,16,32] [--memory 700MiB]

Every client asks for one answer after the other: a prompt of its own, a stretch of the text, and so many tokens more,
greedy, whatever ends a text. In every round each server is started for each number of clients, by turns; it answers
each client once before the clock starts, with all tokens where memory has no bound, else with one. Tokens a second are
those of all answers over the time from the first request to the last answer, prompts and waiting in the queue
included. llama-server has a slot for each client and a thread for each core, else its own defaults; it maps its file.

`--memory` starts each server in a memory cgroup of that size, which counts its page cache: its files are dropped from
the page cache before, tiermoe is told the size, and llama-server does not repack its weights. Prints one JSON object,
ratios being our tokens a second over llama-server's within a round.
"""

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table, rates, ratios, say, shown
from benchmarks.serving import Server, free_port, limited
from tiermoe.config import parse_size
from tiermoe.errors import TiermoeError
from tiermoe.lab.bench.cases import DEFAULT_TEXT, OURS, Condition, alternating, check_lengths, rows
from tiermoe.lab.bench.child import CaseFailed, drop_from_page_cache, usage
from tiermoe.lab.bench.session import Subject
from tiermoe.platform.machine import processors

LLAMA_SERVER = "llama-server"
_SLOT = 256  # tokens, of which llama-server's slots have a multiple
_NEVER = -100  # the largest bias that OpenAI's field takes
Prompts = Sequence[Sequence[list[int]]]
"""Client → the token ids of its prompts."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server to be measured."""

    words: Callable[[int, int], list[str]]  # (port, clients) → how it is started
    fields: Mapping[str, Any]  # of a request that has it go on where a text ends
    files: tuple[Path, ...]  # what it reads of the model


@dataclass(frozen=True, slots=True)
class Requests:
    """What clients ask for."""

    prompt: int  # tokens of a request
    tokens: int  # of an answer
    answers: int  # of each client
    memory: int | None  # bytes of the server's cgroup; None: no cgroup
    timeout: float  # seconds that a server may take to load, and clients to be answered

    @property
    def warm_tokens(self) -> int:
        """Of each client's first answer, which does not count; as `tiermoe.lab.bench` has it."""
        return self.tokens if self.memory is None else 1

    def prompts(self, ids: Sequence[int], clients: int) -> tuple[Prompts, Prompts]:
        """Those before the clock starts, one a client, and those after it, all of different stretches of the text.
        PromptError where that is too short."""
        condition = Condition(self.memory, self.prompt, self.tokens, clients * (1 + self.answers))
        check_lengths([condition], len(ids), None)
        found = [row[: self.prompt] for row in rows(ids, condition)]
        return [[each] for each in found[:clients]], [found[client::clients][1:] for client in range(clients)]


@dataclass(slots=True)
class Measured:
    """The figures of one number of clients."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # server → of every round
    errors: dict[str, str] = field(default_factory=dict)  # server → why it has no figures

    def summary(self, tokens: int) -> dict[str, Any]:
        """Server → {median, low, high} of tokens a second, of `tokens` in all, and the ratio to llama-server's."""
        whole = {name: seconds for name, seconds in self.seconds.items() if name not in self.errors}
        speeds = {name: rates(seconds, tokens) for name, seconds in whole.items()}
        ratio = ratios(whole, OURS).get(LLAMA_SERVER) if OURS in whole else None
        return {"tok_s": speeds, "ratio": ratio, "errors": self.errors}


def ours(model: Path, memory: int | None, options: Sequence[str], ends: set[int], files: Sequence[Path]) -> Contender:
    """`tiermoe serve`. ends: tokens that end a text."""
    words = [sys.executable, "-m", "tiermoe", "serve", str(model), *options]
    words += [] if memory is None else ["--memory", str(memory)]
    fields = {"logit_bias": {str(token): _NEVER for token in sorted(ends)}} if ends else {}
    return Contender(lambda port, clients: [*words, "--port", str(port)], fields, tuple(files))


def llama_server(binary: str, gguf: Path, tokens: int, options: Sequence[str], memory: int | None = None) -> Contender:
    """llama-server, whose slots have room for so many tokens. Under a bound it does not repack: that would be a copy of
    its weights in memory."""
    slot = -(-(tokens + 1) // _SLOT) * _SLOT
    words = [binary, "-m", str(gguf), "--host", "127.0.0.1", "-t", str(processors()), *options]
    words += [] if memory is None else ["--no-repack"]

    def command(port: int, clients: int) -> list[str]:
        return [*words, "--port", str(port), "-np", str(clients), "-c", str(clients * slot)]

    return Contender(command, {"ignore_eos": True}, (gguf,))


async def answered(address: str, prompts: Prompts, tokens: int, fields: Mapping[str, Any], timeout: float) -> float:
    """Seconds that the server at an address takes to answer all clients, each prompt with so many tokens. CaseFailed
    where it does not."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as http:
        asked = {"max_tokens": tokens, "temperature": 0, **fields}
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(_client(http, its, asked) for its in prompts))
        except TimeoutError:
            said = f"not answered after {timeout:g} s; --timeout allows more, --tokens and --answers ask for less"
            raise CaseFailed(said) from None
        except httpx.TransportError as error:
            raise CaseFailed(f"the server broke off: {type(error).__name__}") from error
        return time.perf_counter() - began


async def _client(http: httpx.AsyncClient, prompts: Sequence[list[int]], asked: Mapping[str, Any]) -> None:
    for prompt in prompts:
        response = await http.post("/v1/completions", json={**asked, "prompt": prompt})
        if response.status_code != 200:
            raise CaseFailed(f"status {response.status_code}: {response.text[:200]}")
        made = response.json()["usage"]["completion_tokens"]
        if made != asked["max_tokens"]:
            raise CaseFailed(f"an answer ended after {made} of {asked['max_tokens']} tokens")


def turn(contender: Contender, requests: Requests, ids: Sequence[int], clients: int, log: Path) -> float:
    """Seconds of the answers of a server that is started for them. CaseFailed where it gives none."""
    warming, prompts = requests.prompts(ids, clients)
    with limited(requests.memory) as group:
        if group:
            drop_from_page_cache(contender.files)
        port = free_port()
        server = Server(contender.words(port, clients), f"http://127.0.0.1:{port}", log, group)
        try:
            server.wait_until_loaded(requests.timeout)
            fields, address = contender.fields, server.address
            asyncio.run(answered(address, warming, requests.warm_tokens, fields, requests.timeout))
            return asyncio.run(answered(address, prompts, requests.tokens, fields, requests.timeout))
        except CaseFailed as error:
            if group and usage(*group)[1]:
                raise CaseFailed(f"killed: it needs more than {requests.memory:,} bytes") from error
            raise
        finally:
            server.end()


def measure(
    contenders: Sequence[str], rounds: int, clients: Sequence[int], run: Callable[[str, int], float],
    say: Callable[[str], None],
) -> dict[int, Measured]:  # fmt: skip
    """Number of clients → what was measured. A server that failed has no more turns with that number."""
    found = {count: Measured({name: [] for name in contenders}) for count in clients}
    for count, its in found.items():
        for number, name in alternating(contenders, rounds):
            if name in its.errors:
                continue
            try:
                its.seconds[name].append(run(name, count))
                said = f"{its.seconds[name][-1]:.2f} s"
            except CaseFailed as error:
                its.errors[name] = said = str(error)
            say(f"[{number + 1}/{rounds}] {name}, {count} clients: {said}")
    return found


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """The figures. Raises a TiermoeError for what cannot be measured."""
    requests = Requests(args.prompt_tokens, args.tokens, args.answers, args.memory, args.timeout)
    binary = shutil.which(args.llama_server)
    if binary is None:
        raise CaseFailed(f"{args.llama_server} is no program; name llama.cpp's server with --llama-server")
    if not args.gguf.exists():
        raise CaseFailed(f"{args.gguf} is not there; `python -m benchmarks.llamacpp` makes one")
    subject = Subject(str(args.model), args.text.read_text())
    options = {} if args.memory is None else {"memory": args.memory}
    files = subject.ensure_packed("default", options, lambda what, done, total: say(what) if done == 0 else None)
    contenders = {
        OURS: ours(args.model, args.memory, args.serve_options, subject.ends, files),
        LLAMA_SERVER: llama_server(
            binary, args.gguf, requests.prompt + requests.tokens, args.llama_options, args.memory
        ),
    }
    for count in args.clients:
        requests.prompts(subject.ids, count)  # refuses before anything is measured
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        found = measure(
            list(contenders), args.rounds, args.clients,
            lambda name, count: turn(contenders[name], requests, subject.ids, count, Path(folder) / "log"), say,
        )  # fmt: skip
    return {
        "model": subject.name,
        "gguf": args.gguf.name,
        **{name: getattr(requests, name) for name in ("prompt", "tokens", "answers", "warm_tokens", "memory")},
        **about(args.rounds, processors()),
        "servers": {name: shlex.join(each.words(0, 1)) for name, each in contenders.items()},
        "clients": {
            str(count): each.summary(count * requests.answers * requests.tokens) for count, each in found.items()
        },
    }


def table(result: dict[str, Any]) -> None:
    """On standard error."""
    lines = []
    for count, found in result["clients"].items():
        speeds = [found["errors"].get(name) or shown(found["tok_s"][name]) for name in (OURS, LLAMA_SERVER)]
        lines.append([count, *speeds, shown(found["ratio"])])
    print_table(["clients", f"{OURS} tok/s", f"{LLAMA_SERVER} tok/s", "times as fast"], lines)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path, required=True, help="the same model for llama-server")
    parser.add_argument("--llama-server", default=LLAMA_SERVER, metavar="PATH", help="llama.cpp's server")
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16, 32], help="at once; default 1,4,16,32")
    parser.add_argument("--memory", type=parse_size, help="in a memory cgroup of this size, such as 700MiB")
    parser.add_argument("--prompt-tokens", type=at_least_one, default=32, help="default 32")
    parser.add_argument("--tokens", type=at_least_one, default=64, help="of an answer; default 64")
    parser.add_argument("--answers", type=at_least_one, default=2, help="that each client asks for; default 2")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="UTF-8 file that prompts are cut from")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to load, and to answer; default 600")
    for name, program in (("--serve-options", "tiermoe serve"), ("--llama-options", LLAMA_SERVER)):
        parser.add_argument(name, type=shlex.split, default=[], help=f"more of {program}'s own, in one word")
    return parser.parse_args()


def main() -> None:
    try:
        result = throughput(arguments())
    except TiermoeError as error:
        sys.exit(f"throughput: {error}")
    table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
