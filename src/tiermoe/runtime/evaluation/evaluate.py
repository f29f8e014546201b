"""How good a preset's text is, and how fast it came: each window's prompt is read at once, as `generate()` would, and
its other tokens are fed one at a time, whatever the model would have said.

Many presets act while a model decodes, and on what happens to be cached (skipping, a lower precision on a miss, falling
back), so a forward pass over a whole window would not show what they cost. Every preset is fed the same tokens, so
speeds compare too. The distributions are kept as they come and scored after each window, outside the measured time.
"""

from __future__ import annotations

from typing import Any

import torch

from tiermoe import batch
from tiermoe.batch import Batch
from tiermoe.runtime.engine import engine_of
from tiermoe.runtime.evaluation import scoring
from tiermoe.runtime.evaluation.reference import Reference
from tiermoe.runtime.evaluation.scoring import TokenScores
from tiermoe.runtime.evaluation.windows import Windows
from tiermoe.runtime.phases import Phase
from tiermoe.runtime.prepare_store import Progress


def reserved_bytes(length: int, vocabulary: int, itemsize: int) -> int:
    """What scoring a window of `length` tokens holds beside the model: its logits, and rows being scored."""
    return length * vocabulary * itemsize + scoring.working_bytes(vocabulary)


@torch.inference_mode()
def write_reference(model: Any, windows: Windows, reference: Reference, progress: Progress) -> list[TokenScores]:
    """Appends the log-probabilities of each scored token to `reference`, which has its header, a window in one forward
    pass: an exact model's logits do not depend on its cache. Returns the windows' scores."""
    scores = []
    for done, window in enumerate(windows, 1):
        logits = _logits(model, window[0].tolist())[-windows.shape.window - 1 : -1]
        for rows in scoring.row_blocks(len(logits)):
            reference.append(scoring.log_probabilities(logits[rows]))
        scores.append(scoring.score_tokens(logits.cpu(), windows.targets(window)))
        progress("scoring the 16-bit weights", done, len(windows.scored))
    return scores


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    """(n, vocabulary) of a window's tokens, read at once."""
    engine = engine_of(model)
    cache = engine.new_cache(1, len(ids))
    return engine.step(Batch((batch.prompt(cache.open(), ids),)), cache, every=True)


def evaluate(model: Any, windows: Windows, reference: Reference | None, progress: Progress) -> dict[str, Any]:
    """Scores and speed of a loaded model on a text's windows, by the names that `--json` prints."""
    logits = torch.empty(windows.shape.window, model.config.vocab_size, dtype=model.dtype)
    decode_window(model, windows.warming[None], windows.shape.prompt, logits, Phase(), Phase())
    prefill, decode = Phase(), Phase()
    scores = []
    for index, window in enumerate(windows):
        decode_window(model, window, windows.shape.prompt, logits, prefill, decode)
        rows = reference.window(index) if reference is not None else None
        scores.append(scoring.score_tokens(logits, windows.targets(window), rows))
        progress("scoring", index + 1, len(windows.scored))
    return {**_speed(model, prefill, decode), **scoring.summarise(scores)}


@torch.inference_mode()
def decode_window(
    model: Any, window: torch.Tensor, prompt: int, logits: torch.Tensor, prefill: Phase, decode: Phase
) -> None:
    """Feeds a window (1, n) to a model: `prompt` tokens in the engine's chunks, then one at a time but for the last.
    Writes the logits of each token after the prompt to `logits` (n - prompt, vocabulary), and adds to the phases."""
    engine = engine_of(model)
    ids = window[0].tolist()
    cache = engine.new_cache(1, len(ids))
    slab = cache.open()
    with prefill.measured(engine, prompt):
        logits[0] = engine.step(Batch((batch.prompt(slab, ids[:prompt]),)), cache)[0]
    with decode.measured(engine, len(logits) - 1):
        for row in range(1, len(logits)):
            at = prompt + row - 1
            logits[row] = engine.step(Batch((batch.decode(slab, at, ids[at]),)), cache)[0]


def _speed(model: Any, prefill: Phase, decode: Phase) -> dict[str, Any]:
    engine = engine_of(model)
    plan, stats, both = engine.plan, engine.stats(), prefill + decode
    return {
        "preset": engine.composition.name,
        "lossy": engine.lossy,
        "set": dict(engine.settings.set),
        "bits": engine.settings.bits,
        "dense_bits": engine.settings.dense_bits_used,
        "cache_fraction": plan.experts / (plan.all_slots * plan.slot_bytes),
        "hit_rate": both.hit_rate,
        "prefill_hit_rate": prefill.hit_rate,
        "decode_hit_rate": decode.hit_rate,
        "prefill_tok_s": prefill.tok_s,
        "decode_tok_s": decode.tok_s,
        "bound_tok_s": decode.bound_tok_s(engine.bandwidth),
        "bytes_read": both.bytes_read,
        "bytes_per_token": decode.bytes_per_token,
        "wait_s": both.wait_s,
        "decode_wait_s": decode.wait_s,
        "fallback_ratio": stats["fallback_ratio"],
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": stats["peak_memory_bytes"],
        "memory_budget_bytes": plan.budget,
    }
