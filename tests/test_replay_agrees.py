"""A run of the engine and its replay hit and miss the same, phase by phase. With one lane: with several, loads arrive in
an order of their own, which decides what a recency rule evicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from tiermoe.compose import PrecisionSlots
from tiermoe.config import CacheSize
from tiermoe.presets import compose
from tiermoe.runtime.evaluate import decode_window
from tiermoe.runtime.phases import Phase
from tiermoe.runtime.record import Recorder
from tiermoe.runtime.trace_header import header_of
from tiermoe.simulate import ReplaySettings, Result, replay
from tiermoe.trace import LayerTrace, Little, Pass, Times, Trace
from tiermoe.types import Routed

PROMPT, LENGTH = 12, 44
TIMES = Times(1e-3, {4: 1e-4}, 1e-3, {4: 1e-5})
NOTHING = {"prefetch": "none"}


@pytest.fixture(scope="module")
def sequences(shipped: Path) -> torch.Tensor:
    """Two of a held-out text, so that records of a sequence and of the model differ."""
    from tiermoe.runtime.resolve import load_tokenizer

    text = (shipped.parents[1] / "data" / "heldout.txt").read_text()[:2000]
    ids = load_tokenizer(shipped)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[: 2 * LENGTH]).view(2, LENGTH)


@pytest.fixture(scope="module")
def recorded(shipped: Path, sequences: torch.Tensor) -> Trace:
    """The text, as `tiermoe trace` records it."""
    model, _ = tiermoe.load(shipped, preset="lru", lanes=1, memory="4GiB")
    with Recorder(model) as recorder:
        passes = [passed for number, ids in enumerate(sequences) for passed in recorder.passes(ids, PROMPT, number)]
        header = header_of(model, TIMES, recorder.holds, recorder.distances, {})
    model.tiermoe.close()
    return Trace(header, passes)


class Run:
    """A text fed to a model: what its phases hit, and the routing as it was, also where the composition is lossy."""

    def __init__(self, directory: Path, sequences: torch.Tensor, preset: str, changes: dict[str, Any], cache: str):
        model, _ = tiermoe.load(directory, preset=preset, set=changes, cache=cache, lanes=1, memory="4GiB")
        engine = model.tiermoe
        self.prefill, self.decode = Phase(), Phase()
        self.passes: list[Pass] = []
        self._current = engine.current
        self._current.needs_weights = True
        engine.observe(self._note)
        for number, ids in enumerate(sequences):
            self._sequence = number
            for begin, end in _cuts():
                phase = self.prefill if begin == 0 else self.decode
                if begin == 0:
                    cache_ = None
                self._begin("prefill" if begin == 0 else "decode", ids[begin:end].tolist())
                with phase.measured(engine, end - begin), torch.inference_mode():
                    cache_ = model(input_ids=ids[None, begin:end], past_key_values=cache_, use_cache=True)
                    cache_ = cache_.past_key_values
        self.header = header_of(model, TIMES, frozenset({"weights", "little"}), (), {})
        self.slots = tuple(PrecisionSlots(pool.bits, pool.slots) for pool in engine.plan.pools)
        self.stats = engine.stats()
        engine.close()
