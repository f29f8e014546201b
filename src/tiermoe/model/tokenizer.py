"""Tokenizer of a model and its chat template: as transformers makes it of a checkpoint or a GGUF file, and as a store
keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tiermoe.config import MIB
from tiermoe.errors import ModelError, first_line
from tiermoe.formats.gguf_file import is_gguf, open_gguf
from tiermoe.formats.outline import Origin, read_kept, write_kept
from tiermoe.model.chat.jinja import render
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.configs import TOKENIZER_CONFIG, files_with_code, origin_of
from tiermoe.platform import process_memory
from tiermoe.platform.json_files import replace_unlocked

NAME = "tokenizer.json"
BACKEND = "tokenizer-backend.json"
_LARGEST = 256 * MIB
_READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
"""The files of a checkpoint that transformers' tokenizers read, and a few small ones beside them."""
_OWN = ("__call__", "encode", "_encode_plus", "decode", "_decode", "apply_chat_template", "get_chat_template")
"""Methods of transformers' fast tokenizers that `Tokenizer` does the work of."""


class Tokenizer:
    """A tokenizer. Its methods are transformers', as far as answers need them.

    chat_template: None if the model has none. special_tokens: those that a template may name. splits: special tokens
    in a text are split as words are."""

    def __init__(
        self, backend: Backend, chat_template: str | None, special_tokens: Mapping[str, str], splits: bool
    ) -> None:
        self.chat_template = chat_template
        self._backend = backend
        self._backend.encode_special_tokens = splits
        self._special_tokens = special_tokens

    @property
    def bos_token_id(self) -> int | None:
        token = self._special_tokens.get("bos_token")
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Template variable ('eos_token') → token."""
        return self._special_tokens

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id → token beyond the model's vocabulary, special ones among them."""
        found: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        return found

    def get_vocab(self) -> dict[str, int]:
        """Token → its id."""
        found: dict[str, int] = self._backend.get_vocab()
        return found

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = False) -> list[int]:
        """Token ids of a text, with the tokens that every text begins and ends with unless add_special_tokens is False.
        verbose: transformers tell of long texts; this one never does."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of tokens. clean_up_tokenization_spaces: no tokenizer is kept that would."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], add_generation_prompt: bool = False, tokenize: bool = False
    ) -> str:
        """The text of a conversation. ValueError without a template, and for tokenize=True: `encode` the text."""
        if self.chat_template is None or tokenize:
            raise ValueError("the model has no chat template" if not tokenize else "a conversation is rendered as text")
        return render(self.chat_template, conversation, self._special_tokens, add_generation_prompt)


def load_tokenizer(directory: Path) -> Any:
    """The model's tokenizer. ModelError if the directory, or the GGUF file, has none."""
    if is_gguf(directory):
        return _from_gguf(directory)
    process_memory.import_transformers()
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", TOKENIZER_CONFIG)
    if not any((directory / name).exists() for name in names):
        raise ModelError(
            f"{directory} has no tokenizer (none of {', '.join(names)}); download it again with its tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        own = TOKENIZER_CONFIG in files_with_code(directory)
        raise ModelError(
            f"the tokenizer in {directory} needs code of its own, and tiermoe never runs a checkpoint's code: choose "
            f"another model"
            if own
            else f"the tokenizer in {directory} cannot be loaded ({first_line(error)}); download it again"
        ) from error


def _from_gguf(file: Path) -> Any:
    from tiermoe.model.gguf.tokenizer import load_tokenizer as from_entries

    try:
        return from_entries(open_gguf(file))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the tokenizer in {file} cannot be used ({first_line(error)}); download it again") from error


def tokenizer_origin(blueprint: Blueprint) -> Origin:
    """The origin of a tokenizer that the model's store keeps."""
    return blueprint.origin if blueprint.in_gguf else origin_of(files_digest(blueprint.directory))


def files_digest(directory: Path) -> str:
    """16 hex digits over the files that make a checkpoint's tokenizer."""
    digest = xxhash.xxh3_64()
    for pattern in _READ:
        for file in sorted(directory.glob(pattern)):
            if not file.name.endswith(".index.json") and file.is_file():
                digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def read_tokenizer(root: Path, origin: Origin) -> Tokenizer | None:
    """The tokenizer that the store at `root` keeps; None if there is none of this origin that can be used."""
    kept = read_kept(root / NAME, origin)
    if kept is None:
        return None
    try:
        with open(root / BACKEND, "rb") as file:
            content = file.read(_LARGEST)
        if xxhash.xxh3_64(content).hexdigest() != kept.pop("backend"):
            return None
        return Tokenizer(Backend.from_buffer(content), **kept)
    except Exception:  # the library raises exceptions of no class of its own
        return None


def keep_tokenizer(root: Path, origin: Origin, tokenizer: Any) -> None:
    """Keeps transformers' tokenizer in the store at `root`. Nothing happens if it does something that `Tokenizer`
    does not, or if the store cannot be written."""
    facts = _facts(tokenizer)
    if facts is None or not root.is_dir():
        return
    backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    content = backend.to_str().encode()
    replace_unlocked(root / BACKEND, content)
    write_kept(root / NAME, origin, {**facts, "backend": xxhash.xxh3_64(content).hexdigest()})


def _facts(tokenizer: Any) -> dict[str, Any] | None:
    """What a `Tokenizer` needs beside the backend; None if it would not do what transformers' tokenizer does."""
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(own, name) is not getattr(PreTrainedTokenizerFast, name) for name in _OWN
    ):
        return None
    bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    anyway = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    if tokenizer.clean_up_tokenization_spaces and (anyway or not bpe):
        return None
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            return None
        template = template["default"]
    return {
        "chat_template": template or None,
        "special_tokens": tokenizer.special_tokens_map,
        "splits": tokenizer.split_special_tokens,
    }
