"""Memory of keys and values by pages: what a sequence takes is what is said, and it comes back."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from tiermoe.model import kv_pages
from tiermoe.model.kv_cache import KVCache, LayerShape, needs
from tiermoe.model.recurrent_states import StateShape
from tiermoe.types import Use, Workload

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
        expected = pages if kv_pages.gives_back() else 2048 * row // mmap.PAGESIZE
        assert kv.nbytes(positions) == 2 * 2 * expected * mmap.PAGESIZE


def test_a_system_that_takes_nothing_back_is_asked_for_whole_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pages, "gives_back", lambda: False)
    kv = KVCache([LayerShape(2, 128, 128)], 2, 2048, 64, torch.bfloat16)
    assert kv.nbytes(1) == kv.nbytes(2048) == 2 * 2 * 2048 * 256


def test_the_plan_counts_what_is_shared_and_no_more_than_all_take() -> None:
    shape = LayerShape(2, 128, 128)
    longest = 2 * 2 * 2048 * 256
    for asked, counted in ((3 * longest, 3 * longest), (9 * longest, 4 * longest)):
        its = needs([shape], Workload(2048, 64, 4, 2, 1, use=Use(kv_memory=asked)))
        assert sum(need.nbytes for need in its) == counted
