"""Clients that could harm a server: they leave long answers, send schemas that take for ever to compile, and bodies of
megabytes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

_PAUSE_S = 0.5  # between two requests of a client
_LEAVES_S = 0.3
_JSON = {"Content-Type": "application/json"}
_REFUSALS = frozenset({400, 413, 429, 503})


@dataclass(frozen=True, slots=True)
class Attack:
    """A POST request that could harm a server."""

    name: str
    path: str
    body: bytes
    answers: frozenset[int] = _REFUSALS  # statuses that a server in order may give
    leaves: bool = False  # the client leaves amid the answer, at a stream's first event or after a moment

    @property
    def streams(self) -> bool:
        return b'"stream": true' in self.body


def attacks(context: int) -> list[Attack]:
    """One of each kind, against a model that has room for `context` tokens."""

    def attack(name: str, path: str, body: dict[str, Any], **options: Any) -> Attack:
        return Attack(name, path, json.dumps(body).encode(), **options)

    endless = {"prompt": "Once", "max_tokens": context - 8}
    hello = {"role": "user", "content": "Hello"}
    chat = {"messages": [hello], "max_tokens": 8}
    schema = {"name": "n", "schema": {"type": "integer", "multipleOf": 99_999_999}}
    asked = chat | {"response_format": {"type": "json_schema", "json_schema": schema}}
    many = {"prompt": [[1]] * 20_000, "n": 128, "max_tokens": 1}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    nested = {"messages": [hello, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 8}
    leaving = {"answers": frozenset({200, 503}), "leaves": True}
    return [
        attack("leaves a stream", "/v1/completions", endless | {"stream": True}, **leaving),
        attack("leaves a whole answer", "/v1/completions", endless, **leaving),
        attack("schema", "/v1/chat/completions", asked),
        attack("20,000 prompts of 128 answers", "/v1/completions", many),
        attack("1,000,000 messages", "/v1/chat/completions", {"messages": [1] * 1_000_000}),
        attack("10 MB of prompt", "/v1/completions", {"prompt": "once " * 2_000_000, "max_tokens": 1}),
        attack("15 MB to tokenize", "/tokenize", {"prompt": "once " * 3_000_000}),
        attack("300,000 stop strings", "/v1/completions", {"prompt": "Once", "stop": ["x"] * 300_000, "max_tokens": 1}),
        attack("100,000 brackets", "/v1/chat/completions", nested),
    ]


@dataclass(slots=True)
class HostileTally:
    """What hostile clients have seen. Numbers are those of `Tally`, of requests that the server counts."""

    sent: int = 0
    left: int = 0
    refused: int = 0
    unheard: int = 0  # also those turned away with 503, which may happen before the server counts them
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)  # attack → status → how often
    unexpected: list[str] = field(default_factory=list)  # answers that a server in order does not give
    longest_answer_s: float = 0.0


class HostileClients:
    """`count` clients of the server at `address`, each with one attack after the other, in an order by chance."""

    def __init__(self, address: str, count: int, context: int, seed: int = 0) -> None:
        self.tally = HostileTally()
        self._address, self._count = address, count
        self._attacks = attacks(context)
        self._chance = random.Random(seed)

    async def run(self, seconds: float) -> None:
        """Attacks for so long."""
        until = time.perf_counter() + seconds
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._address, timeout=60, limits=limits) as http:
            await asyncio.gather(*(self._client(http, until) for _ in range(self._count)))

    async def _client(self, http: httpx.AsyncClient, until: float) -> None:
        while time.perf_counter() < until:
            attack = self._chance.choice(self._attacks)
            began = time.perf_counter()
            status = await (self._leave(http, attack) if attack.leaves else self._wait(http, attack))
            self.tally.longest_answer_s = max(self.tally.longest_answer_s, time.perf_counter() - began)
            counts = self.tally.statuses.setdefault(attack.name, {})
            counts[status] = counts.get(status, 0) + 1
            if not status.isdigit() or int(status) not in attack.answers:
                self.tally.unexpected.append(f"{attack.name}: {status}")
            await asyncio.sleep(_PAUSE_S)

    async def _wait(self, http: httpx.AsyncClient, attack: Attack) -> str:
        try:
            status = (await http.post(attack.path, content=attack.body, headers=_JSON)).status_code
        except httpx.TransportError as error:
            return type(error).__name__
        self.tally.sent += status == 503
        self.tally.unheard += status == 503
        return str(status)

    async def _leave(self, http: httpx.AsyncClient, attack: Attack) -> str:
        """Leaves at a stream's first event, or after a moment: 200 where nothing was refused until then."""
        self.tally.sent += 1
        heard = False
        try:
            async with (
                asyncio.timeout(None if attack.streams else _LEAVES_S),
                http.stream("POST", attack.path, content=attack.body, headers=_JSON) as response,
            ):
                heard = True
                if response.status_code != 200:
                    self.tally.refused += response.status_code == 503
                    return str(response.status_code)
                async for _ in response.aiter_lines():
                    break
        except TimeoutError:
            pass
        except httpx.TransportError as error:
            return type(error).__name__
        self.tally.left += 1
        self.tally.unheard += not heard
        return "200"
