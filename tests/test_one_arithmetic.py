"""A row's bits depend on nothing but the row: the same logits in one piece and in chunks, behind a prefix, beside
others, verified, with any number of threads, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gguf_engines
import gguf_files
from gguf_files import Kinds, kinds
from native_experts import checkpoint
from small_engines import engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

GIVEN, AFTER = 150, 8  # tokens of the prompt, and of what comes after them one by one
SHIPPED = Path(__file__).parent.parent / "models" / "stories-7m"
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {}, "gpt_oss": {"sliding_window": 12}, "glm4_moe": {}, "llama4_text": {}, "ernie4_5_moe": {},
    "qwen3_next": {}, "lfm2_moe": {}, "kimi_linear": {"linear_head_dim": 32},
}  # fmt: skip
"""Norms of heads; sinks and windows; a dense layer and a shared expert; chunks and rotation in float32; a router in
float32; linear attention of two kinds and short convolutions."""
FILES: dict[str, Kinds] = {
    "a file of Q4_K and Q6_K": kinds("q4_k", "q6_k", "q5_k"),
    "a file of IQ2_S and IQ3_S": kinds("iq2_s", "iq3_s", "iq4_xs"),
    "a file of MXFP4 and Q8_0": kinds("mxfp4", "q5_0", "q8_0"),
}
"""Types of experts' first matrices, of the second ones, and of dense layers."""
CASES = ["shipped, 4 bits", "shipped, 2 bits", "shipped, 8 bits", "shipped, 16 bits", *FAMILIES, *FILES]


class Case:
    """An engine, and a sequence for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.ids, self.others = tokens(GIVEN + AFTER), [tokens(20, seed) for seed in (2, 3)]
        options: dict[str, Any] = {"bits": 4, "dense_bits": 4}
        directory = SHIPPED
        if name in FILES:
            model, kind = gguf_files.model_of("qwen3_moe, wide"), FILES[name]
            file = gguf_files.write(folder / "m.gguf", model, "qwen3_moe, wide", kind, context_length=512)
            self.engine = gguf_engines.engine_of(file, torch.bfloat16, store=folder / "store", context=200, batch=4)
            return
        if name in FAMILIES:
            directory = checkpoint(folder, name, max_position_embeddings=512, **FAMILIES[name])
        else:
            bits = int(name.split()[1])
            options = {"bits": bits, "dense_bits": max(bits, 4)}
        self.engine = engine_of(directory, context=200, batch=4, **options)

    def in_chunks(self, most: int, cache: Any = None, slab: int = -1, first: int = 0) -> Tensor:
        """Logits of every token from `first` on: of the prompt in chunks, of the others one by one."""
        cache = cache or self.engine.new_cache(4)
        slab = cache.open() if slab < 0 else slab
        rows = [prompt(slab, self.ids[at : min(at + most, GIVEN)], at) for at in range(first, GIVEN, most)]
        rows += [decode(slab, at, self.ids[at]) for at in range(GIVEN, GIVEN + AFTER)]
        return torch.cat([self.engine.step(Batch((row,)), cache, every=True) for row in rows])

    def beside_others(self) -> Tensor:
        """The same, of which others' prompts and tokens take part in every step."""
        cache = self.engine.new_cache(4)
        slab, *others = [cache.open() for _ in range(3)]
        found = []
        for at in range(0, GIVEN, 50):
            rows = [prompt(slab, self.ids[at : at + 50], at)]
            if at == 0:
                rows += [prompt(other, ids) for other, ids in zip(others, self.others, strict=True)]
            else:
                rows += [decode(other, 19 + at // 50, 7) for other in others]
            found.append(self.engine.step(Batch(tuple(rows), ragged=True), cache, every=True)[:50])
        for at in range(GIVEN, GIVEN + AFTER):
            rows = [decode(slab, at, self.ids[at]), decode(others[0], at - GIVEN + 22, 9)]
            found.append(self.engine.step(Batch(tuple(rows)), cache, every=True)[:1])
        return torch.cat(found)

    def verified(self) -> Tensor:
        """The last tokens are guesses that are verified at once."""
        cache = self.engine.new_cache(4)
        slab = cache.open()
        given = self.engine.step(Batch((prompt(slab, self.ids[:GIVEN]),)), cache, every=True)
        row = verify(slab, GIVEN, self.ids[GIVEN:])
        return torch.cat((given, self.engine.step(Batch((row,)), cache, every=True)))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    made, before = Case(request.param, tmp_path), torch.get_num_threads()
    yield made
    torch.set_num_threads(before)
    made.engine.close()


def test_logits_have_the_same_bits_however_the_tokens_come(
    case: Case, on_every_set: Callable[..., list[Tensor]]
) -> None:
    whole = case.in_chunks(GIVEN)
    for chunk in (1, 7, 64, 100):
        assert torch.equal(case.in_chunks(chunk), whole), chunk
    for prefix in (1, 40, 149):
        cache = case.engine.new_cache(4)
        first = cache.open()
        case.engine.step(Batch((prompt(first, case.ids[:prefix]),)), cache)
        forked = cache.fork(first, prefix)
        assert torch.equal(case.in_chunks(GIVEN, cache, forked, prefix), whole[prefix:]), prefix
    assert torch.equal(case.beside_others(), whole)
    assert torch.equal(case.verified(), whole)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(case.in_chunks(GIVEN), whole), threads
    assert all(torch.equal(each, whole) for each in on_every_set(lambda: case.in_chunks(GIVEN)))
