"""What to expect of a plan on a machine, as a range: arithmetic over bytes, rates and hit rates of recorded routing.

A decoded token reads the dense layers and its experts from memory, and from the drive those of its experts that are not
in the cache. At best both happen at the same time, at the rates that were measured and with the best recorded hit rate;
at worst one after the other, at a share of the rates, with the worst. Deciding what comes and goes takes time too: most
of it, if experts are small. A prompt reads each expert that any of its tokens uses once, or once for so many chunks
as go through a layer together, and computes.

If torch's operators compute, products take their measured time, and the work between products takes longer.

After a run, `as_measured` narrows the range to what the run has measured, and `other_budgets` says what other budgets
than the plan's would bring."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiermoe.engine.memory_plan import GpuMemoryPlan, MemoryPlan
from tiermoe.offload.computers import Rates
from tiermoe.offload.usage import SizeCurve

MEMORY_SHARE = 0.5  # of memory's rate that kernels reach at worst (docs/results.md, "Weights a second")
DRIVE_SHARE = 0.6  # of the drive's rate where reads of single experts wait for each other
ARITHMETIC_SHARE = 0.3  # of a plain matrix product's rate
PROMPT = 512
_DISTINCT = 0.5  # of the experts that evenly spread routing would use in a prompt: at best
_OURS = (0.0, 3e-4)  # seconds of a layer besides its weights, decoding, at best and at worst: our decoders
_TRANSFORMERS = (5e-4, 4e-3)  # transformers' code
_TORCH = (3e-4, 4e-3)  # our decoders on torch's operators: stories-7m .8 ms, a thread of a Zen 4
_TORCH_SHARE = 0.5  # of the time of products in a row that they take at best, with other work between them (.6 there)
_MANY_TOKENS = 2  # times as long as for one token a prompt's products of an expert take: its weights are decoded first
_GATHERING = 5e-4  # seconds of an expert's operators on a prompt besides its products, at worst
_DECIDING = (1e-4, 6e-4)  # seconds of a decoded token's MoE layer where not all experts are in memory, likewise
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the experts, that other budgets hold
_COMING = (5e-5, 5e-4)  # seconds of an expert that comes, besides its bytes
_AS_MEASURED = 1.2  # by which a run may differ from an earlier one (notebook/2026-11-24-plan.md) that had
_NEAR = 2  # times or 1 / _NEAR of the slots, or between


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One MoE layer that decodes."""

    experts: int
    top_k: int
    slot_bytes: int  # of one expert in memory
    stored_bytes: int  # of one expert on the drive


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs."""

    moe: Sequence[LayerWork]
    dense_bytes: int  # read from memory for each token
    kv_bytes: float  # of keys and values, a token of context
    operations: float  # float operations, a token of a prompt
    share: float  # of the experts that have a slot
    chunk: int  # tokens of a prompt that run at once
    context: int  # most tokens
    layers: int  # of the whole model
    ours: bool  # a decoder of our own runs
    packed_bytes: int = 0  # those of `dense_bytes` that are packed, or of a file's own types
    together: int = 1  # chunks of a prompt that go through a layer before the next layer


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a figure."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one sequence may expect, with a loaded model and a filled cache."""

    decode_tok_s: Range  # tokens a second
    first_token_s: Range  # seconds from a prompt of `prompt` tokens to the first token
    prompt: int
    hit_rate: Range  # share of a token's experts that are in the cache
    memory_bytes: float  # that a token reads from memory
    dense_bytes: int  # of `memory_bytes`, dense weights
    drive_bytes: Range  # that a token reads from the drive
    routing: str  # whose recorded routing the hit rates are of; empty: every expert has its slot, or a run's own
    rates: Rates
    measured: bool = False  # decoding as the last run here had it, and its hit rate

    @property
    def assumptions(self) -> str:
        """For people, in a line or two."""
        if self.measured:
            return f"decoding as in the last run, {_AS_MEASURED - 1:.0%} either way; nothing else runs"
        layer, expert = (f"{low * 1e3:.2g} to {high * 1e3:.2g} ms" for low, high in (_DECIDING, _COMING))
        decided = f"beside the bytes {expert} an expert that is read"
        hits = "every expert has its slot"
        if self.routing:
            decided += f" and {layer} a layer"
            hits = f"hit rates as in recorded routing of {self.routing}"
        torch = "torch's products take the time that they took just now, " if self.rates.torch_s else ""
        rates = (
            f"{torch}kernels reach {MEMORY_SHARE:.0%} to 100% of the memory's rate, loads {DRIVE_SHARE:.0%} to 100% of "
            "the drive's"
        )
        return "; ".join((rates, decided, hits, "nothing else runs"))


def expect(work: Work, rates: Rates) -> Expectation:
    """The range for a plan's work on a machine."""
    typical = max(work.moe, key=lambda layer: layer.experts)
    hits, routing = hit_rates(typical.experts, typical.top_k, work.share)
    prompt = max(1, min(PROMPT, work.context - 1))
    experts = sum(layer.top_k * layer.slot_bytes for layer in work.moe)
    memory = work.dense_bytes + experts + work.kv_bytes * prompt
    used = sum(layer.top_k * layer.stored_bytes for layer in work.moe)
    missed = Range(used * (1 - hits[1]), used * (1 - hits[0]))
    torch_least, torch_most = rates.torch_s or (0.0, 0.0)
    ours = _TORCH if rates.torch_s else _OURS
    least, most = (seconds * work.layers for seconds in (ours if work.ours else _TRANSFORMERS))
    if work.share < 1:
        least, most = least + _DECIDING[0] * len(work.moe), most + _DECIDING[1] * len(work.moe)
    uses = sum(layer.top_k for layer in work.moe)
    quickly = missed.low / rates.drive + uses * (1 - hits[1]) * _COMING[0]
    slowly = missed.high / (rates.drive * DRIVE_SHARE) + uses * (1 - hits[0]) * _COMING[1]
    best = max(memory / rates.memory, experts * torch_least * _TORCH_SHARE, quickly) + least
    worst = memory / (rates.memory * MEMORY_SHARE) + (experts + work.packed_bytes) * torch_most + slowly + most
    return Expectation(
        decode_tok_s=Range(1 / worst, 1 / best),
        first_token_s=_first_token(work, rates, prompt, (best, worst)),
        prompt=prompt,
        hit_rate=Range(*hits),
        memory_bytes=memory,
        dense_bytes=work.dense_bytes,
        drive_bytes=missed,
        routing=routing,
        rates=rates,
    )


def as_measured(expected: Expectation, work: Work, curve: SizeCurve, plan: MemoryPlan) -> Expectation:
    """The range with decoding as the last run on this machine had it. `expected` as it is where that run says too
    little: every expert has a slot now and nobody decides anything, or the cache is of quite another size."""
    if plan.slots >= plan.all_slots or not 1 / _NEAR <= plan.slots / curve.slots <= _NEAR:
        return expected
    hits, tok_s = curve.at(plan.slots)
    missed = sum(layer.top_k * layer.stored_bytes for layer in work.moe) * (1 - hits)
    return replace(
        expected,
        decode_tok_s=Range(tok_s / _AS_MEASURED, tok_s * _AS_MEASURED),
        hit_rate=Range(hits, hits),
        drive_bytes=Range(missed, missed),
        routing="",
        measured=True,
    )


def _first_token(work: Work, rates: Rates, prompt: int, token_s: tuple[float, float]) -> Range:
    """A prompt in chunks, then a token: at best with the cache as an earlier answer left it and everything at the same
    time, at worst with an empty one and one after the other."""
    computing = work.operations * prompt / rates.arithmetic
    warm = cold = 0.0  # seconds in which experts come
    few = many = 0.0  # and in which torch multiplies by them
    torch_least, torch_most = rates.torch_s or (0.0, 0.0)
    for first in range(0, prompt, work.chunk * work.together):
        tokens = min(work.chunk * work.together, prompt - first)
        for layer in work.moe:
            used, missing = _distinct(layer, tokens), 1 - work.share
            warm += used * _DISTINCT * missing * (layer.stored_bytes / rates.drive + _COMING[0])
            each = layer.stored_bytes / (rates.drive * DRIVE_SHARE) + _COMING[1]
            cold += used * (missing if first else 1) * each
    for first in range(0, prompt, work.chunk):
        tokens = min(work.chunk, prompt - first)
        for layer in work.moe:
            used = _distinct(layer, tokens)
            few += used * _DISTINCT * layer.slot_bytes * torch_least * _TORCH_SHARE
            if rates.torch_s:
                many += used * (layer.slot_bytes * torch_most * _MANY_TOKENS + _GATHERING)
    best, worst = token_s
    return Range(max(computing, warm, few) + best, computing / ARITHMETIC_SHARE + cold + many + worst)


def _distinct(layer: LayerWork, tokens: int) -> float:
    """Experts of a layer that so many tokens use where routing is spread evenly."""
    return layer.experts * (1 - (1 - layer.top_k / layer.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Recording:
    """Hit rates on a model's recorded routing: what the default preset hits without prefetch, in the worst and the best
    64 tokens that follow each other of the recorded texts, the cache as the tokens before left it."""

    model: str
    experts: int  # a layer
    top_k: int  # experts a token
    hits: tuple[tuple[float, float, float], ...]  # (share of the experts in the cache, lowest, highest hit rate)


_OTHERS = (1.4, 0.7)
"""Factors on the odds of a miss by which another model's routing may differ from the recorded one: chosen by eye from
hit rates that a public project reports of gemma-4-26B-A4B, gpt-oss-120b and Qwen3.6-35B-A3B."""

# fmt: off
RECORDINGS = (
    Recording(
        "Qwen3-30B-A3B", 128, 6,
        (
            (0.05, 0.387, 0.406), (0.1, 0.582, 0.592), (0.2, 0.765, 0.786), (0.3, 0.872, 0.896), (0.4, 0.927, 0.951),
            (0.5, 0.950, 0.976), (0.6, 0.957, 0.984), (0.8, 0.958, 0.984),
        ),
    ),
    Recording(
        "stories-7m", 32, 4,
        (
            (0.05, 0.034, 0.077), (0.1, 0.091, 0.176), (0.2, 0.302, 0.354), (0.3, 0.388, 0.478), (0.4, 0.485, 0.594),
            (0.5, 0.577, 0.686), (0.6, 0.659, 0.772), (0.8, 0.841, 0.900),
        ),
    ),
)
# fmt: on


def hit_rates(experts: int, top_k: int, share: float) -> tuple[tuple[float, float], str]:
    """((lowest, highest) hit rate, model) of the recording with the shape nearest to layers of `experts` experts of
    which a token uses `top_k`, with the share `share` of all experts in the cache; model '' if all are."""
    if share >= 1:
        return (1.0, 1.0), ""
    nearest = min(RECORDINGS, key=lambda each: _distance(each, experts, top_k))
    table = ((0.0, 0.0, 0.0), *nearest.hits, (1.0, 1.0, 1.0))
    above = max(1, bisect_left(table, (share,)))
    (left, *lower), (right, *upper) = table[above - 1], table[above]
    weight = (share - left) / (right - left)
    found = [a + (b - a) * weight for a, b in zip(lower, upper, strict=True)]
    low, high = (hits / (hits + (1 - hits) * factor) for hits, factor in zip(found, _OTHERS, strict=True))
    return (low, high), f"{nearest.model} ({nearest.experts} experts a layer, {nearest.top_k} a token)"


def _distance(recording: Recording, experts: int, top_k: int) -> float:
    return abs(math.log(recording.experts / experts)) + abs(math.log(recording.top_k / top_k))


@dataclass(frozen=True, slots=True)
class OtherBudget:
    """What another memory budget would bring."""

    memory_bytes: int  # of main memory
    slots: int  # experts that would have one
    cache_fraction: float  # slots / experts
    hit_rate: float  # share of a decoded token's experts that would be in the cache
    decode_tok_s: float  # tokens a second


def other_budgets(plan: MemoryPlan, curve: SizeCurve | None) -> list[OtherBudget]:
    """By rising memory: room for a tenth of the experts, two tenths, … all, and the plan's own. Where a GPU holds the
    experts, or nothing is known (None), there are none."""
    if curve is None or isinstance(plan, GpuMemoryPlan):
        return []
    counts = {math.ceil(share * plan.all_slots) for share in _SHARES}
    enough = {slots for slots in counts if slots >= plan.token_slots}  # fewer are one pool, which hits otherwise
    return [at_slots(plan, curve, slots) for slots in sorted({*enough, plan.slots})]


def at_slots(plan: MemoryPlan, curve: SizeCurve, slots: int) -> OtherBudget:
    """The budget that gives `slots` experts a slot besides what the plan needs for all else."""
    hit_rate, tok_s = curve.at(slots)
    nbytes = plan.fixed + slots * plan.slot_bytes
    return OtherBudget(nbytes, slots, slots / plan.all_slots, hit_rate, tok_s)
