"""Truncation: which tokens may be drawn, by their probabilities. Definitions: llama.cpp, src/llama-sampling.cpp
(`llama_sampler_top_n_sigma_apply`, `llama_sampler_typical_apply`, `llama_sampler_top_p_apply`,
`llama_sample_xtc_apply`). There they see probabilities at temperature 1, here those at the request's temperature."""

from __future__ import annotations

import torch
from torch import Tensor

_CANDIDATES = 256  # tokens that reach a share are nearly always among so many: sorting a vocabulary takes milliseconds
_MORE = 16  # times as many are looked at where they are too few


def within_sigma(logits: Tensor, n: float) -> Tensor:
    """Logits (vocabulary), with minus infinity for those more than n standard deviations below the largest. Tang et
    al., "Top-nσ: Not All Logits Are You Need", 2024. Possible tokens alone count."""
    possible = logits[logits > -torch.inf]
    return logits.masked_fill(logits < possible.max() - n * possible.std(correction=0), -torch.inf)


def typical(probabilities: Tensor, share: float, top_k: int) -> Tensor:
    """Probabilities (vocabulary) of tokens whose surprise is nearest to the entropy, as many as have more than `share`
    together, and 0 for others; their sum is 1. Meister et al., "Locally Typical Sampling", 2023. top_k: only so many of
    the likeliest count; 0: all."""
    if 0 < top_k < probabilities.numel():
        probabilities = _alone(probabilities, probabilities.topk(top_k).indices)
    surprise = -probabilities.log()
    entropy = torch.special.entr(probabilities).sum()
    return _alone(probabilities, _reaching(-(surprise - entropy).abs(), probabilities, share, more=True))


def nucleus(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the likeliest tokens, falling: at most top_k (0: any number), as many as have the share
    top_p of the probability of those, at least one. probabilities (vocabulary)."""
    if not top_k:
        tokens = _reaching(probabilities, probabilities, top_p)
        return probabilities[tokens], tokens
    kept, tokens = probabilities.topk(min(top_k, probabilities.numel()))
    if top_p < 1:
        reached = int(torch.searchsorted(kept.cumsum(0), top_p * kept.sum())) + 1
        kept, tokens = kept[:reached], tokens[:reached]
    return kept, tokens


def without_top_choices(weights: Tensor, threshold: float) -> Tensor:
    """Weights without those whose share is at least `threshold`, but for the smallest of them. p-e-w, "Exclude Top
    Choices (XTC)", text-generation-webui, pull request 6335, 2024."""
    shares = weights / weights.sum()
    above = ((shares >= threshold) & (shares > 0)).nonzero().squeeze(1)
    if len(above) < 2:
        return weights
    smallest = above[shares[above].argmin()]
    return weights.index_fill(0, above[above != smallest], 0)


def _reaching(order: Tensor, probabilities: Tensor, share: float, more: bool = False) -> Tensor:
    """Ids of tokens, by falling `order`, as many as have the probability `share` together, at least one. more: as have
    more than that."""
    count = 0
    while True:
        count = min(_MORE * count or _CANDIDATES, order.numel())
        tokens = order.topk(count).indices
        sums = probabilities[tokens].cumsum(0)
        reached = int(torch.searchsorted(sums, torch.tensor(share), right=more)) + 1
        if reached <= count or count == order.numel():
            return tokens[:reached]


def _alone(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The probabilities of these tokens, and 0 for others; their sum is 1."""
    kept = torch.zeros_like(probabilities)
    kept[tokens] = probabilities[tokens]
    return kept / kept.sum()
