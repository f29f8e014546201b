"""The vocabulary of a tiny GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Path, size: int) -> None:
    """The byte-level BPE of a tokenizer.json, cut or padded to `size` tokens."""
    document = json.loads(tokenizer.read_text())
    special = {added["id"]: added["content"] for added in document["added_tokens"] if added["special"]}
    by_id = {index: token for token, index in document["model"]["vocab"].items()} | special
    ids = range(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in ids])
    kinds_ = gguf.TokenType
    writer.add_token_types(
        [kinds_.CONTROL if i in special else kinds_.NORMAL if i in by_id else kinds_.UNUSED for i in ids]
    )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
