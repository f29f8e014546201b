"""Slabs of keys and values: opened, cropped, forked, saved; and their memory by pages, which is what is said and comes
back."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch

from tiermoe.batch import Batch, Row, decode, prompt
from tiermoe.errors import ModelError, PromptError
from tiermoe.model.cache.kv import KVCache, LayerShape, cache_bytes, needs
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.cache.recurrent import StateShape
from tiermoe.model.rotary import Rotary
from tiermoe.model.step import Step
from tiermoe.types import Use, Workload

WHOLE, SLIDING = LayerShape(2, 4, 6), LayerShape(1, 4, 4, window=3)


def cache(slabs: int = 2, context: int = 16, step: int = 4) -> KVCache:
    return KVCache([WHOLE, SLIDING], slabs, context, step, torch.float32)


def write(kv: KVCache, row: Row) -> list[torch.Tensor]:
    """Random keys of a row in both layers; returns them, (T, heads, columns) each."""
    written = []
    for layer, shape in enumerate(kv.shapes):
        keys = torch.randn(len(row.tokens), shape.heads, shape.key_columns)
        write_rows(kv.keys[layer], row, keys)
        write_rows(kv.values[layer], row, torch.randn(len(row.tokens), shape.heads, shape.value_columns))
        written.append(keys)
    kv.end_write(row.slab, row.end)
    return written


def test_a_window_keeps_its_last_positions_in_a_ring() -> None:
    kv = cache()
    slab = kv.open()
    rows = [prompt(slab, range(4), first) for first in (0, 4, 8)]
    all_keys = [torch.cat(each) for each in zip(*(write(kv, row) for row in rows), strict=True)]
    for layer, window in ((0, None), (1, 3)):
        found = read_rows(kv.keys[layer], rows[-1], window).transpose(0, 1)
        begin = 0 if window is None else 8 - window + 1
        assert torch.equal(found, all_keys[layer][begin:12])
    assert kv.keys[1].shape[2] == 3 + 4


def test_bytes_count_the_window() -> None:
    kv = cache(slabs=1)
    held_bytes = sum(tensor.nbytes for tensor in [*kv.keys, *kv.values])
    assert cache_bytes([WHOLE, SLIDING], 16, 4, 4) == held_bytes


def test_a_crop_forgets_the_end_and_refuses_what_a_window_no_longer_holds() -> None:
    kv = cache()
    slab = kv.open()
    for first in (0, 4, 8):
        write(kv, prompt(slab, range(4), first))
    with pytest.raises(ValueError, match="wound back to 7"):
        kv.crop(slab, 7)
    kv.crop(slab, 8)
    assert kv.length(slab) == 8
    with pytest.raises(ValueError, match="cannot be cut to 9"):
        kv.crop(slab, 9)


def test_a_fork_of_a_beginning_goes_on_from_there() -> None:
    """It holds what its windows need of a longer sequence, and no more."""
    kv = cache()
    slab = kv.open()
    for first in (0, 3, 6):
        write(kv, prompt(slab, range(3), first))
    with pytest.raises(ValueError, match="wound back to 4"):
        kv.fork(slab, 4)
    other = kv.fork(slab, 5)
    assert kv.length(other) == 5
    for layer, window in ((0, None), (1, 3)):
        row, same = prompt(slab, range(1), 4), prompt(other, range(1), 4)
        assert torch.equal(read_rows(kv.keys[layer], same, window), read_rows(kv.keys[layer], row, window))
    write(kv, prompt(other, range(4), 5))
    assert (kv.length(slab), kv.length(other)) == (9, 9)
    kv.close(other)
    assert kv.open() == other


def test_slabs_run_out_and_come_back() -> None:
    kv = cache(slabs=1)
    slab = kv.open()
    write(kv, prompt(slab, range(4)))
    with pytest.raises(PromptError, match="all 1 sequences"):
        kv.open()
    kv.close(slab)
    assert kv.length(kv.open()) == 0


def test_more_room_keeps_what_is_there() -> None:
    kv = KVCache([WHOLE], 1, 8, 4, torch.float32, bits=8)
    slab, keys, values = kv.open(), torch.randn(4, 2, 4), torch.randn(4, 2, 6)
    kv.write(0, prompt(slab, range(4)), keys, values)
    before = kv.read(0, prompt(slab, range(4)), None)
    kv.reserve(9)
    assert kv.context == 16
    assert kv.key_scales[0].shape[2] == kv.keys[0].shape[2] == 16
    for kept, again in zip(before, kv.read(0, prompt(slab, range(4)), None), strict=True):
        assert torch.equal(kept, again)
    assert torch.allclose(before[0], keys.transpose(0, 1), atol=0.02)
    assert torch.allclose(before[1], values.transpose(0, 1), atol=0.02)


def test_sequences_change_places() -> None:
    kv = cache()
    slabs = [kv.open(), kv.open()]
    keys = [write(kv, prompt(slab, range(2 + slab)))[0] for slab in slabs]
    kv.select([1, 1])
    assert torch.equal(kv.keys[0][0, :, :3], keys[1].transpose(0, 1))
    assert kv.length(0) == 3


def test_a_sequence_of_another_model_is_refused(tmp_path: Path) -> None:
    kv = cache()
    slab = kv.open()
    write(kv, prompt(slab, range(4)))
    kv.save(slab, tmp_path / "sequence")
    other = KVCache([LayerShape(3, 4, 6), SLIDING], 1, 16, 4, torch.float32)
    with pytest.raises(ModelError, match="another model"):
        other.load(tmp_path / "sequence")
    assert other.open() == 0
    small = KVCache([WHOLE, SLIDING], 1, 2, 4, torch.float32)
    with pytest.raises(PromptError, match="raise --context"):
        small.load(tmp_path / "sequence")


def test_a_token_s_angles_follow_its_own_position() -> None:
    """Phi's factor is another one beyond the length that it was trained for: a neighbour there changes nothing."""
    rotary = Rotary(torch.tensor([1.0, 0.5]), 1.0, torch.float32, beyond=(8, 1.5))
    cache = KVCache([WHOLE], 2, 16, 4, torch.float32)
    rows = [decode(cache.open(), 3, 7), decode(cache.open(), 12, 9)]
    together, *alone = (Step(Batch(tuple(each)), cache, rotary) for each in (rows, rows[:1], rows[1:]))
    assert torch.equal(together.cos, torch.cat([each.cos for each in alone]))
    assert torch.equal(together.sin, torch.cat([each.sin for each in alone]))
    squares = together.cos.square() + together.sin.square()
    assert torch.allclose(squares, torch.tensor([[1.0], [2.25]]).expand_as(squares))


# memory by pages

SHAPES = [
    LayerShape(2, 128, 128),
    LayerShape(3, 40, 24),
    LayerShape(1, 64, 64, window=100),
    LayerShape(0, 0, 0, state=StateShape(3, 50, 2, 16, 16)),
]


def resident(kv: KVCache) -> int:
    """Bytes of pages that are there, as the system says."""
    tensors = [*kv.keys, *kv.values, *kv.key_scales, *kv.value_scales]
    if kv.recurrent is not None:
        tensors += [tensor for kept in kv.recurrent.tensors.values() for tensor in kept.values()]
    libc, found = ctypes.CDLL(None), 0
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    for tensor in tensors:
        there = ctypes.create_string_buffer(-(-tensor.nbytes // mmap.PAGESIZE))
        if tensor.nbytes:
            assert libc.mincore(tensor.data_ptr(), tensor.nbytes, there) == 0
        found += mmap.PAGESIZE * sum(page & 1 for page in there.raw)
    return found


def fill(kv: KVCache, slab: int, positions: int) -> None:
    for tensors in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
        for tensor in tensors:
            tensor[slab, :, :positions] = 1
    for kept in kv.recurrent.tensors.values() if kv.recurrent is not None else ():
        for tensor in kept.values():
            tensor[slab] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are there")
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(("context", "positions"), [(2048, 17), (2048, 2048), (3001, 1000)])
def test_a_sequence_takes_what_is_said_and_gives_it_back(bits: int, context: int, positions: int) -> None:
    kv = KVCache(SHAPES, 3, context, 64, torch.bfloat16, bits)
    assert resident(kv) == 0
    slabs = [kv.open() for _ in range(3)]
    for slab in slabs:
        fill(kv, slab, positions)
    taken = resident(kv)
    assert taken <= 3 * kv.nbytes(positions) <= 1.5 * taken
    kv.close(slabs[1])
    assert resident(kv) <= 2 * kv.nbytes(positions) + between(context, bits)
    for tensor in kv.keys:
        assert (tensor[slabs[0], :, :positions] == 1).all()
        assert (tensor[slabs[2], :, :positions] == 1).all()
    kv.close(slabs[0])
    kv.close(slabs[2])
    assert resident(kv) <= between(context, bits)


def between(context: int, bits: int) -> int:
    load = Workload(context, 64, 3, 2, 1, bits, Use(kv_memory=1 << 40))
    return next(need.nbytes for need in needs(SHAPES, load) if need.what == "pages between them")


def test_what_ends_at_pages_is_exact() -> None:
    kv = KVCache([LayerShape(2, 128, 128)], 2, 2048, 64, torch.bfloat16)
    row = 2 * 128
    for positions in (1, 16, 17, 2048):
        pages = -(-positions * row // mmap.PAGESIZE)
        assert kv.nbytes(positions) == 2 * 2 * pages * mmap.PAGESIZE


def test_the_plan_counts_what_is_shared_and_no_more_than_all_take() -> None:
    shape = LayerShape(2, 128, 128)
    longest = 2 * 2 * 2048 * 256
    for asked, counted in ((3 * longest, 3 * longest), (9 * longest, 4 * longest)):
        its = needs([shape], Workload(2048, 64, 4, 2, 1, use=Use(kv_memory=asked)))
        assert sum(need.nbytes for need in its) == counted
