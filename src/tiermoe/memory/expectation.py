"""What to expect of a plan on a machine, as a range: arithmetic over bytes, rates and hit rates of recorded routing.

A decoded token reads the dense layers and its experts from memory, and from the drive those of its experts that are not
in the cache. At best both happen at the same time, at the rates that were measured and with the best recorded hit rate;
at worst one after the other, at a share of the rates, with the worst. Deciding what comes and goes takes time too: most
of it, where experts are small. A prompt reads each expert that any of its tokens uses once a chunk, and computes.

Where torch's operators compute, products take what they were measured to take, and what stands between them longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiermoe.simulate.machines import Rates
from tiermoe.simulate.recorded import hit_rates

MEMORY_SHARE = 0.5  # of memory's rate that kernels reach at worst (docs/results.md, "Weights a second")
DRIVE_SHARE = 0.6  # of the drive's rate where reads of single experts wait for each other
ARITHMETIC_SHARE = 0.3  # of a plain matrix product's rate
PROMPT = 512
_DISTINCT = 0.5  # of the experts that evenly spread routing would use in a prompt: at best
_OURS = (0.0, 3e-4)  # seconds of a layer beside its weights, decoding, at best and at worst: our decoders
_TRANSFORMERS = (5e-4, 4e-3)  # transformers' code
_TORCH = (3e-4, 4e-3)  # our decoders on torch's operators: stories-7m .8 ms, a thread of a Zen 4
_TORCH_SHARE = 0.5  # of the time of products in a row that they take at best, with other work between them (.6 there)
_MANY_TOKENS = 2  # times as long as for one token a prompt's products of an expert take: its weights are decoded first
_GATHERING = 5e-4  # seconds of an expert's operators on a prompt beside its products, at worst
_DECIDING = (1e-4, 6e-4)  # seconds of a decoded token's MoE layer where not all experts are in memory, likewise
_COMING = (5e-5, 5e-4)  # seconds of an expert that comes, beside its bytes


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One MoE layer that decodes: `experts`, of which a token uses `top_k`; bytes of one in its slot and as stored."""

    experts: int
    top_k: int
    slot_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs. dense_bytes: read from memory for each; kv_bytes: of keys and values a token of context;
    operations: float operations a token of a prompt; share: of the experts that have a slot; chunk: tokens of a prompt
    that run at once; context: most tokens; layers: of the whole model; ours: a decoder of our own runs.
    packed_bytes: those of `dense_bytes` that are packed, or of a file's own types."""

    moe: Sequence[LayerWork]
    dense_bytes: int
    kv_bytes: float
    operations: float
    share: float
    chunk: int
    context: int
    layers: int
    ours: bool
    packed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Range:
    """From the least to the most."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of one sequence, the cache filled. `decode_tok_s`: tokens a second; `first_token_s`: seconds from a prompt of
    `prompt` tokens to the first token, the model loaded; `hit_rate`: of a token's experts those in the cache;
    `memory_bytes`, `drive_bytes`: that a token reads, `dense_bytes` of them dense weights. `routing`: whose recorded
    routing the hit rates are of."""

    decode_tok_s: Range
    first_token_s: Range
    prompt: int
    hit_rate: Range
    memory_bytes: float
    dense_bytes: int
    drive_bytes: Range
    routing: str
    rates: Rates

    @property
    def assumptions(self) -> str:
        """For people, in a line or two."""
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
    asked = sum(layer.top_k for layer in work.moe)
    quickly = missed.low / rates.drive + asked * (1 - hits[1]) * _COMING[0]
    slowly = missed.high / (rates.drive * DRIVE_SHARE) + asked * (1 - hits[0]) * _COMING[1]
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


def _first_token(work: Work, rates: Rates, prompt: int, token_s: tuple[float, float]) -> Range:
    """A prompt in chunks, then a token: at best with the cache as an earlier answer left it and everything at the same
    time, at worst with an empty one and one after the other."""
    computing = work.operations * prompt / rates.arithmetic
    warm = cold = 0.0  # seconds in which experts come
    few = many = 0.0  # and in which torch multiplies by them
    torch_least, torch_most = rates.torch_s or (0.0, 0.0)
    for first in range(0, prompt, work.chunk):
        tokens = min(work.chunk, prompt - first)
        for layer in work.moe:
            used, missing = _distinct(layer, tokens), 1 - work.share
            warm += used * _DISTINCT * missing * (layer.stored_bytes / rates.drive + _COMING[0])
            each = layer.stored_bytes / (rates.drive * DRIVE_SHARE) + _COMING[1]
            cold += used * (missing if first else 1) * each
            few += used * _DISTINCT * layer.slot_bytes * torch_least * _TORCH_SHARE
            if rates.torch_s:
                many += used * (layer.slot_bytes * torch_most * _MANY_TOKENS + _GATHERING)
    best, worst = token_s
    return Range(max(computing, warm, few) + best, computing / ARITHMETIC_SHARE + cold + many + worst)


def _distinct(layer: LayerWork, tokens: int) -> float:
    """Experts of a layer that so many tokens use where routing is spread evenly."""
    return layer.experts * (1 - (1 - layer.top_k / layer.experts) ** tokens)
