"""Several models in one memory budget: which are loaded, which one is loaded next, and which one leaves for it.

A model is loaded when a request names it, and gets what is left of the budget, as far as it can use it. Where that is
too little, models leave, the least recently used idle one first. Where none is idle, the least recently used one
answers what it has begun, and takes no more until it was loaded again. Models are loaded in the order in which requests
for them came, one at a time: a request waits for running answers, never for a later request. A process keeps its
budget: where others have left, an idle model is loaded again with more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import httpx

from tiermoe.config import format_size
from tiermoe.errors import reason
from tiermoe.serve.dialects import LATEST, Refused

PAUSE_S = 60
"""Seconds without a request after which a model may be loaded again with a larger share."""
_GROWTH = 2  # by which its share then grows, at least: its prefix cache is lost


@dataclass(slots=True, eq=False)
class Model:
    """A model that requests may name."""

    name: str  # for clients
    enough: int  # bytes with which it is loaded
    most: int  # bytes beyond which it has no use for more
    context: int  # most tokens of a request
    process_of: Callable[[int], ModelProcess]  # makes its process with a budget in bytes
    aliases: Sequence[str] = ()
    problem: str = ""  # why it cannot be loaded, by its plan
    process: ModelProcess | None = None  # from the beginning of loading until the end
    loaded: bool = False
    leaving: bool = False  # it takes no more requests
    running: int = 0  # requests
    used: float = field(default_factory=time.monotonic)  # when its last request began or ended
    loads: int = 0  # how often it was loaded
    load_s: float = 0.0  # seconds of the last time
    error: str = ""  # why it was not loaded the last time, or has ended since

    @property
    def status(self) -> str:
        return "unloaded" if self.process is None else "loaded" if self.loaded else "loading"

    @property
    def nbytes(self) -> int:
        """Of the budget, while it is loaded."""
        return 0 if self.process is None else self.process.nbytes


@dataclass(frozen=True, slots=True)
class Change:
    """A model that was loaded."""

    model: str
    seconds: float  # with what follows
    waited_s: float  # until models that left had answered and ended
    unloaded: tuple[str, ...]  # models that left


class LoadedModels:
    """The models, and the budget that those which are loaded share.

    nbytes: of the budget. most_loaded: how many are loaded at once, at most; each then has such a part of the budget at
    most. None: as many as fit. keep_alive_s: seconds after which an idle one is unloaded; None: never. most_waiting:
    requests that wait for a model to be loaded. note: called with a line for each change."""

    def __init__(
        self,
        models: Sequence[Model],
        nbytes: int,
        most_loaded: int | None,
        keep_alive_s: float | None,
        most_waiting: int,
        note: Callable[[str], None],
    ) -> None:
        self.models, self.nbytes = models, nbytes
        self.doing = ""  # the change that is being made, in words
        self.last_change: Change | None = None
        self._by_name = {name: model for model in models for name in (model.name, *model.aliases)}
        self._most_loaded = most_loaded or len(models)
        self._largest = nbytes // most_loaded if most_loaded else nbytes
        self._keep_alive_s, self._most_waiting, self._note = keep_alive_s, most_waiting, note
        self._waiting = deque[tuple[Model, asyncio.Future[ModelProcess]]]()
        self._changed = asyncio.Event()  # a request came or ended, a process ended
        self._working: asyncio.Task[None] | None = None
        self._watching = set[asyncio.Task[None]]()
        self._closing = False

    def find(self, name: str) -> Model:
        """The model of a name or an alias. Refused if there is none, or it can never be loaded."""
        have = ", ".join(model.name for model in self.models)
        if not name:
            raise Refused(400, f"name a model; this server has {have}", "model")
        model = self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))
        if model is None:
            raise Refused(
                404, f"the model '{name}' does not exist; this server has {have}", "model", code="model_not_found"
            )
        if model.problem:
            raise Refused(400, f"{model.name} cannot be loaded: {model.problem}", "model")
        return model

    @property
    def waiting(self) -> int:
        """Requests that wait for a model."""
        return len(self._waiting)

    async def begin(self, model: Model) -> ModelProcess:
        """The process of a model, once the model is loaded, for one request; `end` must follow. Refused if it cannot
        be loaded, too many requests wait, or the server is about to end."""
        if self._closing:
            raise _about_to_end()
        if model.process is not None and model.loaded and not model.leaving:
            return self._begun(model, model.process)
        if len(self._waiting) >= self._most_waiting:
            raise Refused(
                503, f"{len(self._waiting)} requests wait for a model, which is all that may; ask again later"
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((model, turn))
        self._working = self._working or asyncio.create_task(self._work())
        self._changed.set()
        try:
            process: ModelProcess = await turn
        except asyncio.CancelledError:  # the client has left
            if not turn.cancelled() and turn.exception() is None:
                self.end(model)
            raise
        finally:
            self._waiting.remove((model, turn))
            self._changed.set()
        return process

    def end(self, model: Model) -> None:
        """Ends a request that was begun."""
        model.running -= 1
        model.used = time.monotonic()
        self._changed.set()

    def close(self) -> None:
        """Ends all processes once their answers have ended; called from another thread than requests run in. Requests
        that wait are refused, and a model that is being loaded ends now."""
        self._closing = True
        if self._working is not None:
            asyncio.run_coroutine_threadsafe(self._end_all(self._working), self._working.get_loop()).result()

    async def _end_all(self, working: asyncio.Task[None]) -> None:
        self._give_turns(None, _about_to_end())
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(*(model.process.end() for model in self.models if model.process is not None))

    # --- turns ---

    def _begun(self, model: Model, process: ModelProcess) -> ModelProcess:
        model.running += 1
        model.used = time.monotonic()
        return process

    def _give_turns(self, wanted: Model | None, error: Refused | None = None) -> None:
        """Lets all requests that wait for a model (None: for any) go on, or fail with an error."""
        for model, turn in self._waiting:
            if turn.done() or wanted not in (None, model):
                continue
            if error is not None:
                turn.set_exception(error)
            elif model.process is not None:
                turn.set_result(self._begun(model, model.process))

    def _wanted(self, model: Model) -> bool:
        """Whether a request still waits for it."""
        return any(asked is model and not turn.done() for asked, turn in self._waiting)

    # --- changes ---

    async def _work(self) -> None:
        """Loads what requests wait for, in their order, and unloads what is idle for long."""
        while True:
            if wanted := next((model for model, turn in self._waiting if not turn.done()), None):
                await self._bring(wanted)
                continue
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_idle()):
                    await self._changed.wait()
            if self._until_idle() == 0:
                _, idle, grows = min(self._pauses(), key=itemgetter(0))
                await self._unload(idle)
                if grows:
                    await self._bring(idle, wanted=True)
                else:
                    self._note(f"unloaded {idle.name}, idle for {self._keep_alive_s:g} s")

    async def _bring(self, model: Model, wanted: bool = False) -> None:
        """Loads a model, and lets the requests for it go on. Gives up where all clients leave before it is begun,
        unless it is `wanted` without them."""
        began = time.monotonic()
        try:
            if model.loaded:
                return
            left = await self._make_room(model)
            if not (wanted or self._wanted(model)):
                return
            waited = time.monotonic() - began
            await self._load(model)
            took = time.monotonic() - began
            self.last_change = Change(model.name, took, waited, tuple(left))
            share = f"{format_size(model.nbytes)} of {format_size(self.nbytes)}"
            instead = f", {waited:.1f} of them until {' and '.join(left)} had ended" if left else ""
            self._note(f"loaded {model.name} in {took:.1f} s{instead}; it has {share}")
        except Exception as error:
            model.error = reason(error)
            self._note(f"{model.name} was not loaded: {model.error}")
            self._give_turns(model, Refused(500, f"{model.name} was not loaded: {model.error}"))
        finally:
            self.doing = ""
            if model.loaded:
                self._give_turns(model)

    async def _make_room(self, model: Model) -> list[str]:
        """Unloads models until there is room for one more. Returns their names."""
        left = list[str]()
        while not self._has_room(model):
            leaving = min(self._there(), key=lambda each: (each.running > 0, each.used))
            if not await self._drained(leaving, model):
                break
            await self._unload(leaving)
            left.append(leaving.name)
        return left

    async def _drained(self, model: Model, wanted: Model) -> bool:
        """Waits until a model has answered what it has begun; False if nobody waits for `wanted` any more."""
        model.leaving = True
        while model.running:
            self.doing = f"waiting for the running answers of {model.name} ({model.running})"
            self._changed.clear()
            await self._changed.wait()
            if not self._wanted(wanted):
                model.leaving = False
                self._give_turns(model)
                return False
        return True

    async def _load(self, model: Model) -> None:
        """Starts a model's process and waits until it is loaded. LoadError if it ends instead."""
        began = time.monotonic()
        self.doing = f"loading {model.name}"
        process = model.process = model.process_of(self._share(model))
        try:
            await process.load()
        except BaseException:
            await process.kill()
            await process.end()
            model.process = None
            raise
        model.loaded, model.error = True, ""
        model.loads, model.load_s, model.used = model.loads + 1, time.monotonic() - began, time.monotonic()
        watch = asyncio.create_task(self._watch(model, process))
        self._watching.add(watch)
        watch.add_done_callback(self._watching.discard)

    async def _watch(self, model: Model, process: ModelProcess) -> None:
        """Waits for the end of a process, and notes one that nobody asked for."""
        await process.ended()
        if model.process is process and not model.leaving and not self._closing:
            model.error = process.cause()
            self._note(f"{model.name} has ended: {model.error}; the next request loads it again")
        if model.process is process:
            model.process, model.loaded, model.leaving = None, False, False
        self._changed.set()

    async def _unload(self, model: Model) -> None:
        model.leaving = True
        self.doing = f"unloading {model.name}"
        if model.process is not None:
            await model.process.end()
        model.process, model.loaded, model.leaving = None, False, False
        self.doing = ""

    # --- the budget ---

    def _there(self) -> list[Model]:
        return [model for model in self.models if model.process is not None]

    def _left(self) -> int:
        """Bytes of the budget that no process has."""
        return self.nbytes - sum(model.nbytes for model in self.models)

    def _share(self, model: Model) -> int:
        """Bytes with which a model is loaded, where only the others keep theirs."""
        return min(model.most, self._largest, self._left() + model.nbytes)

    def _has_room(self, model: Model) -> bool:
        return len(self._there()) < self._most_loaded and self._left() >= min(model.enough, self._largest)

    def _pauses(self) -> Iterator[tuple[float, Model, bool]]:
        """For each idle model when it is unloaded, and when it is loaded again with a larger share (True)."""
        for model in self.models:
            if not model.loaded or model.running:
                continue
            if self._keep_alive_s is not None:
                yield model.used + self._keep_alive_s, model, False
            if self._share(model) >= _GROWTH * model.nbytes:
                yield model.used + PAUSE_S, model, True

    def _until_idle(self) -> float | None:
        """Seconds until a model was idle for long enough; None where none is idle, or stays as it is for good."""
        first = min((when for when, _, _ in self._pauses()), default=None)
        return None if first is None else max(0.0, first - time.monotonic())


def _about_to_end() -> Refused:
    return Refused(503, "the server is about to end")


# --- processes ---


_LOOK_S = 0.2  # between two looks whether the model is loaded
_ENDING_S = 60  # for a process to end by itself: answers under way, prefixes to be written, connections
_LINE = 16 << 10  # bytes of a line on standard error; a longer one is cut
_ERROR = "tiermoe: "  # begins the last line of a command that fails


class LoadError(Exception):
    """A model's process has ended before its model was loaded. The message says why."""


class ModelProcess:
    """A process that loads a model and answers requests for it.

    words: the command; its server listens on `socket`, and it ends when its standard input does. nbytes: its memory
    budget. said: called with each line of its standard error. A crash ends this process alone, and its end gives back
    all that it held."""

    def __init__(self, words: Sequence[str], socket: Path, nbytes: int, said: Callable[[str], None]) -> None:
        self.nbytes = nbytes
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_keepalive_connections=0)),
            base_url="http://localhost",
            timeout=httpx.Timeout(None, connect=30),
        )
        self.progress = ""  # of loading, in words
        self._words, self._said = words, said
        self._process: asyncio.subprocess.Process | None = None
        self._error = ""  # in which the command has ended
        self._reading: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Starts the process and waits until its model is loaded. LoadError if it ends instead."""
        environment = {name: value for name, value in os.environ.items() if name != "TIERMOE_API_KEY"}
        self._process = await asyncio.create_subprocess_exec(
            *self._words, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=_LINE, env=environment,
            start_new_session=True,  # Ctrl-C is for the router, which then asks the process to end
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read(self._process))
        while self._process.returncode is None:
            with contextlib.suppress(httpx.TransportError):  # it does not listen yet, or has just ended
                answer = await self.client.get("/health")
                if answer.status_code == 200:
                    return
                found = answer.json().get("progress")
                self.progress = f"{found['what']}, {found['done']} of {found['total']}" if found else ""
            await asyncio.sleep(_LOOK_S)
        await self._reading
        raise LoadError(self.cause())

    async def ended(self) -> None:
        """Waits for the end of the process."""
        assert self._process is not None
        await self._process.wait()

    async def end(self) -> None:
        """Asks the process to end once it has answered, and waits for it; kills it if it takes longer than
        `_ENDING_S`."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(_ENDING_S):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
        await self.client.aclose()

    async def kill(self) -> None:
        """Ends the process now."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def cause(self) -> str:
        """Why the process has ended, in words."""
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"its process was ended by signal {-code}; its budget was {format_size(self.nbytes)}"
        return self._error or f"its process has ended with exit code {code}"

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hands on what the process says, to its end."""
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readuntil(b"\n")
            except asyncio.IncompleteReadError as rest:
                line = rest.partial
            except asyncio.LimitOverrunError as longer:
                line = await process.stderr.read(longer.consumed)
            if not line:
                return
            if text := line.decode(errors="replace").strip():
                self._error = text.removeprefix(_ERROR) if text.startswith(_ERROR) else ""
                self._said(text)
