"""Short convolutions against transformers' eager layer on the same weights, and what they ask of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from tiermoe.batch import Batch, prompt
from tiermoe.config import settings
from tiermoe.engine.load import resolve_for
from tiermoe.memory.activations import expanding_needs
from tiermoe.model.blueprint import inspect_model
from tiermoe.model.kv_cache import KVCache
from tiermoe.model.rotary import Rotary
from tiermoe.model.short_convolution import convolution_sizes, short_convolution
from tiermoe.model.step import Step
from tiermoe.model.weights import ModuleWeights

PART = "model.layers.0.conv"
ROTARY = Rotary(torch.ones(1), lambda _: 1.0, torch.float32)
LENGTH = 12


@pytest.mark.parametrize("changes", [{}, {"conv_L_cache": 5, "conv_bias": True}], ids=["three", "five with biases"])
@torch.no_grad()
def test_it_agrees_with_transformers_eager_layer(changes: dict[str, Any]) -> None:
    """Of two sequences at once, one of which comes in parts that are shorter than the convolution."""
    config = tiny.config_of("lfm2_moe", num_hidden_layers=1, layer_types=["conv"], **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tiny.make_random(model)
    eager: Any = model.get_submodule(PART)
    block = short_convolution(ModuleWeights(model), PART)
    x = torch.randn(2, LENGTH, config.hidden_size)
    want = eager(hidden_states=x)
    cache = KVCache([convolution_sizes(config).shape], 2, LENGTH, LENGTH, torch.float32)
    assert [cache.open(), cache.open()] == [0, 1]
    found: list[list[torch.Tensor]] = [[], []]
    for rows in ([(0, 0, 7)], [(0, 7, 8), (1, 0, 1)], [(1, 1, 3), (0, 8, 12)], [(1, 3, 12)]):
        batch = Batch(tuple(prompt(slab, range(end - first), first) for slab, first, end in rows))
        step = Step(batch, cache, ROTARY)
        got = block(torch.cat([x[slab, first:end] for slab, first, end in rows]), 0, step)
        for row, its in zip(batch.rows, torch.split(got, [end - first for _, first, end in rows]), strict=True):
            cache.wrote(row.slab, row.end)
            found[row.slab].append(its)
    assert (torch.stack([torch.cat(each) for each in found]) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_taps_take_is_in_the_plan(dtype: torch.dtype, tmp_path: Path) -> None:
    blueprint = inspect_model(tiny.write(tmp_path, "lfm2_moe", dtype), "taps")
    resolved = resolve_for(blueprint, settings(memory="1GiB", device="cpu"))
    (need,) = expanding_needs(blueprint, resolved.settings, "cpu")
    assert need.nbytes == 2 * 3 * 64 * 4  # two layers, three taps
