"""Text that a small model can become sure of, made by rule: chats, some with tools, and listings.

    python -m training.chats OUT [--megabytes 20] [--seed 0] [--held-out]

writes OUT, a file of texts separated by `<|endoftext|>`. The same arguments write the same bytes. What is asked in the
held-out part, a conversation of several turns counting as one, is asked nowhere in the training part.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.rounds import parser_of
from training.listings import LISTINGS
from training.questions import QUESTIONS
from training.tokenizer import CHAT_TEMPLATE, END
from training.tools import TOOLS, Tool

Made = TypeVar("Made")
Messages = list[dict[str, Any]]
TEMPLATE = CHAT_TEMPLATE.read_text()
HELD_OUT_EVERY, ATTEMPTS = 20, 100
CHATS, WITH_TOOLS = 0.8, 0.55
SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You are a small model. Be kind.")


def is_held_out(key: str) -> bool:
    """Whether what ``key`` names belongs to the held-out part, a twentieth."""
    return zlib.crc32(key.encode()) % HELD_OUT_EVERY == 0


def draw(rng: Random, makers: Mapping[Callable[[Random], Made], float]) -> Made:
    """What one of ``makers`` makes, drawn by weight."""
    return rng.choices(list(makers), list(makers.values()))[0](rng)


def question(rng: Random, held_out: bool) -> Messages:
    """The messages of an item of the wanted part."""
    while True:
        item = draw(rng, QUESTIONS)
        if is_held_out(item.key) == held_out:
            roles = ("user", "assistant")
            return [
                {"role": role, "content": text} for turn in item.turns for role, text in zip(roles, turn, strict=True)
            ]


def tool_question(rng: Random, tool: Tool, held_out: bool) -> Messages:
    """A question of the wanted part, the calls of ``tool``, what they return, and the answer; a question without a
    tool where the part has none for this one."""
    drawn = (tool.use(rng) for _ in range(ATTEMPTS))
    use = next((use for use in drawn if is_held_out(use.question) == held_out), None)
    if use is None:
        return question(rng, held_out)
    calls = [{"type": "function", "function": {"name": tool.name, "arguments": given}} for given, _ in use.calls]
    return [
        {"role": "user", "content": use.question},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": result} for _, result in use.calls),
        {"role": "assistant", "content": use.answer},
    ]


def chat(rng: Random, held_out: bool) -> str:
    """A chat of one to three questions, rendered with the template of the model."""
    messages: Messages = [{"role": "system", "content": rng.choice(SYSTEM)}] if rng.random() < 0.2 else []
    tools: dict[str, Tool] = {}
    if rng.random() < WITH_TOOLS:
        tools = {tool.description: tool for tool in (draw(rng, TOOLS) for _ in range(rng.choice((1, 1, 2, 2, 3))))}
    for _ in range(rng.choice((1, 1, 2, 3))):
        if tools and rng.random() < 0.85:
            messages += tool_question(rng, rng.choice(list(tools.values())), held_out)
        else:
            messages += question(rng, held_out)
    rendered, _ = render_jinja_template(
        [messages], tools=[tool.signature for tool in tools.values()] or None, chat_template=TEMPLATE
    )
    return str(rendered[0])


def listing(rng: Random, held_out: bool) -> str:
    """A listing of the wanted part."""
    while is_held_out(text := draw(rng, LISTINGS)) != held_out:
        pass
    return text


def texts(seed: int, held_out: bool) -> Iterator[str]:
    """Texts without end, the same for the same arguments."""
    rng = Random(f"{seed} {held_out}")
    while True:
        yield chat(rng, held_out) if rng.random() < CHATS else listing(rng, held_out)


def write(out: Path, size: int, seed: int, held_out: bool) -> None:
    """Texts to the file ``out`` until it has ``size`` bytes."""
    with out.open("wb") as file:
        for text in texts(seed, held_out):
            if file.tell() >= size:
                return
            file.write((text.strip() + END).encode())


def main() -> None:
    top = parser_of(__doc__)
    top.add_argument("out", type=Path, help="file to write")
    top.add_argument("--megabytes", type=float, default=20, help="size of the file (%(default)s)")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--held-out", action="store_true", help="the held-out part in place of the training part")
    args = top.parse_args()
    write(args.out, round(args.megabytes * 1e6), args.seed, args.held_out)


if __name__ == "__main__":
    main()
