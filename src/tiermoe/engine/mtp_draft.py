"""Drafts by a model's own MTP head, where nothing in prompt and answer says what comes next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermoe.engine.engine import Engine
from tiermoe.engine.likeliest_tokens import CHANCES, Draft, LikeliestTokens
from tiermoe.engine.prompt_lookup import Lookup
from tiermoe.engine.speculation import Chances, Drafter, DraftRequest, Place, Speculation
from tiermoe.engine.steps import verifies_drafts
from tiermoe.errors import ConfigError
from tiermoe.model.mtp_head import Drafted, DraftToken


class MtpDrafts:
    """Drafts of all sequences of an engine by its MTP head: what `Speculation` makes drafters with. A draft of `lookup`
    comes first where there is one: it is longer and costs nothing."""

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
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: Place | None = None
    ) -> list[int]:
        """As of `speculation.Drafter`."""
        assert place is not None
        return self._drafts.draft_batch([DraftRequest(self, prompt, answer, most, rows, place)])[0]


def require_verification(engine: Engine) -> None:
    """ConfigError where guesses of the engine's answers are never verified, so that a head would do nothing."""
    if engine.lossy:
        raise ConfigError(
            f"--draft mtp does not apply to {', '.join(engine.lossy)}: guesses are verified where nothing changes "
            f"tokens; leave one of them out"
        )
    if not verifies_drafts(engine.decoder, engine.settings.batch):
        alone = ", or --batch 1" if engine.decoder.can_verify_draft else ""
        raise ConfigError(
            f"--draft mtp needs kernels that give verified tokens the bits that each has alone: there are none for "
            f"this machine, or for weights in this precision; use --draft none{alone}"
        )
