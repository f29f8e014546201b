"""Pretended CUDA graphs and streams: what is launched in a capture runs at each replay, and not before."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

REFUSED = "CUDA error: operation not permitted when stream is capturing"


class Stream:
    """A stream. Only `wait_stream` puts its work after another's."""

    def wait_stream(self, other: Stream) -> None:
        _thread.apart.discard((self, other))

    def require_order(self) -> None:
        """AssertionError if this thread has let another stream launch since it waited for that."""
        assert not any(late is self for late, _ in _thread.apart), "a stream did not wait for what another had launched"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.side: Stream | None = None  # that launches
        self.graph: FakeGraph | None = None  # that is captured
        self.apart: set[tuple[Stream, Stream]] = set()  # a stream, and one that has launched since it waited for that


_thread = _Thread()


class SideStream(Stream):
    """In the place of torch.cuda.Stream."""

    def __init__(self, default: Any) -> None:
        self.record_event = default.record_event
        _thread.apart.add((self, default))


@contextlib.contextmanager
def stream(default: Stream, side: Stream) -> Iterator[None]:
    """As torch.cuda.stream, in a thread that computes on the default stream."""
    assert _thread.side is None
    side.require_order()
    _thread.side = side
    try:
        yield
    finally:
        _thread.side = None
        _thread.apart |= {(default, side), (side, default)}


def current_stream(default: Stream) -> Stream:
    return _thread.side or default


def capturing() -> bool:
    """Whether this thread captures a graph."""
    return _thread.graph is not None


def refuse() -> None:
    """Ends a capture as what it does not permit: nothing outside of one."""
    if _thread.graph is not None:
        _thread.graph.refused = True
        raise RuntimeError(REFUSED)


def launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args) of values of the device. A graph that is captured calls it again at each replay."""
    if _thread.graph is None:
        return function(*args, **kwargs)
    return _thread.graph.record(function, args, kwargs)


def launch_blind(function: Callable[[], None]) -> None:
    """`launch` of what writes at addresses: in a capture not even for the shape of its result."""
    if _thread.graph is None:
        function()
    else:
        _thread.graph.launches.append((function, []))


class FakeGraph:
    """In the place of torch.cuda.CUDAGraph. Memory that is taken in the capture holds nothing until the replay, nor
    after the replay of an earlier graph of the same pool, which may have had it before. What the capture writes
    elsewhere is taken back. note: called with "graph" at a replay."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.refused = False
        self.launches: list[tuple[Callable[[], Any], list[tuple[int, torch.Tensor]]]] = []
        self._note = note
        self._pool: list[FakeGraph] = []
        self._made: dict[int, torch.Tensor] = {}  # address of a storage → what was made in it
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storages elsewhere, and their bytes

    def capture_begin(self, pool: list[FakeGraph], capture_error_mode: str = "global") -> None:
        assert _thread.side is not None, "CUDA graphs must be captured on a non-default stream"
        assert capture_error_mode == "thread_local", "another thread's copy would end the capture"
        assert not any(each.refused for each in pool), "torch still records to the pool of a capture that failed"
        self._pool = pool
        _thread.graph = self

    def capture_end(self) -> None:
        assert _thread.graph is self
        _thread.graph = None
        for storage, content in self._before.values():
            storage.copy_(content)
        self._pool.append(self)
        if self.refused:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._forget()

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {_storage(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        schema = getattr(function, "_schema", None)
        if function is operator.setitem or (schema is not None and schema.is_mutable):
            for address, each in given.items():
                if address not in self._made and address not in self._before:
                    content = torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage())
                    self._before[address] = content, content.clone()
        found = function(*args, **kwargs)
        leaves = [(at, each) for at, each in enumerate(tree_leaves(found)) if isinstance(each, torch.Tensor)]
        made = [(at, each) for at, each in leaves if _storage(each) not in given]
        self._made |= {_storage(each): each for _, each in made}
        self.launches.append((functools.partial(function, *args, **kwargs), made))
        return found

    def replay(self) -> None:
        self._note("graph")
        for each in self._pool[self._pool.index(self) + 1 :]:
            each._forget()
        for function, made in self.launches:
            found = tree_leaves(function())
            for at, each in made:
                each.copy_(found[at])

    def _forget(self) -> None:
        for each in self._made.values():
            each.fill_(float("nan") if each.is_floating_point() else True if each.dtype == torch.bool else -1)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
