"""A pretended CUDA device: its tensors have values, what mixes devices raises as CUDA does, and what makes the host
wait is recorded with the line of tiermoe's code that asked for it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

import fake_graph
import tiermoe
from fake_graph import launch
from tiermoe.formats.expert_format import SlotMatrix
from tiermoe.formats.int4 import Int2, Int4
from tiermoe.formats.int6 import Int6
from tiermoe.formats.int8 import Int8
from tiermoe.formats.neurons import RecordPlace, Records
from tiermoe.formats.nonuniform import NonUniform
from tiermoe.formats.trellis import Trellis
from tiermoe.kernels import gpu
from tiermoe.model.attention.base import attend
from tiermoe.offload import cuda

DEVICE, CPU = torch.device("cuda:0"), torch.device("cpu")
FREE, WHOLE = 8 << 30, 10 << 30
"""Bytes of memory."""
PACKAGE = f"{Path(tiermoe.__file__).parent}/"
_FACTORIES = (
    "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace",
    "randperm", "tril_indices", "triu_indices",
)  # fmt: skip
"""Operators by which torch makes tensors of nothing; the others are made of these."""
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "equal",
}  # fmt: skip
"""Operators whose result, or its size, the host must know."""
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_TAKES_NUMBERS = {"fill", "fill_", "index_fill", "index_fill_"}
"""Operators that are not pointwise and take a CPU tensor of no dimension as a number."""


class Event(NamedTuple):
    """An operator on the device. waits: the host waits for all that was launched before."""

    operator: str
    where: str  # 'engine/moe.py:117', the innermost line of tiermoe's code
    waits: bool = False


class FakeCuda(fake_graph.Stream):
    """The default stream, and what ran on the device since it was made or cleared, as far as tiermoe's code asked."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        # main memory that was pinned: address → its bytes, and whether copies to it are late (`copy_late`); those of a
        # link's streams are by `fake_gpu.FakeGpu`
        self.pinned: dict[int, tuple[int, bool]] = {}
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []  # targets of the CPU, and what they will hold

    @property
    def waits(self) -> Counter[str]:
        """Line of code and operator → how many times the host waited there."""
        return Counter(f"{each.where} {each.operator}" for each in self.events if each.waits)

    def clear(self) -> None:
        self.events.clear()

    def copy_late(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """A copy to the CPU that nobody has waited for: until then the target holds nothing."""
        self._late.append((target, values.clone()))
        target.fill_(float("nan"))

    def record_event(self) -> SimpleNamespace:
        """An event of the stream; `synchronize` waits for the copies before it."""
        before, self._late = self._late, []

        def synchronize() -> None:
            self.note("synchronize", waits=True)
            for target, values in before:
                target.copy_(values)

        return SimpleNamespace(synchronize=synchronize)

    def note(self, operator: str, waits: bool = False) -> None:
        """Records an operator; nothing in a capture, or if no code of tiermoe's asked for it."""
        if fake_graph.capturing():
            if waits:
                fake_graph.refuse()
            return
        fake_graph.current_stream(self).require_order()
        where = _where(sys._getframe(1))
        if where:
            self.events.append(Event(operator, where, waits))


_device: FakeCuda | None = None  # that takes notes


def _note(operator: str, waits: bool = False) -> None:
    if _device is not None:
        _device.note(operator, waits)


class CudaTensor(torch.Tensor):
    """A tensor on the device, of the values of a CPU tensor."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> CudaTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=DEVICE,
        )  # fmt: skip
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    # torch's own of these ask for a guard of the device, which a build without CUDA has none of

    def __getitem__(self, index: Any) -> CudaTensor:
        index = _with_numbers(index)
        if not _chooses(index):
            return CudaTensor(self.values[index])
        _note("index", _index_waits(index))
        return CudaTensor(launch(operator.getitem, self.values, plain(index)))

    def __setitem__(self, index: Any, value: Any) -> None:
        index = _with_numbers(index)
        number = not isinstance(value, torch.Tensor) or value.dim() == 0
        if not number and not isinstance(value, CudaTensor) and _chooses(index):
            raise RuntimeError("Expected all tensors to be on the same device, but the values to be put are on cpu")
        copied = isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor)
        _note("index_put_" if _chooses(index) else "copy_", copied or _index_waits(index, number))
        launch(operator.setitem, self.values, plain(index), plain(value))

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return (
            self if self.values.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)
        )

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.copy_(self, source, non_blocking)
        return result

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        found: torch.Tensor = torch.ops.aten.nonzero(self)
        return found.unbind(1) if as_tuple else found

    def __invert__(self) -> torch.Tensor:
        return self.bitwise_not()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.item())

    def new_tensor(self, data: Any, **named: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE, **named})

    # torch's own refuse classes like this one

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        return memo.setdefault(id(self), CudaTensor(self.values.clone()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CudaTensor({self.values!r})"


def on_device(values: torch.Tensor) -> CudaTensor:
    """A tensor on the device with these values."""
    return CudaTensor(values.detach().clone())


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor on the device holds. Nobody waits: this is no copy."""
    assert isinstance(tensor, CudaTensor), "a tensor of the CPU where one of the device was to be"
    return tensor.values


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator some of whose arguments lie on the device."""
    name = func.overloadpacket.__name__
    _require_one_device(func, name, args, kwargs)
    _note(name, _waits(name, args, kwargs))
    given: dict[int, torch.Tensor] = {}  # by the id of what the operator is run with

    def taken(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            values = each.values if isinstance(each, CudaTensor) else each
            if fake_graph.capturing() and values is each and name != "copy_":
                values = each.clone()  # a number, as it is now
            given[id(values)] = each
            return values
        return CPU if isinstance(each, torch.device) and each.type == "cuda" else each

    if name == "copy_" and not isinstance(args[0], CudaTensor) and _unblocked(args, kwargs):
        pinned = _pinned(args[0])
        if _device is not None and pinned is not None and pinned[1]:
            fake_graph.launch_blind(functools.partial(_device.copy_late, args[0], args[1].values))
            return args[0]
    if name == "copy_" and not isinstance(args[1], CudaTensor) and _pinned(args[1]) is None:
        fake_graph.refuse()
    to_cpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"

    def made(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        before = given.get(id(each))
        if before is None:
            return each if to_cpu else CudaTensor(each)
        if (before.shape, before.stride()) != (each.shape, each.stride()):
            raise NotImplementedError(f"{func} changes the shape of a tensor in place")
        return before

    plain_args, plain_kwargs = tree_map(taken, (args, dict(kwargs)))
    return tree_map(made, launch(func, *plain_args, **plain_kwargs))


def _require_one_device(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """RuntimeError as CUDA raises it if an operator is given tensors of both devices, or a CPU's generator."""
    leaves = tree_leaves((args, dict(kwargs)))
    if any(isinstance(each, torch.Generator) and each.device.type == "cpu" for each in leaves):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name in ("copy_", "_to_copy"):
        return
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    if name in _INDEXING:
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        tensors = [each for each in args[2:3] if each.dim() > 0]  # the values that are put
    numbers = torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS
    stray = [each for each in tensors if not isinstance(each, CudaTensor) and not (numbers and each.dim() == 0)]
    if stray:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, "
            f"{tuple(stray[0].shape)} on the CPU)"
        )


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether CUDA lets the host wait for an operator. A copy out of memory that is not pinned waits for what was
    launched before it unless it is asked for with non_blocking; a copy to the CPU does unless its memory is pinned
    too."""
    if name == "_to_copy":
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu"
    if name == "copy_":
        if not isinstance(args[0], CudaTensor):
            return not _unblocked(args, kwargs) or _pinned(args[0]) is None
        return not _unblocked(args, kwargs) and not isinstance(args[1], CudaTensor)
    if name in _INDEXING:
        return _index_waits(tuple(args[1]), len(args) > 2 and args[2].numel() == 1)
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _WAITING


def _unblocked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a `copy_` is asked for with non_blocking."""
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _index_waits(index: Any, number: bool = False) -> bool:
    """Masks are turned into places, whose number the host must know, but for one `number` that is put; indices of the
    CPU, lists too, are copied."""
    there = _chooses(index)
    if any(not isinstance(each, CudaTensor) for each in there):
        return True
    return any(each.dtype in (torch.bool, torch.uint8) for each in there) and not (number and len(there) == 1)


def _with_numbers(index: Any) -> Any:
    """An index whose integers are the host's: torch takes one of the device's tensors as its item."""
    integer = (torch.int64, torch.int32, torch.int16, torch.int8)
    return tree_map(
        lambda each: int(each) if isinstance(each, CudaTensor) and not each.dim() and each.dtype in integer else each,
        index,
    )


def _chooses(index: Any) -> list[Any]:
    """The tensors and lists of an index."""
    parts = index if isinstance(index, tuple) else (index,)
    return [each for each in parts if isinstance(each, list | torch.Tensor)]


def plain(given: Any) -> Any:
    """`given` with values in the place of tensors on the device."""
    return tree_map(lambda each: each.values if isinstance(each, CudaTensor) else each, given)


def _where(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _factory(name: str) -> Callable[..., CudaTensor]:
    packet, _, overload = name.partition(".")
    made_by = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> CudaTensor:
        return CudaTensor(launch(made_by, *args, **{**kwargs, "device": CPU, "pin_memory": False}))

    return make


def _tensor(of_torch: Any, *given: Any, device: Any = None, **named: Any) -> torch.Tensor:
    """torch.tensor or torch.as_tensor, which copy to a device past all dispatch."""
    if device is None or torch.device(device).type != "cuda":
        return of_torch(*given, device=device, **named)
    return of_torch(*given, **named).to(DEVICE)


def _unpinned(of_torch: Any, *given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
    """torch.empty without pinned memory, which needs a driver."""
    made: torch.Tensor = of_torch(*given, **named)
    if pin_memory and _device is not None:
        _device.pinned[made.data_ptr()] = made.nbytes, True
    return made


# what stands for Triton's kernels: decoding, then a product, at the addresses that the kernels are given


_ENCODINGS: dict[str, Callable[[int], Any]] = {
    "INT8": lambda group: Int8(), "INT6": lambda group: Int6(group),
    "INT4": lambda group: Int4(group), "INT2": lambda group: Int2(group),
    "TCQ2": lambda group: Trellis(group),
    **{f"NL{bits}": functools.partial(NonUniform, bits) for bits in (4, 3, 2)},
}  # fmt: skip


def _decoded(coding: str, group: int, codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> Any:
    encoding = _ENCODINGS[coding](group)
    how = encoding.in_c(rows, columns)
    fields = {how.weights: codes} | ({how.scales: scales} if how.scales else {})
    return encoding.decode(fields, rows, columns, torch.float32)


def _linear(
    x: torch.Tensor, coding: str, group: int, codes: torch.Tensor, scales: torch.Tensor, rows: int
) -> CudaTensor:
    _note("linear")

    def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return F.linear(x, _decoded(coding, group, codes, scales, rows, x.shape[1]).to(x.dtype))

    return CudaTensor(launch(product, values_of(x), values_of(codes), values_of(scales)))


def _tiles_of(slots: Sequence[int], counts: Sequence[int], device: torch.device) -> dict[int, torch.Tensor]:
    """Tiles of any number of tokens: the rows of an expert are one product, as in `_linear`."""
    first = [0, *accumulate(counts)]
    sizes = {size: [at for at, count in enumerate(counts) if tile_tokens(count) == size] for size in (1, 16, 64)}
    table = torch.tensor([[slots[at], first[at], counts[at]] for each in sizes.values() for at in each])
    parts = torch.split(table.to(device, non_blocking=True), [len(each) for each in sizes.values()])
    return {size: part for size, part in zip(sizes, parts, strict=True) if len(part)}


def tile_tokens(count: int) -> int:
    """As `triton_kernels` has it, which cannot be imported without Triton: what decides the number of launches."""
    return 1 if count == 1 else 16 if count <= 16 else 64


def _grouped_linear(x: torch.Tensor, tiles: dict[int, torch.Tensor], matrix: SlotMatrix, shared: bool) -> CudaTensor:
    for _ in tiles:
        _note("grouped_linear")

    def products(x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        entries = sorted(tiles.tolist(), key=operator.itemgetter(1))
        assert len(x) == (1 if shared else sum(count for _, _, count in entries))
        rows = [x if shared else x[first : first + count] for _, first, count in entries]
        weights = [_decoded_at(slot, matrix).to(x.dtype) for slot, _, _ in entries]
        products = [F.linear(each, weight) for each, weight in zip(rows, weights, strict=True)]
        if matrix.bias is not None:
            biases = [_read(slot + matrix.bias, (matrix.rows,), matrix.dtype) for slot, _, _ in entries]
            products = [each + bias for each, bias in zip(products, biases, strict=True)]
        return torch.cat(products)

    return CudaTensor(launch(lambda x, *tiles: products(x, torch.cat(tiles)), values_of(x), *plain([*tiles.values()])))


def _weighted_sums(choices: torch.Tensor, like: torch.Tensor) -> CudaTensor:
    """torch's separate operations, of rows at addresses."""
    _note("weighted_sums")
    columns = like.shape[-1]

    def sums(choices: torch.Tensor) -> torch.Tensor:
        found, (addresses, weights) = [], choices
        for places, gates in zip(addresses.tolist(), weights.view(torch.float64).float(), strict=True):
            total = torch.zeros(columns, dtype=like.dtype)
            for address, gate in zip(places, gates, strict=True):
                if address:
                    content = bytearray(ctypes.string_at(address, columns * like.element_size()))
                    total += (torch.frombuffer(content, dtype=like.dtype) * gate[None]).to(like.dtype)
            found.append(total)
        return torch.stack(found)

    return CudaTensor(launch(sums, values_of(choices)))


def _read(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A copy of what lies at an address."""
    content = bytearray(ctypes.string_at(address, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(content, dtype=dtype).view(tuple(shape))


def _decoded_at(address: int, matrix: SlotMatrix) -> torch.Tensor:
    """A matrix in the slot at an address, of copies of its fields."""
    rows, columns, encoding = matrix.rows, matrix.columns, _ENCODINGS[matrix.coding](matrix.group)
    how = encoding.in_c(rows, columns)

    def field(name: str, offset: int) -> torch.Tensor:
        (found,) = (each for each in encoding.slot_fields(rows, columns, matrix.dtype) if each.name == name)
        return _read(address + offset, found.shape, found.dtype)

    codes = field(how.weights, matrix.codes)
    scales = field(how.scales, matrix.scales) if how.scales else codes
    weight: torch.Tensor = _decoded(matrix.coding, matrix.group, codes, scales, rows, columns)
    return weight


def _neuron_sums(
    x: torch.Tensor, gates: torch.Tensor, tiles: torch.Tensor, records: Records, place: RecordPlace, dtype: torch.dtype
) -> CudaTensor:
    _note("neuron_sums")

    def found(x: torch.Tensor, gates: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        sums = []
        for address, gate in zip(tiles[:, 0].tolist(), gates.float(), strict=True):
            used = gate.nonzero()[:, 0]
            rows = [address + place.slot_at + place.record_bytes * neuron for neuron in used.tolist()]
            content = b"".join(ctypes.string_at(row, place.record_bytes) for row in rows)
            read = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)].view(len(rows), -1)
            halves = [records.decode_half(read, half, x.shape[1], dtype).float() for half in (0, 1)] if rows else None
            sums.append((gate[used] * (halves[0] @ x[0].float())) @ halves[1] if halves else torch.zeros(x.shape[1]))
        return torch.stack(sums).to(x.dtype)

    return CudaTensor(launch(found, values_of(x), values_of(gates), values_of(tiles)))


def scatter(staged: torch.Tensor, count: int) -> None:
    values = plain(staged)
    _note("scatter")

    def move() -> None:
        for address, first, nbytes in values[: 24 * count].view(torch.int64).view(-1, 3).tolist():
            ctypes.memmove(address, values[first:].data_ptr(), nbytes)

    fake_graph.launch_blind(move)


def _write_row(kept: Sequence[torch.Tensor], new: Sequence[torch.Tensor], place: torch.Tensor) -> None:
    _note("write_row")

    def write() -> None:
        position, slab = values_of(place).tolist()
        for rows, each in zip(kept, new, strict=True):
            values_of(rows)[slab, :, position % rows.shape[2]] = values_of(each)

    fake_graph.launch_blind(write)


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor, scale: float,
    window: int | None = None, chunked: bool = False, sinks: torch.Tensor | None = None,
) -> CudaTensor:  # fmt: skip
    _note("attend_row")
    logits = None if sinks is None else values_of(sinks)

    def attended(query: torch.Tensor, *kept: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        position, slab = place.tolist()
        first = 0 if window is None else position // window * window if chunked else max(0, position - window + 1)
        rows = torch.arange(first, position + 1) % kept[0].shape[2]
        with sdpa_kernel(SDPBackend.MATH):  # as the device's own operator
            return attend(query[None], *(each[slab][:, rows] for each in kept), scale, None, logits)[0].contiguous()

    return CudaTensor(launch(attended, *map(values_of, (query, keys, values)), place=values_of(place)))


KERNELS = SimpleNamespace(
    write_row=_write_row, attend_row=_attend_row,
    linear=_linear, tiles_of=_tiles_of, grouped_linear=_grouped_linear, weighted_sums=_weighted_sums,
    neuron_sums=_neuron_sums, scatter=scatter,
)  # fmt: skip
"""In the place of `kernels.triton_kernels` and `kernels.triton_neurons`."""


def _pin(address: int, nbytes: int, _: int) -> int:
    if _device is not None:
        _device.pinned[address] = nbytes, False
    return 0


def _pinned(tensor: torch.Tensor) -> tuple[int, bool] | None:
    """What `FakeCuda.pinned` says of memory of the CPU."""
    pinned = _device.pinned.items() if _device is not None else ()
    return next((each for first, each in pinned if first <= tensor.data_ptr() < first + each[0]), None)


def _runtime() -> SimpleNamespace:
    """In the place of `torch`, for `offload.cuda`: what it asks of the runtime."""
    driver = SimpleNamespace(cudaHostRegister=_pin, cudaHostUnregister=lambda *_: 0)
    runtime = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, mem_get_info=lambda device: (FREE, WHOLE),
        max_memory_allocated=lambda device: 0, cudart=lambda: driver,
    )  # fmt: skip
    return SimpleNamespace(cuda=runtime, device=torch.device)


@contextlib.contextmanager
def device() -> Iterator[FakeCuda]:
    """Within it `cuda:0` is the pretended device, for torch's operators in all threads, for what stands for Triton's
    kernels, and for `offload.cuda` but for its copies (`fake_gpu.FakeGpu`)."""
    global _device
    _device_constructors()  # kept from its first call on, which must not see what is patched here
    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.library._scoped_library("aten", "IMPL", "CUDA") as operators,  # kernels: modes hold for one thread
    ):
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(cuda, "torch", _runtime())
        patch.setattr(gpu, "triton", lambda *_: KERNELS)
        patch.setattr(gpu, "has_triton", lambda: True)
        patch.setattr(gpu, "_pinned", gpu._Pinned())
        for name in _FACTORIES:
            operators.impl(name, _factory(name))
        patch.setattr(torch, "empty", functools.partial(_unpinned, torch.empty))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, functools.partial(_tensor, getattr(torch, name)))
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # else parameters keep their class
        _device = found = FakeCuda()
        for name, fake in {
            "current_stream": lambda device: fake_graph.current_stream(found),
            "Stream": lambda device: fake_graph.SideStream(found),
            "stream": functools.partial(fake_graph.stream, found),
            "CUDAGraph": lambda: fake_graph.FakeGraph(found.note),
            "graph_pool_handle": list,
        }.items():
            patch.setattr(torch.cuda, name, fake)
        try:
            yield found
        finally:
            _device = None
            torch.__future__.set_overwrite_module_params_on_conversion(overwritten)


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """The pretended device. Skips where torch has a real one."""
    if torch.cuda.is_available():
        pytest.skip("torch has a GPU, and its kernels cannot be replaced")
    with device() as found:
        yield found
