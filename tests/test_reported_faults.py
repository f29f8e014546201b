"""Faults that public reports describe of other servers of language models, tried on this one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
import torch
from transformers import AutoTokenizer

import gguf_files
import tiermoe
from chat_templates import OWN, TOOLS, format_of
from commands import Command
from gguf_files import kinds
from patience import PATIENCE_S, until
from serving import Letters, Stage, connected, ids, parts_of, running, use_template
from small_engines import NATIVE
from test_chat_formats import FIRST, KNOWN, THINKING, given, read, values, written
from test_gguf_tokenizers import BYTES, KIND, put
from test_leaving import Counted, Held
from test_serve import followed
from tiermoe.engine.detokenize import Detokenizer
from tiermoe.engine.generate import Conversation
from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.chat.template import chat_template
from tiermoe.model.gguf.tokenizer import load_tokenizer
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served, served_of
from tiermoe.serve.worker import Worker
from tiny import write

Json = dict[str, Any]
PROMPT = "once upon a time"
CHAT = "/v1/chat/completions"
ASKED: Json = {"role": "user", "content": "a"}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
FORM: Json = {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}}


def answer_of(http: httpx.Client, **fields: Any) -> Json:
    """A greedy completion."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    told: Json = http.post("/v1/completions", json=body).raise_for_status().json()
    return told


def chunks_of(http: httpx.Client, path: str, body: Json) -> list[Json]:
    """Choices of a stream's chunks."""
    lines = http.post(path, json=body | {"stream": True}).raise_for_status().text.splitlines()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [choice for chunk in told for choice in chunk["choices"]]


def cached_of(told: Json) -> int:
    found: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


# --- stop strings and characters in a stream ---


class Words:
    """A tokenizer whose tokens are several letters, or none."""

    words = ("a", "b", "ab", "ba", "bab", "", "aab", "c")

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.words[token] for token in tokens)


@pytest.mark.parametrize("seed", range(60))
def test_a_stop_string_is_found_wherever_tokens_divide_it(seed: int) -> None:
    """Oracle: a search through the whole text after each token."""
    chance = random.Random(seed)
    tokens = chance.choices(range(len(Words.words)), k=30)
    stops = tuple("".join(chance.choices("abc", k=chance.randint(2, 5))) for _ in range(chance.randint(1, 3)))
    tokenizer: Any = Words()
    wanted, ended = tokenizer.decode(tokens), False
    for count in range(len(tokens)):
        text = tokenizer.decode(tokens[: count + 1])
        if found := [text.index(stop) for stop in stops if stop in text]:
            wanted, ended = text[: min(found)], True
            break
    made, told = Detokenizer(tokenizer, stops), ""
    for token in tokens:
        told += made.add(token)
        assert wanted.startswith(told)
        if made.stopped_by:
            break
    assert (told + made.end(), bool(made.stopped_by)) == (wanted, ended)


def test_no_part_of_a_stop_string_is_in_a_stream(http: httpx.Client) -> None:
    whole = answer_of(http, max_tokens=12)["choices"][0]["text"]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    for begin in range(0, len(whole) - 3, 2):
        stop = whole[begin : begin + 3]
        chunks = chunks_of(http, "/v1/completions", body | {"stop": [stop, stop[0] + "\0"]})
        assert "".join(each["text"] for each in chunks) == whole[: whole.index(stop)]
        assert chunks[-1]["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def stories(shipped: Path) -> Iterator[httpx.Client]:
    """A client of the shipped model, whose vocabulary has bytes."""
    model, tokenizer = tiermoe.load(shipped, device="cpu", lanes=1, memory="4GiB", context=256)
    served = served_of(model.tiermoe, tokenizer, "stories", Sampling(), 8)
    with running(create_app(served)) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        yield client
    served.worker.close(1)
    model.tiermoe.close()


@pytest.mark.parametrize("most", range(1, 8))
def test_a_character_of_several_tokens_ends_a_stream_whole_or_as_one_that_is_cut(
    stories: httpx.Client, most: int
) -> None:
    """Oracle: the bytes of the tokens, decoded at once."""
    body = {
        "messages": [ASKED], "temperature": 0, "max_tokens": most, "logprobs": True, "guided_choice": ["é🚀"],
    }  # fmt: skip
    chunks = chunks_of(stories, CHAT, body)
    told = [each["delta"].get("content", "") for each in chunks]
    data = b"".join(bytes(e["bytes"]) for each in chunks if each["logprobs"] for e in each["logprobs"]["content"])
    assert "é🚀".encode().startswith(data)
    assert data
    assert "".join(told) == data.decode(errors="replace")
    assert [text for text in told if text] == [*data.decode(errors="ignore"), *["\ufffd"] * ("\ufffd" in "".join(told))]
    assert (chunks[-1]["finish_reason"] == "stop") is (data == "é🚀".encode())


# --- prefixes from the cache ---


@pytest.fixture(scope="module", params=[{}, {"chunk": 8}], ids=["usual chunk", "chunk of 8"])
def usual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model in the bits that tiermoe chooses by itself."""
    directory = write(tmp_path_factory.mktemp("usual"), "qwen3_moe", torch.bfloat16, **NATIVE)
    model, tokenizer = tiermoe.load(
        directory, device="cpu", lanes=1, memory="4GiB", batch=4, context=128, **request.param
    )
    model.tiermoe.generation_config.eos_token_id = None  # answers are as long as they are asked for
    served = served_of(model.tiermoe, tokenizer, "usual", Sampling(max_tokens=16), 8)
    yield served
    served.worker.close(1)
    model.tiermoe.close()


@pytest.fixture(scope="module")
def asking(usual: Served) -> Iterator[httpx.Client]:
    with running(create_app(usual)) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        yield client


PROMPTS = (
    PROMPT,
    "the king of the hill said nothing at all",
    "x" * 17,
    "a b c d e f g h",
    "12 + 30 = 42, and so on " * 3,
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_same_body_twice_has_the_same_answer(asking: httpx.Client, prompt: str) -> None:
    """To the last bit of its log probabilities, although the second prompt comes from the cache."""
    body = {"prompt": f"first: {prompt}", "logprobs": 5, "max_tokens": 12}
    first, again, third = (answer_of(asking, **body) for _ in range(3))
    fresh = answer_of(asking, **body, cache_prompt=False)
    assert first["choices"] == again["choices"] == third["choices"] == fresh["choices"]
    assert cached_of(again) > 0 == cached_of(fresh)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_client_that_has_left_changes_no_later_answer(usual: Served, asking: httpx.Client, prompt: str) -> None:
    """It leaves with the first token of its answer; then its prompt comes with a word more."""
    held = Held(usual.engine, "decode")
    engine: Any = held
    worker = Worker(RequestLoop(engine, usual.tokenizer, 4, frozenset()), 8, lambda *_: None)
    app = Counted(create_app(replace(usual, worker=worker)))
    body = {"prompt": f"second: {prompt} more", "logprobs": 5, "max_tokens": 12}
    with running(app) as address:
        left = {"prompt": f"second: {prompt}", "max_tokens": 40, "temperature": 0, "stream": True}
        with connected(address, "/v1/completions", left):
            assert held.reached.wait(PATIENCE_S)
        until(lambda: app.done == 1)
        held.let_go()
        until(lambda: not worker.busy)
        assert worker.loop.counts.aborted == 1
        with httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
            warm = answer_of(client, **body)
    worker.close(PATIENCE_S)
    fresh = answer_of(asking, **body, cache_prompt=False)
    assert cached_of(warm) > 0 == cached_of(fresh)
    assert warm["choices"] == fresh["choices"]


# --- ends of answers ---


TURNS = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def several_ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A model whose config names one end token, with a tokenizer that has another one, and a template a third."""
    directory = write(tmp_path_factory.mktemp("ends"), "qwen3_moe", torch.float32, vocab_size=136, eos_token_id=129)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|text|>"]})
    tokenizer.chat_template = TURNS
    model, _ = tiermoe.load(directory, device="cpu", lanes=1, bits=16, dense_bits=16, memory="4GiB", context=96)
    yield model, tokenizer
    model.tiermoe.close()


@pytest.mark.parametrize(("name", "ends"), [("</s>", True), ("<|end|>", True), ("<|text|>", True), ("a", False)])
def test_each_end_token_ends_an_answer_and_none_is_printed(
    several_ends: tuple[Any, Any], name: str, ends: bool
) -> None:
    """The config's, the tokenizer's and the template's: forced, they come once the answer may end."""
    model, tokenizer = several_ends
    chat = chat_template(tokenizer)
    assert model.tiermoe.ends == {129}
    token = tokenizer.convert_tokens_to_ids(name)
    conversation = Conversation(model, tokenizer, chat=chat)
    forced = {token: 100.0, **{other: -100.0 for other in range(100, 136) if other != token}}
    for least in (0, 3):
        told = list[str]()
        report = conversation.reply("hi", Sampling(max_tokens=6, min_tokens=least, logit_bias=forced), told.append)
        if not ends:
            assert report.token_ids == [token] * 6
            continue
        assert report.token_ids.index(token) == len(report.token_ids) - 1 == least
        assert "".join(told) == report.text == tokenizer.decode(report.token_ids[:-1])
        assert name not in report.text


# --- user-defined tokens of GGUF vocabularies ---


DEFINED = ("<think>", "ell", "0x")
WORDS = ("h", "e", "l", "o", "he", "ll", "hell", "hello", "w", "x", "0", "t")


def byte_level(out: Path) -> GgufFile:
    tokens = [*gguf_letters(), *(word for word in WORDS if len(word) > 1), "<|end|>", *DEFINED]
    types = [KIND.NORMAL] * (len(tokens) - 1 - len(DEFINED)) + [KIND.CONTROL] + [KIND.USER_DEFINED] * len(DEFINED)
    named = {"bos": tokens.index("<|end|>"), "eos": tokens.index("<|end|>")}
    return put(out, "gpt2", tokens, types, pre="qwen2", merges=["h e", "l l", "he ll", "hell o"], ids=named)


def gguf_letters() -> list[str]:
    """Letters of a byte-level vocabulary."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def sentencepiece(out: Path) -> GgufFile:
    words = [*WORDS, "▁", *(f"▁{word}" for word in WORDS)]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *words, *DEFINED]
    types = [KIND.UNKNOWN, KIND.CONTROL, KIND.CONTROL, *[KIND.BYTE] * 256, *[KIND.NORMAL] * len(words)]
    scores = [0.0] * 259 + [-1.0 / len(word) for word in words] + [0.0] * len(DEFINED)
    named = {"bos": 1, "eos": 2, "unk": 0}
    return put(out, "llama", tokens, [*types, *[KIND.USER_DEFINED] * len(DEFINED)], scores=scores, ids=named)


def by_letters(out: Path) -> GgufFile:
    words = [*WORDS, "▁"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, *words, *DEFINED]
    types = [*[KIND.CONTROL] * 4, *[KIND.BYTE] * 256, *[KIND.NORMAL] * len(words)]
    named = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    merges = ["h e", "l l", "he ll", "hell o"]
    types = [*types, *[KIND.USER_DEFINED] * len(DEFINED)]
    return put(out, "gemma4", tokens, types, merges=merges, scores=[-1000.0] * len(tokens), ids=named)


@pytest.mark.parametrize("vocabulary_of", [byte_level, sentencepiece, by_letters])
def test_a_user_defined_token_within_a_word_is_taken_whole(
    vocabulary_of: Callable[[Path], GgufFile], tmp_path: Path
) -> None:
    """llama.cpp takes these tokens out of a text before it splits what is between them. Oracle: the parts alone."""
    tokenizer = load_tokenizer(vocabulary_of(tmp_path / "v.gguf"))

    def ids_of(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    for text in ("hello", "he<think>llo", "<think>hello<think>", "w0xell 0x", "h<think>ell<think>o", "<think"):
        parts = re.split(f"({'|'.join(map(re.escape, DEFINED))})", text)
        wanted = list[int]()
        for part in parts:
            defined = part in DEFINED
            wanted += [tokenizer.convert_tokens_to_ids(part)] if defined else ids_of(part) if part else []
        assert ids_of(text) == wanted, tokenizer.convert_ids_to_tokens(ids_of(text))
        kept = tokenizer.decode(ids_of(text), skip_special_tokens=True)
        assert kept.replace(" ", "") == text.replace(" ", "")


# --- schemas of models that think ---


def test_a_schema_holds_for_the_answer_and_not_for_the_thought_before(served: Served, stage: Stage) -> None:
    pet, other = '{"kind": "cat"}', '{"kind": "cow"}'
    worker = stage.says(f"is {other} one?\n</think>\n\n{pet}", OWN["opened"])
    told = stage.ask(CHAT, {"messages": [ASKED], "n": 4, **FORM}).json()["choices"][0]["message"]
    assert stage.prompt.endswith("<think>\n")
    assert (told["reasoning_content"], json.loads(told["content"])) == (f"is {other} one?", {"kind": "cat"})
    texts = {
        f"is {other} one?\n</think>\n\n{pet}": True, pet: False, f"so\n</think>\n\n{other}": False,
        f"so\n</think>\n\nwell, {pet}": False,
    }  # fmt: skip
    for asked, (text, passes) in zip(worker.asked, texts.items(), strict=True):
        assert followed(served, asked.grammar, text) is passes, text


THINKS = (
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)


LETTERS = dict.fromkeys(map(str, (*range(5), *range(99, 128))), -100)
"""Letters alone come, without blanks."""


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_thought_that_its_budget_ends_is_followed_by_json_of_the_schema(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    use_template(monkeypatch, served, THINKS)
    body = {"messages": [ASKED], "temperature": temperature, "seed": 3, "logit_bias": LETTERS, **FORM}
    for budget in (1, 4):
        told = http.post(CHAT, json=body | {"reasoning_budget_tokens": budget}).json()["choices"][0]
        assert len(told["message"]["reasoning_content"]) == budget
        assert json.loads(told["message"]["content"])["kind"] in ("cat", "dog")


@pytest.mark.parametrize("budget", [{}, {"reasoning_budget_tokens": 3}])
def test_a_schema_without_effort_is_followed_from_the_first_token(
    http: httpx.Client, served: Served, stage: Stage, monkeypatch: pytest.MonkeyPatch, budget: Json
) -> None:
    asked = {"messages": [ASKED], "reasoning_effort": "none", **FORM, **budget}
    pet = '{"kind": "cat"}'
    worker = stage.says(pet, OWN["opened"])
    told = stage.ask(CHAT, asked | {"n": 2}).json()["choices"][0]["message"]
    assert stage.prompt.endswith("<think>\n</think>\n")
    assert (told["content"], "reasoning_content" in told) == (pet, False)
    assert [
        followed(served, each.grammar, text) for each, text in zip(worker.asked, (pet, f"</think>{pet}"), strict=True)
    ] == [True, False]
    use_template(monkeypatch, served, THINKS)
    said = http.post(CHAT, json=asked | {"temperature": 0, "logit_bias": LETTERS}).json()["choices"][0]
    assert (said["finish_reason"], "reasoning_content" in said["message"]) == ("stop", False)
    assert json.loads(said["message"]["content"])["kind"] in ("cat", "dog")


# --- calls that come back ---


def closed(text: str) -> Any:
    """The longest beginning of a JSON object that is one with what closes it."""
    for end in range(len(text), 0, -1):
        for rest in ("", '"}', "}"):
            try:
                return json.loads(text[:end] + rest)
            except ValueError:
                continue
    return {}


@pytest.mark.parametrize("name", ["json", "name-json-text", "parameters", "keys-and-values", "typed", "own-quotes"])
def test_a_call_that_was_cut_off_comes_back_and_the_next_one_is_whole(stage: Stage, name: str) -> None:
    """Oracle: the prompt with the arguments as far as they can be read, as an object."""
    call = written(name, given(FIRST))
    for end in (len(call) // 2, call.index("Köln") + 2, call.index("Rhein") + 3, len(call) - 3):
        stage.says(call[:end], OWN[name], finish="length")
        asked: Json = {"messages": [ASKED], "tools": TOOLS}
        choice = stage.ask(CHAT, asked).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        called = message.get("tool_calls", [])
        result = [{"role": "tool", "tool_call_id": each["id"], "content": "none"} for each in called]
        more = [*result, {"role": "user", "content": "again"}]
        stage.says(call, OWN[name])
        next_turn = stage.ask(CHAT, {**asked, "messages": [ASKED, message, *more]})
        assert next_turn.status_code == 200, next_turn.text
        prompt = stage.prompt
        told = next_turn.json()["choices"][0]["message"]["tool_calls"]
        assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in told] == [FIRST]
        for each in called:
            each["function"]["arguments"] = closed(each["function"]["arguments"])
        stage.ask(CHAT, {**asked, "messages": [ASKED, message, *more]})
        assert stage.prompt == prompt
        assert "again" in prompt


# --- sampling ---


def test_a_stop_string_ends_an_answer_that_is_to_have_more_tokens(http: httpx.Client) -> None:
    """`min_tokens` and `ignore_eos` hold off end tokens alone, as docs/server.md says."""
    whole = answer_of(http)["choices"][0]["text"]
    for more in ({"min_tokens": 8}, {"ignore_eos": True}):
        choice = answer_of(http, stop=whole[2:4], **more)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(whole[2:4])], "stop")


@pytest.mark.parametrize("stopped", [False, True])
def test_end_tokens_wait_for_the_least_tokens_beside_a_stop_string(usual: Served, stopped: bool) -> None:
    """Oracle: the answer without the end token, cut at the stop string."""
    prompt, engine = ids(9, 4), usual.engine
    end = answered(engine, [Request(prompt, Sampling(max_tokens=1))])[0][0][0]  # the likeliest
    without = Sampling(max_tokens=6, logit_bias={end: -100.0})
    (whole, text, _), *_ = answered(engine, [Request(prompt, without)])
    stop = text[3:5] if stopped else "never"
    asked = Request(prompt, Sampling(max_tokens=12, min_tokens=6, logit_bias={}), (stop,))
    ((found, said, finish),) = answered(engine, [asked], frozenset({end}))
    if stopped:
        assert (said, finish) == (text[: text.index(stop)], "stop")
    else:
        assert found[:6] == whole
        assert said[:6] == text
    assert end not in found[:6]


def answered(
    engine: Any, requests: Sequence[Request], ends: frozenset[int] = frozenset()
) -> list[tuple[list[int], str, str | None]]:
    """Tokens, text and end of each answer of a batch."""
    batch = RequestLoop(engine, Letters(), 4, ends)
    numbers, pieces = [batch.add(each) for each in requests], list[Piece]()
    while not batch.scheduler.idle:
        pieces += batch.step()
    found = []
    for number in numbers:
        its = [piece for piece in pieces if piece.number == number]
        found.append(([token for piece in its for token in piece.tokens], "".join(p.text for p in its), its[-1].finish))
    return found


def test_likely_tokens_are_told_of_all_whatever_top_p_keeps(http: httpx.Client) -> None:
    """Log probabilities are the model's own."""
    asked = {"messages": [ASKED], "max_tokens": 6, "logprobs": True, "top_logprobs": 20}
    greedy, kept, few = (
        http.post(CHAT, json=asked | more).raise_for_status().json()["choices"][0]["logprobs"]["content"]
        for more in (
            {"temperature": 0}, {"temperature": 1, "top_p": 1e-6, "seed": 1},
            {"temperature": 1, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "seed": 2},
        )
    )  # fmt: skip
    assert kept == greedy
    assert few[0]["top_logprobs"] == greedy[0]["top_logprobs"]
    assert few[0]["token"] in [each["token"] for each in greedy[0]["top_logprobs"][:2]]
    for each in (*greedy, *few):
        assert len(each["top_logprobs"]) == 20
        assert min(top["logprob"] for top in each["top_logprobs"]) > -9999


def test_penalties_of_one_request_are_of_no_other(usual: Served) -> None:
    """Each answer in a batch of four is the one that it has alone."""
    chance = random.Random(7)
    penalties: list[Json] = [
        {}, {"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}, {},
        {"repetition_penalty": 1.3, "repeat_last_n": 4, "presence_penalty": -1.0}, {"dry_multiplier": 2.0},
        {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 5, "presence_penalty": 2.0},
    ]  # fmt: skip
    prompt = ids(12, 3)
    asked = [Request(prompt, Sampling(max_tokens=20, **more)) for more in penalties]
    alone = [answered(usual.engine, [each])[0] for each in asked]
    assert len({tuple(tokens) for tokens, _, _ in alone}) > 4  # they do something
    for _ in range(3):
        order = chance.sample(range(len(asked)), len(asked))
        found = answered(usual.engine, [asked[at] for at in order])
        assert found == [alone[at] for at in order]


# --- files ---


def test_a_later_shard_of_a_gguf_file_that_is_cut_is_named(tmp_path: Path, shipped: Path, tiermoe_: Command) -> None:
    model = gguf_files.model_of("qwen3_moe")
    vocabulary = shipped / "tokenizer.json"
    gguf_files.write(tmp_path / "model.gguf", model, "qwen3_moe", kinds("q8_0"), shards=12, vocabulary=vocabulary)
    first, *_, last = sorted(tmp_path.glob("model-*.gguf"))
    header = gguf.GGUFReader(last).data_offset
    content = last.read_bytes()
    last.write_bytes(content[: (header + len(content)) // 2])
    cause = tiermoe_("run", first, "hi", "--memory", "4GiB").cause
    assert last.name in cause
    assert "cut short" in cause


# --- calls and thoughts ---


@pytest.mark.parametrize("name", [name for name in KNOWN if name in OWN and name in THINKING])
@pytest.mark.parametrize("pieces", [1, 5, 60])
def test_a_call_within_a_thought_is_thought(name: str, pieces: int) -> None:
    """No call, and none of its text is lost; the one after the thought is a call."""
    form = format_of(name)
    assert form.thought is not None
    begin, end = form.thought
    call = written(name, given(FIRST)).replace(begin, "").replace(end, "").strip()
    thought = f"I could say\n{call}\nbut not yet."
    for after, calls in (("It rains.", []), (call, [FIRST])):
        answer = f"{thought}{end}{form.text[0] if not calls else ''}{after}{form.text[1] if not calls else ''}"
        for text, inside in ((begin + answer, False), (answer, True)):
            told, said, found = read(form, parts_of(text, pieces), inside=inside)
            assert (told, said.strip(), values(found)) == (thought, "" if calls else after, calls)


TAGGED = [name for name in KNOWN if name in OWN and (calls := format_of(name).calls) and calls.style == "tags"]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("pieces", [1, 9, 80])
def test_a_value_with_the_tags_that_end_it_stays_one(name: str, pieces: int) -> None:
    """With text behind them, as the template writes it."""
    plain = written(name, given(("get_weather", {"city": "QQ", "days": 3, "fast": True})))
    after = plain.partition("QQ")[2].lstrip("\n")
    closing = after[: after.index(">") + 1]  # the parameter's
    last = plain[plain.rindex("<") :].strip()  # the block's
    for city in (
        f"a {closing} b",
        f"a {last} b",
        f"{closing}b",
        f"a\n{closing}\nb {last} c",
        f"{closing}{closing} x",
        f"{last} b",
        f"a{closing}\n\nb",
        closing,
    ):
        call = ("get_weather", {"city": city, "days": 3, "fast": True})
        thought, said, found = read(format_of(name), parts_of(written(name, given(call)), pieces))
        assert (thought, said.strip(), values(found)) == ("", "", [call])
