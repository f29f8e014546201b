"""`tiermoe chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, prompt_progress, summary, utf8_input
from tiermoe.cli.session import Session, choose_sampling, make_sampling, open_session
from tiermoe.config import format_size
from tiermoe.errors import ModelError, TiermoeError

OTHERWISE = {"temperature": 0.7, "top_p": 0.95}
"""How a model that says nothing of sampling chats."""

HELP = """\
/help            this text
/stats           hits, misses, bytes, waiting time and memory since loading
/set NAME VALUE  max_tokens, temperature, top_p, top_k or seed; /set alone shows them
/clear           forget the conversation
/bye             leave (so does Ctrl-D); Ctrl-C stops the reply"""


@opt.engine_options()
def chat(
    model: opt.Model,
    options: dict[str, Any],
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    seed: opt.Seed = None,
) -> None:
    """Talk to a model in its chat template. Type /help for the commands."""
    named = opt.given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    make_sampling(**named)
    sampling: dict[str, Any] = {}

    def no_context(tokenizer: Any, blueprint: Any) -> None:
        _refuse_encoder_decoder(blueprint)
        sampling.update(asdict(choose_sampling(blueprint, named, make_sampling(**OTHERWISE))))

    session = open_session(model, options, no_context)
    if not getattr(session.tokenizer, "chat_template", None):
        note("this model has no chat template: what you type is continued as plain text")
    note("type /help for the commands, /bye to leave")
    _Chat(session, sampling).loop()
    session.engine.close()


class _Chat:
    """A conversation: its messages, its sampling settings, and the keys and values computed so far."""

    def __init__(self, session: Session, sampling: dict[str, Any]) -> None:
        from tiermoe.generation.chat import Conversation

        self._session = session
        self._sampling = sampling
        self._conversation = Conversation(session.engine, session.tokenizer)

    def loop(self) -> None:
        for line in _lines():
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line.split()):
                    return
                continue
            self._answer(line)

    def _answer(self, text: str) -> None:
        try:
            report = self._conversation.reply(
                text, make_sampling(**self._sampling), lambda piece: print(piece, end="", flush=True), prompt_progress()
            )
            print(flush=True)
            note(summary(report))
        except KeyboardInterrupt:
            print(flush=True)
            note("[stopped]")
        except TiermoeError as error:
            print(flush=True)
            note(f"tiermoe: {error}")

    def _command(self, words: list[str]) -> bool:
        """Runs a /command; False where the conversation is over."""
        match words:
            case ["/bye"]:
                return False
            case ["/help"]:
                note(HELP)
            case ["/stats"]:
                note(_stats(self._session.engine.stats()))
            case ["/clear"]:
                self._conversation.clear()
                note("forgotten")
            case ["/set"]:
                note("\n".join(f"{name} = {value}" for name, value in self._sampling.items()))
            case ["/set", name, value]:
                self._set(name, value)
            case _:
                note(f"unknown command {' '.join(words)}; /help lists them")
        return True

    def _set(self, name: str, value: str) -> None:
        if name not in self._sampling:
            note(f"unknown setting {name}; there are {', '.join(self._sampling)}")
            return
        try:
            number = int(value) if name in ("max_tokens", "top_k", "seed") else float(value)
            make_sampling(**{**self._sampling, name: number})
        except (ValueError, TiermoeError) as error:
            note(f"{name} cannot be {value}: {error}")
            return
        self._sampling[name] = number
        note(f"{name} = {number}")


def _refuse_encoder_decoder(blueprint: Any) -> None:
    if blueprint.family.encoder_decoder:
        raise ModelError(f"{blueprint.family.name} models do not chat; use 'tiermoe run'")


def _lines() -> Iterator[str]:
    """Lines of the user: with editing and history on a terminal, plain where input is piped."""
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (makes input() editable)
        prompt = "> "
    while True:
        try:
            with utf8_input():
                line = input(prompt)
            yield line
        except EOFError:
            return
        except KeyboardInterrupt:
            note("")


def _stats(stats: dict[str, Any]) -> str:
    return (
        f"hit rate {stats['hit_rate']:.1%} ({stats['expert_hits']} hits, {stats['expert_misses']} misses), "
        f"{format_size(stats['bytes_read'])} read, waited {stats['wait_s']:.1f} s, "
        f"peak memory {format_size(stats['peak_memory_bytes'])} of {format_size(stats['memory_budget_bytes'])}"
        + (f", prefetching {stats['prefetching']}" if stats["prefetching"] else "")
    )
