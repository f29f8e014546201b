"""Computing times for replays: by hand from laps, and what is counted while a model runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiermoe
import tiny
from tiermoe.lab.measure.record import Lap, Stopwatch, measure_times, times_of
from tiermoe.lab.trace import Times


def test_times_by_hand() -> None:
    # a token: 5 s, 2 of them for 4 experts; a prompt of 10: 12 s, 7 for 8 experts that 18 (token, expert) pairs chose
    found = times_of([Lap(12.0, 7.0, 18, 8)], [Lap(5.0, 2.0, 4, 4)], 10, 4)
    # the first token of each takes 8 x 0.5 s, so the 10 others 3 s; 12 - 7 s are left for ten tokens
    assert found == Times(3.0, {4: 0.5}, pytest.approx(0.5), {4: pytest.approx(0.3)})
    # where a prompt's experts take less than so many single ones, they are charged no less, and the rest takes less
    assert times_of([Lap(12.0, 3.0, 18, 8)], [Lap(5.0, 2.0, 4, 4)], 10, 4) == Times(3.0, {4: 0.5}, 0.8, {4: 0.0})
    # the median of several
    laps = [Lap(5.0, 2.0, 4, 4), Lap(50.0, 20.0, 4, 4), Lap(6.0, 2.0, 4, 4)]
    assert times_of([Lap(12.0, 7.0, 18, 8)], laps, 10, 4).dense == 4.0
    # 1 s of the layers' 3 s before their experts, and 2 s of the prompt's
    found = times_of([Lap(12.0, 7.0, 18, 8, layers_s=2.0)], [Lap(5.0, 2.0, 4, 4, layers_s=1.0)], 10, 4)
    assert (found.dense, found.layers, found.prefill_layers) == (3.0, 1.0, pytest.approx(0.2))


@torch.inference_mode()
def test_what_ran_is_counted_and_the_model_left_as_it_was(tmp_path: Path) -> None:
    model, _ = tiermoe.load(
        tiny.write(tmp_path, "mixtral", torch.float32), bits=16, preset="lru", lanes=1, store=tmp_path / "store"
    )
    ids = torch.tensor([5, 40, 77, 12, 9, 100, 33, 8])
    with Stopwatch(model) as watch:
        model(ids[None])
        prompt = watch.lap()
        model(ids[None, :1])
        token = watch.lap()
    assert (prompt.used, token.used, token.active) == (8 * 2 * 3, 2 * 3, 2 * 3)
    assert 3 * 2 <= prompt.active <= 3 * 8
    assert 0 < token.experts_s < token.experts_s + token.layers_s < token.seconds
    times = measure_times(model, ids, 4)
    assert times.dense > 0
    assert times.expert[16] > 0
    assert times.layers > 0
    assert model.tiermoe.context.observer is None
    model.tiermoe.close()
