"""A batch policy: a request begins as soon as another one's place is free."""

from __future__ import annotations

from typing import Any

from tiermoe.batch import Batch, decode, prompt


def serve(engine: Any, requests: list[list[int]], count: int, together: int) -> list[list[int]]:
    """`count` greedy tokens after each of `requests`, of which at most `together` run at once."""
    cache = engine.new_cache(together)
    answers: list[list[int]] = [[] for _ in requests]
    waiting, running = list(range(len(requests))), {}
    while waiting or running:
        rows = [decode(slab, cache.length(slab), answers[request][-1]) for slab, request in running.items()]
        while waiting and len(running) < together:
            running[slab := cache.open()] = waiting.pop(0)
            rows.append(prompt(slab, requests[running[slab]]))
        found = engine.step(Batch(tuple(rows)), cache).argmax(-1).tolist()
        for row, token in zip(rows, found, strict=True):
            answer = answers[running[row.slab]]
            answer.append(token)
            if len(answer) == count:
                cache.close(row.slab)
                del running[row.slab]
    return answers
