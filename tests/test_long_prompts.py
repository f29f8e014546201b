"""Prompts of several chunks: what is told while they are read, and what is left where reading is interrupted."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from serving import Letters
from tiermoe import native
from tiermoe.batch import Batch, prompt
from tiermoe.cli.output import prompt_progress
from tiermoe.engine.loop import RequestLoop
from tiermoe.engine.request import Piece, Request
from tiermoe.engine.sampling import Sampling
from tiermoe.model.rotary import Rotary
from tiny import write

IDS = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write(tmp_path_factory.mktemp("long"), "qwen3_moe", torch.float32)
    loaded = tiermoe.load(directory, memory="4GiB", device="cpu", lanes=1, bits=16, dense_bits=16, chunk=8)[0].tiermoe
    yield loaded
    loaded.close()


def answered(loop: RequestLoop, ids: list[int]) -> tuple[list[Piece], list[tuple[int, int]]]:
    """The pieces of an answer of two tokens with their log probabilities, and what was reported while it was read."""
    reported: list[tuple[int, int]] = []
    loop.add(Request(ids, Sampling(2), logprobs=1, on_read=lambda done, total: reported.append((done, total))))
    pieces: list[Piece] = []
    while not loop.idle:
        pieces += loop.step()
    return pieces, reported


def test_each_chunk_is_reported(engine: Any) -> None:
    loop = RequestLoop(engine, Letters())
    assert answered(loop, IDS)[1] == [(8, 20), (16, 20), (20, 20)]
    assert answered(loop, [*IDS[:18], 5, 6])[1] == [(20, 20)]


def test_chunks_that_have_run_stay_where_reading_is_interrupted(engine: Any) -> None:
    (whole, *_), _ = answered(RequestLoop(engine, Letters()), IDS)
    loop = RequestLoop(engine, Letters())
    number = loop.add(Request(IDS, Sampling(2)))
    loop.step()
    loop.step()
    loop.cancel(number)
    (again, *_), _ = answered(loop, IDS)
    assert (again.cached, again.logprobs) == (16, whole.logprobs)


def test_angles_that_come_chunk_by_chunk_are_those_of_the_whole() -> None:
    def rotary() -> Rotary:
        return Rotary(1.0 / 1e4 ** (torch.arange(0, 32, 2) / 32), lambda _: 1.0, torch.bfloat16)

    positions = torch.arange(1500)
    whole, growing = rotary().at(positions, 1500), rotary()
    for begin in range(0, 1500, 100):
        some = positions[begin : begin + 100]
        for mine, its in zip(growing.at(some, begin + 100), whole, strict=True):
            assert torch.equal(mine, its[some])


LATENT = {
    "hidden_size": 128, "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_latents_are_expanded_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens in two chunks: pieces of 128, one piece, and torch's operators over all of them."""
    loaded = tiermoe.load(
        write(tmp_path, "deepseek_v2", torch.bfloat16, **LATENT), memory="4GiB", device="cpu", lanes=1, bits=16,
        dense_bits=16, chunk=150,
    )[0].tiermoe  # fmt: skip
    ids = torch.randint(3, 128, (300,), generator=torch.Generator().manual_seed(1)).tolist()

    def read() -> torch.Tensor:
        cache = loaded.new_cache(context=400)
        logits: torch.Tensor = loaded.step(Batch((prompt(cache.open(), ids),)), cache)[0]
        return logits.float()

    whole = read()
    monkeypatch.setattr("tiermoe.model.latent_attention.PIECE", 128)
    pieces = read()
    monkeypatch.setattr("tiermoe.model.latent_attention.takes_prompts", lambda *_: False)
    torchs = read()
    loaded.close()
    for each in (whole, pieces):
        assert (each - torchs).norm() < 0.03 * torchs.norm()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_line_that_goes_when_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report = prompt_progress()
    report(512, 32768)
    assert terminal.getvalue().endswith("reading the prompt: 512 of 32,768 tokens")
    report(1024, 32768)
    assert "1,024 of 32,768 tokens, " in terminal.getvalue()
    assert terminal.getvalue().endswith(" s left")
    report(32768, 32768)
    assert terminal.getvalue().endswith("\r\033[K")
    assert "\n" not in terminal.getvalue()


def test_elsewhere_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    prompt_progress()(512, 32768)
    assert not pipe.getvalue()
