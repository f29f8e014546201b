"""From logits to scores: perplexity, KL divergence and same-top-1 against a reference, with standard errors; and the
reference, the log-probabilities of the model that others are compared with, in a file.

The text is scored in windows, of one length but for summaries. A score is the mean over all tokens; its standard error
is that of the mean of the windows' means (their standard deviation, n - 1, over sqrt(n)), and of windows of several
lengths that of a ratio, to first order: tokens of one window are not independent, windows that lie apart nearly are.
The error of a perplexity, exp of a mean, is the perplexity times that of the mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch

from tiermoe.config import format_size
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.texts import Windows
from tiermoe.platform.json_files import parse_json

_ROWS = 4  # tokens scored at once: few, since each row holds the whole vocabulary in float64 several times
_FORMAT = "tiermoe log-probabilities 1"
_HEADER = 4096


class TokenScores(NamedTuple):
    """Scores of each token of a window, all (n,) float64."""

    nll: torch.Tensor  # negative log-likelihood in nats
    reference_nll: torch.Tensor | None = None  # the reference's; None without one, likewise below
    kl: torch.Tensor | None = None  # KL(reference || model) in nats
    same_top1: torch.Tensor | None = None  # 1 where both take the same token for the likeliest, else 0


class Rows(Protocol):
    """Log-probabilities (n, vocabulary), read a few rows at a time: a tensor, or a file that is longer than memory."""

    def __getitem__(self, rows: slice, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over windows."""

    value: float
    error: float | None  # its standard error; None where there is one window


def _row_blocks(rows: int) -> Iterator[slice]:
    """Slices of a few rows that cover `rows` of them."""
    return (slice(begin, min(begin + _ROWS, rows)) for begin in range(0, rows, _ROWS))


def working_bytes(vocabulary: int) -> int:
    """Bytes that scoring takes at most beside the logits: a few rows in float64, six times (logits, exponentials, both
    log-probabilities, the terms of the divergence and the copy of their sum)."""
    return 6 * 8 * _ROWS * vocabulary


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Logits (n, vocabulary) of any floating dtype → log-probabilities, float64."""
    return torch.log_softmax(logits.double(), dim=-1)


def total_nll(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Negative log-likelihood in nats of the tokens `targets` (n,), summed. logits: (n, vocabulary)."""
    return sum(float(_nll(log_probabilities(logits[rows]), targets[rows]).sum()) for rows in _row_blocks(len(targets)))


def score_tokens(logits: torch.Tensor, targets: torch.Tensor, reference: Rows | None = None) -> TokenScores:
    """Scores of n next-token distributions.

    logits: (n, vocabulary), any floating dtype. targets: (n,) int64, the tokens that came. reference: the
    log-probabilities (n, vocabulary) of the model to compare with, any floating dtype.
    """
    blocks = [
        _score_block(logits[rows], targets[rows], None if reference is None else reference[rows])
        for rows in _row_blocks(len(targets))
    ]
    return TokenScores._make(None if part[0] is None else torch.cat(part) for part in zip(*blocks, strict=True))


def _score_block(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor | None) -> TokenScores:
    ours = log_probabilities(logits)
    nll = _nll(ours, targets)
    if reference is None:
        return TokenScores(nll)
    theirs = reference.double()
    return TokenScores(nll, _nll(theirs, targets), kl_divergence(theirs, ours), same_top1(theirs, ours))


def _nll(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -log_probs.gather(-1, targets[:, None])[:, 0]


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) in nats, (n,), of log-probabilities (n, vocabulary). A token without probability in the
    reference adds nothing, also where the other gives it none."""
    terms = reference.exp() * (reference - other)
    return torch.where(reference.isneginf(), 0.0, terms).sum(-1)


def same_top1(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """1 where both take the same token for the likeliest (the first of equal ones), else 0: (n,) float64."""
    return (reference.argmax(-1) == other.argmax(-1)).double()


def mean_over_windows(windows: list[torch.Tensor]) -> Score:
    """Mean over the tokens of windows, with the standard error."""
    sums, counts = torch.stack([window.sum() for window in windows]), torch.tensor([len(window) for window in windows])
    mean = float(sums.sum() / counts.sum())
    if len(windows) == 1:
        return Score(mean, None)
    apart = (sums - mean * counts) / counts.double().mean()  # of windows of one length: their means' differences to it
    return Score(mean, float(apart.std(correction=1)) / math.sqrt(len(windows)))


def exp_of(score: Score) -> Score:
    """exp of a mean: a perplexity of a mean negative log-likelihood, with the error to first order."""
    value = math.exp(score.value)
    return Score(value, None if score.error is None else value * score.error)


def summarise(windows: list[TokenScores]) -> dict[str, float | None]:
    """The scores of all windows by name, each followed by its standard error `NAME_se`.

    perplexity; and beside a reference perplexity_16bit, perplexity_loss (perplexity / perplexity_16bit - 1, its error
    from the windows' differences, which the text's own variation does not widen), kl and same_top1.
    """
    nll = [window.nll for window in windows]
    scores = {"perplexity": exp_of(mean_over_windows(nll))}
    reference = [window.reference_nll for window in windows if window.reference_nll is not None]
    if reference:
        ratio = exp_of(mean_over_windows([a - b for a, b in zip(nll, reference, strict=True)]))
        scores |= {
            "perplexity_16bit": exp_of(mean_over_windows(reference)),
            "perplexity_loss": Score(ratio.value - 1, ratio.error),
            "kl": mean_over_windows([window.kl for window in windows if window.kl is not None]),
            "same_top1": mean_over_windows([window.same_top1 for window in windows if window.same_top1 is not None]),
        }
    named: dict[str, float | None] = {}
    for name, score in scores.items():
        named |= {name: score.value, f"{name}_se": score.error}
    return named


class Reference:
    """A file of log-probabilities: a header that names the checkpoint and the text, then a float32 row of the
    vocabulary for each scored token, window by window. The file is too long for memory beside a model, and read a few
    rows at a time with ordinary reads: mapped pages count against the process's memory budget."""

    def __init__(self, file: IO[bytes], name: str, fingerprint: str, windows: Windows, vocabulary: int) -> None:
        self._file = file
        self._name = name
        self._vocabulary = vocabulary
        counts = [len(window.targets) for window in windows.scored]
        self._begins = [0, *itertools.accumulate(counts)]  # the row that each window begins with, and their number
        text = hashlib.sha256(b"".join(window.ids.numpy().tobytes() for window in windows.scored)).hexdigest()[:16]
        self._about = {
            "format": _FORMAT, "checkpoint": fingerprint, "vocabulary": vocabulary, "windows": len(counts),
            "prompt": windows.shape.prompt, "window": windows.shape.window, "text": text,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return _HEADER + 4 * self._begins[-1] * self._vocabulary

    def write_header(self) -> None:
        """Writes the header. ConfigError where the disk has no room for the rows."""
        folder = os.path.dirname(self._name) or "."
        free = shutil.disk_usage(folder).free
        if free < self.nbytes:
            raise ConfigError(
                f"the 16-bit log-probabilities of {self._begins[-1]:,} tokens take "
                f"{format_size(self.nbytes)}, {folder} has {format_size(free)} free; lower --tokens, free some space, "
                f"or skip the comparison with --reference none"
            )
        self._file.write(json.dumps(self._about).encode().ljust(_HEADER))

    def append(self, logits: torch.Tensor) -> None:
        """Writes the log-probabilities of the next logits, (n, vocabulary). ConfigError where the disk fills or
        fails."""
        try:
            for rows in _row_blocks(len(logits)):
                self._file.write(log_probabilities(logits[rows]).float().cpu().numpy().tobytes())
                self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"writing the 16-bit log-probabilities to {self._name} failed ({error.strerror}); lower --tokens, free "
                f"some space, or skip the comparison with --reference none"
            ) from error

    def check(self) -> None:
        """ConfigError where the file is not one, was cut short, or was made of another checkpoint or text."""
        self._file.seek(0, os.SEEK_END)
        found = self._file.tell()
        self._file.seek(0)
        again = f"make it again with --save-reference {self._name}"
        try:
            about = parse_json(self._file.read(_HEADER))
            known = about["format"] == _FORMAT
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError(f"{self._name} holds no log-probabilities that this version reads; {again}")
        differing = [key for key, value in self._about.items() if about.get(key) != value]
        if differing:
            words = ", ".join(f"{key} ({about.get(key)}, not {self._about[key]})" for key in differing)
            raise ConfigError(f"{self._name} was made with another {words}; {again}")
        if found != self.nbytes:
            raise ConfigError(f"{self._name} has {found:,} bytes of {self.nbytes:,}: it was cut short; {again}")

    def window(self, index: int) -> _WindowRows:
        """The rows of a window, read as they are sliced."""
        return _WindowRows(self._file, _HEADER + 4 * self._begins[index] * self._vocabulary, self._vocabulary)


class _WindowRows:
    """Log-probabilities (window, vocabulary) in a file."""

    def __init__(self, file: IO[bytes], offset: int, vocabulary: int) -> None:
        self._file = file
        self._offset = offset
        self._row_bytes = 4 * vocabulary

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        count = rows.stop - rows.start
        self._file.seek(self._offset + rows.start * self._row_bytes)
        content = bytearray(self._file.read(count * self._row_bytes))
        return torch.frombuffer(content, dtype=torch.float32).reshape(count, -1)


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A nameless file, gone when it is closed or the process ends, however it ends: in `folder`, or where that cannot
    be written in the system's folder for temporary files; and a name in that folder, to speak of it."""
    place = str(folder) if os.access(folder, os.W_OK) else tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=place) as file:
        yield file, os.path.join(place, "the reference")


@contextlib.contextmanager
def saved_file(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file that gets the name `path` once it is whole. ConfigError where it cannot be written."""
    try:
        file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from error
    try:
        with file:
            yield file, str(path)
        os.replace(file.name, path)
    except BaseException:
        Path(file.name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file that `saved_file` made. ConfigError where it cannot be read."""
    try:
        file = open(path, "rb")  # noqa: SIM115  (an error of what the caller does with it is not this file's)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; make it with --save-reference {path}, or use --reference 16bit"
        ) from error
    with file:
        yield file, str(path)
