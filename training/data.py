"""From a folder of text files to batches of token ids."""

import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerFast

from training.tokenizer import END

SUFFIXES = (".txt", ".txt.xz")
PIECE = 200_000
Tokens = npt.NDArray[np.uint16]


def text_files(path: Path) -> list[Path]:
    """``path`` itself, or every .txt and .txt.xz file below it, sorted by name. Raises ValueError if none."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if file.name.endswith(SUFFIXES)]
    if not files:
        raise ValueError(f"{path} holds no text: no file ends with {' or '.join(SUFFIXES)}")
    return files


def documents(path: Path) -> Iterator[str]:
    """Each text of each file; a file may hold several, separated by `END`."""
    for file in text_files(path):
        raw = file.read_bytes()
        text = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode("utf-8")
        yield from (stripped for document in text.split(END) if (stripped := document.strip()))


def pieces(document: str) -> list[str]:
    """The document cut at line ends into pieces of about 200,000 characters, which encode in parallel."""
    found, begin = [], 0
    while begin < len(document):
        end = document.find("\n", begin + PIECE) + 1 or len(document)
        found.append(document[begin:end])
        begin = end
    return found


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], path: Path) -> Tokens:
    """Write the ids of ``texts``, each followed by `END`, to ``path`` and return them mapped (N,), uint16.

    A file that is already there is used as it is; it appears under its name only when it is complete.
    """
    if len(tokenizer) > np.iinfo(np.uint16).max:
        raise ValueError(f"a vocabulary of {len(tokenizer)} does not fit 16-bit ids")
    end = tokenizer.convert_tokens_to_ids(END)
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for text in texts:
                for encoding in tokenizer.backend_tokenizer.encode_batch(pieces(text)):
                    np.asarray(encoding.ids, dtype=np.uint16).tofile(file)
                np.asarray([end], dtype=np.uint16).tofile(file)
        partial.rename(path)
    return np.memmap(path, np.uint16, "r")


def batch(tokens: Tokens, step: int, seed: int, size: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token targets, each (size, sequence) int64, from random places of ``tokens``.

    The places depend on ``seed`` and ``step`` alone, so that a resumed run sees what it would have seen.
    """
    if len(tokens) <= sequence:
        raise ValueError(f"{len(tokens)} tokens of text are too few for sequences of {sequence}")
    begins = np.random.default_rng((seed, step)).integers(0, len(tokens) - sequence, size)
    rows = torch.from_numpy(np.stack([tokens[begin : begin + sequence + 1] for begin in begins]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]
