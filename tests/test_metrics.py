"""One metrics object, of which a report, an evaluation and `stats()` are views."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiermoe
from tiermoe.engine.generate import encode_prompt
from tiermoe.metrics import ExpertCounts, Metrics, PhaseMetrics


def test_figures_have_their_phases() -> None:
    prefill = PhaseMetrics(4.0, 1.0, 3.0, 1000, 8, ExpertCounts(hits=2, misses=6))
    decode = PhaseMetrics(5.0, 4.0, 1.0, 300, 10, ExpertCounts(hits=9, misses=1, displaced=5, moved_weight=4.0))
    run = Metrics(prefill=prefill, decode=decode, bandwidth=100.0, layers=2)
    assert (run.hit_rate, run.prefill_hit_rate, run.decode_hit_rate) == (11 / 18, 0.25, 0.9)
    assert (run.expert_hits, run.expert_misses) == (11, 7)
    assert (run.prefill_tok_s, run.decode_tok_s, run.bound_tok_s) == (2, 2, 2.5)  # 4 s of computing, 3 s of reading
    assert (run.bytes_read, run.prefill_bytes_per_token, run.bytes_per_token) == (1300, 125, 30)
    assert (run.wait_s, run.decode_wait_s) == (4.0, 1.0)
    assert (run.displaced_share, run.moved_weight_share) == (0.5, 0.2)
    decode.bytes_read = 0
    assert run.bound_tok_s == 0  # no drive bounds it


def test_a_report_is_what_stats_gained(shipped: Path) -> None:
    with tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache="30%", warm=False) as (model, tokenizer):
        ids = encode_prompt(tokenizer, "Once upon a time")
        before = model.tiermoe.stats()
        report = tiermoe.generate(model, tokenizer, ids, tiermoe.Sampling(max_tokens=6, temperature=0.0))
        after = model.tiermoe.stats()
    said = report.as_dict()
    for name in ("expert_hits", "expert_misses", "bytes_read", "wait_s"):
        assert 0 < said[name] == pytest.approx(after[name] - before[name])
    assert said["hit_rate"] == pytest.approx(report.expert_hits / (report.expert_hits + report.expert_misses))
    for name in ("preset", "bits", "dense_bits", "memory_budget_bytes", "prefetching"):
        assert said[name] == after[name]
    assert (said["prompt_tokens"], said["completion_tokens"]) == (ids.shape[1], len(report.token_ids)) == (5, 6)
