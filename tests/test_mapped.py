"""Slots that are the store's files, mapped: what a load does, what goes wrong, and when they are used."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from extent_files import EXPERTS, FORM, SIZE, bytes_of, flip, write_experts
from parity import logits, tokens
from tiermoe.config import Settings
from tiermoe.engine import reading
from tiermoe.engine.load import load_resolved, resolve_for
from tiermoe.engine.memory_plan import MemoryPlan, PlannedSlots, total
from tiermoe.engine.reading import Packed, open_reading, reading_for
from tiermoe.engine.service import Tiers, mapped_tiers
from tiermoe.errors import LoadError
from tiermoe.formats.expert_format import expert_format, format_from_names
from tiermoe.formats.store import open_store
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload import mapped
from tiermoe.offload.mapped import MappedFiles, populate
from tiermoe.offload.presets import Resolved, compose
from tiermoe.offload.profiles import Tables
from tiermoe.platform.process_memory import resident_bytes
from tiermoe.types import ExpertKey, Extent, Load, MoeLayer, Need, Part, Phase, Segment

FAMILIES = ["qwen3_moe", "gpt_oss"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")


def key(expert: int) -> ExpertKey:
    return ExpertKey(0, expert, 16)


def tiers_over(extents: list[Extent], lanes: int = 2) -> Tiers:
    files = MappedFiles()
    files.add([extents[0].segments[0].file])
    return mapped_tiers(files, EXPERTS, lambda key: extents[key.expert], lambda _: FORM, lanes)


def load(tiers: Tiers, expert: int, slot: int) -> Exception | None:
    tiers.link.submit(Load(key(expert), slot, urgent=True))
    return tiers.link.wait().error


@pytest.fixture(params=["populated", "read"])
def any_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that cannot be asked to bring pages in."""
    if request.param == "read":
        monkeypatch.setattr(mapped, "populate", lambda pages: False)


# loads


@pytest.mark.usefixtures("any_system")
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_slot_is_the_extent_of_its_expert(tmp_path: Path, lanes: int) -> None:
    extents = write_experts(tmp_path / "experts", shift=4096)
    tiers = tiers_over(extents, lanes)
    for slot in range(EXPERTS):
        tiers.link.submit(Load(key(EXPERTS - 1 - slot), slot, urgent=slot % 2 > 0))
    assert [tiers.link.wait().error for _ in range(EXPERTS)] == [None] * EXPERTS
    assert tiers.link.counters().bytes_read == EXPERTS * SIZE
    first = tiers.slots.buffer(EXPERTS - 1).data_ptr()
    for slot in range(EXPERTS):
        buffer, expert = tiers.slots.buffer(slot), EXPERTS - 1 - slot
        assert buffer.numpy().tobytes() == bytes_of(tmp_path / "experts", extents[expert])
        assert buffer.data_ptr() == first + expert * SIZE  # as in the file: nothing is copied
    tiers.link.close()


@pytest.mark.usefixtures("any_system")
@pytest.mark.parametrize(
    ("wrong", "early", "cause"),
    [
        (
            lambda path: flip(path, 4 * SIZE + 77),
            False,
            r"expert 4 \(16 bits\) is damaged: its bytes in .*experts do not",
        ),
        (lambda path: os.truncate(path, 4 * SIZE), False, r"expert 4 .*experts: the file ends 8,192 bytes early"),
        (lambda path: os.truncate(path, 4 * SIZE), True, "experts is truncated"),
    ],
    ids=["damaged", "cut while it is mapped", "cut before"],
)
def test_a_wrong_file_is_named_and_ends_neither_process_nor_lane(
    tmp_path: Path, wrong: Callable[[Path], None], early: bool, cause: str
) -> None:
    extents = write_experts(tmp_path / "experts")
    if early:
        wrong(tmp_path / "experts")
    tiers = tiers_over(extents, lanes=1)
    if not early:
        wrong(tmp_path / "experts")
    with pytest.raises(LoadError, match=cause):
        raise load(tiers, 4, slot=0) or AssertionError
    assert load(tiers, 3, slot=0) is None
    tiers.link.close()


def test_a_file_that_is_replaced_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    extents = write_experts(path)
    expected = bytes_of(path, extents[1])
    tiers = tiers_over(extents)
    (tmp_path / "new").write_bytes(bytes(EXPERTS * SIZE))
    os.replace(tmp_path / "new", path)
    assert load(tiers, 1, slot=0) is None
    assert tiers.slots.buffer(0).numpy().tobytes() == expected
    path.unlink()
    assert load(tiers, 2, slot=1) is None
    tiers.link.close()


def test_what_writes_into_a_slot_changes_no_file(tmp_path: Path) -> None:
    extents = write_experts(tmp_path / "experts")
    before = (tmp_path / "experts").read_bytes()
    tiers = tiers_over(extents)
    load(tiers, 1, slot=0)
    tiers.slots.buffer(0).fill_(7)
    assert (tmp_path / "experts").read_bytes() == before
    tiers.link.close()


def test_a_slot_in_use_is_given_to_no_other_expert(tmp_path: Path) -> None:
    tiers = tiers_over(write_experts(tmp_path / "experts"))
    assert load(tiers, 1, slot=0) is None
    assert load(tiers, 2, slot=0) is None  # nobody has seen the first one
    tiers.slots.buffer(0)
    assert isinstance(load(tiers, 3, slot=0), RuntimeError)
    tiers.link.close()


@linux
def test_reading_ahead_makes_pages_resident(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as handle:
        handle.truncate(96 << 20)
    files = MappedFiles()
    files.add([str(tmp_path / "large")])
    before = resident_bytes()
    files.read_ahead()
    assert files._ahead is not None
    files._ahead.join()
    assert resident_bytes() - before > 90 << 20  # what a plan counts as slots is counted by the system too
    files.close()
    assert resident_bytes() - before < 8 << 20


# when they are used


def plan_of(slots: int = EXPERTS) -> MemoryPlan:
    return MemoryPlan(
        1 << 30, "--memory", (), slot_bytes=SIZE,
        slots=slots, all_slots=EXPERTS, layer_slots=2, token_slots=2, context=64,
        pools=(PlannedSlots((4,), slots, SIZE),),
    )  # fmt: skip


def is_mapped(
    root: Path, changes: dict[str, Any] | None = None, device: str = "cpu", slots: int = EXPERTS, **packed: Any
) -> bool:
    resolved = Resolved(Settings(lanes=1), compose("lru", {"store": "disk", **(changes or {})}), Tables(), (4,))
    found = replace(Packed(write_experts(root / "experts", 4096), [FORM], own=True), **packed)
    chosen = reading_for(plan_of(slots), found, resolved, device)
    if chosen.files is not None:
        chosen.files.close()
    assert chosen.files is None or chosen.keep
    return chosen.files is not None


def test_they_are_used_where_all_fits_and_kernels_take_the_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extents = write_experts(tmp_path / "experts")
    (segment,) = extents[0].segments
    halves = Segment(segment.file, 0, SIZE // 2, 0), Segment(segment.file, SIZE // 2, SIZE // 2, SIZE // 2)
    smaller = MoeLayer("other", EXPERTS // 2, 2, (Part("weight", (64, 32)),))
    uneven = [FORM, expert_format(smaller, 16, torch.float32, "")]
    larger = MoeLayer("layer", EXPERTS, 2, (Part("weight", (64, 256)),))
    turned = format_from_names(larger, 4, torch.bfloat16, {"weight": "transposed4/awq/f16/32/1"})
    assert turned.widened
    assert is_mapped(tmp_path)
    assert not is_mapped(tmp_path, slots=EXPERTS - 1)
    assert not is_mapped(tmp_path, {"store": "memory"})
    assert not is_mapped(tmp_path, {"unit": "neuron", "theta": 0.1})
    assert not is_mapped(tmp_path, device="cuda")
    assert not is_mapped(tmp_path, own=False)
    assert not is_mapped(tmp_path, extents=[Extent(halves, "")])
    assert not is_mapped(tmp_path, extents=[Extent((replace(segment, offset=64),), "")])
    assert not is_mapped(tmp_path, formats=[turned])
    assert not is_mapped(tmp_path, {"allotment": "even"}, formats=uneven)
    assert is_mapped(tmp_path, {"allotment": "pool"}, formats=uneven)
    monkeypatch.setattr(reading, "resident_bytes", lambda: 0)
    monkeypatch.setattr(reading, "page_cache_room", lambda: EXPERTS * SIZE * 10 // 9 + 9)
    assert is_mapped(tmp_path)  # no copy needs room
    monkeypatch.setattr(reading, "page_cache_room", lambda: EXPERTS * SIZE)
    assert not is_mapped(tmp_path)


def test_a_file_system_that_maps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(mmap, "mmap", refused)
    assert not is_mapped(tmp_path)


# engines


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def open_(directory: Path, **options: Any) -> Any:
        made.append(tiermoe.load(directory, memory="4GiB", device="cpu", lanes=2, **options)[0])
        return made[-1]

    yield open_
    for model in made:
        model.tiermoe.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_depends_on_it(
    family: str,
    dtype: torch.dtype,
    tiny_model: Callable[..., Path],
    opened: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, ids, found = tiny_model(family, dtype), tokens(1, 9), []
    for room in (1 << 40, 0):
        monkeypatch.setattr(reading, "page_cache_room", lambda room=room: room)
        model = opened(directory, bits=4, dense_bits=4)
        assert model.tiermoe.stats()["mapped"] is bool(room)
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)
        found.append((logits(model, family, ids), answer))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_what_does_not_fit_is_copied_and_evicted_as_before(
    tiny_model: Callable[..., Path], opened: Callable[..., Any]
) -> None:
    directory, ids = tiny_model("qwen3_moe", torch.float32), tokens(1, 9)
    half, whole = (opened(directory, bits=4, cache=cache, preset="lru") for cache in ("50%", "100%"))
    assert [model.tiermoe.stats()["mapped"] for model in (half, whole)] == [False, True]
    assert torch.equal(logits(half, "qwen3_moe", ids), logits(whole, "qwen3_moe", ids))


def test_a_damaged_expert_stops_an_answer_and_not_the_engine(
    tiny_model: Callable[..., Path], opened: Callable[..., Any], tmp_path: Path
) -> None:
    directory, ids = tiny_model("qwen3_moe", torch.float32), tokens(1, 40)
    store = tmp_path / "store"
    opened(directory, bits=4, store=store).tiermoe.close()
    extent = next(iter(open_store(store).precisions.values())).layers[0].extents[2]
    flip(Path(extent.segments[0].file), extent.segments[0].offset + 5)
    model = opened(directory, bits=4, store=store)
    assert model.tiermoe.stats()["mapped"]
    with pytest.raises(LoadError, match=r"layer 0, expert 2 \(4 bits\) is damaged"):
        logits(model, "qwen3_moe", ids)
    flip(Path(extent.segments[0].file), extent.segments[0].offset + 5)
    logits(model, "qwen3_moe", ids)


def test_a_damaged_dense_layer_is_named(
    tiny_model: Callable[..., Path], opened: Callable[..., Any], tmp_path: Path
) -> None:
    directory, store = tiny_model("qwen3_moe", torch.float32), tmp_path / "store"
    opened(directory, bits=4, dense_bits=4, store=store).tiermoe.close()
    flip(next(store.glob("dense-*.bin")), 5)
    with pytest.raises(LoadError, match=r"dense layer .* is damaged or cannot be read; 'tiermoe pack MODEL"):
        opened(directory, bits=4, dense_bits=4, store=store)


def test_files_are_read_ahead_where_loading_leaves_memory_for_it(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[MappedFiles] = []
    monkeypatch.setattr(MappedFiles, "read_ahead", lambda files: ahead.append(files))
    blueprint = inspect_model(tiny_model("qwen3_moe", torch.float32), "")
    resolved = resolve_for(blueprint, Settings(memory=4 << 30, lanes=1))
    model = load_resolved(blueprint, resolved)
    plan, store = model.tiermoe.plan, model.tiermoe.store
    assert len(ahead) == 1
    model.tiermoe.close()
    for loading, expected in ((plan.budget - plan.experts, 2), (plan.budget - plan.experts + 1, 2)):
        running = [need for need in plan.needs if need.phase is not Phase.LOADING]
        needs = (*running, Need("dense", loading - total(running, Phase.LOADING), Phase.LOADING))
        opened = open_reading(replace(plan, needs=needs), store, resolved, blueprint, "cpu")
        assert opened.files is not None
        opened.files.close()
        assert len(ahead) == expected


@linux
def test_populating_what_is_no_memory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    files = MappedFiles()
    files.add([str(tmp_path / "file")])
    extent = Extent((Segment(str(tmp_path / "file"), 0, 8192, 0),), "")
    assert populate(files.view(extent))
    os.truncate(tmp_path / "file", 4096)
    assert not populate(files.view(extent))


@pytest.mark.parametrize("file", ["dense", "experts"])
def test_a_file_that_is_cut_short_in_use_is_an_error(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Where a page of it were touched, the process would end."""
    monkeypatch.setattr(mapped, "CHECK_EVERY_S", 0.0)
    with tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, store=tmp_path / "store") as (model, tokenizer):
        inputs = tokenizer("Once upon a time", return_tensors="pt")
        whole = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert model.tiermoe.stats()["mapped"]
        cut = next(path for path in sorted((tmp_path / "store").iterdir()) if path.name.startswith(file))
        content = cut.read_bytes()
        os.truncate(cut, 4096)
        for _ in range(2):
            with pytest.raises(LoadError, match=rf"{cut.name} has become [0-9,]+ bytes shorter"):
                model.generate(**inputs, max_new_tokens=4, do_sample=False)
        cut.write_bytes(content)
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), whole)
