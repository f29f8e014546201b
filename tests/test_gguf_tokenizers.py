"""Tokenizers that GGUF files describe: the ids that llama.cpp gives a text, how they are decoded, which end an answer.

llama.cpp's ids need llama-cpp-python, here or in the interpreter that TIERMOE_PEER_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import gguf_files
from gguf_files import kinds
from tiermoe.engine.detokenize import token_bytes
from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, open_gguf
from tiermoe.formats.outline import Origin
from tiermoe.model.families.gguf import end_ids
from tiermoe.model.gguf.tokenizer import PRE_TOKENIZERS, load_tokenizer
from tiermoe.model.tokenizer import keep_tokenizer, read_tokenizer
from tiermoe.model.tokenizer import load_tokenizer as load_any

PEER = os.environ.get("TIERMOE_PEER_PYTHON", sys.executable)
_COMBINING = "Việt Nam ไทย हिन्दी"
TEXTS = [
    "Hello world", "Hello  world   three", "1 22 333 4444 55555 3.14 1,000,000", "naïve Straße ñandú élan déjà",
    "🚀 😶‍🌫️ ✅🦙 emoji", "def f(x):\n    return x**2  # ok\n\n\tif x: y=1\r\n", "I'm you've don't HE'LL 'tis",
    "我想在apple工作1314天～ Привет мир こんにちは", "  leading and trailing  ", "\n\n\n a\n\nb \n", "",
    "foo_bar-baz@x.com http://a.b/c?d=e&f=g", '!!!??? ... --- === "quoted" `tick`', _COMBINING,
    "x=[1,2,3];{}()<>|\\/", "CamelCaseWord ALLCAPS iPhone", "  中文 Kimi月之暗面AI、これ",
]  # fmt: skip
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"]
KIND = gguf.TokenType
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_ASK = """
import json, sys, llama_cpp
job = json.load(sys.stdin)
model = llama_cpp.Llama(job["file"], vocab_only=True, verbose=False)
print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=True) for text in job["texts"]]))
"""


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    """A byte-level BPE of a thousand merges learned from the texts: tokens and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1256, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"tokens": [*model["vocab"]], "merges": [" ".join(merge) for merge in model["merges"]]}


def put(
    out: Path,
    model: str,
    tokens: Sequence[str],
    types: Sequence[gguf.TokenType],
    *,
    pre: str | None = None,
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    ids: Mapping[str, int],
    **flags: bool,
) -> GgufFile:
    """A file with a vocabulary and nothing else. ids: of special tokens."""
    writer = gguf.GGUFWriter(out, "qwen3moe" if model == "gpt2" else model)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if scores:
        writer.add_token_scores(scores)
    if merges:
        writer.add_token_merges(merges)
    for name, token in ids.items():
        getattr(writer, f"add_{name}_token_id")(token)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return open_gguf(out)


def write(out: Path, vocabulary: dict[str, Any], pre: str | None, **flags: bool) -> GgufFile:
    """A file with a byte-level vocabulary."""
    tokens, count = [*vocabulary["tokens"], *SPECIAL, "<think>"], len(vocabulary["tokens"])
    types = [*[KIND.NORMAL] * count, *[KIND.CONTROL] * len(SPECIAL), KIND.USER_DEFINED]
    ids = {"bos": count, "eos": count + 2}
    return put(out, "gpt2", tokens, types, pre=pre, merges=vocabulary["merges"], ids=ids, **flags)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_text_comes_back(pre: str, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "v.gguf", vocabulary, pre, add_bos_token=False))
    kept = kept_of(tokenizer, tmp_path)
    for text in TEXTS:
        assert kept.decode(kept.encode(text)) == text
        assert kept.encode(text) == tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert bytes_of(tokenizer, text) == text.encode()
    ids = tokenizer("a<|im_end|>b<think>c")["input_ids"]
    names = ["a", "<|im_end|>", "b", "<think>", "c"]
    assert tokenizer.convert_ids_to_tokens(ids) == names
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>c"


def kept_of(tokenizer: Any, root: Path) -> Any:
    """The tokenizer that a store keeps, and reads without transformers."""
    keep_tokenizer(root, Origin("a", "b"), tokenizer)
    return read_tokenizer(root, Origin("a", "b"))


def test_ends_of_a_text_and_of_an_answer(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    count = len(vocabulary["tokens"])
    both = write(tmp_path / "v.gguf", vocabulary, "qwen2", add_bos_token=True, add_eos_token=True)
    ids = load_tokenizer(both)("a")["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (count, count + 2, 3)
    assert len(load_tokenizer(write(tmp_path / "w.gguf", vocabulary, "qwen2"))("a")["input_ids"]) == 1
    begun = load_tokenizer(write(tmp_path / "x.gguf", vocabulary, "llama-bpe"))  # by its kind
    assert begun("a")["input_ids"][0] == count
    assert begun.chat_template == "{{ messages[0].content }}"
    assert end_ids(both) == [count + 2, count + 1, count + 3]


def test_what_splits_text_must_be_known(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="splits text as 'superbpe' does, which tiermoe does not know from GGUF files"):
        load_tokenizer(write(tmp_path / "v.gguf", vocabulary, "superbpe"))


def bytes_of(tokenizer: Any, text: str) -> bytes:
    return b"".join(token_bytes(tokenizer, token) for token in tokenizer(text, add_special_tokens=False)["input_ids"])


def _peer(file: Path) -> list[list[int]]:
    job = json.dumps({"file": str(file), "texts": TEXTS})
    done = subprocess.run([PEER, "-c", _ASK], input=job, capture_output=True, text=True, check=False)
    if "No module named" in done.stderr:
        pytest.skip(f"{PEER} has no llama-cpp-python")
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout)
    return found


SPLITS = ["qwen2", "gpt-2", "llama-bpe", "gpt-4o", "deepseek-llm", "deepseek-v3", "kimi-k2", "olmo", None]


@pytest.mark.parametrize("pre", SPLITS)
def test_ids_are_llama_cpps(pre: str | None, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "v.gguf"
    tokenizer = load_tokenizer(write(file, vocabulary, pre))
    # llama.cpp has no expression for marks that combine there, and splits before them; the model's own does not
    left_out = {_COMBINING} if pre == "gpt-4o" else set()
    for text, wanted in zip(TEXTS, _peer(file), strict=True):
        assert text in left_out or tokenizer(text)["input_ids"] == wanted, text


def sentencepiece(out: Path) -> GgufFile:
    """A file with a vocabulary of words' beginnings, letters and bytes."""
    pieces = [(text[:end], -float(end)) for text in TEXTS for end in range(1, 6) if text[:end]]
    words = {"▁" + word[:end]: -10.0 * end for text in TEXTS for word in text.split() for end in range(1, 8)}
    letters = {letter: -1000.0 for text in TEXTS for letter in text if letter != " "} | {"▁": -1000.0, "▁▁": -2.0}
    scores = letters | {piece.replace(" ", "▁"): score for piece, score in pieces} | words
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *scores]
    types = [KIND.UNKNOWN, KIND.CONTROL, KIND.CONTROL, *[KIND.BYTE] * 256, *[KIND.NORMAL] * len(scores)]
    ids = {"bos": 1, "eos": 2, "unk": 0}
    return put(out, "llama", tokens, types, scores=[0.0] * 259 + [*scores.values()], ids=ids)


def by_letters(out: Path) -> GgufFile:
    """A file with a vocabulary as Gemma 4's: merges of letters learned from the texts but the last, and bytes."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, min_frequency=1)
    learned.train_from_iterator([text for text in TEXTS[:-1] for _ in range(3)], trainer)
    model = json.loads(learned.to_str())["model"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "<|tool_response>", "</s>", *BYTES, *model["vocab"]]
    types = [*[KIND.CONTROL] * 6, KIND.NORMAL, *[KIND.BYTE] * 256, *[KIND.NORMAL] * len(model["vocab"])]
    merges, ids = [" ".join(merge) for merge in model["merges"]], {"pad": 0, "eos": 1, "bos": 2, "unk": 3}
    # as the first files said of the begin token, and llama.cpp does not believe
    flags = {"add_space_prefix": False, "add_bos_token": False}
    return put(out, "gemma4", tokens, types, merges=merges, scores=[-1000.0] * len(tokens), ids=ids, **flags)


@pytest.mark.parametrize("vocabulary_of", [sentencepiece, by_letters])
def test_ids_of_other_vocabularies_are_llama_cpps(vocabulary_of: Callable[[Path], GgufFile], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(vocabulary_of(tmp_path / "v.gguf"))
    for text, wanted in zip(TEXTS, _peer(tmp_path / "v.gguf"), strict=True):
        assert (not text and vocabulary_of is sentencepiece) or tokenizer(text)["input_ids"] == wanted, text


@pytest.mark.parametrize("vocabulary_of", [sentencepiece, by_letters])
def test_tokens_of_other_vocabularies_have_their_own_bytes(
    vocabulary_of: Callable[[Path], GgufFile], tmp_path: Path
) -> None:
    file = vocabulary_of(tmp_path / "v.gguf")
    tokenizer, spaced = load_tokenizer(file), vocabulary_of is sentencepiece
    kept = kept_of(tokenizer, tmp_path)
    for text in (*TEXTS, "ሰላም\u3000\U00013000"):  # the last one's letters are no tokens
        assert kept.encode(text) == tokenizer(text)["input_ids"]
        assert bytes_of(tokenizer, text) == (b" " + text.encode() if text and spaced else text.encode())
        assert spaced or tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    if not spaced:
        assert tokenizer("a")["input_ids"][0] == 2
        assert end_ids(file) == [1, 4, 5]  # </s> is a tag


def test_a_model_s_tokenizer_is_its_file_s(tmp_path: Path, shipped: Path) -> None:
    model = gguf_files.model_of("qwen3_moe of 4096 tokens")
    file = gguf_files.write(
        tmp_path / "m.gguf", model, "qwen3_moe of 4096 tokens", kinds("q8_0"), vocabulary=shipped / "tokenizer.json"
    )
    mine, theirs = load_any(file), load_any(shipped)
    for text in TEXTS:
        assert mine(text)["input_ids"] == theirs(text)["input_ids"]
