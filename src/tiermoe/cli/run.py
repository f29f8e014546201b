"""`tiermoe run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, prompt_progress, summary, utf8_input
from tiermoe.cli.session import choose_sampling, make_sampling, open_session, read_ahead
from tiermoe.errors import ConfigError

if TYPE_CHECKING:
    from tiermoe.model.chat.template import ChatTemplate
    from tiermoe.model.hf.blueprint import Blueprint


@opt.engine_options()
def run(
    model: opt.Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)],
    options: dict[str, Any],
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    draft: opt.Draft = "lookup",
    chat_template_file: opt.ChatTemplateFile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Answer one prompt. The first run of a model packs its experts; later runs start from the store."""
    if prompt == "-":
        with utf8_input():
            prompt = sys.stdin.read()
    if raw and chat_template_file is not None:
        raise ConfigError("--chat-template-file does nothing with --raw; leave one of them out")
    template = opt.read_template(chat_template_file)
    headers = read_ahead(model, options)
    named = opt.given(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    make_sampling(**named)
    chosen: dict[str, Any] = {}

    def context_for(tokenizer: Any, blueprint: Blueprint, chat: ChatTemplate) -> int:
        from tiermoe.engine.generate import check_length, encode_prompt

        chosen["sampling"] = choose_sampling(blueprint, named, make_sampling())
        chosen["ids"] = ids = encode_prompt(tokenizer, prompt, None if raw else chat)
        length = check_length(ids.shape[1], max_tokens, blueprint.max_context(), options.get("context"))
        return int(ids.shape[1]) + length

    session = open_session(model, options, context_for, headers=headers, draft=draft, template=template)
    from tiermoe.engine.generate import generate

    show = (lambda _: None) if as_json else (lambda text: print(text, end="", flush=True))
    report = generate(
        session.engine, session.tokenizer, chosen["ids"], chosen["sampling"], show, session.load_s,
        on_read=prompt_progress(), speculation=session.speculation, chat=None if raw else session.chat,
    )  # fmt: skip
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        print(flush=True)
        note(summary(report))
    session.engine.close()
