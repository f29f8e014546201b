"""Which passes of `generate()` are of the prompt and which are of generated tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiermoe
from small_engines import OnRoute
from tiermoe.types import Routed

CHUNK = 4


@pytest.mark.parametrize(
    "prompt",
    [
        1, CHUNK - 1,
        CHUNK, CHUNK + 1, 2 * CHUNK + 2,
    ],
)  # fmt: skip
def test_every_token_after_the_prompt_is_decoded(prompt: int, tiny_model: Callable[..., Path]) -> None:
    mixtral = tiny_model("mixtral", torch.float32)
    model, _ = tiermoe.load(mixtral, memory="4GiB", device="cpu", bits=16, chunk=CHUNK)
    seen: list[tuple[str, int]] = []

    def observe(routed: Routed, hidden: torch.Tensor) -> None:
        if routed.layer == 0:
            seen.append((routed.phase, len(hidden)))

    model.tiermoe.observe(OnRoute(observe))
    ids = torch.arange(10, 10 + prompt)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None)
    model.tiermoe.close()
    whole, rest = divmod(prompt, CHUNK)
    chunks = [CHUNK] * whole + [rest] * (rest > 0)
    assert seen == [*(("prefill", size) for size in chunks), *[("decode", 1)] * 3]
