"""How slots are divided among MoE layers: worked examples and what holds for any division."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.allotment import ALLOTMENTS, Pool, Share, shallow_and_shared


def sizes(pools: list[Pool]) -> list[int]:
    return [pool.slots for pool in pools]


@pytest.mark.parametrize(
    ("name", "share", "expected"),
    [
        ("pool", Share(10, [8] * 24), [10]),
        # what does not divide goes to the first layers
        ("even", Share(11, [8] * 4), [3, 3, 3, 2]),
        # Fate: (N - bE) / (L - b) = (300 - 4 * 60) / (24 - 4) = 3; (70 - 2 * 16) / (6 - 2) = 9.5
        ("shallow", Share(300, [60] * 24, boundary=4), [60] * 4 + [3] * 20),
        ("shallow", Share(70, [16] * 6, boundary=2), [16, 16, 10, 10, 9, 9]),
        # one slot each for six layers, 20 left: 15 make layer 0 whole, 5 go to layer 1
        ("shallow", Share(26, [16] * 6, boundary=3), [16, 6, 1, 1, 1, 1]),
        ("shallow", Share(26, [16] * 6, boundary=3, minimum=2), [16, 2, 2, 2, 2, 2]),
        # layers of different sizes are whole at their own
        ("shallow", Share(30, [4, 8, 8, 8], boundary=2), [4, 8, 9, 9]),
        # boundaries at the ends
        ("shallow", Share(11, [8] * 4), [3, 3, 3, 2]),
        ("shallow", Share(16, [4] * 4, boundary=4), [4, 4, 4, 4]),
        ("shallow", Share(18, [4] * 4, boundary=4), [5, 5, 4, 4]),
    ],
)
def test_slots_are_divided(name: str, share: Share, expected: list[int]) -> None:
    assert sizes(ALLOTMENTS[name](share)) == expected


@pytest.mark.parametrize(
    ("name", "share", "message"),
    [
        *((name, Share(7, [8] * 4, boundary=1, minimum=2), r"at least 8 slots \(2 each\), there are 7.*allotment=pool")
          for name in ("even", "shallow")),
        ("pool", Share(1, [8] * 4, minimum=2), r"at least 2 slots \(2 each\), there are 1; give more memory$"),
        ("shallow", Share(100, [8] * 4, boundary=5), "from 0 to 4, the model's MoE layers, got 5"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused_with_the_numbers(name: str, share: Share, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ALLOTMENTS[name](share)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (23, [(6, range(1)), (6, range(1, 2)), (11, range(2, 6))]),
        (14, [(6, range(1)), (4, range(1, 2)), (4, range(2, 6))]),
        (13, [(6, range(1)), (7, range(1, 6))]),  # three are no room for a layer's four
        (9, [(5, range(1)), (4, range(1, 6))]),
        (7, [(7, range(6))]),
    ],
)
def test_below_a_layers_k_each_the_shallow_come_first_and_the_others_share_a_pool(
    slots: int, expected: list[tuple[int, range]]
) -> None:
    pools = shallow_and_shared(Share(slots, [6] * 6, boundary=2, minimum=4))
    assert [(pool.slots, pool.layers) for pool in pools] == expected


@given(st.data())
def test_every_slot_is_given_once_and_every_layer_is_served(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ALLOTMENTS)))
    experts = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=30))
    minimum = data.draw(st.integers(1, 2))
    boundary = data.draw(st.integers(0, len(experts)))
    slots = data.draw(st.integers(minimum * len(experts), 1500))
    bits = data.draw(st.sampled_from([None, frozenset({2}), frozenset({4, 16})]))
    recall = [data.draw(st.floats(0, 1)) for _ in experts]
    pools = ALLOTMENTS[name](Share(slots, experts, boundary, minimum, bits, recall, [1.5] * len(experts)))
    assert sum(sizes(pools)) == slots
    assert min(sizes(pools)) >= minimum
    assert [layer for pool in pools for layer in pool.layers] == list(range(len(experts)))
    assert {pool.bits for pool in pools} == {bits}
    if name == "shallow" and 0 < boundary < len(experts):
        shallow, deep = sizes(pools)[:boundary], sizes(pools)[boundary:]
        assert max(deep) - min(deep) <= 1
        assert all(size <= count for size, count in zip(shallow, experts, strict=False))
        whole = [size == count for size, count in zip(shallow, experts, strict=False)]
        assert max(deep) == minimum or all(whole)
        assert sum(minimum < size < count for size, count in zip(shallow, experts, strict=False)) <= 1
