# mypy: allow-untyped-calls
# (torch.cuda's streams, events and runtime have no types.)
"""What the GPU tier asks of torch.cuda; all of it is here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermoe.errors import BudgetError, ConfigError

Mark = torch.cuda.Event
"""A point in the order of computation."""


class Ticket(NamedTuple):
    """A copy that has been asked for: events around it, on the stream that copies."""

    begun: torch.cuda.Event
    done: torch.cuda.Event


class CudaCopier:
    """Copies from pinned memory to a GPU on a stream of its own, during the computation."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def mark(self) -> Mark:
        """The point after everything that the calling thread has launched so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, host: torch.Tensor, device: torch.Tensor, after: Mark) -> Ticket:
        """Asks for a copy that starts once `after` is reached. Returns at once; any thread may call."""
        begun = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True, blocking=True)  # a thread that waits for it sleeps
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            begun.record(self._stream)
            device.copy_(host, non_blocking=True)
            done.record(self._stream)
        return Ticket(begun, done)

    def ready(self, ticket: Ticket) -> bool:
        """True if the copy is done."""
        return bool(ticket.done.query())

    def wait(self, ticket: Ticket) -> None:
        """Blocks the calling thread until the copy is done."""
        ticket.done.synchronize()

    def seconds(self, ticket: Ticket) -> float:
        """How long a copy that is done took, from the moment when it could start."""
        return float(ticket.begun.elapsed_time(ticket.done)) / 1e3

    def wait_before_use(self, ticket: Ticket) -> None:
        """Lets what the calling thread launches from now on start only after the copy; does not block."""
        torch.cuda.current_stream(self._device).wait_event(ticket.done)


def resolve_device(asked: str) -> str:
    """What 'auto', 'cpu', 'cuda' or 'cuda:1' stands for here: 'cpu', or the GPU's name. ConfigError names the
    cause if there is no such GPU."""
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
    """Bytes that `device` has free, besides what torch holds."""
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return free


def peak_memory(device: str) -> int:
    """The most bytes that this process's tensors have taken on `device`."""
    return torch.cuda.max_memory_allocated(torch.device(device))


def pin_memory(tensor: torch.Tensor) -> None:
    """Locks a tensor's memory so that the GPU can copy from it during the computation. BudgetError if the
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
