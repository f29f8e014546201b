"""Which tokens end an answer of a model in a GGUF file: those that end llama.cpp's."""

from __future__ import annotations

from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.header import Strings

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""They do whatever else the file says (`special_eog_ids` of src/llama-vocab.cpp)."""


def end_ids(file: GgufFile) -> list[int]:
    """Their ids, the file's end token first."""
    tokens = file.strings("tokenizer.ggml.tokens")
    found = [token_id(file, name) for name in ("eos", "eot", "eom")]
    there = {token: index for index, token in enumerate(tokens) if token in _ENDS}
    if "<|return|>" in there and "<|call|>" in there:  # gpt-oss: it ends a message, not the answer
        there.pop("<|end|>", None)
    return list(dict.fromkeys([*(token for token in found if token is not None), *there.values()]))


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of a token that the file names ('bos', 'eos', 'padding', …); None where it names none of its own."""
    token = file.entries.get(f"tokenizer.ggml.{name}_token_id")
    tokens = file.entries.get("tokenizer.ggml.tokens")
    return token if isinstance(token, int) and isinstance(tokens, Strings) and 0 <= token < tokens.count else None
