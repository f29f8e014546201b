"""How many reads are in flight is learned, over drives that are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiermoe.config import MIB, Settings
from tiermoe.offload.disk import LANES, most_lanes, staging_bytes
from tiermoe.offload.lanes import MOST, Lanes

Rate = Callable[[int], float]
DRIVES: dict[str, Rate] = {
    "each read adds as much": lambda reads: reads,
    "four are enough": lambda reads: min(reads, 4),
    "eight are enough": lambda reads: min(reads, 8),
    "the number does not matter": lambda reads: 1,
    "a head that moves": lambda reads: 1 / (1 + 0.08 * (reads - 1)),
    "fresh memory (virtual machine)": lambda reads: {1: 0.34, 2: 0.4, 4: 0.5, 8: 0.77, 16: 0.97}[reads],
    "used memory (virtual machine)": lambda reads: {1: 1.85, 2: 2.1, 4: 2.17, 8: 1.69, 16: 1.5}[reads],
}


def share_of_best(rate: Rate, reads: int, after: int, noise: float, burst: int, seed: int) -> float:
    """Of the reads that come `after` the first ones, speed as a share of the best number's. A window's rate varies by
    `noise`, one in twenty changes the drive's pace, and the first `burst` reads come as fast whatever their number."""
    chance, lanes, pace, done, took, counted = random.Random(seed), Lanes(), 1.0, 0, 0.0, 0
    best = max(map(rate, (1, 2, 4, 8, 16)))
    while done < reads:
        alone = rate(lanes.limit)
        if chance.random() < 0.05 and noise:
            pace = chance.choice((1, 1, 3, 0.4))
        found = (3 * best if done < burst else alone) * pace * chance.lognormvariate(0, noise)
        window = lanes.reads
        if done >= after:
            took, counted = took + window / alone, counted + window
        done += window
        lanes.record(window * 1e6, window / found)
    return counted / took / best


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize(
    ("noise", "burst", "after"), [(0.0, 0, 800), (0.1, 0, 1600), (0.1, 400, 1600)], ids=["steady", "noisy", "bursts"]
)
def test_nine_tenths_of_the_best_are_reached(drive: str, noise: float, burst: int, after: int) -> None:
    shares = [share_of_best(DRIVES[drive], after + 1600, after, noise, burst, seed) for seed in range(20)]
    assert sum(shares) / len(shares) > 0.9
    assert min(shares) > 0.75


def test_a_drive_that_changes_is_learned_again() -> None:
    lanes = Lanes()
    for rate in (DRIVES["each read adds as much"], DRIVES["a head that moves"], DRIVES["each read adds as much"]):
        numbers = []
        for _ in range(200):
            numbers.append(lanes.limit)
            lanes.record(lanes.reads * 1e6, lanes.reads / rate(lanes.limit))
        best = max((1, 2, 4, 8, 16), key=rate)
        assert numbers[-40:].count(best) > 25


@pytest.mark.parametrize("most", [1, 4, 6, 16, 32])
def test_there_are_never_more_than_may_be(most: int) -> None:
    lanes, chance, seen = Lanes(most), random.Random(most), set()
    for _ in range(2000):
        seen.add(lanes.limit)
        assert 1 <= lanes.floor <= lanes.limit <= most
        lanes.record(lanes.reads, chance.choice((0.0, 1e-3, 1.0)))
    assert {1, most} <= seen


def form(bits: int, nbytes: int, widened: bool = False) -> Any:
    return SimpleNamespace(bits=bits, widened=widened, stored=SimpleNamespace(nbytes=nbytes))


@pytest.mark.parametrize(
    ("forms", "most"),
    [
        ([form(4, 300 * MIB)], MOST),  # into the slots themselves
        ([form(16, 2 * MIB)], MOST),
        ([form(16, 8 * MIB)], 5),
        ([form(16, 4 * MIB), form(4, 4 * MIB, widened=True)], 5),
        ([form(16, 300 * MIB)], LANES),
    ],
)
def test_threads_whose_buffers_are_large_are_few(forms: list[Any], most: int) -> None:
    assert most_lanes(Settings(), forms) == most
    assert most_lanes(Settings(also=Path()), forms) == 2 * most
    assert most_lanes(Settings(lanes=3), forms) == 3
    assert most_lanes(Settings(lanes=64, also=Path()), forms) == 64  # native threads
    assert staging_bytes(forms, most) <= max(48 * MIB, LANES * 301 * MIB)
