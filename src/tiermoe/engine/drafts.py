"""Drafters: prompt lookup, which needs no model, and what gives probabilities of a next token: a model's own MTP head,
or a small model of the same vocabulary. The likeliest next tokens are guesses, while they are worth verifying.

Prompt lookup drafts what followed the same tokens earlier in prompt and answer (Saxena, "Prompt Lookup Decoding",
2023)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence

import torch

from tiermoe.batch import Batch, Row, decode, prompt
from tiermoe.config import Settings, format_size
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import plan_for
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.speculation import LEAST, MOST, CachedSequence, Chances, Drafter, DraftRequest, Speculation
from tiermoe.errors import BudgetError, ConfigError, ModelError
from tiermoe.model.cache.prefix import common_prefix
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.mtp_head import Drafted, DraftToken

MATCH = 3  # tokens that must be the same: fewer are followed by anything
_CHANCES = (0.35, 0.6, 0.8, 0.9)  # of a guess after a match of 3 or 4 tokens, 5 to 7, 8 to 15, more
_TOKEN_BITS = 32
_ROW = (1 << MATCH * _TOKEN_BITS) - 1
LONGEST = 32  # tokens of a match that are looked at


class PromptLookup:
    """A sequence's tokens, indexed by each `MATCH` of them in a row. Memory grows with the sequence, about 150 bytes a
    token. places: latest places of the same last tokens that are compared."""

    def __init__(self, places: int = 8) -> None:
        self._places = places
        self._tokens: list[int] = []
        self._last: dict[int, int] = {}  # `MATCH` tokens in a row, as one number → position after their last place
        self._earlier: list[int] = []  # position → that after the place before, of the tokens that end there; 0: none
        self._row = 0  # the last `MATCH` tokens, as one number

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens. Notes every place but the sequence's own end, which nothing follows
        yet."""
        last, earlier, row = self._last, self._earlier, self._row
        for end, token in enumerate(tokens, len(earlier)):
            if end >= MATCH:
                earlier.append(last.get(row, 0))
                last[row] = end
            else:
                earlier.append(0)
            row = (row << _TOKEN_BITS | token) & _ROW
        self._tokens += tokens
        self._row = row

    def draft(self, most: int) -> tuple[list[int], int]:
        """(`most` tokens that may follow, length of the match that says so); ([], 0) if nothing matches. Of several
        places the one with the longest match is taken, then the latest. A draft that reaches the sequence's end goes on
        with its own beginning."""
        tokens, end = self._tokens, len(self._tokens)
        place = self._last.get(self._row, 0) if end >= MATCH else 0
        if not place:
            return [], 0
        best, length = 0, 0
        for _ in range(self._places):
            same = _matching(tokens, place)
            if same > length:
                best, length = place, same
            place = self._earlier[place]
            if not place:
                break
        period = end - best
        return [tokens[best + at % period] for at in range(most)], length


def _matching(tokens: Sequence[int], place: int) -> int:
    """Number of tokens before `place` that are the same as the last ones, at most `LONGEST`."""
    end, length = len(tokens), 0
    while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class Lookup:
    """Drafts of all sequences by prompt lookup: what `Speculation` makes drafters with."""

    def __init__(self) -> None:
        self._chances = Chances(_CHANCES)

    def __call__(self, speculation: Speculation) -> LookupDrafter:
        return LookupDrafter(speculation, Chances(_CHANCES, self._chances))


class LookupDrafter:
    """Drafts of one sequence by prompt lookup. It learns from every draft, verified or not."""

    def __init__(self, speculation: Speculation, chances: Chances) -> None:
        self._lookup = PromptLookup()
        self._speculation = speculation
        self._chances = chances
        self._found: list[int] = []  # the last draft
        self._match = 0  # length of the match before it
        self._withheld = False  # it was worth verifying, and was not

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: CachedSequence | None = None
    ) -> list[int]:
        lookup, speculation = self._lookup, self._speculation
        if not len(lookup):
            lookup.extend(prompt)
        came = answer[len(lookup) - len(prompt) :]
        lookup.extend(came)
        if self._found:
            self._learn(came)
        self._found, self._match = lookup.draft(MOST)
        if not self._found:
            return []
        chance, worth = 1.0, 0
        for at in range(min(most, len(self._found))):
            chance *= self._chances.of(_kind(self._match + at))
            if chance < speculation.share:
                break
            worth += 1
        allowed = speculation.allows(rows)
        self._withheld = worth >= LEAST and not allowed
        return self._found[:worth] if worth >= LEAST and allowed else []

    def _learn(self, came: Sequence[int]) -> None:
        """Compares the last draft with the tokens that came."""
        if self._withheld and came:
            self._speculation.record_withheld(self._found[0] == came[0])
        self._chances.learn(((guess, _kind(self._match + at)) for at, guess in enumerate(self._found)), came)


def _kind(match: int) -> int:
    return 0 if match < 5 else min(match.bit_length() - 2, len(_CHANCES) - 1)


Draft = Generator[list[int], torch.Tensor, list[int]]
"""A draft that is under way: asks what follows tokens, and is sent the probabilities (vocabulary)."""
_BOUNDS = (0.4, 0.7, 0.9)  # of a token's probability, between the kinds of guesses
CHANCES = (0.25, 0.5, 0.75, 0.92)
"""Assumed chance of a guess of each kind."""


class LikeliestTokens:
    """Drafts of one sequence. least: guesses that are worth a step of several tokens."""

    def __init__(self, speculation: Speculation, chances: Chances, least: int = LEAST) -> None:
        self._speculation = speculation
        self._chances = chances
        self._least = least
        self._guesses: list[tuple[int, int]] = []  # of the last draft, with their kinds
        self._at = 0  # tokens before them

    def ready(self, tokens: list[int]) -> bool:
        """Whether drafts of the sequence, `tokens` by now, can be made at once; makes them so for the next step."""
        return True

    def begin(self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int) -> Draft:
        """A draft as of `speculation.Drafter`. It asks what follows the sequence, and what follows the guesses that
        were made of it since."""
        tokens = [*prompt, *answer]
        self._chances.learn(self._guesses, tokens[self._at :])
        self._guesses, self._at = [], len(tokens)
        if most < self._least or not self._speculation.allows(rows):
            return []
        if not self.ready(tokens):
            self._speculation.ignore_step()
            return []
        chance = 1.0
        while len(self._guesses) < most:
            probability, token = (yield list(tokens)).max(dim=0)
            kind = sum(float(probability) >= bound for bound in _BOUNDS)
            self._guesses.append((int(token), kind))
            chance *= self._chances.of(kind)
            if chance < self._speculation.share:
                break
            tokens.append(int(token))
        worth = [token for token, _ in self._guesses][: len(tokens) - self._at]
        return worth if len(worth) >= self._least else []


class MtpDrafts:
    """Drafts of all sequences of an engine by its MTP head: what `Speculation` makes drafters with. A draft of `lookup`
    comes first if there is one: it is longer and costs nothing."""

    def __init__(self, engine: Engine, lookup: Lookup | None = None) -> None:
        self._engine = engine
        self._lookup = lookup
        self._chances = Chances(CHANCES)

    def __call__(self, speculation: Speculation) -> MtpDrafter:
        lookup = None if self._lookup is None else self._lookup(speculation)
        return MtpDrafter(self, speculation, Chances(CHANCES, self._chances), lookup)

    def draft_batch(self, asked: Sequence[DraftRequest]) -> list[list[int]]:
        """The drafts of several sequences of one cache: a pass of the head gives the next guess of each that goes on.
        LoadError and TiermoeError as `Engine.step`."""
        drafts: list[Draft] = [each.drafter.begin(*each[1:5]) for each in asked]
        found: list[list[int]] = [[] for _ in asked]
        answers: dict[int, Drafted | None] = dict.fromkeys(range(len(asked)))
        while True:
            wanted: dict[int, DraftToken] = {}
            for at, drafted in answers.items():
                try:
                    tokens = next(drafts[at]) if drafted is None else drafts[at].send(_probabilities(drafted))
                except StopIteration as ended:
                    found[at] = ended.value
                else:
                    _, slab, end = asked[at].place
                    wanted[at] = DraftToken(slab, end, tokens[-1], drafted)
            if not wanted:
                return found
            cache = asked[0].place.cache
            answers = dict(zip(wanted, self._engine.draft(cache, list(wanted.values())), strict=True))


def _probabilities(drafted: Drafted) -> torch.Tensor:
    return torch.softmax(drafted.logits.float(), dim=-1)


class MtpDrafter(LikeliestTokens):
    """Drafts of one sequence by the MTP head. One guess is worth a step: the head is made for one. lookup: whose drafts
    come first."""

    def __init__(
        self, drafts: MtpDrafts, speculation: Speculation, chances: Chances, lookup: Drafter | None = None
    ) -> None:
        super().__init__(speculation, chances, least=1)
        self._drafts = drafts
        self._lookup = lookup

    def begin(self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int) -> Draft:
        if self._lookup is not None and (guesses := self._lookup.draft(prompt, answer, most, rows)):
            return guesses
        return (yield from super().begin(prompt, answer, most, rows))

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: CachedSequence | None = None
    ) -> list[int]:
        """As of `speculation.Drafter`."""
        assert place is not None
        return self._drafts.draft_batch([DraftRequest(self, prompt, answer, most, rows, place)])[0]


def require_verification(engine: Engine) -> None:
    """ConfigError if guesses of the engine's answers are never verified, so that a head would do nothing."""
    if engine.lossy:
        raise ConfigError(
            f"--draft mtp does not apply to {', '.join(engine.lossy)}: guesses are verified where nothing changes "
            f"tokens; leave one of them out"
        )
    if not engine.decoder.can_verify_draft:
        raise ConfigError(
            "--draft mtp needs kernels that give verified tokens the bits that each has alone: there are none for "
            "this machine, or for weights in this precision; use --draft none"
        )


class DraftModel:
    """Drafts of all sequences by one engine: what `Speculation` makes drafters with. Its KV cache has a slab for each
    of `rows` sequences; one more takes that of the sequence that was drafted longest ago.

    vocabulary: of the model that verifies. context: most tokens of a sequence."""

    def __init__(self, engine: Engine, vocabulary: int, rows: int, context: int) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._rows = rows
        self._cache = engine.new_cache(rows, context)
        self._chances = Chances(CHANCES)
        self._ran: OrderedDict[ModelDrafter, tuple[int, list[int]]] = OrderedDict()
        """Drafter → its slab and the tokens there, by when it drafted."""

    def __call__(self, speculation: Speculation) -> ModelDrafter:
        return ModelDrafter(self, speculation, Chances(CHANCES, self._chances))

    def follows(self, drafter: ModelDrafter) -> bool:
        """Whether a slab has the beginning of the drafter's sequence."""
        return drafter in self._ran

    def run(self, drafter: ModelDrafter, tokens: list[int]) -> torch.Tensor:
        """Probabilities (vocabulary) of what follows `tokens`, the whole of a sequence. What the last call had of it
        does not run again."""
        if drafter not in self._ran:
            if len(self._ran) == self._rows:
                _, (slab, _) = self._ran.popitem(last=False)
                self._cache.close(slab)
            self._ran[drafter] = self._cache.open(), []
        self._ran.move_to_end(drafter)
        slab, ran = self._ran[drafter]
        first = self._cache.kept(slab, min(common_prefix(ran, tokens), len(tokens) - 1))
        if first < len(ran):
            self._cache.crop(slab, first)
        rest = tokens[first:]
        row: Row = decode(slab, first, rest[0]) if len(rest) == 1 and first else prompt(slab, rest, first)
        logits = self.engine.step(Batch((row,)), self._cache)[0, : self._vocabulary]
        self._ran[drafter] = slab, tokens
        return torch.softmax(logits.float(), dim=-1)


class ModelDrafter(LikeliestTokens):
    """Drafts of one sequence by a draft model."""

    def __init__(self, model: DraftModel, speculation: Speculation, chances: Chances) -> None:
        super().__init__(speculation, chances)
        self._model = model

    def ready(self, tokens: list[int]) -> bool:
        if self._model.follows(self):
            return True
        self._model.run(self, tokens)
        return False

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: CachedSequence | None = None
    ) -> list[int]:
        """As of `speculation.Drafter`."""
        draft = self.begin(prompt, answer, most, rows)
        try:
            tokens = next(draft)
            while True:
                tokens = draft.send(self._model.run(self, tokens))
        except StopIteration as ended:
            return list(ended.value)


def check_vocabulary(own: dict[str, int], draft: dict[str, int], name: str) -> None:
    """ModelError if a draft model's tokens, by their ids, are not those of the model that verifies. name: the draft
    model's."""
    wrong = sorted(id for token, id in draft.items() if own.get(token) != id)
    if wrong or len(own) != len(draft):
        first = f", the first of them {wrong[0]}" if wrong else ""
        raise ModelError(
            f"{name} cannot draft for this model: of its {len(draft):,} tokens {len(wrong):,} have other ids or are "
            f"missing here, where there are {len(own):,}{first}; a draft model has the same tokenizer"
        )


def plan_draft(blueprint: Blueprint, settings: Settings, name: str) -> MemoryPlan:
    """The plan of a draft model that is in memory whole. BudgetError if it does not fit."""
    blueprint.require_text()
    plan = plan_for(blueprint, settings)
    if plan.slots < plan.all_slots:
        raise BudgetError(
            f"the draft model {name} does not fit in memory whole: {plan.slots} of its {plan.all_slots} experts do in "
            f"{format_size(plan.budget)}; name a smaller one, or more --memory"
        )
    return plan
