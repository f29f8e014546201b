"""MoBiLE's decoding against the plain model decoded by hand: K/2 experts, and all K again where it is unsure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from tiny import oracle, write

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2"]
LENGTH = 10


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(3, 128, (rows, columns), generator=torch.Generator().manual_seed(5))


def set_k(model: Any, change: dict[int, int] | None) -> dict[int, int]:
    """Gives every router a number of experts; returns what they had."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    before = {id(router): router.top_k for router in routers}
    for router in routers:
        router.top_k = change[id(router)] if change else (router.top_k + 1) // 2
    return before


@torch.no_grad()
def decoded_by_hand(model: Any, ids: torch.Tensor, gamma: float) -> tuple[list[int], torch.Tensor, int]:
    """(tokens, logits of each step, fallbacks) of greedy decoding, one sequence."""
    result = model(ids, use_cache=True)
    logits, cache = [result.logits[:, -1]], result.past_key_values
    fallbacks = 0
    for _ in range(LENGTH - 1):
        token = logits[-1].argmax(-1, keepdim=True)
        spare = copy.deepcopy(cache)
        before = set_k(model, None)
        result = model(token, past_key_values=spare)
        set_k(model, before)
        if float(result.logits[:, -1].softmax(-1).max()) <= gamma:
            fallbacks += 1
            result = model(token, past_key_values=cache)
        else:
            cache = spare
        logits.append(result.logits[:, -1])
    return [int(step.argmax()) for step in logits], torch.cat(logits), fallbacks


def generated(model: Any, ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequences, logits (steps, rows, vocabulary)) of generate()."""
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, eos_token_id=None,
        **{"do_sample": False, **options}, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return done.sequences[:, ids.shape[1] :], torch.stack(done.logits)


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Any]:
    """(load with options, the oracle)."""
    directory = tiny_model(request.param, torch.float32)
    loaded: list[Any] = []

    def load(**options: Any) -> Any:
        options = {"memory": "4GiB", "device": "cpu", "bits": 16, "cache": "60%", "preset": "mobile", **options}
        loaded.append(tiermoe.load(directory, **options)[0])
        return loaded[-1]

    yield load, oracle(directory, request.param, torch.float32)
    for model in loaded:
        model.tiermoe.close()


def test_equals_the_plain_model_decoded_by_hand(pair: Any) -> None:
    load, plain = pair
    ids = tokens(1, 6)
    confidences = decoded_by_hand(plain, ids, 0.0)[1].softmax(-1).amax(-1)
    gamma = float(confidences[1:].median())  # about half of the tokens fall back
    expected, logits, fallbacks = decoded_by_hand(plain, ids, gamma)
    assert 0 < fallbacks < LENGTH - 1
    model = load(set={"gamma": gamma})
    found, found_logits = generated(model, ids)
    assert found[0].tolist() == expected
    assert (found_logits[:, 0] - logits).abs().max() <= 1e-4 * logits.abs().max()
    assert model.tiermoe.stats()["fallback_ratio"] == fallbacks / (LENGTH - 1)


def test_always_falling_back_is_exact(pair: Any) -> None:
    load, _ = pair
    ids = tokens(2, 6)
    one, two = load(set={"gamma": 1.0}), load(preset="lru")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(generated(one, ids), generated(two, ids), strict=True))
    assert one.tiermoe.stats()["discarded_hits"] + one.tiermoe.stats()["discarded_misses"] > 0


def load(directory: Path, **options: Any) -> Any:
    return tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, preset="mobile", **options)[0]


def test_in_a_batch_only_the_unsure_rows_fall_back(mixtral: Path) -> None:
    """Every row of a batch is decoded as it is alone."""
    rows = tokens(3, 6)
    little = load(mixtral, set={"routing": "half"})
    gamma = float(generated(little, rows)[1][1:].softmax(-1).amax(-1).median())
    little.tiermoe.close()
    model = load(mixtral, set={"gamma": gamma})
    together, logits = generated(model, rows)
    ratio = model.tiermoe.stats()["fallback_ratio"]
    assert 0 < ratio < 1
    for row in range(3):
        alone, alone_logits = generated(model, rows[row : row + 1])
        assert alone[0].tolist() == together[row].tolist()
        assert (alone_logits[:, 0] - logits[:, row]).abs().max() < 1e-3
    model.tiermoe.close()


@pytest.mark.parametrize("options", [{"cache_implementation": "static", "disable_compile": True}, {}])
def test_any_cache_is_put_back(mixtral: Path, options: dict[str, Any]) -> None:
    model = load(mixtral, set={"gamma": 0.2})
    ids = tokens(1, 6)
    expected = generated(model, ids)[0]
    assert torch.equal(generated(model, ids, **options)[0], expected)
    model.tiermoe.close()


def test_sampling_repeats_with_its_seed(mixtral: Path) -> None:
    model = load(mixtral, set={"gamma": 0.2})
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(generated(model, tokens(2, 6), do_sample=True)[0])
    assert torch.equal(*results)
    model.tiermoe.close()


def test_the_prompts_last_token_alone_in_its_chunk_still_runs_with_all_experts(mixtral: Path) -> None:
    little, whole = load(mixtral, set={"routing": "half"}, chunk=4), load(mixtral, set={"routing": "all"}, chunk=4)
    ids = tokens(1, 9)
    assert torch.equal(generated(little, ids)[1][0], generated(whole, ids)[1][0])
    little.tiermoe.close()
    whole.tiermoe.close()


def test_half_the_experts_of_one_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, "mixtral", torch.float32, num_experts_per_tok=1)
    with pytest.raises(tiermoe.ConfigError, match="this model uses one"):
        load(directory)
