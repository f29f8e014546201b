"""`tiermoe chat`, and the conversation behind it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiermoe
from commands import Command
from patience import PATIENCE_S
from small_engines import OnRoute
from tiermoe.batch import Batch
from tiermoe.cli.chat import HISTORY
from tiermoe.cli.output import shows_markdown
from tiermoe.engine.detokenize import Detokenizer
from tiermoe.engine.engine import Engine
from tiermoe.engine.generate import Conversation
from tiermoe.types import Routed
from tiny import TEMPLATE

FAST = ("--memory", "4GiB", "--lanes", "1")
GREEDY = (*FAST, "--max-tokens", "5", "--temperature", "0")


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
        r"^top_p cannot be 7: top-p must be from 0, the likeliest token alone, to 1, got 7\.0$",
        r"^unknown setting speed; there are max_tokens,",
        r"^seed cannot be x: ",
        r"^\[3 tokens, .*\]$",
        r"^hit rate [\d.]+% \(\d+ hits, \d+ misses\), .* read, waited",
        r"^forgotten$",
        r"^unknown command /dance now; /help lists them, a message that begins with / is typed //$",
    ):
        assert re.search(wanted, said, re.MULTILINE), wanted


def test_the_last_message_is_answered_again_or_another_in_its_place(tiermoe_: Command, tiny: Path) -> None:
    """What was taken back is part of no later prompt."""

    def answers(*lines: str) -> str:
        outcome = tiermoe_("chat", tiny, *GREEDY, stdin="\n".join(lines))
        assert outcome.code == 0, outcome.err
        return outcome.out

    first = answers("one two")
    assert answers("one two", "/retry", "five") == first + answers("one two", "five")
    assert answers("one two", "/edit three four", "five") == first + answers("three four", "five")
    early = tiermoe_("chat", tiny, *GREEDY, stdin="/retry\n/edit x\none two\n/clear\n/retry")
    assert (early.out, early.err.count("nothing was asked yet")) == (first, 3)


def test_set_takes_values_of_the_right_kind_alone(tiermoe_: Command, tiny: Path) -> None:
    """Of every setting that /set lists; nothing else changes, and the conversation goes on."""
    listed = tiermoe_("chat", tiny, *GREEDY, stdin="/set\n").err
    names = re.findall(r"^(\w+) = ", listed, re.MULTILINE)
    assert {"max_tokens", "seed", "logit_bias", "repetition_penalty"} <= set(names)
    wrong = [f"/set {name} {value}" for name in names for value in ("x", "[1", "")]
    wrong += ["/set logit_bias 3", "/set logit_bias 99999=1", "/set logit_bias -1=1", "/set logit_bias 3=x"]
    wrong += ["/set top_k 1.5", "/set temperature none", "/set temperature nan", f"/set seed {2**64}"]
    outcome = tiermoe_("chat", tiny, *GREEDY, stdin="\n".join([*wrong, "/set", "hello"]))
    assert outcome.code == 0
    assert len(re.findall(r"^\w+ cannot be .+: .+$", outcome.err, re.MULTILINE)) == len(wrong)
    for wanted in (
        r"^logit_bias cannot be 3: it takes tokens and what is added to their logits, like 15=-2,20=0\.5, or none$",
        r"^logit_bias cannot be 99999=1: the model has the tokens 0 to 127, not 99999$",
        r"^seed cannot be x: it takes a whole number or none$",
        r"^seed cannot be empty: it takes a whole number or none$",
        r"^repetition_penalty cannot be \[1: it takes a number or none$",
        r"^top_k cannot be 1\.5: it takes a whole number$",
        r"^temperature cannot be none: it takes a number$",
    ):
        assert re.search(wanted, outcome.err, re.MULTILINE), wanted
    settings = "".join(f"{line}\n" for line in listed.splitlines() if " = " in line)
    assert settings in outcome.err
    assert outcome.out == tiermoe_("chat", tiny, *GREEDY, stdin="hello\n").out


def test_what_is_set_can_be_unset(tiermoe_: Command, tiny: Path) -> None:
    lines = ["/set logit_bias 75=100,9=-1.5", "hello", "/set logit_bias none", "/set seed 3", "/set seed none"]
    lines += ["/set repetition_penalty 2", "/set repetition_penalty None", "/clear", "hello"]
    outcome = tiermoe_("chat", tiny, *GREEDY, stdin="\n".join(lines))
    for wanted in ("logit_bias = {75: 100.0, 9: -1.5}", "seed = 3\nseed = None", "repetition_penalty = None"):
        assert f"{wanted}\n" in outcome.err, wanted
    biased, _, plain = outcome.out.partition("\n")
    assert len(set(biased)) == 1  # the token that is favoured
    assert plain == tiermoe_("chat", tiny, *GREEDY, stdin="hello\n").out


@pytest.mark.parametrize("error", [tiermoe.LoadError("layer 1: torn"), KeyError("unforeseen"), MemoryError()])
def test_an_error_of_one_reply_ends_no_conversation(
    error: Exception, tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reply fails after its prompt was read; the third answers as if the second had not been asked."""
    step, replies = Engine.step, []

    def failing(self: Engine, batch: Batch, *arguments: Any) -> Any:
        replies.extend([batch.tokens] if len(batch.tokens) > 1 else [])
        if len(replies) == 2 and len(batch.tokens) == 1:
            raise error
        return step(self, batch, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", failing)
        outcome = tiermoe_("chat", tiny, *GREEDY, stdin="one two\nthree\nfour\n")
    assert outcome.code == 0
    assert len(re.findall(r"^tiermoe: ", outcome.err, re.MULTILINE)) == 1
    assert {"LoadError": "layer 1: torn", "KeyError": "unforeseen", "MemoryError": "out of memory"}[
        type(error).__name__
    ] in outcome.err
    first, *_, last = outcome.out.splitlines()
    assert [first, last] == tiermoe_("chat", tiny, *GREEDY, stdin="one two\nfour\n").out.splitlines()


def test_a_message_that_begins_with_a_slash(tiermoe_: Command, tiny: Path) -> None:
    """Typed with two; it is sent with one."""
    outcome = tiermoe_("chat", tiny, *GREEDY, stdin="//set\n")
    assert "max_tokens =" not in outcome.err
    assert outcome.out == tiermoe_("chat", tiny, *GREEDY, "--system", "/", stdin="set\n").out


def test_a_system_prompt(tiermoe_: Command, tiny: Path) -> None:
    lines = ["/system", "/system a\\", "/system Be  brief", "/clear", "hi", "/system none", "/clear", "hi"]
    outcome = tiermoe_("chat", tiny, *GREEDY, "--system", "Be kind", stdin="\n".join(lines))
    assert re.findall(r"^system = (.*)$", outcome.err, re.MULTILINE) == [
        "Be kind", "a\\", "Be  brief", "None",  # in a pipe each line is a message
    ]  # fmt: skip
    told, untold = outcome.out.splitlines()
    assert told != untold
    assert [told] == tiermoe_("chat", tiny, *GREEDY, "--system", "Be  brief", stdin="hi\n").out.splitlines()
    assert [untold] == tiermoe_("chat", tiny, *GREEDY, stdin="hi\n").out.splitlines()


HIDDEN_CURSOR = b"\x1b[?25l"
"""What is drawn hides the cursor meanwhile."""


def test_messages_on_a_terminal(tiny: Path, tmp_path: Path) -> None:
    """Several lines that are pasted, into a terminal that marks what is pasted, as readline asks for, and into one that
    does not; lines that are typed with Alt-Enter, or a backslash at the end of a line. Another day all come back
    whole; the file has a line for each, so that every version reads it."""
    earlier = "/system of an older version\\n"  # a backslash and a letter are no line break
    (tmp_path / HISTORY).write_text(earlier + "\n")
    with in_a_terminal(tiny, TIERMOE_CACHE=str(tmp_path)) as ours:
        read_until(ours, b"> ")
        os.write(ours, b"/set temperature 0\r")
        said = read_until(ours, b"temperature = 0.0", b"> ")
        assert b"\x1b[?2004h" in said  # the terminal is asked to mark what is pasted
        os.write(ours, b"\x1b[200~one\rtwo\r\x1b[201~\r")
        said = read_until(ours, b"[1 tokens", b"> ")
        assert HIDDEN_CURSOR in said  # answers are drawn
        os.write(ours, b"three\nfour\n")
        assert read_until(ours, b"[1 tokens", b"> ").count(b"[1 tokens") == 1
        os.write(ours, b"/system x\\ \r")  # no backslash at the end of a line
        read_until(ours, b"system = x\\\r\n", b"> ")
        os.write(ours, b"/system c\\\r")
        read_until(ours, b"... ")
        for typed, said in (
            (b"d\r", b"system = c\r\nd\r\n"),
            (b"/system a\x1b\rb\x1b\r c\r", b"system = a\r\nb\r\n c"),
            (b"/set seed 8\r", b"= 8"),
            (b"/set seed 8\r", b"= 8"),
            (b"\x1b[200~/system e\r\r f\r\x1b[201~\r", b"system = e\r\n\r\n f"),
        ):
            os.write(ours, typed)
            read_until(ours, said, b"> ")
        os.write(ours, b"\x04")
        read_until(ours)
    assert (tmp_path / HISTORY).stat().st_mode & 0o077 == 0  # nobody else reads it
    assert (tmp_path / HISTORY).read_bytes().count(b"\n") == 9  # what is said twice in a row counts once
    with in_a_terminal(tiny, TIERMOE_CACHE=str(tmp_path)) as ours:
        read_until(ours, b"> ")
        saids = (b"e\r\n\r\n f", b"8", b"a\r\nb\r\n c", b"c\r\nd")
        for back, said in zip((1, 2, 4, 6), saids, strict=True):  # what is said again becomes the last entry
            os.write(ours, b"\x10" * back + b"\r")
            read_until(ours, b" = " + said + b"\r\n", b"> ")
        os.write(ours, b"\x10" * 12 + b"\r")
        read_until(ours, b" = of an older version\\n\r\n", b"> ")
        os.write(ours, b"\x04")
        read_until(ours)


@pytest.mark.parametrize(
    ("terminal", "environment", "drawn"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": None}, False),
    ],
)
def test_answers_are_drawn_on_a_terminal_that_can(
    terminal: bool, environment: dict[str, str | None], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TERM": "xterm", "NO_COLOR": None, **environment}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    assert shows_markdown() == drawn


def test_bare_text_is_not_drawn(tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[bool]()

    @contextmanager
    def printed(markdown: bool) -> Iterator[Any]:
        drawn.append(markdown)
        yield lambda piece: None

    monkeypatch.setattr("tiermoe.cli.chat.shows_markdown", lambda: True)
    monkeypatch.setattr("tiermoe.cli.chat.printed", printed)
    for more in ((), ("--plain",)):
        assert tiermoe_("chat", tiny, *GREEDY, *more, stdin="hello\n").code == 0
    assert drawn == [True, False]


@contextmanager
def in_a_terminal(model: Path, *more: str, **environment: str) -> Iterator[int]:
    """`tiermoe chat` in a terminal of its own: the file descriptor of the other side. It ends by itself, and well."""
    ours, its = pty.openpty()
    script = "import sys; from tiermoe.cli.main import main; sys.argv[0] = 'tiermoe'; main()"
    words = ("chat", str(model), *FAST, "--max-tokens", "1", *more)
    variables = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull, **environment}
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], stdin=its, stdout=its, stderr=its, env=variables
    ) as chat:
        os.close(its)
        try:
            yield ours
            assert chat.wait(PATIENCE_S) == 0
        finally:
            chat.kill()
            os.close(ours)


def read_until(terminal: int, *wanted: bytes) -> bytes:
    """What comes on a terminal, up to all of `wanted` in this order; up to its end where nothing is."""
    order = re.compile(b".*?".join(map(re.escape, wanted)), re.DOTALL)
    come = b""
    while not wanted or not order.search(come):
        assert select.select([terminal], [], [], PATIENCE_S)[0], come
        try:
            come += os.read(terminal, 4096)
        except OSError:  # whoever wrote there is gone
            assert not wanted, come
            break
    return come


def test_interrupting_a_reply_stops_it_alone(tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the second token of the first reply; the second turn answers as in a fresh chat."""
    add, calls = Detokenizer.add, []

    def stopped(self: Any, token: int) -> str:
        calls.append(token)
        if len(calls) == 3:  # two tokens have passed
            raise KeyboardInterrupt
        return add(self, token)

    monkeypatch.setattr(Detokenizer, "add", stopped)
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
    outcome = tiermoe_("chat", tiny, *FAST, "--temperature", "0")
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


def test_a_system_prompt_begins_the_conversation(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that changes counts from the first message on; what was said stays."""
    model, tokenizer = loaded
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    greedy = tiermoe.Sampling(max_tokens=4)
    conversation = Conversation(model, tokenizer, "Be kind")
    first = conversation.reply("hi", greedy, lambda _: None)
    assert first.prompt_tokens == len(tokenizer("s:Be kind;u:hi;a:").input_ids)
    conversation.system = "Be brief"
    second = conversation.reply("so", greedy, lambda _: None)
    ids = tokenizer(f"s:Be brief;u:hi;a:{first.text};u:so;a:", return_tensors="pt").input_ids
    assert second.token_ids == tiermoe.generate(model, tokenizer, ids, greedy).token_ids


def test_earlier_turns_are_not_computed_again(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    lengths: list[int] = []
    step = Engine.step

    def counted(self: Engine, batch: Batch, *arguments: Any) -> Any:
        lengths.append(len(batch.tokens))
        return step(self, batch, *arguments)

    monkeypatch.setattr(Engine, "step", counted)
    conversation = Conversation(model, tokenizer)
    report = conversation.reply("a long beginning of it", tiermoe.Sampling(max_tokens=4), lambda _: None)
    assert lengths[0] == 22
    spoken = len(tokenizer(report.text).input_ids)
    lengths.clear()
    conversation.reply("more", tiermoe.Sampling(max_tokens=2), lambda _: None)
    assert lengths[0] <= spoken + len("more") + 1


def test_an_interruption_in_the_middle_of_a_pass_leaves_nothing_behind(loaded: Any) -> None:
    """Some layers have taken the new tokens' keys and values, others have not: none of them may stay."""
    model, tokenizer = loaded
    greedy = tiermoe.Sampling(max_tokens=5)
    one, other = Conversation(model, tokenizer), Conversation(model, tokenizer)
    one.reply("abc", greedy, lambda _: None)
    other.reply("abc", greedy, lambda _: None)
    model.tiermoe.observe(OnRoute(interrupt))
    with pytest.raises(KeyboardInterrupt):
        one.reply("never mind", greedy, lambda _: None)
    model.tiermoe.observe(None)
    assert one.reply("def", greedy, lambda _: None).token_ids == other.reply("def", greedy, lambda _: None).token_ids


def interrupt(routed: Routed, _: torch.Tensor) -> None:
    if routed.layer == 1:
        raise KeyboardInterrupt
