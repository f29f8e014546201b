"""A link whose time is computed: transfers share the bandwidth, and only its caller moves the clock. Main memory
behind it, and a second processor beside it, go on in the same time."""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tiermoe.offload.link import Finished, LinkCounters
from tiermoe.offload.policies.routing import averaged
from tiermoe.offload.second_level import SecondLevelCache
from tiermoe.types import ExpertKey, Load


@dataclass(slots=True)
class VirtualClock:
    """The clock of a replay."""

    now: float = 0.0  # seconds since the replay began
    compute_s: float = 0.0  # seconds of computing among them
    deciding_s: float = 0.0  # seconds of deciding among them, as the engine measured them

    def compute(self, seconds: float) -> None:
        """The processor computes for `seconds`; the link goes on meanwhile."""
        self.now += seconds
        self.compute_s += seconds

    def decide(self, seconds: float) -> None:
        """Decisions take `seconds`; the link goes on meanwhile."""
        self.now += seconds
        self.deciding_s += seconds


class Move(NamedTuple):
    """What a load moves: `nbytes` bytes over the link, after `gather_s` seconds of gathering in main memory."""

    nbytes: int
    gather_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Transfer:
    nbytes: int
    latency: float  # seconds until the first byte
    left: float  # bytes
    then: Callable[[], None]  # called at the end


@dataclass(slots=True, eq=False)
class _Hop:
    """One stretch of the way: transfers under way share `bandwidth` equally, each after `latency` seconds."""

    bandwidth: float  # bytes per second
    latency: float
    active: list[_Transfer] = field(default_factory=list)
    bytes_moved: int = 0
    busy_s: float = 0.0  # seconds in which a transfer was under way

    def begin(self, nbytes: int, then: Callable[[], None], delay: float = 0.0) -> None:
        """Begins a transfer. delay: seconds before the latency."""
        self.active.append(_Transfer(nbytes, delay + self.latency, nbytes, then))

    def alone_s(self, nbytes: int) -> float:
        """Seconds of a transfer that shares the way with none."""
        return self.latency + nbytes / self.bandwidth

    def next_event(self) -> float:
        """Seconds until a transfer's first or last byte comes; infinity where none is under way."""
        rate = self._rate()
        return min([math.inf, *(active.latency or active.left / rate for active in self.active)])

    def advance(self, seconds: float) -> list[_Transfer]:
        """Moves what is under way; returns what has ended."""
        rate = self._rate()
        self.busy_s += seconds if self.active else 0.0
        for active in self.active:
            if active.latency:
                active.latency = active.latency - seconds if active.latency > seconds else 0.0
            else:
                # what ends now ends exactly: a rounded rest would be another event
                active.left = active.left - rate * seconds if active.left / rate > seconds else 0.0
        done = [active for active in self.active if not active.latency and not active.left]
        if done:
            self.active = [active for active in self.active if active.latency or active.left]
            self.bytes_moved += sum(transfer.nbytes for transfer in done)
        return done

    def _rate(self) -> float:
        return self.bandwidth / max(1, sum(not active.latency for active in self.active))


@dataclass(slots=True, eq=False)
class _Timer:
    left: float  # seconds
    then: Callable[[], None]


class HostTier:
    """Main memory between a drive and the link: the engine's second-level cache, filled at `bandwidth` (bytes per
    second) after `latency` seconds. bytes_of: bytes that reading an expert moves."""

    def __init__(
        self, cache: SecondLevelCache, bandwidth: float, latency: float, bytes_of: Callable[[ExpertKey], int]
    ) -> None:
        self.cache = cache
        self.drive = _Hop(bandwidth, latency)
        self.bytes_of = bytes_of
        self.read_s: float | None = None  # of one expert alone, as the last ones took
        self.blocked: list[tuple[ExpertKey, Callable[[], None]]] = []  # until a slot is free, or another has read it


class VirtualLink:
    """Implements `tiermoe.offload.link.Link` as the real lanes do: each of `lanes` serves one load at a time,
    urgent before speculative; one that has begun is not interrupted. A transfer takes `latency` seconds, then its bytes
    at an equal share of `bandwidth` (bytes per second) with the others under way.

    move_of: what a load moves; called when the load begins. `wait_s`: seconds in which the clock stood at `wait` or
    `fetch`. `at`: the time up to which the link is simulated, between two calls the clock's.

    host: main memory that does not hold every expert. As in `offload.gpu.GpuLink` the lanes then read from the drive
    what is not there, and copies over this link run one after the other. An urgent load of an expert that is there
    needs no lane; a lane waits for the copies of its speculative loads.
    """

    def __init__(
        self,
        clock: VirtualClock,
        bandwidth: float,
        move_of: Callable[[ExpertKey], Move],
        latency: float = 0.0,
        lanes: int = 1,
        host: HostTier | None = None,
    ) -> None:
        self.wait_s = 0.0
        self.seconds_per_copy: float | None = None  # of one expert alone, as the last ones took
        self._clock = clock
        self._hop = _Hop(bandwidth, latency)
        self._host = host
        self._hops = [self._hop] if host is None else [self._hop, host.drive]
        self._move_of = move_of
        self._lanes = lanes
        self.at = 0.0  # the link is simulated up to this time
        self._fetches: deque[tuple[Move, list[Move]]] = deque()  # each with where it arrives
        self._urgent: deque[Load] = deque()
        self._speculative: deque[Load] = deque()
        self._background: OrderedDict[ExpertKey, Load] = OrderedDict()
        self._on_lanes: list[Load | None] = []  # what each lane at work serves; None: a fetch
        self._uncopied: deque[Load] = deque()  # in main memory, behind other copies
        self._timers: list[_Timer] = []
        self._finished: deque[Finished] = deque()

    @property
    def seconds_per_load(self) -> float | None:
        """As `offload.gpu.GpuLink.seconds_per_load`: a copy, and its share of reading what main memory lacks."""
        if self.seconds_per_copy is None or self._host is None:
            return self.seconds_per_copy
        cache = self._host.cache
        return self.seconds_per_copy + cache.misses / max(1, cache.hits + cache.misses) * (self._host.read_s or 0.0)

    def submit(self, load: Load) -> None:
        self._run_to(self._clock.now)
        if self._host is not None and load.urgent and self._host.cache.pin_if_here(load.key):
            self._copy(load)
            return
        if load.background:
            self._background[load.key] = load
        else:
            (self._urgent if load.urgent else self._speculative).append(load)
        self._begin()

    def wait(self) -> Finished:
        self.wait_s += self.run_until(lambda: bool(self._finished))
        return self._finished.popleft()

    def poll(self) -> Finished | None:
        self._run_to(self._clock.now)
        return self._finished.popleft() if self._finished else None

    def recall(self) -> list[Load]:
        self._run_to(self._clock.now)
        loads = list(self._speculative)
        self._speculative.clear()
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        self._run_to(self._clock.now)
        return self._background.pop(key, None) is not None

    def now(self) -> float:
        return self._clock.now

    def counters(self) -> LinkCounters:
        """What the link has done by the clock's time, as the engine's links count: with main memory in between reads
        from the drive and copies, else reads alone."""
        self._run_to(self._clock.now)
        hop = self._hop
        if self._host is None:
            return LinkCounters(hop.bytes_moved, hop.busy_s, self.wait_s)
        drive = self._host.drive
        return LinkCounters(drive.bytes_moved, drive.busy_s, self.wait_s, hop.bytes_moved, hop.busy_s)

    def catch_up(self) -> None:
        """Simulates the link up to the clock's time."""
        self._run_to(self._clock.now)

    def fetch(self, move: Move) -> None:
        """Waits for more of an expert that is in the cache in part, ahead of every queued load."""
        self._run_to(self._clock.now)
        arrived: list[Move] = []
        self._fetches.append((move, arrived))
        self._begin()
        self.wait_s += self.run_until(lambda: bool(arrived))

    def bring(self, key: ExpertKey, then: Callable[[], None]) -> None:
        """Pins `key` in main memory, from the drive where it is not there, and calls `then`."""
        host = self._host
        if host is None or host.cache.pin_if_here(key):
            then()
        elif host.cache.being_read(key) or host.cache.reserve(key) is None:
            host.blocked.append((key, then))
        else:
            nbytes = host.bytes_of(key)
            host.read_s = averaged(host.read_s, host.drive.alone_s(nbytes))
            host.drive.begin(nbytes, lambda: self._read(key, then))

    def give_back(self, key: ExpertKey) -> None:
        """Ends one `bring`: the expert's slot in main memory may be taken again."""
        if self._host is not None:
            self._host.cache.unpin(key)
            self._unblock()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Calls `then` in so many seconds of what is simulated."""
        self._timers.append(_Timer(seconds, then))

    def run_until(self, done: Callable[[], bool]) -> float:
        """Moves the clock from one event to the next until `done`; the seconds it took."""
        self._run_to(self._clock.now)
        began = self._clock.now
        while not done():
            seconds = self._next_event()
            if seconds == math.inf:
                raise RuntimeError("waited for what was never asked for")
            self._advance(seconds)
        self._clock.now = max(began, self.at)
        return self._clock.now - began

    def _begin(self) -> None:
        while len(self._on_lanes) < self._lanes:
            if self._fetches:
                move, arrived = self._fetches.popleft()
                self._on_lanes.append(None)
                self._hop.begin(move.nbytes, functools.partial(self._fetched, move, arrived), move.gather_s)
            elif (load := self._next_load()) is not None:
                self._on_lanes.append(load)
                self._serve(load)
            else:
                return

    def _next_load(self) -> Load | None:
        """The load that a free lane begins; of several lanes one is kept free of background loads."""
        if self._urgent or self._speculative:
            return self._urgent.popleft() if self._urgent else self._speculative.popleft()
        begun = sum(load is not None and load.background for load in self._on_lanes)
        if self._background and begun < max(1, self._lanes - 1):
            return self._background.popitem(last=False)[1]
        return None

    def _serve(self, load: Load) -> None:
        """A lane begins a load."""
        if self._host is not None:
            self.bring(load.key, lambda: self._brought(load))
            return
        move = self._move_of(load.key)
        self.seconds_per_copy = averaged(self.seconds_per_copy, move.gather_s + self._hop.alone_s(move.nbytes))
        self._hop.begin(move.nbytes, lambda: self._loaded(load), move.gather_s)

    def _fetched(self, move: Move, arrived: list[Move]) -> None:
        self._on_lanes.remove(None)
        arrived.append(move)

    def _loaded(self, load: Load) -> None:
        self._on_lanes.remove(load)
        self._finished.append(Finished(load))

    def _read(self, key: ExpertKey, then: Callable[[], None]) -> None:
        assert self._host is not None
        self._host.cache.arrived(key)
        then()
        self._unblock()

    def _brought(self, load: Load) -> None:
        if load.urgent:
            self._on_lanes.remove(load)
        self._copy(load)

    def _copy(self, load: Load) -> None:
        self._uncopied.append(load)
        if len(self._uncopied) == 1:
            self._next_copy()

    def _next_copy(self) -> None:
        load = self._uncopied[0]
        move = self._move_of(load.key)
        self.seconds_per_copy = averaged(self.seconds_per_copy, self._hop.alone_s(move.nbytes))
        self._hop.begin(move.nbytes, lambda: self._copied(load))

    def _copied(self, load: Load) -> None:
        self._uncopied.popleft()
        if not load.urgent:
            self._on_lanes.remove(load)
        self._finished.append(Finished(load))
        if self._uncopied:
            self._next_copy()
        self.give_back(load.key)

    def _unblock(self) -> None:
        """Who waits for main memory tries again."""
        assert self._host is not None
        blocked, self._host.blocked = self._host.blocked, []
        for key, then in blocked:
            self.bring(key, then)

    def _run_to(self, time: float) -> None:
        while self.at < time and (seconds := self._next_event()) < math.inf:
            self._advance(min(seconds, time - self.at))
        self.at = max(self.at, time)

    def _next_event(self) -> float:
        """Seconds until a timer ends or a transfer's first or last byte comes; infinity where nothing goes on."""
        return min([*(timer.left for timer in self._timers), *(hop.next_event() for hop in self._hops)])

    def _advance(self, seconds: float) -> None:
        self.at += seconds
        ended: list[_Transfer | _Timer] = []
        for hop in self._hops:
            ended += hop.advance(seconds)
        ended += [timer for timer in self._timers if timer.left <= seconds]
        self._timers = [_Timer(timer.left - seconds, timer.then) for timer in self._timers if timer.left > seconds]
        for each in ended:
            each.then()
        if ended:
            self._begin()


class VirtualCpu:
    """The processor beside the one that computes layers: computes experts one after the other from main memory, as
    `engine.units.CpuHelper` does. seconds_of: (bits, tokens) → seconds of one expert. `seconds_per_expert`: what
    the last ones took, with reading them where main memory had to; None before the first."""

    def __init__(self, link: VirtualLink, seconds_of: Callable[[int, int], float]) -> None:
        self.seconds_per_expert: float | None = None
        self._link = link
        self._seconds_of = seconds_of
        self._queue: deque[tuple[ExpertKey, int]] = deque()  # the first one is being computed

    def submit(self, key: ExpertKey, tokens: int) -> None:
        """Queues an expert on `tokens` tokens; returns at once."""
        self._link.catch_up()
        self._queue.append((key, tokens))
        if len(self._queue) == 1:
            self._next()

    def finish(self) -> float:
        """Waits until all that was queued is computed; the seconds of waiting."""
        return self._link.run_until(lambda: not self._queue)

    def _next(self) -> None:
        key, tokens = self._queue[0]
        began = self._link.at
        self._link.bring(key, lambda: self._link.after(self._seconds_of(key.bits, tokens), lambda: self._ended(began)))

    def _ended(self, began: float) -> None:
        key, _ = self._queue.popleft()
        self.seconds_per_expert = averaged(self.seconds_per_expert, self._link.at - began)
        if self._queue:
            self._next()
        self._link.give_back(key)


class InstantLink:
    """Implements `tiermoe.offload.link.Link` without time: what is submitted is there. For hit rates alone."""

    def __init__(self, bytes_of: Callable[[ExpertKey], int]) -> None:
        self.bytes_read = 0
        self._bytes_of = bytes_of
        self._finished: deque[Finished] = deque()

    def submit(self, load: Load) -> None:
        self.bytes_read += self._bytes_of(load.key)
        self._finished.append(Finished(load))

    def wait(self) -> Finished:
        return self._finished.popleft()

    def poll(self) -> Finished | None:
        return self._finished.popleft() if self._finished else None

    def recall(self) -> list[Load]:
        return []

    def withdraw(self, key: ExpertKey) -> bool:
        return False

    def now(self) -> float:
        return 0.0
