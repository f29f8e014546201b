"""Invariant 1: with the same packed weights nothing depends on the cache, on prefetching, on lanes or on timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe

PROMPT = "The king looked at the little boat and said that it was time to go. "


def outputs(directory: Path, text: str = PROMPT, **options: Any) -> tuple[torch.Tensor, list[int]]:
    """(logits of the prompt and of 24 greedy tokens, those tokens)."""
    model, tokenizer = tiermoe.load(directory, memory="4GiB", device="cpu", **options)
    ids = tokenizer(text, return_tensors="pt").input_ids
    result = model.generate(ids, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
    prompt_logits = model(ids).logits[0]
    stats = model.tiermoe.stats()
    model.tiermoe.close()
    assert stats["expert_misses"] + stats["warmed_experts"] > 0
    return torch.cat([prompt_logits, *result.logits]), result.sequences[0].tolist()


@pytest.mark.parametrize("bits", [4, 8, 16, 3, 2])
def test_cache_size_prefetch_and_lanes_change_no_bit(shipped: Path, bits: int) -> None:
    reference_logits, reference_tokens = outputs(shipped, bits=bits, lanes=1)
    variants: list[dict[str, Any]] = [
        {"cache": "1.6%", "lanes": 2},  # one layer's four experts
        {"lanes": 2, "warm": False},
        {"cache": "10%", "lanes": 8},
        {"cache": "10%"},  # how many is learned
        {"cache": "10%", "lanes": 3, "preset": "mixtral-offload"},
        {"cache": "45%", "lanes": 1, "preset": "mixtral-offload"},
        {"cache": "45%", "lanes": 1},  # the one before has left a record
        {"cache": "45%", "lanes": 1, "warm": False},
    ]
    for options in variants if bits == 4 else variants[:4]:
        logits, tokens = outputs(shipped, bits=bits, **options)
        assert tokens == reference_tokens, options
        assert torch.equal(logits, reference_logits), options


def test_batches_and_sampling_do_not_depend_on_the_cache(shipped: Path) -> None:
    results = []
    for cache in ("2%", "30%", "100%"):
        model, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache=cache)
        tokenizer.pad_token = tokenizer.eos_token
        batch = tokenizer([PROMPT, "A cat", "Three men in a"], return_tensors="pt", padding=True, padding_side="left")
        torch.manual_seed(3)
        results.append(model.generate(**batch, max_new_tokens=12, do_sample=True, temperature=0.9))
        model.tiermoe.close()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_chunk_is_a_setting_and_not_derived_from_the_budget(shipped: Path) -> None:
    text = PROMPT * 6
    first = outputs(shipped, text=text, bits=4, chunk=16, cache="5%")
    second = outputs(shipped, text=text, bits=4, chunk=16)
    assert first[1] == second[1]
    assert torch.equal(first[0], second[0])


def test_each_expert_is_read_once_a_chunk(shipped: Path) -> None:
    """EdgeMoE's re-batching: a prompt of many tokens costs each expert at most one read, whatever the cache."""
    model, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache="1.6%")
    ids = tokenizer(PROMPT * 8, return_tensors="pt").input_ids
    before = model.tiermoe.stats()
    model(ids)
    after = model.tiermoe.stats()
    asked = after["expert_hits"] + after["expert_misses"] - before["expert_hits"] - before["expert_misses"]
    assert asked <= 8 * 32
    assert after["bytes_read"] - before["bytes_read"] <= 8 * 32 * after["slot_bytes"]
    model.tiermoe.close()
