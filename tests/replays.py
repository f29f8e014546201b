"""Replays of traces written by hand, over a link on which one expert takes a second."""

from __future__ import annotations

from typing import Any

from tiermoe.config import CacheSize
from tiermoe.simulate import ReplaySettings, Result, replay
from tiermoe.systems import compose
from tiermoe.trace.schema import Times, Trace

TIMES = Times(dense=0.5, expert={4: 0.4}, prefill_token=0.1, prefill_expert={4: 0.05})


def replayed(trace: Trace, preset: str = "lru", slots: int = 4, **options: Any) -> Result:
    """100 bytes a second: one expert of `trace_of` takes one second."""
    changes = options.pop("changes", {})
    nbytes = slots * trace.header.expert_bytes[4][0]
    given = {"bandwidth": 100.0, "times": TIMES} | options
    return replay(trace, compose(preset, changes), ReplaySettings(CacheSize(nbytes=nbytes), **given))
