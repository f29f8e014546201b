"""What runs at once: rows of tokens, each with its sequence and positions. The one argument of a step, for decoders and
policies alike. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a row is. PROMPT: tokens that were given. DECODE: the last generated token. VERIFY: a generated
    token and guesses at its successors, checked at once."""

    PROMPT = "prompt"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive `tokens` of one sequence, which lie in `slab` of the KV cache, from position `first` on."""

    slab: int
    first: int
    tokens: tuple[int, ...]
    kind: Kind

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + len(self.tokens)

    def one_by_one(self) -> list[Row]:
        """The row, or each of several tokens that it verifies as a row."""
        if self.kind is not Kind.VERIFY:
            return [self]
        return [Row(self.slab, self.first + at, (token,), self.kind) for at, token in enumerate(self.tokens)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of sequences, of any positions, lengths and kinds; at least one, each with at least one token. Rows of one
    sequence are chunks of its prompt, in their order."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if not self.rows or not all(row.tokens for row in self.rows):
            raise ValueError("a batch has at least one row, and a row at least one token")

    @property
    def tokens(self) -> list[int]:
        """The tokens of all rows, one row after the other."""
        return [token for row in self.rows for token in row.tokens]

    @property
    def positions(self) -> list[int]:
        """The position of each token in its sequence."""
        return [position for row in self.rows for position in range(row.first, row.end)]

    @property
    def slabs(self) -> list[int]:
        """The slab of each token's sequence."""
        return [row.slab for row in self.rows for _ in row.tokens]

    @property
    def last(self) -> list[int]:
        """Indices in `tokens` of the last token of each row: the tokens that logits are computed for."""
        ends, count = [], 0
        for row in self.rows:
            count += len(row.tokens)
            ends.append(count - 1)
        return ends

    @property
    def phase(self) -> str:
        """'prefill' where a prompt is in it, else 'decode': what records, budgets and predictions are kept by."""
        return "prefill" if any(row.kind is Kind.PROMPT for row in self.rows) else "decode"

    @property
    def verifies(self) -> bool:
        """Whether it has several tokens of a sequence to verify."""
        return any(row.kind is Kind.VERIFY and len(row.tokens) > 1 for row in self.rows)

    def parts(self, invariant: bool) -> list[Batch]:
        """What goes through a layer at once; each expert is read once for all parts. invariant: a token's bits do not
        depend on the others of a part: all rows, or each chunk of one prompt. Else each row is a part, and each token
        to verify."""
        if invariant and len(self.ends) == len(self.rows):
            return [self]
        each = [[row] if invariant else row.one_by_one() for row in self.rows]
        return [Batch((row,)) for rows in each for row in rows]

    def chunks(self, tokens: int) -> Iterator[Batch]:
        """The batch in steps of at most `tokens` of each row. A row that is through is not in the later ones."""
        longest = max(len(row.tokens) for row in self.rows)
        for begin in range(0, longest, tokens):
            rows = [
                Row(row.slab, row.first + begin, row.tokens[begin : begin + tokens], row.kind)
                for row in self.rows
                if begin < len(row.tokens)
            ]
            yield Batch(tuple(rows))

    @property
    def ends(self) -> dict[int, int]:
        """Slab → the position after the last token of its sequence."""
        return {row.slab: row.end for row in self.rows}


def prompt(slab: int, tokens: Sequence[int], first: int = 0) -> Row:
    """A row of given tokens."""
    return Row(slab, first, tuple(tokens), Kind.PROMPT)


def decode(slab: int, position: int, token: int) -> Row:
    """A row of the last generated token."""
    return Row(slab, position, (token,), Kind.DECODE)


def verify(slab: int, first: int, tokens: Sequence[int]) -> Row:
    """A row of tokens that are checked at once."""
    return Row(slab, first, tuple(tokens), Kind.VERIFY)
