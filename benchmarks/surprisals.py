"""Surprisals of a text in windows, computed here from each engine's logits, so that two engines differ by these alone.
Needs only numpy: `benchmarks.peer` imports it in the interpreter that has llama-cpp-python."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Logits = Callable[[Ids], npt.NDArray[np.float32]]
"""Token ids of a window (T,) → logits (T, vocabulary) after each of them."""


def surprisals(logits_fn: Logits, ids: Ids, context: int) -> Iterator[npt.NDArray[np.float64]]:
    """Negative log-likelihoods in nats of the tokens of each window of `ids` (N,) but its first, which nothing stands
    before. Windows have `context` tokens and do not overlap."""
    for begin in range(0, len(ids) - 1, context):
        window = ids[begin : begin + context]
        logits = logits_fn(window)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(logits).sum(axis=1))
        yield normaliser - logits[np.arange(len(window) - 1), window[1:]]
