"""OpenAI's dialect: `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest

from tiermoe.errors import ConfigError
from tiermoe.generation.sampling import Sampling
from tiermoe.serve.answers import ANSWERS, Stream, submitted, whole
from tiermoe.serve.chats import Chat, Prepared, grammar_of, prepare
from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import check_fields
from tiermoe.serve.intake import aside
from tiermoe.serve.openai_answers import Logprobs, Reading, choice, shape_of, stream, usage_of
from tiermoe.serve.openai_fields import ChatRequest, Common, CompletionRequest
from tiermoe.serve.request import Piece, Request
from tiermoe.serve.served import Served

COMPLETION_TOKENS = 16
"""Of a completion that names no `max_tokens`, as OpenAI has it; a chat's answer may take the whole context."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip


def sampling_of(asked: Common, default: Sampling, most: int) -> Sampling:
    """How the tokens of an answer are chosen: as asked, else as `default`. most: tokens that there is room for."""
    values = {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    kept = {name: getattr(default, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    wanted = getattr(asked, "max_completion_tokens", None) or asked.max_tokens
    if wanted is None:
        wanted = COMPLETION_TOKENS if isinstance(asked, CompletionRequest) else most
    wanted = max(wanted, 1)
    return Sampling(max_tokens=min(wanted, most), **{**kept, **values})


def requests_of(its: Prepared, asked: Common, sampling: Sampling, more: Mapping[str, Any]) -> list[Request]:
    """One for each choice; a seed gives each its own. more: fields of `Request`."""
    seeds = [None if sampling.seed is None else sampling.seed + index for index in range(asked.n or 1)]
    stops = (*asked.stops, *its.stops)
    return [Request(its.ids, replace(sampling, seed=seed), stops, **more) for seed in seeds]


def routes(app: FastAPI, served: Served) -> None:
    """Adds the endpoints."""

    @app.post("/v1/chat/completions", response_model=None, responses=ANSWERS)
    async def chat(asked: ChatRequest, http: HttpRequest) -> Response | dict[str, Any]:
        check_fields(asked)
        served.check_model(asked.model)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        parallel = asked.parallel_tool_calls is not False
        messages = [message.plain for message in asked.messages]
        its = Chat(messages, asked.functions, asked.choice, asked.answer_schema, asked.told, parallel, asked.new_turn)
        _check_count(served, asked.n or 1)
        prepared = await aside(prepare, served, its)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return await _answer(http, served, asked, [prepared], logprobs)

    @app.post("/v1/completions", response_model=None, responses=ANSWERS)
    async def complete(asked: CompletionRequest, http: HttpRequest) -> Response | dict[str, Any]:
        check_fields(asked)
        served.check_model(asked.model)
        if asked.max_tokens == 0 and not asked.echo:
            raise Refused(400, "max_tokens of 0 needs echo=true: there would be nothing to tell", "max_tokens")
        several = isinstance(asked.prompt, list) and asked.prompt and not isinstance(asked.prompt[0], int)
        _check_count(served, (len(asked.prompt) if several else 1) * (asked.n or 1))
        prompts = await aside(_prepared, served, asked)
        return await _answer(http, served, asked, prompts, asked.logprobs)


async def _answer(
    http: HttpRequest, served: Served, asked: Common, prompts: Sequence[Prepared], logprobs: int | None
) -> Response | dict[str, Any]:
    chat = isinstance(asked, ChatRequest)
    requests, readings = await aside(_requests, served, asked, prompts, logprobs)
    if asked.logit_bias is not None:
        served.check_ids(list(asked.logit_bias), "logit_bias")
    answers = await submitted(served.worker, requests, prompts[0].grammar)
    form, count = shape_of(served.name, chat), sum(len(each.ids) for each in prompts)
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        told = ((index, _shown(asked, piece)) async for index, piece in answers)
        return Stream(answers, stream(form, told, count, readings, usage))
    pieces: list[list[Piece]] = [[] for _ in requests]
    await whole(http, answers, lambda index, piece: pieces[index].append(_shown(asked, piece)))
    choices = [choice(index, chat, its, readings[index]) for index, its in enumerate(pieces)]
    return form.whole(choices, usage_of(count, [piece for its in pieces for piece in its], readings.values()))


def _requests(
    served: Served, asked: Common, prompts: Sequence[Prepared], logprobs: int | None
) -> tuple[list[Request], dict[int, Reading]]:
    """Of all answers, by their indices."""
    chat = isinstance(asked, ChatRequest)
    echo = isinstance(asked, CompletionRequest) and asked.echo
    requests: list[Request] = []
    readings: dict[int, Reading] = {}
    for each in prompts:
        served.check_ids(each.ids, "prompt")
        room = served.context - len(each.ids)
        try:
            sampling = sampling_of(asked, served.sampling, max(room, 1))
        except ConfigError as error:
            raise Refused(400, str(error)) from error
        scored = echo and logprobs is not None
        more = {"logprobs": logprobs, "prompt_logprobs": scored, "special": each.special}
        text = served.tokenizer.decode(each.ids, skip_special_tokens=True) if echo else ""
        for request in requests_of(each, asked, sampling, more):
            readings[len(requests)] = Reading(Logprobs(served.tokenizer, chat), each.reader(), text)
            requests.append(request)
    return requests, readings


def _check_count(served: Served, count: int) -> None:
    """Refused where so many answers are more than ever wait at once."""
    most = served.worker.most_waiting
    if count > max(1, most):
        raise Refused(400, f"{count:,} answers are asked for, {most} at most may wait; lower n", "n")


def _shown(asked: Common, piece: Piece) -> Piece:
    """Without its token where none is asked for: the batch makes one at least, from the logits that the prompt's last
    token has anyway."""
    return replace(piece, text="", tokens=(), logprobs=()) if asked.max_tokens == 0 else piece


def _prepared(served: Served, asked: CompletionRequest) -> list[Prepared]:
    grammar = grammar_of(served, asked.answer_schema)
    return [Prepared(ids, grammar=grammar) for ids in _prompts(served, asked.prompt)]


def _prompts(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [served.text_ids(prompt)]
    if not prompt:
        raise Refused(400, "the prompt is empty", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [served.text_ids(each) if isinstance(each, str) else each for each in prompt]
