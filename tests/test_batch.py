"""Batches: what runs at once."""

from __future__ import annotations

import pytest

from tiermoe.batch import Batch, Kind, Row, decode, prompt, verify


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
    rows = (decode(0, 9, 8), decode(1, 3, 1), prompt(2, range(5)), prompt(3, range(2)), verify(4, 3, [1, 2]))
    assert [part.rows for part in Batch(rows, apart=True).parts()] == [rows[:2], rows[2:3], rows[3:4], rows[4:]]
    assert [part.rows for part in Batch(rows, apart=True).parts(7)] == [rows[:3], rows[3:]]
    assert [part.rows for part in Batch(rows).parts()] == [rows]
    assert [len(chunk.parts()) for chunk in Batch(rows[1:4], apart=True).chunks(2)] == [3, 1, 1]


@pytest.mark.parametrize("rows", [(), (Row(0, 0, (), Kind.PROMPT),)])
def test_an_empty_batch_is_refused(rows: tuple[Row, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Batch(rows)
