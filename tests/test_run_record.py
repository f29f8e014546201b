"""What a run leaves to the next one: the file, the engine that begins with it, and that no token depends on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from fake_link import FakeLink, Said
from patience import until
from tiermoe import native
from tiermoe.engine.service import History
from tiermoe.formats.store import Source, Store
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.policies.prefetch_trial import PAIRS
from tiermoe.offload.presets import compose
from tiermoe.offload.run_record import RunRecord, read_record, record_path, write_record
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import ExpertKey, MoeLayer, Routed
from tiny import write

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


# the file


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, record = record_path(tmp_path, "4-hqq"), RunRecord([[1.5, 0.0], [2.0, 7.0]], {"here": True})
    assert read_record(path, "abc", [2, 2]) == RunRecord()
    write_record(path, "abc", record)
    assert read_record(path, "abc", [2, 2]) == record
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"}, {"version": 2}, {"fingerprint": "another"}, {"uses": [[1.0, 2.0]]}, {"uses": 3},
        {"uses": [[1.0, 2.0], [1.0, -1.0]]}, {"uses": [[1.0, 2.0], [1.0, float("inf")]]}, {"uses": [[1, 2], [1, "x"]]},
        {"prefetching": []},
    ],
)  # fmt: skip
def test_a_foreign_one_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    path = record_path(tmp_path, "4-hqq")
    write_record(path, "abc", RunRecord([[1.0, 2.0], [3.0, 4.0]]))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_record(path, "abc", [2, 2]) == RunRecord()


def test_a_torn_one_is_passed_over(tmp_path: Path) -> None:
    path = record_path(tmp_path, "4-hqq")
    write_record(path, "abc", RunRecord([[1.0, 2.0], [3.0, 4.0]], {"here": False}))
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert read_record(path, "abc", [2, 2]) == RunRecord()
    path.write_bytes(b"\xff\xfe" + whole)
    assert read_record(path, "abc", [2, 2]) == RunRecord()


def test_where_it_cannot_be_written_nothing_happens(tmp_path: Path) -> None:
    write_record(tmp_path / "missing" / "runs.json", "abc", RunRecord())
    (tmp_path / "runs.json").mkdir()
    write_record(tmp_path / "runs.json", "abc", RunRecord())
    assert [file.name for file in tmp_path.iterdir()] == ["runs.json"]


# what is written


def store_in(root: Path) -> Store:
    layers = [MoeLayer(f"layers.{index}", 4, 2, ()) for index in range(3)]
    return Store(root, Source("tiny", "abc", "qwen3_moe", "bfloat16"), layers)


def scheduler() -> Scheduler:
    shape = ModelShape([4, 4, 4], [2, 2, 2])
    return assemble(compose("default"), shape, [PrecisionSlots((4,), 6)], FakeLink(), 4)


def test_it_is_written_once_when_its_owner_ends(tmp_path: Path) -> None:
    class Owner: ...

    running, owner = scheduler(), Owner()
    history = History(store_in(tmp_path), "4-hqq", "here")
    history.keep(owner, running)
    list(running.run_layer(Routed(1, "prefill", [[0, 2], [2, 3]], [[], []]), Said()))
    assert list(tmp_path.iterdir()) == []
    del owner
    assert History(store_in(tmp_path), "4-hqq", "here").uses == [[0, 0, 0, 0], [1, 0, 2, 1], [0, 0, 0, 0]]
    assert History(store_in(tmp_path), "8", "here").uses == []


def test_a_run_that_used_nothing_writes_nothing(tmp_path: Path) -> None:
    running = scheduler()
    History(store_in(tmp_path), "4-hqq", "here").keep(running.uses, running)()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pays", [True, False])
def test_what_the_trial_found_is_where_the_next_begins(tmp_path: Path, pays: bool) -> None:
    running, history = scheduler(), History(store_in(tmp_path), "4-hqq", "here")
    leave = history.keep(running.uses, running)
    running.uses.counts[0][1] = 3
    assert running.trial is not None
    running.trial._pairs.extend([(1.0, 2.0) if pays else (2.0, 1.0)] * PAIRS)
    leave()
    leave()
    later = History(store_in(tmp_path), "4-hqq", "here")
    assert later.uses[0] == [0, 3, 0, 0]
    assert later.trial(lambda layer_s: not pays).on is pays
    assert History(store_in(tmp_path), "4-hqq", "elsewhere").trial(lambda layer_s: True).on is False


# the engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32}  # which the kernels take
    return write(tmp_path_factory.mktemp("recorded"), "qwen3_moe", torch.bfloat16, **sizes)


class Run:
    """One loading of the checkpoint, in a store of its own, and what it answers."""

    def __init__(self, checkpoint: Path, store: Path, wait: bool = True, **options: Any) -> None:
        options = {"memory": "4GiB", "device": "cpu", "bits": 4, "lanes": 2, "store": store, **options}
        self.model, _ = tiermoe.load(checkpoint, **options)
        self.engine = self.model.tiermoe
        if wait:
            until(lambda: self.engine.loader.collect() or not self.engine.loader.filling)

    def answer(self, tokens: int = 12) -> torch.Tensor:
        mask = torch.ones_like(IDS)
        found = self.model.generate(IDS, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        assert isinstance(found, torch.Tensor)
        return found

    def here(self) -> set[ExpertKey]:
        keys = (ExpertKey(layer, expert, 4) for layer in range(3) for expert in range(8))
        return {key for key in keys if self.engine.loader.cache.slot(key) is not None}


@pytest.fixture
def cold(checkpoint: Path, tmp_path: Path) -> Iterator[torch.Tensor]:
    run = Run(checkpoint, tmp_path, warm=False)
    assert run.here() == set()
    yield run.answer()
    run.engine.close()


def test_all_that_fits_is_there_before_anything_runs(checkpoint: Path, tmp_path: Path, cold: torch.Tensor) -> None:
    for dense_bits in (16, 4):  # through the layers' forwards, and through those that know what has settled
        run = Run(checkpoint, tmp_path, dense_bits=dense_bits)
        assert len(run.here()) == 24
        answer, stats = run.answer(), run.engine.stats()
        assert (stats["expert_misses"], stats["warmed_experts"], stats["speculative_loads"]) == (0, 24, 0)
        assert stats["expert_hits"] > 0
        assert stats["bytes_read"] == 24 * stats["slot_bytes"]
        if dense_bits == 4:
            assert torch.equal(answer, cold)
        run.engine.close()


@pytest.mark.skipif(not native.available(), reason="no native kernels here")
def test_nothing_is_decided_of_what_has_come_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    run = Run(checkpoint, tmp_path, dense_bits=4)
    run.engine.loader.report_warmed(24)
    uses = [list(row) for row in run.engine.scheduler.uses.counts]
    run.answer()
    assert run.engine.scheduler.uses.counts == uses
    assert run.engine.stats()["expert_hits"] > 0
    run.engine.close()


def test_an_answer_does_not_wait_for_it(checkpoint: Path, tmp_path: Path, cold: torch.Tensor) -> None:
    run = Run(checkpoint, tmp_path, wait=False, lanes=1)
    assert torch.equal(run.answer(), cold)
    run.engine.close()


def test_the_next_run_begins_with_the_most_used(checkpoint: Path, tmp_path: Path, cold: torch.Tensor) -> None:
    first = Run(checkpoint, tmp_path, cache="50%")
    assert first.here() == set()
    assert torch.equal(first.answer(), cold)
    first.engine.close()
    (path,) = tmp_path.glob("runs-4-*.json")
    uses = json.loads(path.read_text())["uses"]
    assert all(sum(row) == (8 + 11) * 3 for row in uses)  # eight tokens of the prompt, eleven more, three experts each
    second = Run(checkpoint, tmp_path, cache="50%")
    most = {(layer, e) for layer, row in enumerate(uses) for e in sorted(range(8), key=lambda e: -row[e])[:4]}
    assert {(key.layer, key.expert) for key in second.here()} == {(at, e) for at, e in most if uses[at][e]}
    assert torch.equal(second.answer(), cold)
    stats = second.engine.stats()
    second.engine.close()
    assert stats["warmed_experts"] == len(most)
    assert json.loads(path.read_text())["uses"] != uses


def test_a_cold_run_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    run = Run(checkpoint, tmp_path, warm=False)
    run.answer()
    run.engine.close()
    assert list(tmp_path.glob("runs-*")) == []


def test_warm_is_yes_or_no(checkpoint: Path) -> None:
    with pytest.raises(tiermoe.ConfigError, match="warm must be True or False, got 'yes'"):
        tiermoe.load(checkpoint, warm="yes")
