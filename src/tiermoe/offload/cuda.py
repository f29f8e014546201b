# mypy: allow-untyped-calls
# (torch.cuda's streams, events and runtime have no types.)
"""What the GPU tier asks of torch.cuda; all of it is here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermoe.errors import BudgetError, ConfigError


class _Copy(NamedTuple):
    """Events around a copy, on the stream that copies."""

    begun: torch.cuda.Event
    done: torch.cuda.Event


class CudaCopier:
    """Copies on a stream of its own (`offload.gpu.Copier`). A mark is an event, a ticket a `_Copy`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, host: torch.Tensor, device: torch.Tensor, after: torch.cuda.Event) -> _Copy:
        begun = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True, blocking=True)  # a thread that waits for it sleeps
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            begun.record(self._stream)
            device.copy_(host, non_blocking=True)
            done.record(self._stream)
        return _Copy(begun, done)

    def ready(self, ticket: _Copy) -> bool:
        return bool(ticket.done.query())

    def wait(self, ticket: _Copy) -> None:
        ticket.done.synchronize()

    def seconds(self, ticket: _Copy) -> float:
        return float(ticket.begun.elapsed_time(ticket.done)) / 1e3

    def wait_before_use(self, ticket: _Copy) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket.done)


def resolve_device(asked: str) -> str:
    """What 'auto', 'cpu', 'cuda' or 'cuda:1' stands for here: 'cpu', or the GPU's name. ConfigError names the
    cause where there is no such GPU."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if asked == "auto":
        return "cuda"
    if not torch.cuda.is_available():
        raise ConfigError(f"device '{asked}' was asked for, but {why_no_gpu()}; use --device cpu")
    index = asked.partition(":")[2]
    count = torch.cuda.device_count()
    if index and not (index.isdecimal() and int(index) < count):
        raise ConfigError(f"device '{asked}' was asked for, but there are cuda:0 to cuda:{count - 1}")
    return asked


def free_memory(device: str) -> int:
    """Bytes that `device` has free, beside what torch holds."""
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return free


def peak_memory(device: str) -> int:
    """The most bytes that this process's tensors have taken on `device`."""
    return torch.cuda.max_memory_allocated(torch.device(device))


def pin_memory(tensor: torch.Tensor) -> None:
    """Locks a tensor's memory so that the GPU can copy from it beside the computation. BudgetError where the
    system does not allow it."""
    status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
    if status != 0:
        raise BudgetError(
            f"the GPU driver refused to pin {tensor.numel():,} bytes of host memory (status {status}); lower --memory"
        )


def unpin_memory(tensor: torch.Tensor) -> None:
    """Takes back `pin_memory`; no copy may be under way."""
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def why_no_gpu() -> str:
    """Why torch has no GPU, in words."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"CUDA cannot start: {str(error).splitlines()[0]}"
    return "torch finds no GPU"
