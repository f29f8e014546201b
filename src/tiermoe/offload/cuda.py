# mypy: allow-untyped-calls
# (torch.cuda's streams, events and runtime have no types.)
"""What the GPU tier asks of torch.cuda; all of it is here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tiermoe.config import format_size
from tiermoe.errors import BudgetError, ConfigError, DeviceError, first_line

Mark = torch.cuda.Event
"""A point in the order of computation."""


class Ticket(NamedTuple):
    """Events around a copy that has been asked for, or around what a stream waits for one."""

    begun: torch.cuda.Event
    done: torch.cuda.Event


class CudaCopier:
    """Copies from pinned memory to a GPU during the computation, on two streams of its own: no urgent copy waits for a
    speculative one that was asked for before it. cuda: the module with streams and events."""

    def __init__(self, device: str, cuda: Any = torch.cuda) -> None:
        self._device = torch.device(device)
        self._cuda = cuda
        # CUDA's manual promises the priority to kernels; copies have what a stream without others' copies gives
        self._urgent = cuda.Stream(self._device, priority=-1)
        self._speculative = cuda.Stream(self._device)

    def mark(self) -> Mark:
        """The point after everything that the calling thread has launched so far."""
        event: Mark = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def launch(self, work: Callable[[], object], after: Mark, urgent: bool) -> Ticket:
        """Lets `work` launch copies, and kernels on what they bring, which start once `after` is reached. Returns at
        once; any thread may call."""
        stream = self._urgent if urgent else self._speculative
        begun = self._cuda.Event(enable_timing=True)
        done = self._cuda.Event(enable_timing=True, blocking=True)  # a thread that waits for it sleeps
        stream.wait_event(after)
        begun.record(stream)
        self._launch(work, stream)
        done.record(stream)
        return Ticket(begun, done)

    def _launch(self, work: Callable[[], object], stream: Any) -> None:
        with self._cuda.stream(stream):
            work()

    def ready(self, ticket: Ticket) -> bool:
        """True if the copy, or the wait, is done."""
        return bool(ticket.done.query())

    def wait(self, ticket: Ticket) -> None:
        """Blocks the calling thread until the copy is done."""
        ticket.done.synchronize()

    def seconds(self, ticket: Ticket) -> float:
        """How long a copy that is done took, from the moment when it could start; or a wait that is done."""
        return float(ticket.begun.elapsed_time(ticket.done)) / 1e3

    def wait_before_use(self, ticket: Ticket) -> Ticket | None:
        """Lets what the calling thread launches from now on start only after the copy; does not block. Returns what the
        computation waits, None if the copy is done."""
        if ticket.done.query():
            return None
        stream = self._cuda.current_stream(self._device)
        wait = Ticket(self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True))
        wait.begun.record(stream)
        stream.wait_event(ticket.done)
        wait.done.record(stream)
        return wait


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
    """Bytes that `device` has free, besides what torch holds. As `GpuErrors` if it cannot be asked."""
    with GpuErrors(device, "starting"):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
    return free


class GpuErrors:
    """Within it an error of a GPU is one line: BudgetError if its memory is used up, DeviceError if it fails. Others
    pass. doing: what asks the GPU, like 'computing'."""

    def __init__(self, device: str, doing: str) -> None:
        self._device, self._doing = device, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        text = str(error)
        of_gpu = isinstance(error, torch.AcceleratorError) or re.search(r"CUDA error|Triton Error \[CUDA\]", text)
        if isinstance(error, torch.OutOfMemoryError) or (of_gpu and re.search("out of memory|ALLOC_FAILED", text)):
            asked = re.search(r"Tried to allocate (\d[\d.]* [KMGT]?i?B)", text)
            raise BudgetError(
                f"{self._device} ran out of memory while {self._doing}: {asked[1] if asked else 'more than that'} "
                f"asked for, {_free_in_words(self._device)} free; end other programs on it, or load the model with "
                f"less --gpu-memory"
            ) from error
        if of_gpu:
            raise DeviceError(
                f"{self._device} failed while {self._doing}: {first_line(error)}; start again, with --device cpu if "
                f"the GPU is gone"
            ) from error


def _free_in_words(device: str) -> str:
    try:
        return format_size(torch.cuda.mem_get_info(torch.device(device))[0])
    except (RuntimeError, AssertionError):
        return "an unknown size"


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
