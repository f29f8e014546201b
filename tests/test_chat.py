"""`tiermoe chat`, and the conversation behind it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from commands import Command
from tiermoe.engine.passes import CurrentPass
from tiermoe.generation.chat import Conversation
from tiermoe.generation.loop import _Streamer
from tiny import TEMPLATE, write

FAST = ("--memory", "4GiB", "--lanes", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp32 checkpoint without a chat template."""
    return write(tmp_path_factory.mktemp("cli") / "tiny", "qwen3_moe", torch.float32)


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> Any:
    """(model, tokenizer) at 16 bits."""
    model, tokenizer = tiermoe.load(tiny, memory="4GiB", bits=16, cache="50%", lanes=1)
    yield model, tokenizer
    model.tiermoe.close()


def test_chat_with_piped_input(tiermoe_: Command, tiny: Path) -> None:
    lines = [
        "/help",
        "/set",
        "/set max_tokens 3",
        "/set temperature 0",
        "/set top_p 7",
        "/set speed 3",
        "/set seed x",
        "hello",
        "",
        "/stats",
        "/clear",
        "/dance now",
        "again",
        "/bye",
        "never said",
    ]
    outcome = tiermoe_("chat", tiny, *FAST, stdin="\n".join(lines))
    assert outcome.code == 0
    assert len(outcome.out.split()) == 2  # two answers, of a word and perhaps newlines
    said = outcome.err
    for wanted in (
        r"this model has no chat template: what you type is continued",
        r"^/clear +forget the conversation$",
        r"^max_tokens = 512\ntemperature = 0\.7\ntop_p = 0\.95\ntop_k = 0\nseed = None$",
        r"^max_tokens = 3$",
        r"^temperature = 0\.0$",
        r"^top_p cannot be 7: top-p must be above 0 and at most 1, got 7\.0$",
        r"^unknown setting speed; there are max_tokens,",
        r"^seed cannot be x: ",
        r"^\[3 tokens, .*\]$",
        r"^hit rate [\d.]+% \(\d+ hits, \d+ misses\), .* read, waited",
        r"^forgotten$",
        r"^unknown command /dance now; /help lists them$",
    ):
        assert re.search(wanted, said, re.MULTILINE), wanted


def test_chat_ends_with_its_input(tiermoe_: Command, tiny: Path) -> None:
    assert tiermoe_("chat", tiny, *FAST, stdin="").code == 0


def test_interrupting_a_reply_stops_it_alone(tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the second token of the first reply; the second turn answers as in a fresh chat."""
    put, calls = _Streamer.put, []

    def stopped(self: Any, value: torch.Tensor) -> None:
        calls.append(value)
        if len(calls) == 4:  # the prompt and two tokens have passed
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(_Streamer, "put", stopped)
    words = ("chat", tiny, *FAST, "--max-tokens", "9", "--temperature", "0")
    outcome = tiermoe_(*words, stdin="first one\nsecond\n")
    assert outcome.code == 0
    assert "[stopped]" in outcome.err
    _, second = outcome.out.splitlines()
    assert [second] == tiermoe_(*words, stdin="second\n").out.splitlines()


def test_interrupting_at_the_prompt_changes_nothing(
    tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter([KeyboardInterrupt, "/set max_tokens 2", "hello", KeyboardInterrupt, EOFError])

    def read(_: str = "") -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    outcome = tiermoe_("chat", tiny, *FAST)
    assert outcome.code == 0
    assert len(outcome.out.split()) == 1


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_conversation_equals_a_fresh_run_on_all_of_it(
    template: str | None, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    monkeypatch.setattr(tokenizer, "chat_template", template)
    greedy = tiermoe.Sampling(max_tokens=7)
    conversation, text, messages = Conversation(model, tokenizer), "", []
    for turn in ("tell me", "and then?", "so"):
        report = conversation.reply(turn, greedy, lambda _: None)
        messages.append({"role": "user", "content": turn})
        text += turn
        if template:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = ids["input_ids"]
        else:
            ids = tokenizer(text, return_tensors="pt").input_ids
        assert report.prompt_tokens == ids.shape[1]
        assert report.token_ids == tiermoe.generate(model, tokenizer, ids, greedy).token_ids
        messages.append({"role": "assistant", "content": report.text})
        text += report.text
    conversation.clear()
    again = conversation.reply("tell me", greedy, lambda _: None)
    assert again.prompt_tokens < 20


def test_earlier_turns_are_not_computed_again(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    lengths: list[int] = []
    begin = CurrentPass.begin

    def counted(self: Any, batch: Any) -> None:
        lengths.append(len(batch.tokens))
        begin(self, batch)

    monkeypatch.setattr(CurrentPass, "begin", counted)
    conversation = Conversation(model, tokenizer)
    report = conversation.reply("a long beginning of it", tiermoe.Sampling(max_tokens=4), lambda _: None)
    assert lengths[0] == 22
    spoken = len(tokenizer(report.text).input_ids)
    lengths.clear()
    conversation.reply("more", tiermoe.Sampling(max_tokens=2), lambda _: None)
    assert lengths[0] <= spoken + len("more") + 1


def test_a_prompt_that_fails_leaves_the_conversation_as_it_was(loaded: Any) -> None:
    model, tokenizer = loaded
    conversation, greedy = Conversation(model, tokenizer), tiermoe.Sampling(max_tokens=4)
    conversation.reply("abc", greedy, lambda _: None)
    with pytest.raises(tiermoe.PromptError, match=r"has 3[0-9]+ tokens, there is room for 256"):
        conversation.reply("x" * 300, greedy, lambda _: None)
    after = conversation.reply("def", greedy, lambda _: None)
    other = Conversation(model, tokenizer)
    other.reply("abc", greedy, lambda _: None)
    assert other.reply("def", greedy, lambda _: None).token_ids == after.token_ids


def test_an_interruption_in_the_middle_of_a_layer_leaves_nothing_behind(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have taken the new tokens' keys and values, others have not: none of them may stay."""
    model, tokenizer = loaded
    greedy = tiermoe.Sampling(max_tokens=5)
    one, other = Conversation(model, tokenizer), Conversation(model, tokenizer)
    one.reply("abc", greedy, lambda _: None)
    other.reply("abc", greedy, lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(model.tiermoe.layers[1], "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.reply("never mind", greedy, lambda _: None)
    assert one.reply("def", greedy, lambda _: None).token_ids == other.reply("def", greedy, lambda _: None).token_ids


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
