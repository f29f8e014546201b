"""A link whose time is computed: transfers share the bandwidth, and only its caller moves the clock."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from tiermoe.offload.link import Finished
from tiermoe.types import ExpertKey, Load


@dataclass(slots=True)
class VirtualClock:
    """The clock of a replay."""

    now: float = 0.0  # seconds since the replay began
    compute_s: float = 0.0  # seconds of computing among them

    def compute(self, seconds: float) -> None:
        """The processor computes for `seconds`; the link goes on meanwhile."""
        self.now += seconds
        self.compute_s += seconds


@dataclass(slots=True, eq=False)
class _Transfer:
    load: Load | None  # None: bytes that `fetch` waits for itself
    nbytes: int
    latency: float
    left: float


class VirtualLink:
    """Implements `tiermoe.offload.link.Link` as the real lanes do: each of `lanes` serves one load at a time,
    urgent before speculative; one that has begun is not interrupted. A transfer takes `latency` seconds, then its bytes
    at an equal share of `bandwidth` (bytes per second) with the others under way.

    bytes_of: bytes that a load moves; called when the load begins. start: seconds from a load's submission until an
    idle lane begins it; till then it can be recalled. A lane that has just ended a load begins the next at once. wake:
    seconds from a transfer's end until the processor that waits for it goes on. `wait_s`: seconds in which the clock
    stood at `wait` or `fetch`; `busy_s`: seconds in which a lane was at work.
    """

    def __init__(
        self,
        clock: VirtualClock,
        bandwidth: float,
        bytes_of: Callable[[ExpertKey], int],
        latency: float = 0.0,
        lanes: int = 1,
        wake: float = 0.0,
        start: float = 0.0,
    ) -> None:
        self.wait_s = 0.0
        self.busy_s = 0.0
        self.bytes_read = 0
        self._clock = clock
        self._bandwidth = bandwidth
        self._bytes_of = bytes_of
        self._latency = latency
        self._lanes = lanes
        self._wake = wake
        self._start = start
        self._at = 0.0  # the link is simulated up to here
        self._fetches: deque[_Transfer] = deque()
        self._urgent: deque[Load] = deque()
        self._speculative: deque[Load] = deque()
        self._background: OrderedDict[ExpertKey, Load] = OrderedDict()
        self._active: list[_Transfer] = []
        self._starting: list[float] = []  # lanes that were woken: seconds until each begins
        self._finished: deque[Finished] = deque()
        self._outstanding = 0

    def submit(self, load: Load) -> None:
        self._run_to(self._clock.now)
        self._outstanding += not load.background
        if load.background:
            self._background[load.key] = load
        else:
            (self._urgent if load.urgent else self._speculative).append(load)
        self._wake_lane()

    def wait(self) -> Finished:
        self._run_to(self._clock.now)
        self._run_while(lambda: not self._finished)
        return self._take_finished()

    def poll(self) -> Finished | None:
        self._run_to(self._clock.now)
        return self._take_finished() if self._finished else None

    def recall(self) -> list[Load]:
        self._run_to(self._clock.now)
        loads = list(self._speculative)
        self._speculative.clear()
        self._outstanding -= len(loads)
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        self._run_to(self._clock.now)
        return self._background.pop(key, None) is not None

    def is_idle(self) -> bool:
        return self._outstanding == 0

    def now(self) -> float:
        return self._clock.now

    def catch_up(self) -> None:
        """Simulates the link up to the clock's time, so that its figures are of that time."""
        self._run_to(self._clock.now)

    def fetch(self, nbytes: int) -> None:
        """Waits for `nbytes` more of an expert that is in the cache in part, ahead of every queued load."""
        self._run_to(self._clock.now)
        transfer = _Transfer(None, nbytes, self._latency, nbytes)
        self._fetches.append(transfer)
        self._begin()
        self._run_while(lambda: transfer in self._fetches or transfer in self._active)

    def _take_finished(self) -> Finished:
        finished = self._finished.popleft()
        self._outstanding -= not finished.load.background
        return finished

    def _wake_lane(self) -> None:
        """Wakes an idle lane for a load that was submitted."""
        if not self._start:
            self._begin()
        elif len(self._active) + len(self._starting) < self._lanes:
            self._starting.append(self._start)

    def _begin(self) -> None:
        while len(self._active) + len(self._starting) < self._lanes:
            if self._fetches:
                self._active.append(self._fetches.popleft())
            elif (load := self._next_load()) is not None:
                nbytes = self._bytes_of(load.key)
                self._active.append(_Transfer(load, nbytes, self._latency, nbytes))
            else:
                return

    def _next_load(self) -> Load | None:
        """The load that a free lane begins; of several lanes one is kept free of background loads."""
        if self._urgent or self._speculative:
            return self._urgent.popleft() if self._urgent else self._speculative.popleft()
        begun = sum(active.load is not None and active.load.background for active in self._active)
        if self._background and begun < max(1, self._lanes - 1):
            return self._background.popitem(last=False)[1]
        return None

    def _run_while(self, unfinished: Callable[[], bool]) -> None:
        """Moves the clock from one event to the next; the processor waits."""
        began = self._clock.now
        if not unfinished():
            return
        while unfinished():
            if not (self._active or self._starting):
                raise RuntimeError("waited for a load that was never submitted")
            self._advance(self._next_event())
        self._clock.now = max(began, self._at) + self._wake
        self.wait_s += self._clock.now - began

    def _run_to(self, time: float) -> None:
        while (self._active or self._starting) and self._at < time:
            self._advance(min(self._next_event(), time - self._at))
        self._at = max(self._at, time)

    def _next_event(self) -> float:
        """Seconds until a lane begins, or until a transfer's first or last byte comes."""
        rate = self._rate()
        return min([*self._starting, *(active.latency or active.left / rate for active in self._active)])

    def _rate(self) -> float:
        return self._bandwidth / max(1, sum(not active.latency for active in self._active))

    def _advance(self, seconds: float) -> None:
        rate = self._rate()
        self._at += seconds
        self.busy_s += seconds if self._active else 0.0
        for active in self._active:
            if active.latency:
                active.latency = active.latency - seconds if active.latency > seconds else 0.0
            else:
                # what ends now ends exactly: a rounded rest would be another event
                active.left = active.left - rate * seconds if active.left / rate > seconds else 0.0
        done = [active for active in self._active if not active.latency and not active.left]
        starting = [left - seconds for left in self._starting if left > seconds]
        begun = len(starting) < len(self._starting)
        self._starting = starting
        if done or begun:
            self._active = [active for active in self._active if active.latency or active.left]
            for transfer in done:
                self.bytes_read += transfer.nbytes
                if transfer.load is not None:
                    self._finished.append(Finished(transfer.load))
            self._begin()


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

    def is_idle(self) -> bool:
        return not self._finished

    def now(self) -> float:
        return 0.0
