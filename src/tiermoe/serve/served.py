"""The model behind a server: the request loop in a thread, the tokenizer, the checks of every dialect, and metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiermoe.engine.engine import Engine, numerics
from tiermoe.engine.expectation import OtherBudget, other_budgets
from tiermoe.engine.request import Piece
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.engine.speculation import Speculation
from tiermoe.errors import first_line
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.cache.prefix_disk import PrefixDisk, PrefixFolder, first_name
from tiermoe.model.chat.template import ChatTemplate, LeftOutError, chat_template
from tiermoe.serve.dialects import TOO_LONG, Json, Refused
from tiermoe.serve.grammar import Grammars
from tiermoe.serve.intake import hold_tokens, longest_text
from tiermoe.serve.worker import Times, Worker


@dataclass(slots=True)
class Served:
    """A loaded model in a server."""

    name: str  # the model's, for clients
    tokenizer: Any
    worker: Worker
    metrics: PrometheusMetrics
    engine: Engine
    sampling: Sampling  # of a request that names none
    created: int  # seconds since the epoch
    grammars: Grammars
    chat: ChatTemplate

    @property
    def context(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self.worker.loop.context

    @property
    def other_budgets(self) -> list[OtherBudget]:
        """What other memory budgets would bring, estimated from the costs of decoding so far; empty where too little is
        known."""
        plan, scheduler = self.engine.plan, self.engine.scheduler
        return other_budgets(plan, scheduler.size_curve(plan.slots, self.worker.loop.decoding))

    def check_model(self, name: str) -> None:
        """Refused if a client names another model than this one."""
        if name and name != self.name:
            raise Refused(
                404,
                f"the model '{name}' does not exist; this server has '{self.name}'",
                "model",
                code="model_not_found",
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refused if an id is no token's."""
        most = len(self.tokenizer)
        wrong = next((token for token in ids if not 0 <= token < most), None)
        if wrong is not None:
            raise Refused(400, f"there is no token {wrong}; the vocabulary has {most:,}", param)

    def text_ids(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text. special: with the tokens that every text begins with. Refused if the text is longer
        than `longest_text`."""
        self._check_length(text)
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        hold_tokens(len(ids))
        return ids

    def chat_ids(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        variables: Mapping[str, Any] | None = None,
        new_turn: bool = False,
    ) -> tuple[list[int], str]:
        """Token ids and text of a conversation in the model's chat template, ready for the answer.

        messages: with role and content. The answer continues the last message where that is `continued`, unless it is
        to be a `new_turn`. variables: of the template. A model without a template is given the contents, one after the
        other. Refused if the template does not take the messages, or if it leaves out what the answer continues, as
        some do with thoughts."""
        goes_on = None if new_turn else continued(messages)
        if not self.chat.text:
            if goes_on == "reasoning_content":
                raise _left_out("thought")
            text = "\n".join(message["content"] for message in messages)
            return self.text_ids(text), text
        if why := self.chat.form.refused:
            raise Refused(400, f"the model's chat template is not used: {why}", "messages")
        try:
            prompt = self.chat.prompt(messages, tools, variables, goes_on)
        except LeftOutError as error:
            raise _left_out("thought" if goes_on == "reasoning_content" else "text") from error
        except Exception as error:  # a template refuses what it does not know with errors of its own
            why = first_line(error)
            raise Refused(400, f"the model's chat template does not take these messages: {why}", "messages") from error
        self._check_length(prompt.text)
        return [token for piece in prompt.pieces for token in self.text_ids(piece, special=False)], prompt.text

    def _check_length(self, text: str) -> None:
        size, most = len(text.encode()), longest_text(self.context)
        if size > most:
            raise Refused(
                400,
                f"the text is too long: {size:,} bytes, {most:,} at most with a context of {self.context:,} tokens",
                "prompt",
                code=TOO_LONG,
            )


def _left_out(part: str) -> Refused:
    """The error where a prompt would lack the part of the last message that the answer continues."""
    return Refused(
        400,
        f"the model's chat template leaves out the {part} that the conversation ends with, so that no answer can "
        "continue it; leave that message out and ask for a new answer",
        "messages",
    )


def continued(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Field of the last message that the answer continues: `content` of an assistant's message, or `reasoning_content`
    where its content has not begun. None: the answer is a new turn."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        return None
    return "content" if messages[-1]["content"] or not messages[-1].get("reasoning_content") else "reasoning_content"


# --- metrics, in Prometheus' text format; names are vLLM's if it has one ---


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


# --- starting ---


def prefix_disk(engine: Engine, folder: PrefixFolder, warn: Callable[[str], None]) -> Callable[[KVCache], PrefixDisk]:
    """Makes a `PrefixDisk` from an engine's KV cache."""
    facts = json.dumps(numerics(engine), sort_keys=True).encode()
    return lambda cache: PrefixDisk(cache, folder, first_name(facts), warn)


def served_of(
    engine: Engine,
    tokenizer: Any,
    name: str,
    sampling: Sampling,
    most_waiting: int,
    disk: Callable[[KVCache], PrefixDisk] | None = None,
    speculation: Speculation | None = None,
    chat: ChatTemplate | None = None,
) -> Served:
    """Starts the loop of a loaded engine, in a thread.

    As many requests run at once as the engine was planned for; `most_waiting` more may wait. name: the model's, for
    clients. disk, speculation: as in `RequestLoop`. chat: the tokenizer's chat template; None: its format is learned
    now."""
    chat = chat or chat_template(tokenizer)
    ends = engine.ends | chat.ends
    loop = RequestLoop(
        engine,
        tokenizer,
        engine.settings.batch,
        ends=ends,
        disk=disk,
        times_decoding=True,
        speculation=speculation,
    )
    grammars = Grammars(tokenizer, engine.config.vocab_size, ends)
    metrics = PrometheusMetrics(engine, loop)
    worker = Worker(loop, most_waiting, metrics.ended)
    return Served(name, tokenizer, worker, metrics, engine, sampling, int(time.time()), grammars, chat)
