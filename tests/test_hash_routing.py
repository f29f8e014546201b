"""Layers that are routed by the token alone (DeepSeek-V4's first ones) are prefetched exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiermoe
from native_experts import checkpoint as native_checkpoint
from parity import put_decoded_experts
from small_engines import OnRoute, finish
from tiermoe.metrics import ExpertCounts
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import Routed
from tiny import oracle, write

FAMILY = "deepseek_v4"
HASHED = 2  # of three layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(FAMILY), FAMILY, torch.float32)


@pytest.fixture
def model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Prefetches two layers ahead into a cache of less than half the experts, over a link that is fast enough."""
    loaded, _ = tiermoe.load(
        checkpoint, memory="4GiB", device="cpu", bits=16, cache="40%", chunk=4, preset="lru",
        set={"prefetch": "hash", "ahead": HASHED}, warm=False,
    )  # fmt: skip
    begin = Scheduler.begin_pass

    def prefetched(self: Scheduler, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        finish(loaded)

    monkeypatch.setattr(Scheduler, "begin_pass", prefetched)
    yield loaded
    loaded.tiermoe.close()


def counted(model: Any) -> list[ExpertCounts]:
    """The counts when the hashed layers of each pass begin, and when the first layer after them does."""
    seen: list[ExpertCounts] = []
    controller = model.tiermoe.loader

    def note(routed: Routed, _: torch.Tensor) -> None:
        if routed.layer in (0, HASHED):
            seen.append(controller.counts.copy())

    model.tiermoe.observe(OnRoute(note))
    return seen


def test_every_expert_of_a_hashed_layer_is_there_when_it_is_asked_for(model: Any, checkpoint: Path) -> None:
    seen = counted(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
    first = seen[1].minus(seen[0])
    assert (first.hits, first.prefetched, first.misses) == (HASHED * 3, HASHED * 3, 0), "an empty cache before"

    seen.clear()
    ids = torch.tensor([[7, 11, 90, 4, 33, 60, 21, 8, 70]])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(
        model.generate(ids, **options), oracle(checkpoint, FAMILY, torch.float32).generate(ids, **options)
    )
    _, *decoded = (after.minus(before) for before, after in zip(seen[::2], seen[1::2], strict=True))
    assert len(decoded) == 11
    assert sum(counts.misses for counts in decoded) == 0
    assert sum(counts.prefetched for counts in decoded) > 0


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, "olmoe", torch.float32)
    with pytest.raises(tiermoe.ConfigError, match="routed by a hash of the token, and this model has none"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, preset="lru", set={"prefetch": "hash"})


@pytest.fixture(scope="module", params=[16, 4], ids=["torch", "kernels"])
def naming_twice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint whose tokens name one expert twice in their first layers, every third token three times; and the
    bits that its experts get."""
    directory, bits = tmp_path_factory.mktemp("twice"), request.param
    if bits == 16:
        write(directory, FAMILY, torch.float32)
    else:
        native_checkpoint(directory, FAMILY, num_key_value_heads=1)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name, table in tensors.items():
        if name.endswith("tid2eid"):
            table[:, 2] = table[:, 0]
            table[::3] = table[::3, :1]
    save_file(tensors, file, metadata={"format": "pt"})
    return directory, bits


@pytest.mark.parametrize("cache", ["40%", "100%"])
def test_an_expert_that_is_named_twice_counts_with_both_weights(cache: str, naming_twice: tuple[Path, int]) -> None:
    """A token alone, twice, so that all experts of the second time are in memory; few tokens; many."""
    directory, bits = naming_twice
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=bits, dense_bits=16, cache=cache)
    plain = oracle(directory, FAMILY, torch.float32)
    if bits != 16:
        put_decoded_experts(ours.tiermoe, plain)
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(4))
    for some in (ids[:, :1], ids[:, :1], ids[:, 1:2], ids[:, :3], ids):
        with torch.no_grad():
            mine, theirs = ours(input_ids=some).logits.float(), plain(input_ids=some).logits
        error = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        # rounded to bfloat16, a router may decide a near tie otherwise
        assert error.max() < 1e-5 if bits == 16 else error.median() < 0.05
    ours.tiermoe.close()
