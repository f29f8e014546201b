"""Drawing tokens: greedy, by temperature, among the likeliest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiermoe.generation.sampling import Sampler, Sampling

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]))
DRAWS = 4000


def shares(logits: torch.Tensor, **sampling: float | int) -> list[float]:
    """How often each token is drawn."""
    sampler = Sampler(Sampling(seed=1, **sampling))  # type: ignore[arg-type]
    drawn = Counter(sampler.choose(logits) for _ in range(DRAWS))
    return [drawn[token] / DRAWS for token in range(len(logits))]


def near(found: list[float], wanted: list[float]) -> bool:
    return all(abs(a - b) < 0.03 for a, b in zip(found, wanted, strict=True))


def test_temperature_0_takes_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert Sampler(Sampling()).choose(torch.tensor([1.0, 3.0, 3.0, 2.0])) == 1


def test_tokens_are_drawn_by_their_probabilities() -> None:
    assert near(shares(LOGITS, temperature=1.0), [0.05, 0.4, 0.1, 0.3, 0.15])


def test_temperature_flattens() -> None:
    flat = torch.softmax(LOGITS / 2.0, 0).tolist()
    assert near(shares(LOGITS, temperature=2.0), flat)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),
    ],
)
def test_only_the_likeliest_are_drawn(options: dict[str, float], kept: list[int]) -> None:
    total = sum(float(LOGITS[token].exp()) for token in kept)
    wanted = [float(LOGITS[token].exp()) / total if token in kept else 0.0 for token in range(5)]
    assert near(shares(LOGITS, temperature=1.0, **options), wanted)


def test_a_nucleus_of_more_tokens_than_are_looked_at_first() -> None:
    logits = torch.zeros(5000)
    sampler = Sampler(Sampling(temperature=1.0, top_p=0.5, seed=2))
    drawn = {sampler.choose(logits) for _ in range(DRAWS)}
    assert 1500 < len(drawn) <= 2501


class _Threads(TorchDispatchMode):
    """Keeps how many threads torch has at each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_drawing_wakes_no_thread_of_torch_and_leaves_their_number(options: dict[str, float]) -> None:
    threads, logits, sampler = torch.get_num_threads(), torch.zeros(1000), Sampler(Sampling(**options))  # type: ignore[arg-type]
    torch.set_num_threads(2)
    try:
        with _Threads() as found:
            sampler.choose(logits)
        assert found.seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_seed_names_an_answer() -> None:
    first, second, other = (
        [Sampler(Sampling(temperature=1.0, seed=seed)).choose(LOGITS + step) for step in range(3)] for seed in (3, 3, 4)
    )
    assert first == second
    assert [Sampler(Sampling(temperature=1.0, seed=seed)).choose(LOGITS) for seed in range(40)].count(first[0]) < 40
    assert len(other) == 3


def test_a_penalty_lowers_tokens_that_were_there() -> None:
    sampler = Sampler(Sampling(), penalty=2.0)
    assert sampler.choose(torch.tensor([2.0, 1.5, -1.0]), before=[0]) == 1
    assert sampler.choose(torch.tensor([-1.0, -1.5, -1.2]), before=[0]) == 2
