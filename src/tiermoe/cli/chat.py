"""`tiermoe chat`: a conversation in the terminal."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import (
    ThoughtPrinter,
    cause,
    note,
    one_line,
    printed,
    prompt_progress,
    shows_markdown,
    summary,
    utf8_input,
)
from tiermoe.cli.session import Session, choose_sampling, make_sampling, open_session, read_ahead
from tiermoe.config import format_size
from tiermoe.errors import ConfigError, ModelError, PromptError

if TYPE_CHECKING:
    from tiermoe.engine.sampling import Sampling
    from tiermoe.model.chat.template import ChatTemplate
    from tiermoe.model.hf.blueprint import Blueprint

OTHERWISE = {"temperature": 0.7, "top_p": 0.95}
"""Sampling where neither options nor the model's generation_config.json name it."""

HELP = """\
/help            this text
/stats           hits, misses, bytes, waiting time and memory since loading
/set NAME VALUE  a sampling parameter, like temperature 0 or seed none; /set alone shows all
/system TEXT     the system prompt; /system alone shows it, /system none removes it
//TEXT           a message that begins with /
/retry           answer the last message again
/edit TEXT       put TEXT in the place of the last message, and answer that
/clear           forget the conversation
/bye             leave (so does Ctrl-D); Ctrl-C stops the reply
Enter sends a message. Alt-Enter, or a backslash at the end of a line, begins another line of it; lines that are pasted
at once are one message. The arrows up and down bring earlier messages, also of other days."""
HISTORY = "chat-history"
"""File in the cache folder with the messages typed in a terminal, one a line, for nobody else to read."""
BREAK_IN_HISTORY = "\r"
"""Line break within a message in the history file. No terminal sends it as part of a message."""
MOST_HISTORY = 1000
PROMPT, CONTINUED = "> ", "... "
"""Before a message, and before a line that continues it."""
PASTE_S = 0.02
"""Seconds that a terminal may take to deliver the next line of pasted text."""


def _is_none(text: str) -> bool:
    return text.lower() == "none"


def _read_bias(text: str) -> dict[int, float]:
    if _is_none(text):
        return {}
    return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in text.split(","))}


def _read_strings(text: str) -> tuple[str, ...]:
    found = [] if _is_none(text) else json.loads(text)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("no list of strings")
    return tuple(found)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if _is_none(text) else read(text)


KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", int),
    float: ("a number", float),
    int | None: ("a whole number or none", _or_none(int)),
    float | None: ("a number or none", _or_none(float)),
    tuple[str, ...]: ('strings as a JSON list, like [":", "*"], or none', _read_strings),
    Mapping[int, float]: ("tokens and what is added to their logits, like 15=-2,20=0.5, or none", _read_bias),
}
"""Type of a field of `Sampling` → (what /set takes for it, in words; its parser, which raises ValueError)."""


@opt.engine_options()
def chat(
    model: opt.Model,
    options: dict[str, Any],
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    draft: opt.Draft = "lookup",
    chat_template_file: opt.ChatTemplateFile = None,
    system: Annotated[str, typer.Option(help="System prompt.", show_default=False)] = "",
    bare: Annotated[
        bool, typer.Option("--plain", help="Print the text of answers, on a terminal too: no Markdown.")
    ] = False,
) -> None:
    """Chat with a model in its chat template. Type /help for the commands. Enter sends a message; Alt-Enter, or a
    backslash at the end of a line, begins another line of it."""
    template = opt.read_template(chat_template_file)
    headers = read_ahead(model, options)
    named = opt.given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    sampling = make_sampling(**named)

    def no_context(tokenizer: Any, blueprint: Blueprint, chat: ChatTemplate) -> None:
        nonlocal sampling
        if blueprint.family.encoder_decoder:
            raise ModelError(f"{blueprint.family.name} models do not chat; use 'tiermoe run'")
        sampling = choose_sampling(blueprint, named, make_sampling(**OTHERWISE))

    session = open_session(model, options, no_context, headers=headers, draft=draft, template=template)
    if not session.chat.text:
        note("this model has no chat template: what you type is continued as plain text")
    note("type /help for the commands, /bye to leave")
    _Chat(session, sampling, system, markdown=shows_markdown() and not bare).loop()
    session.engine.close()


class _Chat:
    """A conversation in the terminal: replies, /commands and sampling parameters."""

    def __init__(self, session: Session, sampling: Sampling, system: str, markdown: bool) -> None:
        from tiermoe.engine.generate import Conversation

        self._session = session
        self._sampling = sampling
        self._kinds = {name: kind for name, kind in get_type_hints(type(sampling)).items() if kind in KINDS}
        self._markdown = markdown
        self._conversation = Conversation(session.engine, session.tokenizer, system, session.speculation, session.chat)
        self._asked = ""  # the last message
        self._answered = False  # whether its answer is part of the conversation

    def loop(self) -> None:
        for text in _messages():
            if text.startswith("//"):
                self._answer(text.removeprefix("/"))
            elif text.startswith("/"):
                if not self._command(text):
                    return
            elif text.strip():
                self._answer(text)

    def _answer(self, text: str) -> None:
        self._asked, self._answered = text, False
        try:
            with printed(self._markdown) as show, ThoughtPrinter() as thoughts:

                def answer(piece: str) -> None:
                    thoughts.end()
                    show(piece)

                report = self._conversation.reply(text, self._sampling, answer, prompt_progress(), thoughts.add)
            self._answered = True
            note(summary(report))
        except KeyboardInterrupt:
            note("[stopped]")
        except BrokenPipeError:
            raise  # nobody reads the answer
        except Exception as error:  # whatever it is, the conversation goes on
            note(f"tiermoe: {one_line(cause(error))}")

    def _answer_instead(self, text: str) -> None:
        """Answers `text` in the place of the last message."""
        if not self._asked:
            note("nothing was asked yet")
            return
        if self._answered:
            self._conversation.undo()
        self._answer(text)

    def _command(self, text: str) -> bool:
        """Runs a /command. False: the conversation is over."""
        match text.split():
            case ["/bye"]:
                return False
            case ["/help"]:
                note(HELP)
            case ["/stats"]:
                note(_stats(self._session.engine.stats()))
            case ["/retry"]:
                self._answer_instead(self._asked)
            case ["/edit", _, *_]:
                self._answer_instead(text.removeprefix("/edit").strip())
            case ["/clear"]:
                self._conversation.clear()
                self._asked, self._answered = "", False
                note("forgotten")
            case ["/set"]:
                note("\n".join(f"{name} = {getattr(self._sampling, name)}" for name in self._kinds))
            case ["/set", name, *words]:
                self._set(name, " ".join(words))
            case ["/system", *_]:
                if system := text.removeprefix("/system").strip():
                    self._conversation.system = "" if _is_none(system) else system
                note(f"system = {self._conversation.system or None}")
            case words:
                note(f"unknown command {' '.join(words)}; /help lists them, a message that begins with / is typed //")
        return True

    def _set(self, name: str, value: str) -> None:
        if name not in self._kinds:
            note(f"unknown setting {name}; there are {', '.join(self._kinds)}")
            return
        kind, read = KINDS[self._kinds[name]]
        try:
            changed = replace(self._sampling, **{name: read(value)})
            self._check_tokens(changed.logit_bias)
        except ValueError:
            note(f"{name} cannot be {value or 'empty'}: it takes {kind}")
        except ConfigError as error:
            note(f"{name} cannot be {value}: {error}")
        else:
            self._sampling = changed
            note(f"{name} = {getattr(changed, name)}")

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        vocabulary = self._session.engine.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise ConfigError(f"the model has the tokens 0 to {vocabulary - 1:,}, not {token}")


def _messages() -> Iterator[str]:
    """Messages of the user. On a terminal lines can be edited, and a message has several after Alt-Enter or a backslash
    at a line's end, or where they are pasted at once. In a pipe each line is a message."""
    prompt, terminal, remember = "", sys.stdin.isatty(), None
    if terminal:
        prompt = PROMPT
        with contextlib.suppress(ImportError):
            import readline  # makes input() editable

            remember = _keep_history(readline)
            # GNU readline's macro for Alt-Enter; Ctrl-J sends, as it is what Enter writes while an answer comes
            readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
            if os.environ.get("TERM", "dumb") != "dumb":
                readline.parse_and_bind("set enable-bracketed-paste on")  # which Python turns off
    ended = False
    while not ended:
        lines: list[str] = []
        try:
            with utf8_input():
                lines.append(input(prompt))
                while terminal:
                    if select.select([sys.stdin], [], [], PASTE_S)[0]:
                        lines.append(input())
                    elif lines[-1].endswith("\\"):
                        lines[-1] = lines[-1].removesuffix("\\")
                        lines.append(input(CONTINUED))
                    else:
                        break
        except EOFError:
            ended = True
        except KeyboardInterrupt:
            note("")
            continue
        except PromptError as error:
            if not terminal:
                raise
            note(f"tiermoe: {error}")
            continue
        if lines:
            message = "\n".join(lines)
            if remember is not None:
                remember(message)
            yield message


def _keep_history(readline: Any) -> Callable[[str], None]:
    """Has the terminal recall messages of earlier conversations, and keep those of this one: the function that adds a
    message to them, as one entry however many lines it has."""
    from tiermoe.formats.store_files import cache_folder

    file = cache_folder() / HISTORY

    def replace_in_all(old: str, new: str) -> None:
        for place in range(readline.get_current_history_length()):
            readline.replace_history_item(place, readline.get_history_item(place + 1).replace(old, new))

    def add(message: str) -> None:
        entry = message.rstrip()
        if entry and entry != readline.get_history_item(readline.get_current_history_length()):
            readline.add_history(entry)

    def keep() -> None:
        replace_in_all("\n", BREAK_IN_HISTORY)
        with contextlib.suppress(OSError):
            readline.write_history_file(file)

    with contextlib.suppress(OSError):
        readline.read_history_file(file)
        replace_in_all(BREAK_IN_HISTORY, "\n")
    readline.set_history_length(MOST_HISTORY)
    readline.set_auto_history(False)  # which makes an entry of each line
    atexit.register(keep)
    return add


def _stats(stats: dict[str, Any]) -> str:
    """The line of /stats."""
    return (
        f"hit rate {stats['hit_rate']:.1%} ({stats['expert_hits']} hits, {stats['expert_misses']} misses), "
        f"{format_size(stats['bytes_read'])} read, waited {stats['wait_s']:.1f} s, "
        f"peak memory {format_size(stats['peak_memory_bytes'])} of {format_size(stats['memory_budget_bytes'])}"
        + (f", prefetching {stats['prefetching']}" if stats["prefetching"] else "")
    )
