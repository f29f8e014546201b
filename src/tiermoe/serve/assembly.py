"""A server's parts over a loaded engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tiermoe.generation.sampling import Sampling
from tiermoe.generation.sequence import end_tokens
from tiermoe.serve.batcher import Batcher
from tiermoe.serve.grammar import Grammars
from tiermoe.serve.metrics import Metrics
from tiermoe.serve.prefix_disk import PrefixDisk
from tiermoe.serve.served import Served
from tiermoe.serve.worker import Worker


def served_of(
    engine: Any,
    tokenizer: Any,
    name: str,
    sampling: Sampling,
    most_waiting: int,
    disk: Callable[[Any], PrefixDisk] | None = None,
) -> Served:
    """What answers requests: as many at once as the engine was planned for, `most_waiting` more in the queue. name: the
    model's, for clients. disk: as `Batcher` takes it. Its worker's thread runs from now on."""
    config = engine.generation_config
    ends = end_tokens(config)
    penalty = getattr(config, "repetition_penalty", None)
    batcher = Batcher(engine, tokenizer, ends, engine.settings.batch, penalty, disk)
    grammars = Grammars(tokenizer, engine.config.vocab_size, ends)
    metrics = Metrics(engine, batcher)
    worker = Worker(batcher, most_waiting, metrics.ended)
    return Served(name, tokenizer, worker, metrics, engine, sampling, int(time.time()), grammars)
