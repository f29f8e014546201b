"""Decoders whose layers are not one native call: rows, forks, prompts in parts and tokens that are verified together
have the bits that each token has alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tiny
from small_engines import NATIVE, alone, engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

SIZES: dict[str, dict[str, Any]] = {
    "gemma4_text": {**NATIVE, "intermediate_size": 128, "global_head_dim": 64},
    "lfm2_moe": {**NATIVE, "intermediate_size": 128},
}


@pytest.fixture(scope="module", params=SIZES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """At 4 bits; a prompt of more than 8 tokens comes in parts."""
    directory = tiny.write(tmp_path_factory.mktemp("alone"), request.param, torch.bfloat16, **SIZES[request.param])
    made = engine_of(directory, bits=4, dense_bits=4, chunk=8)
    yield made
    made.close()


def test_a_prompt_in_parts_and_tokens_verified_together(engine: Any) -> None:
    ids = tokens(24)
    want, cache = alone(engine, ids, 1), engine.new_cache()
    slab = cache.open()
    read = engine.step(Batch((prompt(slab, ids[:19]),)), cache, every=True)
    assert torch.equal(read[1:], want[:18])
    assert torch.equal(engine.step(Batch((verify(slab, 19, ids[19:]),)), cache, every=True), want[18:])
    cache.crop(slab, 23)  # the last one was wrong
    assert torch.equal(engine.step(Batch((decode(slab, 23, ids[23]),)), cache), want[22:])


def test_rows_and_forks(engine: Any) -> None:
    long, short = tokens(14), tokens(7, 2)
    other = [*long[:12], 5, 6]
    cache = engine.new_cache(3)
    one = cache.open()
    engine.step(Batch((prompt(one, long[:12]),)), cache)
    two, three = cache.fork(one), cache.open()
    engine.step(Batch((decode(one, 12, long[12]), decode(two, 12, 5))), cache)
    found = engine.step(Batch((decode(one, 13, long[13]), decode(two, 13, 6), prompt(three, short))), cache)
    want = [alone(engine, ids, len(ids) - 1) for ids in (long, other, short)]
    assert torch.equal(found, torch.cat(want))
