"""Batches and the passes that a step makes of them: rows, tokens, logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from small_engines import NATIVE, OnRoute, alone, engine_of, tokens
from tiermoe.batch import Batch, Kind, Row, decode, prompt, verify
from tiny import OWN_DECODERS, write


def test_tokens_positions_and_slabs_of_rows_of_different_sequences() -> None:
    batch = Batch((prompt(2, [5, 6, 7], first=4), decode(0, 9, 8), verify(1, 3, [1, 2])))
    assert batch.tokens == [5, 6, 7, 8, 1, 2]
    assert batch.positions == [4, 5, 6, 9, 3, 4]
    assert batch.slabs == [2, 2, 2, 0, 1, 1]
    assert batch.last == [2, 3, 5]
    assert [row.end for row in batch.rows] == [7, 10, 5]


def test_a_batch_with_a_prompt_is_a_prefill() -> None:
    assert Batch((decode(0, 9, 8), prompt(1, [3]))).phase == "prefill"
    assert Batch((decode(0, 9, 8), verify(1, 2, [3, 4]))).phase == "decode"


def test_chunks_keep_positions_and_leave_out_rows_that_are_through() -> None:
    chunks = list(Batch((prompt(0, range(5)), prompt(1, range(2), first=7))).chunks(2))
    assert [[(row.slab, row.first, row.tokens) for row in chunk.rows] for chunk in chunks] == [
        [(0, 0, (0, 1)), (1, 7, (0, 1))],
        [(0, 2, (2, 3))],
        [(0, 4, (4,))],
    ]
    assert all(row.kind is Kind.PROMPT for chunk in chunks for row in chunk.rows)


def test_parts_are_each_prompt_and_what_lies_between() -> None:
    rows = (decode(0, 9, 8), decode(1, 3, 1), prompt(2, range(5)), prompt(3, range(2)), verify(4, 3, [1]))
    assert [part.rows for part in Batch(rows, ragged=True).parts()] == [rows[:2], rows[2:3], rows[3:4], rows[4:]]
    assert [part.rows for part in Batch(rows, ragged=True).parts(7)] == [rows[:3], rows[3:]]
    assert [part.rows for part in Batch(rows).parts()] == [rows]
    assert [len(chunk.parts()) for chunk in Batch(rows[1:4], ragged=True).chunks(2)] == [3, 1, 1]


@pytest.mark.parametrize("ragged", [False, True])
def test_each_token_to_verify_is_a_part_where_no_two_run_together(ragged: bool) -> None:
    rows = (verify(0, 3, [1, 2]), decode(1, 9, 8), verify(2, 5, [4]))
    assert [part.rows for part in Batch(rows, ragged).parts()] == [
        (verify(0, 3, [1]),), (verify(0, 4, [2]),), rows[1:2], rows[2:]
    ]  # fmt: skip
    assert [part.rows for part in Batch(rows, ragged).parts(4)] == [rows]


@pytest.mark.parametrize("rows", [(), (Row(0, 0, (), Kind.PROMPT),)])
def test_an_empty_batch_is_refused(rows: tuple[Row, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Batch(rows)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine at 4 bits whose products do not depend on how many tokens there are."""
    engine = engine_of(
        write(tmp_path_factory.mktemp("native"), "qwen3_moe", torch.bfloat16, **NATIVE), bits=4, dense_bits=4
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["auto", "generic"])
def any_decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write(tmp_path_factory.mktemp("any"), "qwen3_moe", torch.float32)
    engine = engine_of(directory, bits=16, dense_bits=16, decoder=request.param, chunk=4)
    yield engine
    engine.close()


def near(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((mine - theirs).abs().max() <= 1e-5 * theirs.abs().max())


def test_rows_of_different_lengths_and_positions(any_decoder: Any) -> None:
    one, two, three = tokens(9, 1), tokens(5, 2), tokens(7, 3)
    cache = any_decoder.new_cache(3)
    slabs = [cache.open() for _ in range(3)]
    any_decoder.step(Batch((prompt(slabs[0], one[:8]), prompt(slabs[1], two[:4]))), cache)
    mixed = Batch((decode(slabs[0], 8, one[8]), decode(slabs[1], 4, two[4]), prompt(slabs[2], three)))
    logits = any_decoder.step(mixed, cache)
    expected = torch.cat([alone(any_decoder, ids, len(ids) - 1) for ids in (one, two, three)])
    assert near(logits, expected)


def test_a_forked_prefix(any_decoder: Any) -> None:
    shared, ends = tokens(6), (tokens(3, 4), tokens(3, 5))
    cache = any_decoder.new_cache(2)
    first = cache.open()
    any_decoder.step(Batch((prompt(first, shared),)), cache)
    slabs = [first, cache.fork(first)]
    for at in range(3):
        rows = tuple(decode(slab, 6 + at, end[at]) for slab, end in zip(slabs, ends, strict=True))
        logits = any_decoder.step(Batch(rows), cache)
    expected = torch.cat([alone(any_decoder, [*shared, *end], 8) for end in ends])
    assert near(logits, expected)


def test_five_tokens_verified_at_once_are_what_each_is_alone(any_decoder: Any) -> None:
    check_verifying(any_decoder)


def test_five_tokens_verified_at_once_by_native_kernels(native: Any) -> None:
    check_verifying(native)


@pytest.mark.parametrize(("read", "beside"), [(7, 0), (0, 80)], ids=["long", "beside a prompt"])
def test_tokens_among_too_many_for_one_call_are_verified_in_several(native: Any, read: int, beside: int) -> None:
    """More than are computed as few; or few, but with a prompt's."""
    if not native.decoder.batch_invariant:
        pytest.skip("this machine has no native kernels")
    ids = tokens(77)
    first, count = (read, 70) if read else (70, 7)
    want = alone(native, ids, first)
    cache = native.new_cache(2)
    slab = cache.open()
    native.step(Batch((prompt(slab, ids[:first]),)), cache)
    rows = [verify(slab, first, ids[first:])]
    if beside:
        rows.append(prompt(cache.open(), tokens(beside, seed=2)))
    found = native.step(Batch(tuple(rows)), cache, every=True)
    assert torch.equal(found[:count], want)


def check_verifying(engine: Any) -> None:
    ids = tokens(12)
    expected = alone(engine, ids, 7)
    cache = engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:7]),)), cache)
    logits = engine.step(Batch((verify(slab, 7, ids[7:]),)), cache, every=True)
    assert torch.equal(logits, expected)
    cache.crop(slab, 9)  # three of them were wrong
    again = engine.step(Batch((decode(slab, 9, ids[9]),)), cache)
    assert torch.equal(again, expected[2:3])


def test_rows_of_a_native_batch_have_the_bits_that_each_has_alone(native: Any) -> None:
    sequences = [tokens(6 + seed, seed) for seed in range(4)]
    cache = native.new_cache(4)
    slabs = [cache.open() for _ in sequences]
    for slab, ids in zip(slabs, sequences, strict=True):
        native.step(Batch((prompt(slab, ids[:-1]),)), cache)
    rows = [decode(slab, len(ids) - 1, ids[-1]) for slab, ids in zip(slabs, sequences, strict=True)]
    logits = native.step(Batch(tuple(rows)), cache)
    assert torch.equal(logits, torch.cat([alone(native, ids, len(ids) - 1) for ids in sequences]))


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("qwen3_moe", torch.bfloat16, {"bits": 4, "dense_bits": 4}),
        ("deepseek_v3", torch.float32, {"bits": 16, "dense_bits": 16}),  # a dense layer, a shared expert
        ("gemma4_text", torch.float32, {"bits": 16, "dense_bits": 16}),  # a dense block beside the experts, windows
    ],
)
def test_prompts_that_are_computed_apart_have_the_bits_of_each_alone(
    family: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    """With an answer's token beside them; each expert is asked for once a layer."""
    sizes = NATIVE if family == "qwen3_moe" else {}
    engine = engine_of(write(tmp_path, family, dtype, **sizes), cache="50%", chunk=80, **options)
    prompts, answered = [tokens(count, seed) for seed, count in enumerate((5, 80, 1, 30, 40))], tokens(7, 9)
    want = [alone(engine, answered, 6)]
    for ids in prompts:
        cache = engine.new_cache()
        want.append(engine.step(Batch((prompt(cache.open(), ids),)), cache))
    cache = engine.new_cache(6)
    slabs = [cache.open() for _ in range(6)]
    engine.step(Batch((prompt(slabs[0], answered[:6]),)), cache)
    asked: list[int] = []
    engine.observe(OnRoute(lambda routed, _: asked.append(len({expert for row in routed.experts for expert in row}))))
    before = engine.loader.counts.copy()
    rows = [prompt(slab, ids) for slab, ids in zip(slabs[1:], prompts, strict=True)]
    found = engine.step(Batch((decode(slabs[0], 6, answered[6]), *rows), ragged=True), cache)
    done = engine.loader.counts.minus(before)
    assert torch.equal(found, torch.cat(want))
    assert done.hits + done.misses == sum(asked)
    assert done.misses > 0
    engine.close()


@pytest.mark.parametrize("chunk", [3, 8])
def test_a_chunk_of_a_prompt_is_never_taken_for_a_generated_token(chunk: int, tmp_path: Path) -> None:
    """Prompts of 8 and 9 tokens: the last chunk is whole, or one token."""
    engine = engine_of(write(tmp_path, "qwen3_moe", torch.float32), bits=16, dense_bits=16, chunk=chunk)
    phases: list[str] = []
    engine.observe(OnRoute(lambda routed, _: phases.append(routed.phase)))
    for length in (8, 9):
        cache = engine.new_cache()
        slab = cache.open()
        phases.clear()
        engine.step(Batch((prompt(slab, tokens(length)),)), cache)
        assert set(phases) == {"prefill"}
        phases.clear()
        engine.step(Batch((decode(slab, length, 5),)), cache)
        assert set(phases) == {"decode"}
    engine.close()


def test_every_family_with_an_architecture_decodes_by_it(tmp_path: Path) -> None:
    from tiermoe.model.decoder import Decoder

    for family in OWN_DECODERS:
        engine = engine_of(write(tmp_path / family, family, torch.float32), bits=16, dense_bits=16)
        assert isinstance(engine.decoder, Decoder), family
        engine.close()
