"""The text made by rule for the second recipe: parts, right answers, calls, and the tokenizer of chats."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from tiermoe.model.chat.parameters import parameters_of
from tiermoe.model.chat.reader import AnswerReader, CallPatterns
from tiermoe.model.chat.template import chat_template
from training.chats import chat, is_held_out, question, texts, tool_question, write
from training.export import export
from training.listings import python_class, python_functions
from training.model import build_model
from training.questions import QUESTIONS, programs, records
from training.settings import Settings
from training.tokenizer import CHAT_TEMPLATE, END, TAGS, TURN, TURN_END, train_tokenizer
from training.tools import TOOLS, weather

SMALL = Settings(
    layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_hidden=16, vocab=512
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(islice(texts(0, False), 200), SMALL.vocab, SMALL.max_length, chats=True)


def test_the_same_seed_writes_the_same_bytes_and_no_more_than_asked(tmp_path: Path) -> None:
    for name, seed, held_out in (("a", 0, False), ("b", 0, False), ("c", 1, False), ("d", 0, True)):
        write(tmp_path / name, 20_000, seed, held_out)
    a, b, c, d = ((tmp_path / name).read_bytes() for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3
    assert a.endswith(END.encode())
    assert len(a[: a[: -len(END)].rfind(END.encode())]) < 20_000 <= len(a)  # it ends with the text that fills it


@cache
def asked(held_out: bool) -> set[str]:
    """What 3,000 items of a part ask, those for tools with them."""
    rng, found = Random(0), set()
    for _ in range(3000):
        tool = rng.choice(list(TOOLS))(rng)
        for messages in (question(rng, held_out), tool_question(rng, tool, held_out)):
            found.add("\n".join(message["content"] for message in messages if message["role"] == "user"))
    return found


def test_what_is_held_out_is_asked_nowhere_in_training() -> None:
    training, held_out = asked(False), asked(True)
    assert len(training) > 2000
    assert len(held_out) > 200
    assert not training & held_out


def test_a_sum_is_in_one_part_however_it_is_asked() -> None:
    parts: dict[str, set[bool]] = {}
    for held_out in (False, True):
        for text in asked(held_out):
            if found := re.search(r"(?:is|^|Add) (\d\d?) (?:\+|plus|and) (\d\d?)\b", text):
                parts.setdefault(" ".join(found.groups()), set()).add(held_out)
    assert len(parts) > 100
    assert all(len(part) == 1 for part in parts.values())


@pytest.mark.parametrize("maker", QUESTIONS, ids=lambda maker: maker.__name__)
def test_answers_are_right(maker: object) -> None:
    """Terms are computed, code is compiled, JSON is read: whatever an answer holds of them."""
    rng = Random(3)
    for _ in range(200):
        for _, answer in maker(rng).turns:  # type: ignore[operator]
            for term, value in re.findall(r"(\d+ [-+*/] \d+) = (-?\d+)", answer):
                assert eval(term) == int(value)
            for code in re.findall(r"```python\n(.*?)\n```", answer, re.DOTALL):
                compile(code, "answer", "exec")


def test_records_are_read_and_written() -> None:
    rng = Random(5)
    for _ in range(200):
        ((asks, answer),) = records(rng).turns
        if asks.startswith("Write"):
            told = ", ".join(f"{field} {value}" for field, value in json.loads(answer).items())
            assert asks == f"Write this in JSON: {told}"
        else:
            field, text = re.fullmatch(r"What is the (\w+) in (.*)\?", asks).groups()  # type: ignore[union-attr]
            assert answer == f"The {field} is {json.loads(text)[field]}."


def test_programs_do_what_was_asked() -> None:
    rng = Random(6)
    for _ in range(200):
        ((asks, answer),) = programs(rng).turns
        if found := re.search(r"function (\w+) that (.*) (\d+)\.", asks):
            names: dict[str, object] = {}
            exec(answer.removeprefix("```python\n").removesuffix("\n```"), names)
            number = int(found[3])
            expected = {"adds": 100 + number, "multiplies by": 100 * number, "subtracts": 100 - number}[found[2]]
            assert names[found[1]](100) == expected  # type: ignore[operator]


def test_listings_of_code_compile() -> None:
    rng = Random(7)
    for maker in (python_class, python_functions):
        for _ in range(50):
            compile(maker(rng), "listing", "exec")


def test_the_server_reads_the_calls_that_the_template_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = Random(8)
    for _ in range(50):
        tool = weather(rng)
        messages = tool_question(rng, tool, False)
        calls = [call["function"] for call in messages[1]["tool_calls"]]
        tools = [tool.signature]
        before = tokenizer.apply_chat_template(messages[:1], tools=tools, tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[:2], tools=tools, tokenize=False)
        assert after.startswith(before)  # what was said stays as the model said it
        form = chat_template(tokenizer).form
        assert form.calls is not None
        reader = AnswerReader(form, CallPatterns(form.calls, parameters_of(tools)))
        found = reader.add(after.removeprefix(before).removesuffix(f"{TURN_END}\n"), last=True).calls
        made = [(piece.call.name, json.loads(piece.call.arguments)) for piece in found if piece.kind == "end"]
        assert made == [(call["name"], call["arguments"]) for call in calls]


def test_a_chat_is_balanced() -> None:
    rng = Random(9)
    for _ in range(100):
        text = chat(rng, False)
        assert text.count(TURN) == text.count(TURN_END) > 1
        assert text.rstrip().endswith(TURN_END)
        assert re.findall(re.escape(TURN) + r"(\w+)\n", text)[-1] == "assistant"


def test_tokens_of_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == SMALL.vocab
    for token in (END, TURN, TURN_END, *TAGS):
        assert len(tokenizer(token)["input_ids"]) == 1
    assert len(tokenizer("2026")["input_ids"]) == 4
    call = f'{TAGS[0]}\n{{"name": "weather", "arguments": {{}}}}\n{TAGS[1]}'
    ids = tokenizer(call + TURN_END)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == call


def test_the_export_answers_until_its_turn_ends(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = build_model(replace(SMALL, tied=False, embedding_std=0.25))
    export(model, tokenizer, tmp_path)
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path)
    ends = [tokenizer(token)["input_ids"][0] for token in (TURN_END, END)]
    assert loaded.generation_config.eos_token_id == ends
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    assert loaded.model.embed_tokens.weight.float().std().item() == pytest.approx(0.25, rel=0.05)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == CHAT_TEMPLATE.read_text()


def test_a_twentieth_is_held_out() -> None:
    share = sum(is_held_out(f"item {number}") for number in range(10_000)) / 10_000
    assert share == pytest.approx(0.05, abs=0.01)
