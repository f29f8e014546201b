# mypy: allow-untyped-calls
# (torch.cuda's streams and graphs have no types.)
"""CUDA graphs of functions of tensors: the launches of a call are captured once, and then replayed by one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tiermoe.errors import first_line

Tensors = TypeVar("Tensors")
"""A tensor, None, or tuples and lists of them, nested."""

_log = logging.getLogger("tiermoe.graphs")
_warned: set[str] = set()  # causes


class _Graph:
    """A captured call of a key. inputs: the tensors that it reads, and whether each is the caller's own or a copy.
    result: what the call returns."""

    def __init__(self, key: Hashable, graph: Any, inputs: Sequence[tuple[Tensor, bool]], result: Any) -> None:
        self._key = key
        self._inputs = inputs
        self._replay = graph.replay
        self.result = result

    def launch(self, inputs: Sequence[Tensor], kept: Mapping[int, Hashable]) -> bool:
        """Replays the call with these inputs; False if it was captured for others. kept: as `Graphs._kept`."""
        copies = []
        for x, (own, in_place) in zip(inputs, self._inputs, strict=True):
            if x is own:
                continue
            if x.shape != own.shape or x.dtype != own.dtype:
                return False
            if in_place:
                if x.data_ptr() != own.data_ptr() or x.stride() != own.stride():
                    return False
                continue
            key = kept.get(_storage(x))
            if key is None:
                copies.append((own, x))
            elif key == self._key:  # a result that may lie in an input, which is overwritten here
                copies.append((own, x.clone()))
            else:
                return False
        for own, x in copies:
            own.copy_(x)
        self._replay()
        return True


class Graphs:
    """The graphs of one device, by key. One thread at a time computes with them, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # captures: the default stream cannot
        self._graphs: dict[Hashable, list[_Graph]] = {}
        self._results: dict[Hashable, Tensor] = {}  # of all graphs of a key, by form
        self._fixed: dict[Hashable, tuple[Tensor, ...]] = {}
        self._kept: dict[int, Hashable] = {}  # address of the storage of a result or a fixed tensor → its key
        self._called: set[Hashable] = set()  # keys with the inputs' forms
        self._refused: set[Hashable] = set()  # keys without graphs
        # torch's allocator asks a graph whose capture failed about later allocations
        self._failed: list[Any] = []
        # One pool for what is temporary in any graph, as their replays follow each other on one stream. Results lie
        # elsewhere: a graph that was captured before theirs would overwrite them.
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, function: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """function(*inputs), by a graph from the second call of a key with inputs of the same shapes and types on.

        inputs: on the device. Results of other keys' graphs, `fixed` tensors and views of them are read where they lie,
        by a graph for each of their addresses; other inputs are copied first. The result holds until the key's next
        call, or as long as an input that it is or views. It has the bits of a plain call: each graph's first result is
        compared with them, the only time that the host waits. A key whose function cannot be captured, or gives other
        bits then, is called from then on, and one warning a cause says so.

        function: of its inputs and of memory that stays; it writes none of the inputs. It may be called three times
        with the same inputs, and what it writes (a row of a KV cache) must be the same each time. A number of the host
        stays what it was at the capture. TypeError if it returns anything but tensors and None.
        """
        for graph in self._graphs.get(key, ()):
            if graph.launch(inputs, self._kept):
                result: Tensors = graph.result
                return result
        if key in self._refused:
            return function(*inputs)
        call = (key, *map(_form, inputs))
        if call not in self._called:
            self._called.add(call)
            return function(*inputs)
        with using(None):
            found: Tensors = self._capture(key, function, inputs)
            return found

    def fixed(self, key: Hashable, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies of the tensors on the device, at the same addresses in every call of a key with the same shapes and
        types. The host does not wait: pinned memory must stay as it is until the copies are done."""
        place = (key, *map(_form, tensors))
        if place not in self._fixed:
            self._fixed[place] = tuple(_empty(x, self.device) for x in tensors)
            self._kept.update((_storage(each), place) for each in self._fixed[place])
        fixed = self._fixed[place]
        for own, x in zip(fixed, tensors, strict=True):
            if x is not own:
                own.copy_(x, non_blocking=True)
        return fixed

    def clear(self) -> None:
        """Drops all graphs and fixed tensors: memory that the functions know has moved."""
        for each in (self._graphs, self._results, self._fixed, self._kept):
            each.clear()
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool that has lost its last graph

    def _capture(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """Calls the function, captures it and compares the two. Returns the graph's result, or the call's."""
        in_place = [self._kept.get(_storage(x), key) != key for x in inputs]
        own = [x if there else _empty(x, x.device).copy_(x) for x, there in zip(inputs, in_place, strict=True)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._stream):
                called = function(*inputs)  # on this stream, so that cuBLAS has its workspace before the capture
                expected, structure = tree_flatten(called)
                places = [self._place(key, at, each) for at, each in enumerate(expected)]
                try:
                    found = self._captured(graph, function, own, called, places)
                except Exception as error:  # of the capture alone: the call has just succeeded
                    self._refuse(key, graph, first_line(error))
                    return called
        finally:
            stream.wait_stream(self._stream)
        pairs = [(a, b) for a, b, place in zip(expected, found, places, strict=True) if b is place and b is not None]
        bits = [_bits(each) for each, _ in pairs]  # copies: a place may be the expected tensor itself
        graph.replay()
        if pairs and not torch.equal(torch.cat(bits), torch.cat([_bits(each) for _, each in pairs])):
            self._refuse(key, graph, "it gives other bits than the call")
            return function(*inputs)
        for at, each in enumerate(found):
            if each is not None:
                self._kept.setdefault(_storage(each), key)
                if each is places[at]:
                    self._results[key, at, *_layout(each)] = each
        result = tree_unflatten(found, structure)
        self._graphs.setdefault(key, []).insert(0, _Graph(key, graph, list(zip(own, in_place, strict=True)), result))
        return result

    def _place(self, key: Hashable, at: int, expected: Tensor | None) -> Tensor | None:
        """Where graphs of the key put a result like this one: memory outside of the pool."""
        if expected is None:
            return None
        if not isinstance(expected, Tensor):
            raise TypeError(f"{key}: a graph returns tensors and None, no {type(expected).__name__}")
        known = self._results.get((key, at, *_layout(expected)))
        if known is not None:
            return known
        of_storage = expected.untyped_storage().nbytes() / max(expected.nbytes, 1)
        return expected if of_storage < 2 else _empty(expected, expected.device)

    def _captured(
        self,
        graph: Any,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        called: Any,
        places: Sequence[Any],
    ) -> list[Tensor | None]:
        """Captures the call, and a copy of its results to their places. What lies in an input, or in the same memory as
        in the call before, does not lie in the graph's and is not copied."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads copy meanwhile
        try:
            (found, structure), (expected, of_call) = tree_flatten(function(*inputs)), tree_flatten(called)
            if structure != of_call or list(map(_form, found)) != list(map(_form, expected)):
                raise RuntimeError("it gives other shapes than the call")
            stays = {_storage(each) for each in (*inputs, *expected) if each is not None}
            moved = [each is not None and _storage(each) not in stays for each in found]
            if any(moved):  # at once: one launch where all have one type
                torch._foreach_copy_(list(compress(places, moved)), list(compress(found, moved)))
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return [place if away else each for place, away, each in zip(places, moved, found, strict=True)]

    def _refuse(self, key: Hashable, graph: Any, cause: str) -> None:
        self._refused.add(key)
        self._graphs.pop(key, None)
        self._failed.append(graph)
        self._pool = torch.cuda.graph_pool_handle()  # a capture that failed keeps the old one
        if cause not in _warned:
            _warned.add(cause)
            _log.warning("no CUDA graph for %s: %s; it is computed without one, which is slower", key, cause)


class _Current(threading.local):
    """A thread's graphs."""

    graphs: Graphs | None = None


_current = _Current()


@contextmanager
def using(graphs: Graphs | None) -> Iterator[None]:
    """Within it `launch` goes through these graphs, in this thread; None: through none."""
    before, _current.graphs = _current.graphs, graphs
    try:
        yield
    finally:
        _current.graphs = before


def launch(key: Hashable, function: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
    """`Graphs.run` of the graphs in use; without any, and within a function that they call, function(*inputs)."""
    graphs = _current.graphs
    return function(*inputs) if graphs is None else graphs.run(key, function, *inputs)


def on_device(key: Hashable, x: Tensor, device: torch.device) -> Tensor:
    """A copy of x, of the CPU, on the device: by `Graphs.fixed` of the graphs in use, else a new one."""
    graphs = _current.graphs
    return x.to(device, non_blocking=True) if graphs is None else graphs.fixed(key, x)[0]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _form(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.dtype)


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor of the same form, which a later call may write in inference mode and out of it."""
    with torch.inference_mode(False):
        return torch.empty_like(like, device=device, requires_grad=False)


def _bits(x: Tensor) -> Tensor:
    """A copy of the bytes, in which NaN is equal to itself."""
    return x.reshape(-1).view(torch.uint8).clone()
