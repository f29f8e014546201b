"""The training recipe: learning, resuming, export, tokenizer, experts."""

from __future__ import annotations

import lzma
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from training.checkpoint import OtherSettings
from training.data import Tokens, batch, documents, encode, pieces
from training.experts import batched_experts
from training.export import export
from training.model import build_model, load_balance
from training.settings import Settings
from training.tokenizer import END, train_tokenizer
from training.train import Step, main, stop_on_signal, train

TINY = Settings(
    layers=2,
    hidden=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    experts=4,
    top_k=2,
    expert_hidden=16,
    vocab=320,
    sequence=32,
    batch=4,
    tokens=40 * 4 * 32,
    warmup_steps=5,
    learning_rate=1e-2,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files, one compressed, of three documents."""
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "sea", "was", "calm", "and", "a", "ship", "lay", "still", "upon", "it", "for", "days"]
    draws = np.random.default_rng(0).integers(0, len(words), 6000)
    lines = [" ".join(words[i] for i in row) + ".\n" for row in draws.reshape(-1, 10)]
    (folder / "b.txt").write_text("".join(lines[:300]) + END + "\n" + "".join(lines[300:500]))
    (folder / "below").mkdir()
    (folder / "below" / "a.txt.xz").write_bytes(lzma.compress("".join(lines[500:]).encode()))
    (folder / "notes.md").write_text("not read")
    return folder


@pytest.fixture(scope="module")
def tokenizer(text: Path) -> PreTrainedTokenizerFast:
    return train_tokenizer(documents(text), TINY.vocab, TINY.max_length)


@pytest.fixture(scope="module")
def tokens(text: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return encode(tokenizer, documents(text), tmp_path_factory.mktemp("tokens") / "train.tokens")


def weights(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def trained(tokens: Tokens, tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3MoeForCausalLM, list[Step]]:
    """A model trained without interruption, and its steps."""
    steps: list[Step] = []
    model = build_model(TINY)
    assert train(model, tokens, TINY, tmp_path_factory.mktemp("state") / "state.pt", steps.append) == TINY.steps
    return model, steps


def test_loss_falls(trained: tuple[Qwen3MoeForCausalLM, list[Step]]) -> None:
    _, steps = trained
    assert [step.done for step in steps] == list(range(1, TINY.steps + 1))
    assert steps[-1].loss < 0.7 * steps[0].loss


def test_resumed_is_uninterrupted(
    trained: tuple[Qwen3MoeForCausalLM, list[Step]], tokens: Tokens, tmp_path: Path
) -> None:
    seen: list[Step] = []
    state = tmp_path / "state.pt"
    done = train(build_model(TINY), tokens, TINY, state, seen.append, stop=lambda: len(seen) == 7)
    assert done == 7
    resumed = build_model(replace(TINY))
    torch.nn.init.zeros_(resumed.model.embed_tokens.weight)  # whatever it starts from, the state decides
    assert train(resumed, tokens, TINY, state, seen.append) == TINY.steps
    assert [step.done for step in seen] == list(range(1, TINY.steps + 1))
    expected = weights(trained[0])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_state_of_another_run_is_refused(tokens: Tokens, tmp_path: Path) -> None:
    train(build_model(TINY), tokens, TINY, tmp_path / "state.pt", stop=lambda: True)
    other = replace(TINY, learning_rate=1e-3)
    with pytest.raises(OtherSettings, match=r"learning_rate 0.01 \(now 0.001\)"):
        train(build_model(other), tokens, other, tmp_path / "state.pt")


def test_interrupted_while_saving_leaves_the_old_state(
    tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.pt"
    train(build_model(TINY), tokens, TINY, state, stop=lambda: True)
    before = state.read_bytes()

    def torn(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        train(build_model(TINY), tokens, TINY, state, stop=lambda: True)
    assert state.read_bytes() == before


def test_export_has_the_same_logits(
    trained: tuple[Qwen3MoeForCausalLM, list[Step]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = trained[0].eval()
    export(model, tokenizer, tmp_path / "fp32", torch.float32)
    export(model, tokenizer, tmp_path / "bf16")
    assert next(model.parameters()).dtype == torch.float32
    ids = torch.tensor(tokenizer("a ship lay still upon the calm sea")["input_ids"])[None]
    with torch.no_grad():
        ours = model(ids).logits
        for name, dtype, tolerance in (("fp32", torch.float32, 1e-4), ("bf16", torch.bfloat16, 0.2)):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, experts_implementation="eager")
            assert loaded.dtype == dtype
            torch.testing.assert_close(loaded.float()(ids).logits, ours, atol=tolerance, rtol=0)
    again = AutoTokenizer.from_pretrained(tmp_path / "bf16")
    assert again("ship" + END)["input_ids"] == tokenizer("ship" + END)["input_ids"]


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_an_expert_takes_the_first_tokens_up_to_its_capacity(factor: float) -> None:
    model = build_model(replace(TINY, capacity_factor=factor, seed=3))
    experts = model.model.layers[0].mlp.experts.train()
    torch.manual_seed(1)
    hidden = torch.randn(20, TINY.hidden)
    index = torch.stack([torch.randperm(TINY.experts)[: TINY.top_k] for _ in range(20)])
    share = torch.rand(20, TINY.top_k)
    room = {expert: int(np.ceil(20 * 2 / 4 * factor)) for expert in range(TINY.experts)}
    expected = torch.zeros_like(hidden)
    for token in range(20):
        for k in range(TINY.top_k):
            expert = int(index[token, k])
            if room[expert]:
                room[expert] -= 1
                gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
                out = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                expected[token] += share[token, k] * out
    torch.testing.assert_close(batched_experts(experts, hidden, index, share), expected, atol=1e-6, rtol=1e-4)


def test_load_balance_of_even_and_of_collapsed_routing() -> None:
    even = 50.0 * torch.eye(4).repeat(2, 1)
    balance, dropped = load_balance(even, top_k=1, factor=1.0)
    assert (balance.item(), dropped.item()) == (pytest.approx(1.0), 0.0)
    collapsed = torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    balance, dropped = load_balance(collapsed, top_k=1, factor=1.0)
    assert (balance.item(), dropped.item()) == (pytest.approx(4.0), 0.75)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast, string: str) -> None:
    assert tokenizer.decode(tokenizer(string)["input_ids"]) == string


def test_tokens_are_the_documents_each_followed_by_the_end(
    text: Path, tokens: Tokens, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = list(documents(text))
    assert len(found) == 3
    assert tokenizer.decode(tokens) == "".join(document + END for document in found)
    assert (tokens == 0).sum() == 3


@given(st.text(alphabet="ab\n", max_size=50))
def test_pieces_lose_nothing(small_pieces: None, document: str) -> None:
    found = pieces(document)
    assert "".join(found) == document
    assert all(piece.endswith("\n") for piece in found[:-1])


@pytest.fixture(scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.data.PIECE", 5)
        yield


def test_an_interrupted_encoding_is_not_taken_for_whole(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "a ship"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        encode(tokenizer, broken(), tmp_path / "tokens")
    assert tokenizer.decode(encode(tokenizer, ["the sea"], tmp_path / "tokens")) == "the sea" + END


def test_batches_depend_on_seed_and_step_alone(tokens: Tokens) -> None:
    inputs, targets = batch(tokens, 5, 0, 4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, batch(tokens, 5, 0, 4, 16)[0])
    assert not torch.equal(inputs, batch(tokens, 6, 0, 4, 16)[0])
    assert not torch.equal(inputs, batch(tokens, 5, 1, 4, 16)[0])


def test_a_signal_asks_to_stop_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signal() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
    assert signal.getsignal(signal.SIGINT) is before


def arguments(text: Path, out: Path, steps: int) -> list[str]:
    shape = "--layers 1 --hidden 32 --heads 2 --kv-heads 1 --head-dim 16 --experts 4 --top-k 2 --expert-hidden 16"
    size = f"--vocab 320 --sequence 32 --batch 4 --tokens {steps * 128} --threads 1 --device cpu"
    return ["train", str(text), "--out", str(out), *shape.split(), *size.split()]


def test_command(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", arguments(text, tmp_path / "model", 3))
    main()
    assert capsys.readouterr().out.startswith("held-out perplexity ")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (loaded.config.num_experts, loaded.config.num_experts_per_tok) == (4, 2)
    monkeypatch.setattr("sys.argv", arguments(text, tmp_path / "model", 4))
    with pytest.raises(SystemExit, match=r"tokens 384 \(now 512\)"):
        main()


def test_a_recipe_brings_the_settings_that_are_not_given(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [*arguments(text, tmp_path / "model", 1), "--recipe", "chats-15m"]
    monkeypatch.setattr("sys.argv", given)
    main()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (loaded.config.num_experts, loaded.config.tie_word_embeddings) == (4, False)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    monkeypatch.setattr("sys.argv", [*given, "--tied"])
    with pytest.raises(SystemExit, match=r"tied False \(now True\)"):
        main()


def test_command_without_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", arguments(tmp_path, tmp_path / "model", 3))
    with pytest.raises(SystemExit, match="holds no text"):
        main()
