"""Does a server hold under load? `tiermoe serve` with many clients, and its end while they ask.

    python -m benchmarks.load MODEL --clients 64 --seconds 600 --memory 700MiB [--hostile 8] [--cgroup] [OPTIONS]

Clients of every dialect (`load_dialects.py`) stream or wait for whole answers, of mixed lengths, some by a schema, and
forced calls where the model has tools; a tenth leaves midway; the queue overflows, and who is refused comes again after
Retry-After. `--hostile` many of them attack (`hostile_clients.py`); before that a fifth of the time passes without
them. `--cgroup` starts the server in a memory cgroup of the size of --memory; OPTIONS are those of serve. Then they all
stop, and the server's counters must add up with theirs; then they ask again while the server is told to end.
Prints one JSON object, and on standard error each rule that was broken; exits with 1 where there is one:

    killed      the server was not killed, and ended with 0
    drift       resident size from the second fifth of the time to the last one, at most 2 % in five minutes and more;
                before that the cache is still being written for the first time
    standstill  no stream was silent for more than 10 s between two tokens, nor all clients at once
    counters    requests sent are those that finished, failed, were refused or aborted as the server counts them; its
                tokens are those of finished answers, and at most those that clients that left could have had
    lost        no answer broke off without a word, also not when the server ended; none failed
    hostile     each hostile request is answered as it should be; beside them the others wait at most two steps longer
                for a first and a next token (99th percentiles; a step: the longest silence in a stream without them);
                the resident size stays within --memory
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.hostile_clients import HostileClients
from benchmarks.load_clients import Clients, Tally
from benchmarks.rounds import parser_of
from benchmarks.serving import Group, Server, free_port, limited
from tiermoe.config import parse_size
from tiermoe.errors import TiermoeError
from tiermoe.kernels.linear import cpu_kernels
from tiermoe.lab.bench.child import usage

MOST_DRIFT = 0.02
SETTLES_S = 300
MOST_SILENCE_S = 10.0
_LOADING_S = 600  # packing included
_ENDING_S = 60  # its grace time, last words and closing
_UNDER_LOAD_S = 3  # of asking before the server is told to end
_SAMPLE_S = 0.5


class Loaded(Server):
    """`tiermoe serve` under load."""

    def __init__(self, args: argparse.Namespace, log: Path, group: Group) -> None:
        port = free_port()
        words = [sys.executable, "-m", "tiermoe", "serve", str(args.model), "--port", str(port)]
        words += ["--memory", args.memory, "--max-batch", str(args.max_batch), "--max-queue", str(args.max_queue)]
        super().__init__([*words, *args.options], f"http://127.0.0.1:{port}", log, group)
        self._group = group

    def resident_bytes(self) -> int | None:
        """None where the system does not tell it, or the process has ended."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) << 10
        return None

    def ended(self) -> dict[str, Any]:
        """How it ended after a signal."""
        began = time.perf_counter()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDING_S)
        seconds = time.perf_counter() - began
        self.process.kill()
        peak, kills = usage(*self._group) if self._group else (None, 0)
        return {"exit": self.process.wait(), "ending_s": round(seconds, 1), "oom_kills": kills, "cgroup_peak": peak}


async def under_load(server: Loaded, clients: Clients, hostile: HostileClients, seconds: float) -> list[int]:
    """Resident sizes while clients ask."""
    sizes: list[int] = []

    async def sample() -> None:
        while True:
            size = server.resident_bytes()
            sizes.extend([] if size is None else [size])
            await asyncio.sleep(_SAMPLE_S)

    sampling = asyncio.create_task(sample())
    await asyncio.gather(clients.run(seconds), hostile.run(seconds))
    sampling.cancel()
    return sizes


def metrics(address: str) -> dict[str, float]:
    """What a server tells of itself: names, without the prefix and with their labels, and values."""
    lines = httpx.get(f"{address}/metrics", timeout=MOST_SILENCE_S).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("tiermoe:"): float(value) for name, value in pairs}


def settled(address: str) -> dict[str, float]:
    """The metrics once nothing runs any more, or 10 s have passed."""
    limit = time.monotonic() + MOST_SILENCE_S
    while True:
        found = metrics(address)
        if time.monotonic() > limit or not found["num_requests_running"] + found["num_requests_waiting"]:
            return found
        time.sleep(0.1)


async def ended_under_load(server: Loaded, clients: Clients) -> dict[str, Any]:
    """Has the clients ask, and tells the server to end meanwhile; how it ended."""
    asking = asyncio.create_task(clients.run(_UNDER_LOAD_S + _ENDING_S))
    await asyncio.sleep(_UNDER_LOAD_S)
    clients.ended_at = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    ended = await asyncio.to_thread(server.ended)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asking, MOST_SILENCE_S)
    return ended


def drift(sizes: list[int]) -> float | None:
    """How much larger the sizes of the last fifth are than those of the second one; None where there are too few."""
    fifth = len(sizes) // 5
    if not fifth:
        return None
    return sum(sizes[-fifth:]) / sum(sizes[fifth : 2 * fifth]) - 1


def course(sizes: list[int]) -> list[int]:
    """The means of ten parts of the time, in MiB."""
    tenths = [sizes[len(sizes) * at // 10 : len(sizes) * (at + 1) // 10] for at in range(10)]
    return [sum(tenth) // len(tenth) >> 20 for tenth in tenths if tenth]


def counters_broken(seen: Tally, told: dict[str, float], context: int) -> list[str]:
    """Where the server's counters and what clients saw do not add up."""
    ends = {name: value for name, value in told.items() if name.startswith("request_success_total")}
    ended = sum(ends.values()) + told["requests_aborted_total"]
    finished = sum(value for name, value in ends.items() if "error" not in name)
    read = told["prompt_tokens_total"] + told["prompt_tokens_cached_total"]
    made = told["generation_tokens_total"]
    known = seen.sent - seen.unheard
    checks = (
        ("requests sent", known, ended + told["requests_refused_total"], seen.unheard),
        ("requests taken", told["requests_total"], ended, 0),
        ("requests refused", seen.refused, told["requests_refused_total"], seen.unheard),
        ("answers finished", seen.finished, finished, seen.left),
        ("tokens of prompts", seen.prompt_tokens, read, seen.left * context),
        ("tokens generated", seen.completion_tokens, made, seen.left * context),
    )
    return [
        f"counters: {what}: {ours:,.0f} here, {theirs:,.0f} there" + (f", {more:,} more at most" if more else "")
        for what, ours, theirs, more in checks
        if not ours <= theirs <= ours + more
    ]


def broken_rules(first: Tally, last: Tally, ended: dict[str, Any], drifted: float | None) -> list[str]:
    """What was not as it must be, but for the counters."""
    broken = []
    if ended["exit"] or ended["oom_kills"]:
        broken.append(f"killed: the server ended with {ended['exit']}, {ended['oom_kills']} kills for memory")
    if drifted is not None and abs(drifted) > MOST_DRIFT:
        broken.append(f"drift: {drifted:+.1%}, {MOST_DRIFT:.0%} at most")
    for name in ("longest_silence_s", "longest_standstill_s"):
        if getattr(first, name) > MOST_SILENCE_S:
            broken.append(f"standstill: {name} is {getattr(first, name):.1f}, {MOST_SILENCE_S:g} at most")
    if first.lost or last.lost or first.told:
        broken.append(f"lost: {first.lost} answers under load, {last.lost} at the end; {first.told} failed")
    return broken


def percentile_99(seconds: Sequence[float]) -> float:
    """0 of nothing."""
    return sorted(seconds)[len(seconds) * 99 // 100] if seconds else 0.0


def waited(clients: Clients) -> dict[str, float]:
    """Seconds to a first token, and between two events of a stream: 99th percentiles."""
    return {"first token": percentile_99(clients.waits), "next token": percentile_99(clients.silences)}


def hostile_broken(
    unexpected: Sequence[str], alone: dict[str, float], beside: dict[str, float], step: float, peak: int, memory: int
) -> list[str]:
    """What others had to bear for hostile clients. alone, beside: what they `waited` without and with them; step:
    seconds; peak: most bytes resident, of `memory`."""
    broken = [f"hostile: {each}" for each in sorted(set(unexpected))]
    for what, seconds in beside.items():
        if seconds - alone[what] > 2 * step:
            broken.append(f"hostile: {seconds:.2f} s to a {what} after {alone[what]:.2f}, a step takes {step:.2f}")
    if peak > memory:
        broken.append(f"hostile: {peak:,} bytes resident, --memory is {memory:,}")
    return broken


def measure(args: argparse.Namespace, server: Loaded) -> tuple[dict[str, Any], list[str]]:
    """The figures, and which rules were broken."""
    server.wait_until_loaded(_LOADING_S)
    (model,) = httpx.get(f"{server.address}/v1/models").json()["data"]
    context = int(model["max_model_len"])
    before = Clients(server.address, args.clients, context, args.seed + 2)
    if args.hostile:
        asyncio.run(before.run(args.seconds / 5))
    clients = Clients(server.address, args.clients - args.hostile, context, args.seed)
    hostile = HostileClients(server.address, args.hostile, context, args.seed)
    already = settled(server.address)
    sizes = asyncio.run(under_load(server, clients, hostile, args.seconds))
    told = settled(server.address)
    counted = {name: value - already.get(name, 0) for name, value in told.items()}
    seen = replace(
        clients.tally,
        **{
            name: getattr(clients.tally, name) + getattr(hostile.tally, name)
            for name in ("sent", "left", "refused", "unheard")
        },
    )
    last = Clients(server.address, args.clients, context, args.seed + 1)
    ended = asyncio.run(ended_under_load(server, last))
    drifted = drift(sizes)
    broken = counters_broken(seen, counted, context)
    if args.hostile:
        step, peak = before.tally.longest_silence_s, int(told["resident_memory_peak_bytes"])
        unexpected, memory = hostile.tally.unexpected, parse_size(args.memory)
        broken += hostile_broken(unexpected, waited(before), waited(clients), step, peak, memory)
    broken += broken_rules(clients.tally, last.tally, ended, drifted if args.seconds >= SETTLES_S else None)
    figures = {
        "kernels": cpu_kernels(),
        "clients": args.clients,
        "seconds": args.seconds,
        "context": context,
        "memory_bytes": parse_size(args.memory),
        "resident_peak_bytes": int(told["resident_memory_peak_bytes"]),
        "resident_drift_percent": None if drifted is None else round(100 * drifted, 2),
        "resident_mib": course(sizes),
        "load": asdict(clients.tally),
        "hostile": asdict(hostile.tally),
        "percentiles_99_s": {"alone": waited(before), "beside_hostile": waited(clients)},
        "end": asdict(last.tally) | ended,
        "server": {name: value for name, value in told.items() if "_bucket" not in name and "_created" not in name},
        "broken": broken,
    }
    return figures, broken


def main() -> None:
    top = parser_of(__doc__, allow_abbrev=False)
    top.add_argument("model", type=Path)
    top.add_argument("--clients", type=int, default=64)
    top.add_argument("--seconds", type=float, default=600)
    top.add_argument("--memory", default="700MiB")
    top.add_argument("--max-batch", type=int, default=8)
    top.add_argument("--max-queue", type=int, default=32)
    top.add_argument("--hostile", type=int, default=8, help="so many of the clients are hostile; 0: none")
    top.add_argument("--cgroup", action="store_true", help="in a memory cgroup of the size of --memory")
    top.add_argument("--seed", type=int, default=0)
    args, args.options = top.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        try:
            with limited(parse_size(args.memory) if args.cgroup else None) as group:
                server = Loaded(args, Path(folder) / "log", group)
                try:
                    figures, broken = measure(args, server)
                finally:
                    server.process.kill()
                    server.process.wait()
        except TiermoeError as error:
            sys.exit(f"load: {error}")
        print(json.dumps(figures | {"said": server.log().splitlines()[-20:]}))
    for each in broken:
        print(each, file=sys.stderr)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
