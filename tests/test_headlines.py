"""The table of the papers' headlines: its settings exist, its numbers are those of replays, refusals are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.headlines import ON_DEMAND, Headline, Replays, Setting, Side, headlines, row, with_windows
from small_traces import decode, layer, trace_of
from tiermoe.config import CacheSize
from tiermoe.simulate import ReplaySettings, parse_link, replay, spread
from tiermoe.systems import compose
from tiermoe.trace.schema import Times, Trace


def small() -> Trace:
    return trace_of([decode(layer([0, 1]), layer([token % 4, 3])) for token in range(3)], nbytes=1 << 20)


def test_every_setting_is_one_that_the_parts_read() -> None:
    for headline in headlines():
        for setting in (headline.setting, *headline.moved.values()):
            parse_link(setting.link)
            for side in (setting.ours, setting.theirs):
                compose(side.preset, dict(side.changes))


def test_a_ratio_is_that_of_two_replays() -> None:
    trace, machine = small(), parse_link("sata")
    times = spread(trace.header, 2e-3, 2e-4)

    def speed(preset: str, nbytes: int) -> float:
        settings = ReplaySettings(CacheSize(nbytes=nbytes), machine.bandwidth, machine.latency, bits=4, times=times)
        return replay(trace, compose(preset, {}), settings).phases["decode"].tok_s

    setting = Setting(Side("lru"), ON_DEMAND, "sata", share="75%")
    expected = speed("lru", 6 << 20) / speed("load-on-demand", 6 << 20)
    assert expected > 1.2
    assert Replays(trace, None).ratio(setting) == pytest.approx(expected)
    half = Setting(Side("lru", bits=2, share="50%", share_of=4), ON_DEMAND, "sata")
    assert Replays(trace, None).ratio(half) > Replays(trace, None).ratio(setting)


def test_fates_windows_are_of_the_machine_that_is_replayed() -> None:
    trace, times = small(), Times(2e-3, {4: 5e-4}, 1e-3, {4: 1e-4})  # of two layers each 1 ms and two experts': 2 ms
    ahead = [with_windows(compose("fate", {}), trace, times, megabytes * 2**20)["window"] for megabytes in (400, 1600)]
    assert ahead == [(0, 0), (3, 0)]  # in 2 ms .8 and 3.2 experts of 1 MiB; behind the last layer none


def test_what_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    setting = Setting(Side("fate"), ON_DEMAND, "pcie3")
    headline = Headline("fate", "Fate", "4.1", setting, {"lru": Setting(Side("lru"), ON_DEMAND, "pcie3")})
    line = row(headline, Replays(small(), tmp_path))
    assert line.startswith("| Fate | 4.1 | not replayed (no calibration in ")
    assert line.rsplit("lru: ", 1)[1].removesuffix(" |").replace(".", "").isdigit()
