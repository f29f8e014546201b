"""Batches and the passes that a step makes of them: rows, tokens, logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from small_engines import NATIVE, OnRoute, alone, engine_of, tokens
from tiermoe.batch import Batch, Kind, Row, decode, prompt, verify
from tiny import write


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


def test_parts_are_all_rows_or_chunks_of_one_prompt() -> None:
    rows = (decode(0, 9, 8), prompt(2, range(5)), verify(4, 3, [1, 2]))
    assert Batch(rows).parts(invariant=True) == [Batch(rows)]
    chunks = (prompt(0, range(4)), prompt(0, range(3), first=4))
    assert Batch(chunks).parts(invariant=True) == [Batch((chunk,)) for chunk in chunks]


def test_each_row_and_each_token_to_verify_is_a_part_where_bits_depend_on_others() -> None:
    rows = (decode(0, 9, 8), prompt(2, range(5)), verify(4, 3, [1, 2]))
    alone = (*rows[:2], verify(4, 3, [1]), verify(4, 4, [2]))
    assert Batch(rows).parts(invariant=False) == [Batch((row,)) for row in alone]


@pytest.mark.parametrize("rows", [(), (Row(0, 0, (), Kind.PROMPT),)])
def test_an_empty_batch_is_refused(rows: tuple[Row, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Batch(rows)


PACKED = {"bits": 4, "dense_bits": 4, "chunk": 8}
PLAIN = {"bits": 16, "dense_bits": 16, "chunk": 8}
ENGINES: dict[str, tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "own": ("qwen3_moe", torch.float32, {}, PLAIN),
    "generic": ("qwen3_moe", torch.float32, {}, PLAIN | {"decoder": "generic"}),
    "native": ("qwen3_moe", torch.bfloat16, NATIVE, PACKED),
    # whose layers are not one native call
    "gemma": ("gemma4_text", torch.bfloat16, {**NATIVE, "intermediate_size": 128, "global_head_dim": 64}, PACKED),
    "lfm": ("lfm2_moe", torch.bfloat16, {**NATIVE, "intermediate_size": 128}, PACKED),
}
"""Family, dtype, sizes and options. A prompt of more than 8 tokens comes in parts."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    family, dtype, sizes, options = ENGINES[request.param]
    made = engine_of(write(tmp_path_factory.mktemp(family), family, dtype, **sizes), **options)
    if dtype is torch.bfloat16 and not made.decoder.chunk_invariant:
        made.close()
        pytest.skip("this machine has no native kernels")
    yield made
    made.close()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine at 4 bits whose products do not depend on how many tokens there are."""
    directory = write(tmp_path_factory.mktemp("native"), "qwen3_moe", torch.bfloat16, **NATIVE)
    made = engine_of(directory, bits=4, dense_bits=4)
    yield made
    made.close()


def check(engine: Any, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but for the rounding of torch's products."""
    if engine.decoder.chunk_invariant:
        assert torch.equal(mine, theirs)
    assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_rows_of_different_lengths_and_forks(engine: Any) -> None:
    long, short = tokens(14), tokens(7, 2)
    other = [*long[:12], 5, 6]
    cache = engine.new_cache(3)
    one = cache.open()
    engine.step(Batch((prompt(one, long[:12]),)), cache)
    two, three = cache.fork(one), cache.open()
    engine.step(Batch((decode(one, 12, long[12]), decode(two, 12, 5))), cache)
    found = engine.step(Batch((decode(one, 13, long[13]), decode(two, 13, 6), prompt(three, short))), cache)
    check(engine, found, torch.cat([alone(engine, ids, len(ids) - 1) for ids in (long, other, short)]))


def test_a_prompt_in_parts_and_tokens_verified_together(engine: Any) -> None:
    ids = tokens(24)
    want, cache = alone(engine, ids, 1), engine.new_cache()
    slab = cache.open()
    read = engine.step(Batch((prompt(slab, ids[:19]),)), cache, every=True)
    check(engine, read[1:], want[:18])
    check(engine, engine.step(Batch((verify(slab, 19, ids[19:]),)), cache, every=True), want[18:])
    cache.crop(slab, 23)  # the last one was wrong
    check(engine, engine.step(Batch((decode(slab, 23, ids[23]),)), cache), want[22:])


def test_five_tokens_verified_at_once_have_the_bits_of_each_alone(engine: Any) -> None:
    ids = tokens(12)
    expected = alone(engine, ids, 7)
    cache = engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:7]),)), cache)
    assert torch.equal(engine.step(Batch((verify(slab, 7, ids[7:]),)), cache, every=True), expected)
    cache.crop(slab, 9)  # three of them were wrong
    assert torch.equal(engine.step(Batch((decode(slab, 9, ids[9]),)), cache), expected[2:3])


@pytest.mark.parametrize(("read", "beside"), [(7, 0), (0, 80)], ids=["long", "beside a prompt"])
def test_tokens_among_too_many_for_one_call_are_verified_in_several(native: Any, read: int, beside: int) -> None:
    """More than are computed as few; or few, but with a prompt's."""
    if not native.decoder.chunk_invariant:
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
    found = engine.step(Batch((decode(slabs[0], 6, answered[6]), *rows)), cache)
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
