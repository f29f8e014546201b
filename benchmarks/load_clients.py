"""Clients of a server under load: of every dialect, streaming and not, with prompts and answers of mixed lengths,
schemas and forced calls; some leave midway."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.load_dialects import DIALECTS, Dialect, error_of, event_of, is_beginning, is_end, request_of, usage_of

_TEXT = "once upon a time there was king who lived in great house by the sea and he had little dog that liked to play"
_WORDS = _TEXT.split()
_BEGINNINGS = 4  # that half of the prompts begin with
_LEAVING = 0.1  # of the requests, midway
_MOST_ANSWER = 64


class ClosedError(Exception):
    """The server takes no more connections."""


@dataclass(slots=True)
class Tally:
    """What clients have seen: numbers of requests, tokens of finished answers, and the longest times."""

    sent: int = 0
    finished: int = 0
    refused: int = 0  # with status 503
    left: int = 0  # by the client, midway
    unheard: int = 0  # of those that were left: the server had not said a word
    told: int = 0  # ended with an error
    lost: int = 0  # ended without a word
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest_wait_s: float = 0.0  # until a first token
    longest_silence_s: float = 0.0  # between two events of a stream
    longest_standstill_s: float = 0.0  # without an event for any client
    errors: dict[str, int] = field(default_factory=dict)  # message → how often


class Clients:
    """`count` clients of the server at `address`, whose requests have room for `context` tokens. `ended_at`: when the
    server was told to end; what is asked for after that and breaks off was turned away. waits: seconds to the first
    token of each answer; silences: seconds between two events of a stream."""

    def __init__(self, address: str, count: int, context: int, seed: int = 0) -> None:
        self.tally = Tally()
        self.ended_at = math.inf
        self.waits, self.silences = array("d"), array("d")
        self._address, self._count, self._context = address, count, context
        self._chance = random.Random(seed)
        told = httpx.post(f"{address}/tokenize", json={"prompt": _TEXT, "add_special_tokens": False}).json()
        self._words = len(_WORDS) * context // len(told["tokens"])  # that fill the context
        self._beginnings = [self._chance.choices(_WORDS, k=self._words // 4) for _ in range(_BEGINNINGS)]
        able = "tools" in httpx.post(f"{address}/api/show", json={}).json()["capabilities"]
        self._dialects = [each for each in DIALECTS if able or not each.tools]
        self._heard_at = 0.0

    async def run(self, seconds: float) -> None:
        """Asks for so long, and waits for the answers that are under way then, or until the server is gone."""
        until = self._heard_at = time.perf_counter()
        until += seconds
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._address, timeout=None, limits=limits) as http:
            await asyncio.gather(*(self._client(http, until) for _ in range(self._count)))

    async def _client(self, http: httpx.AsyncClient, until: float) -> None:
        while (left_s := until - time.perf_counter()) > 0:
            try:
                again_s = await self._ask(http)
            except ClosedError:
                return
            await asyncio.sleep(min(again_s, left_s))

    async def _ask(self, http: httpx.AsyncClient) -> float:
        """One request; seconds after which the next one may come."""
        stream = self._chance.random() < 0.5
        patience = self._chance.uniform(0.3, 3) if self._chance.random() < _LEAVING else None
        dialect, heard = self._chance.choice(self._dialects), False
        asked = self._request(dialect, stream)
        began = time.perf_counter()
        self.tally.sent += 1
        try:
            async with (
                asyncio.timeout(None if stream else patience) as limit,
                http.stream("POST", dialect.path, json=asked) as response,
            ):
                if response.status_code != 200:
                    return await self._refused(response)
                heard = True
                if patience is not None:
                    limit.reschedule(asyncio.get_running_loop().time() + patience)
                ended = await (self._streamed(response, began) if stream else self._whole(response, began))
                if not ended:
                    self._broke(began, "the answer broke off")
        except TimeoutError:
            self.tally.left += 1
            self.tally.unheard += not heard
        except httpx.ConnectError:
            self.tally.sent -= 1
            if began < self.ended_at:
                self._broke(began, "no connection")
            raise ClosedError from None
        except httpx.TransportError as error:
            self._broke(began, type(error).__name__)
        return 0.0

    def _request(self, dialect: Dialect, stream: bool) -> dict[str, Any]:
        chance = self._chance
        most = self._words // 2
        words = chance.choices(_WORDS, k=int(math.exp(chance.uniform(0, math.log(most)))))
        if chance.random() < 0.5:
            words = chance.choice(self._beginnings) + words
        return request_of(dialect, " ".join(words), chance.randint(1, _MOST_ANSWER), stream)

    async def _refused(self, response: httpx.Response) -> float:
        body = (await response.aread()).decode()
        if response.status_code == 503:
            # one that waits for no grammar to be compiled is refused before the server counts it
            counted = "grammars are being compiled" not in body
            self.tally.refused += counted
            self.tally.unheard += not counted
            return float(response.headers["Retry-After"])
        self.tally.told += 1
        self._note(f"{response.status_code} {body}")
        return 0.0

    async def _whole(self, response: httpx.Response, began: float) -> bool:
        body = json.loads(await response.aread())
        self._waited(began)
        self._finished(usage_of(body))
        return True

    async def _streamed(self, response: httpx.Response, began: float) -> bool:
        """Whether the stream came to an end that was told."""
        heard_at: float | None = None
        usage: tuple[int, int] | None = None
        async for line in response.aiter_lines():
            event = event_of(line)
            if event is None or is_beginning(event):
                continue
            if error := error_of(event):
                self.tally.told += 1
                self._note(error)
                return True
            usage = usage_of(event) or usage
            if is_end(event):
                self._finished(usage)
                return usage is not None
            now = time.perf_counter()
            if heard_at is None:
                self._waited(began)
            else:
                self.silences.append(now - heard_at)
                self.tally.longest_silence_s = max(self.tally.longest_silence_s, now - heard_at)
            heard_at = now
            self._heard()
        return False

    def _finished(self, usage: tuple[int, int] | None) -> None:
        self.tally.finished += 1
        prompt, answer = usage or (0, 0)
        self.tally.prompt_tokens += prompt
        self.tally.completion_tokens += answer

    def _waited(self, began: float) -> None:
        self.waits.append(time.perf_counter() - began)
        self.tally.longest_wait_s = max(self.tally.longest_wait_s, self.waits[-1])
        self._heard()

    def _heard(self) -> None:
        now = time.perf_counter()
        self.tally.longest_standstill_s = max(self.tally.longest_standstill_s, now - self._heard_at)
        self._heard_at = now

    def _broke(self, began: float, why: str) -> None:
        """A connection that ended without a word: an answer lost, unless it was asked for after the server had been
        told to end."""
        if began < self.ended_at:
            self.tally.lost += 1
            self._note(why)
        else:
            self.tally.refused += 1

    def _note(self, error: str) -> None:
        self.tally.errors[error[:200]] = self.tally.errors.get(error[:200], 0) + 1
