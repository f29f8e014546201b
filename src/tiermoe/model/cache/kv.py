"""KV cache: a slab of keys, values and recurrent states for each sequence; opened, cropped, forked for a shared prefix,
saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiermoe.batch import Row
from tiermoe.errors import ModelError, PromptError
from tiermoe.kernels.attention import Slabs
from tiermoe.kernels.gpu import takes_graphs
from tiermoe.model.cache.memory import (
    CODED,
    CPU,
    SCALE_BYTES,
    decode_kv,
    empty_pages,
    encode_kv,
    page_bytes,
    places,
    read_rows,
    release_pages,
    shared_page_bytes,
    write_rows,
)
from tiermoe.model.cache.recurrent import RecurrentStates, StateShape
from tiermoe.native import computes_on
from tiermoe.types import Need, Phase, Workload


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer's cache."""

    heads: int  # key/value heads, each with a key and a value of every position
    key_columns: int
    value_columns: int
    window: int | None = None  # the last positions that a token attends to; None: all
    state: StateShape | None = None  # the state of a whole sequence, of a layer without keys and values
    index_columns: int = 0  # of the key that an indexer keeps of every position; such a layer has no window
    stride: int = 1  # positions of a row, which is written with the last of them; such a layer has no window
    beside: tuple[LayerShape, ...] = ()  # what the layer keeps in rows of other kinds

    def row_bytes(self, itemsize: int, bits: int = 16) -> int:
        """Bytes of a position: numbers of `itemsize` bytes, or codes of 8 or 4 bits with a scale for each row."""
        return sum(heads * nbytes for heads, nbytes in self.parts(itemsize, bits))

    def parts(self, itemsize: int, bits: int = 16) -> list[tuple[int, int]]:
        """(heads, bytes of each head) of a position's key, of its value, of their scales, and of the indexer's key."""
        if bits in CODED:
            rows = (self.key_columns * bits // 8, self.value_columns * bits // 8, SCALE_BYTES, SCALE_BYTES)
            return [*((self.heads, nbytes) for nbytes in rows), (1, self.index_columns * itemsize)]
        columns = (self.key_columns, self.value_columns, self.index_columns)
        key, value, index = (each * itemsize for each in columns)
        return [(self.heads, key), (self.heads, value), (1, index)]

    def room(self, context: int, step: int) -> int:
        """Rows that a slab has room for: of all of the context, or of the window and the tokens of a step."""
        return context // self.stride if self.window is None else min(context, self.window + step)


def with_beside(shapes: Sequence[LayerShape]) -> list[LayerShape]:
    """The shapes of layers, and after all of them those of what the layers keep in rows of other kinds."""
    return [*shapes, *(each for shape in shapes for each in shape.beside)]


def cache_bytes(shapes: Sequence[LayerShape], context: int, step: int, itemsize: int, bits: int = 16) -> int:
    """Bytes of one sequence of `context` tokens in layers of these shapes, of which `step` tokens run at once."""
    shapes = with_beside(shapes)
    states = sum(shape.state.nbytes(itemsize) for shape in shapes if shape.state is not None)
    return states + sum(shape.room(context, step) * shape.row_bytes(itemsize, bits) for shape in shapes)


def sequence_bytes(
    shapes: Sequence[LayerShape], positions: int, context: int, step: int, itemsize: int, bits: int = 16
) -> int:
    """Bytes of pages that a sequence of so many tokens takes of the memory for one of `context` tokens."""
    shapes = with_beside(shapes)
    nbytes = sum(page_bytes(1, 1, each, 1) for each in _state_parts(shapes, itemsize))
    for shape in shapes:
        for heads, each in shape.parts(itemsize, bits):
            nbytes += page_bytes(positions // shape.stride, shape.room(context, step), each, heads)
    return nbytes


def _state_parts(shapes: Sequence[LayerShape], itemsize: int) -> list[int]:
    return [each for shape in shapes if shape.state is not None for each in shape.state.parts(itemsize)]


def needs(shapes: Sequence[LayerShape], load: Workload) -> list[Need]:
    """Memory of a cache of layers of these shapes: for each sequence's context, or in all where sequences share the
    memory (`load.use.kv_memory`)."""
    step, context, item, bits = min(load.chunk, load.context), load.context, load.itemsize, load.kv_bits
    if load.use.kv_memory is None:
        nbytes = load.sequences * cache_bytes(shapes, context, step, item, bits)
        return [Need("kv cache", nbytes, Phase.RUNNING, f"{context} tokens of context")]
    longest = load.sequences * sequence_bytes(shapes, context, context, step, item, bits)
    slabs = [
        shape.room(context, step) * heads * each
        for shape in with_beside(shapes)
        for heads, each in shape.parts(item, bits)
    ]
    between = sum(shared_page_bytes(load.sequences, each) for each in [*slabs, *_state_parts(shapes, item)])
    return [
        Need("kv cache", min(load.use.kv_memory, longest), Phase.RUNNING, "shared by all sequences"),
        Need("kv cache", between, Phase.RUNNING, "pages between them"),
    ]


@dataclass(slots=True)
class Unread:
    """Tokens at a sequence's end, from position `first` on, that an MTP head has not read."""

    first: int
    tokens: list[int]
    hidden: Tensor  # (len(tokens), H): their hidden states after the model's last norm


class KVCache:
    """Slabs of `context` positions in every layer, on a device. On a CPU memory is taken as positions are written, not
    before, and given back when a slab is closed; on a GPU it is taken at once.

    keys[layer] (slabs, heads, room, key columns), values[layer] (slabs, heads, room, value columns): position p lies at
    p % room; a layer whose room is smaller than the context is a ring that keeps a window alone; with a stride a row
    stands for so many positions. In `dtype`, or with `bits` 8 as codes, int8; with 4 uint8, of two columns each.
    beside[layer]: where among all of them lies what the layer keeps in rows of other kinds.
    key_scales[layer], value_scales[layer] (slabs, heads, room, 1): scales of the codes; empty lists at 16 bits.
    index_keys[layer] (slabs, 1, room, index columns): keys of indexers; an empty list if no layer has an indexer.
    recurrent: states of the layers that have no keys and values; None if there is no such layer.
    by_kernels: whether the attention kernels take it: in bfloat16, on a CPU. native: layer → its slabs for them.
    by_place: whether kernels attend to it that find a token's position and slab on the device: on a GPU with Triton, at
    16 bits.
    step: the most tokens of a sequence in one step. unread: slab → what an MTP head is to read yet."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slabs: int,
        context: int,
        step: int,
        dtype: torch.dtype,
        bits: int = 16,
        device: torch.device = CPU,
    ) -> None:
        self.slabs, self.context, self.step, self.bits = slabs, context, step, bits
        ends = accumulate((len(shape.beside) for shape in shapes), initial=len(shapes))
        self.beside = [range(*pair) for pair in pairwise(ends)]
        self.shapes = tuple(with_beside(shapes))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_scales: list[Tensor] = []
        self.value_scales: list[Tensor] = []
        self.index_keys: list[Tensor] = []
        self.unread: dict[int, Unread] = {}
        self._lengths = [0] * slabs
        self._furthest = [0] * slabs  # how far positions were ever written: what lies in a ring
        self._free = list(reversed(range(slabs)))
        self.dtype, self.device = dtype, device
        self.by_kernels = dtype == torch.bfloat16 and computes_on(device)
        self.by_place = bits == 16 and takes_graphs(device.type)
        states = {layer: shape.state for layer, shape in enumerate(shapes) if shape.state is not None}
        self.recurrent = RecurrentStates(states, slabs, dtype, device) if states else None
        indexed = any(shape.index_columns for shape in shapes)
        for shape in self.shapes:
            rows = slabs, shape.heads, shape.room(context, step)
            stored, in_one = CODED.get(bits, dtype), 2 if bits == 4 else 1
            self.keys.append(empty_pages((*rows, shape.key_columns // in_one), stored, device))
            self.values.append(empty_pages((*rows, shape.value_columns // in_one), stored, device))
            if bits in CODED:
                self.key_scales.append(empty_pages((*rows, 1), torch.bfloat16, device))
                self.value_scales.append(empty_pages((*rows, 1), torch.bfloat16, device))
            if indexed:
                self.index_keys.append(empty_pages((slabs, 1, rows[2], shape.index_columns), dtype, device))
        self.native = self._native_slabs()

    @property
    def _kept(self) -> dict[str, list[Tensor]]:
        """Name → each layer's tensor."""
        return {
            "keys": self.keys, "values": self.values,
            "key_scales": self.key_scales, "value_scales": self.value_scales, "index_keys": self.index_keys,
        }  # fmt: skip

    def open(self) -> int:
        """A slab for another sequence, empty. PromptError if all are taken."""
        if not self._free:
            raise PromptError(
                f"all {self.slabs} sequences that memory is set aside for are in use; close one, or --batch"
            )
        slab = self._free.pop()
        self._lengths[slab] = self._furthest[slab] = 0
        self.unread.pop(slab, None)
        if self.recurrent is not None:
            self.recurrent.clear(slab)
        return slab

    def close(self, slab: int) -> None:
        """Gives a slab back, and its memory."""
        for tensor, _ in self._each_tensor():
            release_pages(tensor, slab)
        if self.recurrent is not None:
            self.recurrent.release(slab)
        self._free.append(slab)

    def reserve(self, positions: int) -> None:
        """Makes room for sequences of so many tokens, at least twice as many as before."""
        if positions <= self.context:
            return
        self.context = max(positions, 2 * self.context)
        self.native = {}  # keeps the smaller tensors alive
        for tensors in filter(None, self._kept.values()):
            for layer, (tensor, shape) in enumerate(zip(tensors, self.shapes, strict=True)):
                room = shape.room(self.context, self.step)
                if room <= tensor.shape[2]:
                    continue
                grown = empty_pages((*tensor.shape[:2], room, tensor.shape[3]), tensor.dtype, self.device)
                grown[:, :, : tensor.shape[2]] = tensor
                tensors[layer] = grown
        self.native = self._native_slabs()

    def nbytes(self, positions: int) -> int:
        """Bytes that a sequence of so many tokens takes at the most, in whole pages."""
        return sequence_bytes(self.shapes, positions, self.context, self.step, self.dtype.itemsize, self.bits)

    def nbytes_held(self, slab: int) -> int:
        """Bytes of pages that have been written since the slab was opened."""
        return self.nbytes(self._furthest[slab])

    def length(self, slab: int) -> int:
        """Tokens of the sequence."""
        return self._lengths[slab]

    def reached(self, slab: int) -> int:
        """Positions that have been written since the slab was opened, those that were cut off again included."""
        return self._furthest[slab]

    def begin_write(self, slab: int, end: int) -> None:
        """Begins a step that writes the sequence's tokens before position `end`."""
        self._furthest[slab] = max(self._furthest[slab], end)
        if self.recurrent is not None:
            self.recurrent.begin_write(slab)

    def end_write(self, slab: int, end: int) -> None:
        """Ends that step: the sequence has `end` tokens."""
        self._furthest[slab] = max(self._furthest[slab], end)
        self._lengths[slab] = end
        if self.recurrent is not None:
            self.recurrent.end_write(slab)

    def write(self, layer: int, row: Row, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values (T, heads, columns) of a batch's row into a layer's slabs, as codes where the
        cache has them."""
        tensors = ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values))
        for stored, scales, new in tensors:
            if self.bits in CODED:
                new, new_scales = encode_kv(new, self.bits)
                write_rows(scales[layer], row, new_scales)
            write_rows(stored[layer], row, new)

    def read(self, layer: int, row: Row, window: int | None) -> tuple[Tensor, Tensor]:
        """Keys and values (heads, n, columns) that the tokens of a batch's row may attend to, in the cache's dtype."""
        keys, values = (read_rows(each[layer], row, window) for each in (self.keys, self.values))
        if self.bits not in CODED:
            return keys, values
        key_scales, value_scales = (
            read_rows(each[layer], row, window) for each in (self.key_scales, self.value_scales)
        )
        return decode_kv(keys, key_scales, self.dtype), decode_kv(values, value_scales, self.dtype)

    def read_chosen(self, layer: int, slab: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (T, heads, n, columns) of positions (T, heads, n), or (T, 1, n) for all heads, of a sequence,
        in the cache's dtype, of a layer without a window."""
        heads, rows = torch.arange(self.shapes[layer].heads, device=self.device)[:, None], positions.long()
        keys, values = (each[layer][slab][heads, rows] for each in (self.keys, self.values))
        if self.bits == 16:
            return keys, values
        key_scales, value_scales = (each[layer][slab][heads, rows] for each in (self.key_scales, self.value_scales))
        return decode_kv(keys, key_scales, self.dtype), decode_kv(values, value_scales, self.dtype)

    def can_crop(self, slab: int, length: int, ahead: int = 0) -> bool:
        """Whether the sequence can be cut to its first `length` positions: its windows have not moved on past them, and
        a recurrent state of them is kept. ahead: so many more positions may be written meanwhile."""
        return self._window_holds(slab, length, ahead) and self._state_holds(slab, length)

    def kept(self, slab: int, length: int) -> int:
        """The most of the sequence's first `length` tokens that it can be cut to."""
        ends = [length] if self.recurrent is None else self.recurrent.ends(slab)
        return max((end for end in ends if end <= length and self._window_holds(slab, end)), default=0)

    def crop(self, slab: int, length: int) -> None:
        """Forgets the positions from `length` on. ValueError if a sliding window has moved on past them, or if no
        recurrent state is kept from there and none can be made: amid tokens that the last step verified it can."""
        self._check_crop(slab, length)
        if self.recurrent is not None:
            self.recurrent.crop(slab, length)
        self._lengths[slab] = length

    def fork(self, slab: int, length: int | None = None) -> int:
        """The slab of a new sequence that begins with all tokens of `slab`, or with the first `length` and no more of
        their windows than it needs to go on. ValueError as `crop`."""
        if length is not None:
            self._check_crop(slab, length)
        other = self.open()
        for tensor, shape in self._each_tensor():
            if length is None:
                rows = [slice(min(self._furthest[slab] // shape.stride, tensor.shape[2]))]
            elif shape.window is None:
                rows = [slice(length // shape.stride)]
            else:
                rows = places(max(0, length - shape.window), length, tensor.shape[2])
            for each in rows:
                tensor[other, :, each] = tensor[slab, :, each]
        if self.recurrent is not None:
            self.recurrent.copy(slab, other)
            if length is not None:
                self.recurrent.crop(other, length)
        if length is None:
            self._lengths[other], self._furthest[other] = self._lengths[slab], self._furthest[slab]
        else:
            self._fill_rows(other, length)
        return other

    def select(self, chosen: Sequence[int]) -> None:
        """The sequence of slab i becomes that of slab chosen[i] (beam search)."""
        count = len(chosen)
        for tensors in self._kept.values():
            for tensor in tensors:
                tensor[:count] = tensor[list(chosen)]
        if self.recurrent is not None:
            self.recurrent.select(chosen)
        self._lengths[:count] = [self._lengths[slab] for slab in chosen]
        self._furthest[:count] = [self._furthest[slab] for slab in chosen]

    @property
    def has_ends(self) -> bool:
        """Whether some layer has what belongs to a sequence's end: positions of a window, or a state."""
        return self.recurrent is not None or any(shape.window is not None for shape in self.shapes)

    def memory(self, slab: int, first: int, end: int) -> Iterator[memoryview]:
        """The memory of positions `first` to `end` of a sequence in layers without a window, as bytes, in an order that
        follows from the shapes alone."""
        for tensor, shape in self._each_tensor():
            if shape.window is None:
                yield from _memory(tensor, slab, first // shape.stride, end // shape.stride)

    def end_memory(self, slab: int, end: int) -> Iterator[memoryview]:
        """The memory that layers with a window or a state need of a sequence of `end` positions to go on; no state
        where none of them is kept."""
        for tensor, shape in self._each_tensor():
            if shape.window is not None:
                yield from _memory(tensor, slab, max(0, end - shape.window), end)
        if self.recurrent is not None:
            yield from self.recurrent.memory(slab, end)

    def filled(self, slab: int, length: int) -> None:
        """Declares that the first `length` positions of an empty slab lie in `memory` and `end_memory`, or will before
        anything else is done with the slab."""
        self._fill_rows(slab, length)
        if self.recurrent is not None:
            self.recurrent.filled(slab, length)

    def _fill_rows(self, slab: int, length: int) -> None:
        """`filled` of keys and values."""
        self._lengths[slab] = self._furthest[slab] = length
        for keys, shape in zip(self.keys, self.shapes, strict=True):
            if shape.window is not None and length > shape.window:  # what lies before the window is not there
                self._furthest[slab] = max(self._furthest[slab], length + keys.shape[2] - shape.window)

    def _each_tensor(self) -> Iterator[tuple[Tensor, LayerShape]]:
        for tensors in filter(None, self._kept.values()):
            yield from zip(tensors, self.shapes, strict=True)

    def save(self, slab: int, file: Path) -> None:
        """Writes a sequence to a safetensors file."""
        kept = {}
        for name, tensors in self._kept.items():
            for layer, tensor in enumerate(tensors):
                rows = min(self._furthest[slab] // self.shapes[layer].stride, tensor.shape[2])
                kept[f"{name}.{layer}"] = tensor[slab, :, :rows].contiguous()
        lengths = [self._lengths[slab], self._furthest[slab]]
        if self.recurrent is not None:
            for name, layers in self.recurrent.tensors.items():
                kept |= {f"{name}.{layer}": tensor[slab].contiguous() for layer, tensor in layers.items()}
            lengths += self.recurrent.lengths[slab]
        kept["lengths"] = torch.tensor(lengths)
        save_file(kept, file)

    def load(self, file: Path) -> int:
        """Reads a sequence that `save` wrote for the same model into a new slab, which it returns. ModelError for a
        sequence of another model, PromptError for one that is longer than the slab."""
        saved = load_file(file)
        slab = self.open()
        try:
            length, furthest, *after = saved["lengths"].tolist()
            if furthest > self.context:
                raise PromptError(
                    f"{file} holds {furthest:,} tokens, memory is set aside for {self.context:,}; raise --context"
                )
            for name, tensors in self._kept.items():
                for layer, tensor in enumerate(tensors):
                    each = saved[f"{name}.{layer}"]
                    if each.dtype != tensor.dtype:
                        raise KeyError(f"{name} are {each.dtype}, not {tensor.dtype}")
                    tensor[slab, :, : each.shape[1]] = each
            if self.recurrent is not None:
                for name, layers in self.recurrent.tensors.items():
                    for layer, tensor in layers.items():
                        tensor[slab] = saved[f"{name}.{layer}"]
                self.recurrent.lengths[slab] = after
        except (KeyError, RuntimeError) as error:
            self.close(slab)
            raise ModelError(f"{file} holds keys and values of another model ({error})") from error
        except PromptError:
            self.close(slab)
            raise
        self._lengths[slab], self._furthest[slab] = length, furthest
        return slab

    def _native_slabs(self) -> dict[int, Slabs]:
        """`native` of the tensors as they are."""
        found = {}
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys.shape[1] and self.by_kernels:
                scales = (self.key_scales[layer], self.value_scales[layer]) if self.bits in CODED else None
                ring = keys.shape[2] < self.context
                found[layer] = Slabs(keys, values if values.shape[3] else None, ring, scales)
        return found

    def _check_crop(self, slab: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slab]:
            raise ValueError(f"a sequence of {self._lengths[slab]} tokens cannot be cut to {length}")
        if not self._window_holds(slab, length):
            raise ValueError(f"a sliding window cannot be wound back to {length} of {self._furthest[slab]} positions")
        if not self._state_holds(slab, length) and not (self.recurrent and self.recurrent.can_replay(slab, length)):
            raise ValueError(f"a recurrent state cannot be wound back to {length} of {self._lengths[slab]} positions")

    def _window_holds(self, slab: int, length: int, ahead: int = 0) -> bool:
        return all(
            self._furthest[slab] + ahead - keys.shape[2] <= max(0, length - (shape.window or 0))
            for shape, keys in zip(self.shapes, self.keys, strict=True)
            if shape.window is not None
        )

    def _state_holds(self, slab: int, length: int) -> bool:
        return self.recurrent is None or not length or length in self.recurrent.ends(slab)


def _memory(tensor: Tensor, slab: int, first: int, end: int) -> Iterator[memoryview]:
    """The bytes of rows of a slab, head by head, in a tensor (slabs, heads, room, columns) without empty ones."""
    if not tensor.shape[3]:
        return
    for head in tensor.view(torch.uint8).numpy()[slab]:
        yield from (head[each].data.cast("B") for each in places(first, end, tensor.shape[2]))
