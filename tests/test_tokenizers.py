"""Tokenizers and chat templates without transformers: ids and texts are those that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conftest import SHIPPED
from tiermoe.engine.detokenize import token_bytes
from tiermoe.formats.outline import Origin
from tiermoe.model.tokenizer import BACKEND, NAME, Tokenizer, files_digest, keep_tokenizer, read_tokenizer, render
from tiny import write_tokenizer

ORIGIN = Origin("abc", "transformers 5")
TEXTS = [
    "Hello world", "Hello  world   three\n\n", "1 22 333 4444 3.14", "naïve Straße élan", "🚀 😶‍🌫️ ✅🦙",
    "x**2  # ok\n\tif",
    "I'm you've DON'T", "我想在apple Привет こんにちは", "  leading and trailing  ", "", "a <b>.  It 's , well !",
    "</s>a<s> <|im_end|>b",
]  # fmt: skip


def kept(tokenizer: Any, root: Path) -> Tokenizer | None:
    """The tokenizer that a store at `root` keeps of transformers' one."""
    root.mkdir(exist_ok=True)
    keep_tokenizer(root, ORIGIN, tokenizer)
    return read_tokenizer(root, ORIGIN)


def check(tokenizer: Any, root: Path) -> None:
    """The kept tokenizer does what transformers' does."""
    found = kept(tokenizer, root)
    assert found is not None
    assert (found.chat_template, found.bos_token_id) == (tokenizer.chat_template, tokenizer.bos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = found.encode(text, add_special_tokens=special)
            assert ids == tokenizer(text, add_special_tokens=special).input_ids, text
            for skip in (True, False):
                whole = found.decode(ids, skip_special_tokens=skip)
                assert whole == tokenizer.decode(ids, skip_special_tokens=skip), text
    for token in range(0, len(tokenizer), 1 + len(tokenizer) // 500):
        assert token_bytes(found, token) == token_bytes(tokenizer, token)


def byte_level() -> Any:
    """(vocabulary, merges) of a byte-level BPE."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    backend.train_from_iterator(TEXTS * 3, trainer)
    found = json.loads(backend.to_str())["model"]
    return found["vocab"], [tuple(merge) for merge in found["merges"]]


def spaced() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a BPE over words that begin with ▁, with bytes."""
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")})
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁H", "He", "ll", "▁▁"]
    merges = [("▁", "H"), ("H", "e"), ("l", "l"), ("▁", "▁")]
    return {word: index for index, word in enumerate(words)}, merges


CLASSES: dict[str, Callable[[], Any]] = {
    "Qwen2Tokenizer": lambda: transformers.Qwen2Tokenizer(*byte_level()),
    "GPT2Tokenizer": lambda: transformers.GPT2Tokenizer(*byte_level(), add_prefix_space=True),
    "LlamaTokenizer": lambda: transformers.LlamaTokenizer(*spaced(), add_bos_token=True),
    "LlamaTokenizer, ends": lambda: transformers.LlamaTokenizer(*spaced(), add_eos_token=True, legacy=False),
    "GemmaTokenizer": lambda: transformers.GemmaTokenizer(*spaced()),
}


@pytest.mark.parametrize("name", CLASSES)
def test_ids_and_texts_are_those_of_transformers_classes(name: str, tmp_path: Path) -> None:
    """As a checkpoint has them: files that the class reads, whatever it makes of them."""
    CLASSES[name]().save_pretrained(tmp_path / "model")
    check(AutoTokenizer.from_pretrained(tmp_path / "model"), tmp_path / "store")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bos_token": "<s>", "additional_special_tokens": ["<|im_end|>"]},
        {"split_special_tokens": True, "eos_token": "</s>"},
        {"clean_up_tokenization_spaces": True},  # which a BPE does without
        {"padding_side": "left", "truncation_side": "left", "model_max_length": 4},
    ],
)
def test_ids_and_texts_are_those_of_a_tokenizer_json(changes: dict[str, Any], tmp_path: Path) -> None:
    vocabulary, merges = byte_level()
    backend = Backend(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, **changes).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer(TEXTS, padding="max_length", max_length=12, truncation=True)  # leaves its mark in the backend
    check(tokenizer, tmp_path / "store")


def test_ids_and_texts_of_the_shipped_model_and_of_tiny_ones(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tiny")
    for number, directory in enumerate((SHIPPED, tmp_path / "tiny")):
        check(AutoTokenizer.from_pretrained(directory), tmp_path / str(number))


@pytest.mark.parametrize(
    "make",
    [
        # words are cleaned up, which a `Tokenizer` does not do
        lambda: transformers.BertTokenizer({"[UNK]": 0, "a": 1, ".": 2}, clean_up_tokenization_spaces=True),
        lambda: transformers.ByT5Tokenizer(),  # not the tokenizers library's
    ],
)
def test_a_tokenizer_that_does_more_is_not_kept(make: Callable[[], Any], tmp_path: Path) -> None:
    assert kept(make(), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_class_with_methods_of_its_own_is_not_kept(tmp_path: Path) -> None:
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **named: Any) -> str:
            return "own"

    assert kept(Own(tokenizer_object=Backend(models.BPE())), tmp_path) is None


def test_what_is_damaged_or_of_another_origin_is_passed_over(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert kept(tokenizer, tmp_path) is not None
    assert read_tokenizer(tmp_path, Origin("abd", ORIGIN.versions)) is None
    assert read_tokenizer(tmp_path, Origin("abc", "transformers 6")) is None
    for name in (NAME, BACKEND):
        whole = (tmp_path / name).read_bytes()
        for torn in (whole[:-1], whole.replace(b"<", b">", 1), b""):
            (tmp_path / name).write_bytes(torn)
            assert read_tokenizer(tmp_path, ORIGIN) is None
        (tmp_path / name).unlink()
        assert read_tokenizer(tmp_path, ORIGIN) is None
        (tmp_path / name).write_bytes(whole)
    assert read_tokenizer(tmp_path, ORIGIN) is not None


def test_every_file_of_a_tokenizer_counts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    seen = {files_digest(tmp_path)}
    for name in ("chat_template.jinja", "additional_chat_templates/a.jinja", "tokenizer.model", "vocab.txt"):
        (tmp_path / name).write_text("a")
        seen.add(files_digest(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    seen.add(files_digest(tmp_path))
    assert len(seen) == 6
    (tmp_path / "model.safetensors").write_text("not the tokenizer's")
    assert files_digest(tmp_path) in seen


# chat templates

TEMPLATES = [
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "  {%- for m in messages %}\n    {%- if loop.first and m.role != 'system' %}\n{{ bos_token }}sys\n{% endif %}\n"
    "    {% if m.role == 'assistant' %}{% continue %}{% endif %}\n{{ loop.index }}{{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(seen=0, text='') %}{% for m in messages %}{% set ns.seen = ns.seen + 1 %}{% endfor %}"
    "{{ ns.seen }}{{ dict(a=1) | tojson(indent=2) }}{{ dict.fromkeys(['<b>']) | tojson }}",
    "{% for m in messages %}{% generation %}{% set inside = 1 %}{{ m.content }}{% endgeneration %}"
    "{{ inside is defined }}{% endfor %}",
    "{{ messages[0].content[:3] | upper }}{{ unknown }}{{ messages | length }}{{ tools is none }}{{ documents }}",
    "{{ strftime_now('%Y') }}",
]
REFUSING = [
    "{{ raise_exception('roles must alternate') }}",
    "{% set ns = namespace(_hidden=1) %}",
    "{% set ns = namespace() %}{% set ns._hidden = 1 %}",
    "{{ ''.__class__.__mro__ }}{{ messages.x.y }}",
    "{% for %}",
]
MESSAGES = [
    {"role": "system", "content": " Be <kind> & brief. "},
    {"role": "user", "content": "ä 'quoted' \"text\"\n"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture
def speaker(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompting", [True, False])
def test_a_conversation_is_rendered_as_transformers_renders_it(template: str, prompting: bool, speaker: Any) -> None:
    speaker.chat_template = template
    for messages in (MESSAGES, MESSAGES[1:2]):
        wanted = speaker.apply_chat_template(messages, add_generation_prompt=prompting, tokenize=False)
        assert render(template, messages, speaker.special_tokens_map, prompting) == wanted


@pytest.mark.parametrize("template", REFUSING)
def test_a_template_that_refuses_is_refused(template: str, speaker: Any) -> None:
    speaker.chat_template = template
    with pytest.raises(Exception) as refused:  # noqa: PT011
        render(template, MESSAGES, speaker.special_tokens_map)
    if "_hidden" in template and transformers.__version__.startswith("5.22"):  # which takes it
        return
    with pytest.raises(type(refused.value)):
        speaker.apply_chat_template(MESSAGES, tokenize=False)


def test_the_default_of_several_templates_is_kept(speaker: Any, tmp_path: Path) -> None:
    speaker.chat_template = {"default": TEMPLATES[0], "tool_use": TEMPLATES[1]}
    found = kept(speaker, tmp_path / "store")
    assert found is not None
    assert found.apply_chat_template(MESSAGES) == speaker.apply_chat_template(MESSAGES, tokenize=False)
    speaker.chat_template = {"rag": TEMPLATES[0]}
    assert kept(speaker, tmp_path / "another") is None
