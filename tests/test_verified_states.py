"""Recurrent states behind tokens that were verified together: the bits of decoding one by one, however many of the
guesses were right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from native_experts import checkpoint
from small_engines import alone, engine_of, tokens
from test_speculation import RECURRENT
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.types import MOST_VERIFIED

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

READ = 13  # tokens of a prompt


@pytest.fixture(scope="module", params=RECURRENT)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = checkpoint(tmp_path_factory.mktemp("verified"), request.param, **RECURRENT[request.param])
    made = engine_of(directory, bits=4, dense_bits=4, chunk=32, batch=4, context=120, cache="50%")
    assert made.decoder.can_verify_draft
    yield made
    made.close()


def read(engine: Any, cache: Any, ids: list[int]) -> int:
    """The slab of a sequence of the first `READ` tokens."""
    slab: int = cache.open()
    engine.step(Batch((prompt(slab, ids[:READ]),)), cache)
    return slab


def guessed(ids: list[int], first: int, count: int, right: int) -> list[int]:
    """The token at `first` and `count` guesses behind it, of which `right` are right."""
    return [
        *ids[first : first + 1 + right],
        *((token + 1) % 128 for token in ids[first + 1 + right : first + 1 + count]),
    ]


def state(cache: Any, slab: int, length: int) -> list[bytes]:
    found = [bytes(each) for each in cache.recurrent.memory(slab, length)]
    assert found, f"there is no state after {length} tokens"
    return found


def test_after_each_number_of_right_guesses(engine: Any) -> None:
    """The tokens' logits, the state behind the last right one, and what follows: verified and decoded."""
    ids, count = tokens(60), MOST_VERIFIED - 1
    want, cache, plain = alone(engine, ids, READ), engine.new_cache(1), engine.new_cache(1)
    one_by_one = read(engine, plain, ids)
    for right in range(count + 1):
        slab, end = read(engine, cache, ids), READ + 1 + right
        row = verify(slab, READ, guessed(ids, READ, count, right))
        found = engine.step(Batch((row,)), cache, every=True)
        assert torch.equal(found[: 1 + right], want[: 1 + right])
        cache.crop(slab, end)
        engine.step(Batch((decode(one_by_one, end - 1, ids[end - 1]),)), plain)
        assert state(cache, slab, end) == state(plain, one_by_one, end)
        found = engine.step(Batch((verify(slab, end, guessed(ids, end, 5, 3)),)), cache, every=True)
        assert torch.equal(found[:4], want[end - READ : end - READ + 4])
        cache.crop(slab, end + 4)
        found = engine.step(Batch((decode(slab, end + 4, ids[end + 4]),)), cache)
        assert torch.equal(found, want[end - READ + 4 : end - READ + 5])
        cache.close(slab)


def test_rows_that_are_verified_together(engine: Any) -> None:
    """Three sequences, each with another number of right guesses, again and again; one token is decoded beside them."""
    texts = [tokens(60, seed) for seed in range(4)]
    want = [alone(engine, ids, READ) for ids in texts]
    cache = engine.new_cache(4)
    slabs, at = [read(engine, cache, ids) for ids in texts], [READ] * 4
    for rights in ((0, 3, 2), (3, 0, 1), (2, 2, 3), (1, 3, 0)):
        rows = [
            verify(slab, first, guessed(ids, first, 3, right))
            for slab, first, ids, right in zip(slabs, at, texts, rights, strict=False)
        ]
        found = engine.step(Batch((*rows, decode(slabs[3], at[3], texts[3][at[3]]))), cache, every=True)
        for each, right in enumerate((*rights, 0)):
            begin, first = 4 * each, at[each] - READ
            assert torch.equal(found[begin : begin + 1 + right], want[each][first : first + 1 + right])
            at[each] += 1 + right
            cache.crop(slabs[each], at[each])


def test_forks_and_files_behind_a_wrong_guess(engine: Any, tmp_path: Path) -> None:
    ids = tokens(40)
    want, cache = alone(engine, ids, READ), engine.new_cache(3)
    slab = read(engine, cache, ids)
    engine.step(Batch((verify(slab, READ, guessed(ids, READ, 6, 2)),)), cache, every=True)
    other = cache.fork(slab)
    with pytest.raises(ValueError, match=f"cannot be wound back to {READ + 3}"):
        cache.crop(other, READ + 3)  # what its tokens took lies with the first sequence alone
    with pytest.raises(ValueError, match=f"cannot go on from position {READ + 3}"):
        engine.step(Batch((decode(slab, READ + 3, ids[READ + 3]),)), cache)
    cache.close(other)
    slab = read(engine, cache, ids)
    engine.step(Batch((verify(slab, READ, guessed(ids, READ, 6, 2)),)), cache, every=True)
    cache.crop(slab, READ + 3)
    cache.save(slab, tmp_path / "sequence")
    fresh = engine.new_cache(1)
    for kept, its in ((cache, cache.fork(slab, READ + 3)), (fresh, fresh.load(tmp_path / "sequence")), (cache, slab)):
        assert torch.equal(engine.step(Batch((decode(its, READ + 3, ids[READ + 3]),)), kept), want[3:4])


def test_a_row_of_more_tokens_than_are_kept_is_verified_too(engine: Any) -> None:
    ids = tokens(60)
    want, cache = alone(engine, ids, READ), engine.new_cache(1)
    slab = read(engine, cache, ids)
    found = engine.step(Batch((verify(slab, READ, ids[READ : READ + MOST_VERIFIED + 1]),)), cache, every=True)
    assert torch.equal(found, want[: MOST_VERIFIED + 1])
    with pytest.raises(ValueError, match="cannot be wound back"):
        cache.crop(slab, READ + 2)
