"""Several sequences decoded together, in few calls: each sequence's values are what it has alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tiermoe
from native_experts import checkpoint
from small_engines import OnRoute
from tiermoe import native

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

LENGTHS = (9, 4, 7)  # of the prompts


@pytest.fixture(scope="module", params=["100%", "25%"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # of sums of three and more the order shows
    directory = checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_moe", num_experts_per_tok=4)
    loaded, _ = tiermoe.load(
        directory, memory="4GiB", bits=4, dense_bits=4, cache=request.param, preset="lru", context=128
    )
    yield loaded
    loaded.tiermoe.close()


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 128, (1, length), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_padded_batch_agrees_with_transformers_code(family: str, tmp_path: Path) -> None:
    loaded, _ = tiermoe.load(checkpoint(tmp_path, family), memory="4GiB", bits=4, dense_bits=4)
    ids = torch.randint(3, 128, (3, 20), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(20)[None] >= torch.tensor([[0], [5], [2]])).long()

    def steps(cache: Any) -> torch.Tensor:
        at = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            first = loaded(
                ids[:, :8], attention_mask=mask[:, :8], position_ids=at[:, :8], past_key_values=cache, use_cache=True
            )
            cache = first.past_key_values
            rest = [
                loaded(
                    ids[:, end - 1 : end], attention_mask=mask[:, :end], position_ids=at[:, end - 1 : end],
                    past_key_values=cache,
                ).logits[:, -1]
                for end in range(9, 21)
            ]  # fmt: skip
        return torch.stack([first.logits[:, -1], *rest])

    fast, own = steps(None), steps(DynamicCache(config=loaded.config))
    loaded.tiermoe.close()
    error = (fast.float() - own.float()).norm(dim=-1) / own.float().norm(dim=-1)
    # activations have 8 bits, and a router may decide a near tie otherwise: single tokens may differ more
    assert error.median() < 0.1


def test_few_tokens_are_computed_as_many_are(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt's experts in few native calls, and in a call each."""
    ids = prompts()[0].repeat(3, 1)
    model.tiermoe.observe(OnRoute(lambda *_: None))  # a block whose experts have all come would be one call
    with torch.no_grad():
        few = model(ids).logits
        monkeypatch.setattr("tiermoe.engine.moe.FEW_TOKENS", 1)
        monkeypatch.setattr("tiermoe.engine.expert_sums.FEW_TOKENS", 1)
        many = model(ids).logits
    model.tiermoe.observe(None)
    assert torch.equal(few, many)
