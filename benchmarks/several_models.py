"""Several models behind one address: answers beside those of each model alone, memory of all, time of changes.

    python -m benchmarks.several_models A B C --memory 1GiB --rounds 2

Asks the models by turns, so that one leaves for another where the budget does not hold all. Exits with 1 where an
answer differs, or the processes together ever hold more than the budget. Prints one JSON object.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.rounds import parser_of
from benchmarks.serving import Server, serving
from tiermoe.config import parse_size

PROMPT = "Once upon a time there was a little"
PATIENCE_S = 600
LOOK_S = 0.05


class Memory:
    """The most that a process and its descendants held together, sampled until the end of a `with`, in bytes: resident
    sets, which count shared pages in each process, and proportional sets, which count them once."""

    def __init__(self, process: int) -> None:
        self.resident = self.proportional = self.samples = 0
        self._root = psutil.Process(process)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            resident = proportional = 0
            for each in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    found = each.memory_full_info()
                    resident, proportional = resident + found.rss, proportional + found.pss
            self.resident = max(self.resident, resident)
            self.proportional = max(self.proportional, proportional)
            self.samples += 1


def _client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.address, timeout=PATIENCE_S)


def answer(client: httpx.Client, model: str) -> str:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    found: str = client.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"]
    return found


def measure(models: Sequence[str], memory: str, rounds: int) -> dict[str, Any]:
    alone, budget = {}, ("--memory", memory)
    for model in models:
        with serving([model, *budget], PATIENCE_S) as server, _client(server) as client:
            alone[Path(model).name] = answer(client, Path(model).name)
    changes, differ, last = [], [], None
    with (
        serving([*models, *budget], PATIENCE_S) as server,
        _client(server) as client,
        Memory(server.process.pid) as held,
    ):
        for _ in range(rounds):
            for name, expected in alone.items():
                if answer(client, name) != expected:
                    differ.append(name)
                change = client.get("/stats").json()["last_change"]
                if change != last:
                    changes.append(change)
                last = change
        stats = client.get("/stats").json()
    return {
        "budget_bytes": parse_size(memory),
        "resident_bytes": held.resident,
        "proportional_bytes": held.proportional,
        "samples": held.samples,
        "router_bytes": stats["router_peak_memory_bytes"],
        "differ": differ,
        "changes": changes,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--rounds", type=int, default=2, help="default 2")
    asked = parser.parse_args()
    found = measure(asked.models, asked.memory, asked.rounds)
    print(json.dumps(found, indent=1))
    return int(bool(found["differ"]) or found["proportional_bytes"] > found["budget_bytes"])


if __name__ == "__main__":
    sys.exit(main())
