"""Metrics of the server in Prometheus' text format. Names are vLLM's where it has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiermoe.engine.engine import Engine
from tiermoe.engine.request import Piece
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.model.cache.prefix_disk import PrefixDisk
from tiermoe.serve.dialects import Json
from tiermoe.serve.worker import Times

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class PrometheusMetrics:
    """Counters of a server, its request loop and its engine."""

    def __init__(self, engine: Engine, loop: RequestLoop) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(engine, loop))
        self._finished = Counter(
            "tiermoe:request_success", "Finished requests", ["finished_reason"], registry=self._registry
        )
        self._first = Histogram(
            "tiermoe:time_to_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._between = Histogram(
            "tiermoe:inter_token_latency_seconds",
            "Between two tokens of an answer",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def ended(self, piece: Piece, times: Times) -> None:
        """Records an answer that ended."""
        self._finished.labels(piece.finish).inc()
        self._first.observe(times.first)
        for seconds in times.between:
            self._between.observe(seconds)

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)


class _State(Collector):
    """Counters of the loop and the engine, read at each scrape."""

    def __init__(self, engine: Engine, loop: RequestLoop) -> None:
        self._engine = engine
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        loop = self._loop
        stats: Json = self._engine.stats()
        scheduler, reserved = loop.scheduler, loop.scheduler.prefixes.reserved
        planned = self._engine.plan.kv_cache
        usage = min(1.0, reserved / planned) if planned else 0.0  # whole pages are set aside
        for name, text, value in (
            ("num_requests_running", "Requests in the batch", scheduler.running),
            ("num_requests_waiting", "Requests that wait for a row", len(scheduler.waiting)),
            ("kv_cache_bytes", "Keys and values that are set aside for requests and left by others", reserved),
            ("kv_cache_usage_perc", "Share of their memory that is set aside, 0 to 1", usage),
            ("resident_memory_bytes", "Memory that the process holds", stats["memory_bytes"]),
            ("resident_memory_peak_bytes", "Most memory the process held", stats["peak_memory_bytes"]),
            ("memory_budget_bytes", "Bound on the process", stats["memory_budget_bytes"]),
        ):
            yield GaugeMetricFamily(f"tiermoe:{name}", text, value)
        counts = loop.counts
        for name, text, value in (
            ("requests", "Requests that were taken", counts.requests),
            ("requests_aborted", "Those whose clients left before the end", counts.aborted),
            ("requests_refused", "Requests that came to a full queue or a server about to end", counts.refused),
            ("num_preemptions", "Requests that were preempted for want of KV memory", counts.preemptions),
            ("prompt_tokens", "Tokens of prompts that were read", counts.prompt_tokens),
            ("prompt_tokens_cached", "Tokens of prompts that earlier requests left", counts.cached_tokens),
            ("generation_tokens", "Generated tokens", counts.generated_tokens),
            ("spec_decode_num_draft_tokens", "Verified guesses at next tokens", counts.guessed_tokens),
            ("spec_decode_num_accepted_tokens", "Those that were right", counts.right_guesses),
            ("expert_cache_queries", "Experts that a router asked for", stats["expert_hits"] + stats["expert_misses"]),
            ("expert_cache_hits", "Those that were there", stats["expert_hits"]),
            ("expert_cache_evictions", "Experts that left for others", stats["expert_evictions"]),
            ("read_bytes", "Bytes read from the drive", stats["bytes_read"]),
            ("also_read_bytes", "Those that the second drive gave (--also)", stats["bytes_read_also"]),
            ("expert_wait_seconds", "Time in which computing waited for experts", stats["wait_s"]),
            *_of_gpu(stats),
            *_of_disk(loop.disk),
        ):
            yield CounterMetricFamily(f"tiermoe:{name}", text, value)


def _of_gpu(stats: Json) -> list[tuple[str, str, int]]:
    """Counters of experts that are copied to a GPU."""
    if "bytes_copied" not in stats:
        return []
    return [
        ("gpu_copied_bytes", "Bytes copied from main memory to the GPU", stats["bytes_copied"]),
        ("host_cache_hits", "Experts for the GPU that were in main memory", stats["host_hits"]),
        ("host_cache_misses", "Those that were read from the drive", stats["host_misses"]),
    ]


def _of_disk(disk: PrefixDisk | None) -> list[tuple[str, str, int]]:
    """Counters of the prefix cache on disk."""
    if disk is None:
        return []
    counts = disk.counts
    return [
        ("prefix_disk_hits", "Requests whose beginning was read from disk", counts.hits),
        ("prefix_disk_written_bytes", "Bytes of keys and values written to disk", counts.written_bytes),
        ("prefix_disk_read_bytes", "Bytes of keys and values read from disk", counts.read_bytes),
        ("prefix_disk_dropped_files", "Damaged files that were removed", counts.dropped),
    ]
