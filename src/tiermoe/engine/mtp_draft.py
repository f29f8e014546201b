"""Drafts by a model's own MTP head, where nothing in prompt and answer says what comes next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermoe.engine.engine import Engine
from tiermoe.engine.likeliest_tokens import CHANCES, LikeliestTokens
from tiermoe.engine.prompt_lookup import Lookup
from tiermoe.engine.speculation import Chances, Drafter, Place, Speculation
from tiermoe.errors import ConfigError
from tiermoe.model.mtp_head import Drafted


class MtpDrafts:
    """Drafts of all sequences of an engine by its MTP head: what `Speculation` makes drafters with. A draft of `lookup`
    comes first where there is one: it is longer and costs nothing."""

    def __init__(self, engine: Engine, lookup: Lookup | None = None) -> None:
        self.engine = engine
        self._lookup = lookup
        self._chances = Chances(CHANCES)

    def __call__(self, speculation: Speculation) -> Drafter:
        own = MtpDrafter(self.engine, speculation, Chances(CHANCES, self._chances))
        return own if self._lookup is None else FirstOf(self._lookup(speculation), own)


class MtpDrafter(LikeliestTokens):
    """Drafts of one sequence by the MTP head. One guess is worth a step: the head is made for one."""

    def __init__(self, engine: Engine, speculation: Speculation, chances: Chances) -> None:
        super().__init__(speculation, chances, least=1)
        self._engine = engine
        self._place: Place | None = None
        self._drafted: Drafted | None = None  # the last guess of the running draft

    def ready(self, tokens: list[int], place: Place | None) -> bool:
        self._place, self._drafted = place, None
        return True

    def probabilities(self, tokens: list[int]) -> torch.Tensor:
        assert self._place is not None
        self._drafted = self._engine.draft(self._place, tokens[-1], self._drafted)
        return torch.softmax(self._drafted.logits.float(), dim=-1)


class FirstOf:
    """Drafts of one sequence by the first drafter that has one."""

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def draft(
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: Place | None = None
    ) -> list[int]:
        for drafter in self._drafters:
            if guesses := drafter.draft(prompt, answer, most, rows, place):
                return guesses
        return []


def require_verification(engine: Engine) -> None:
    """ConfigError where guesses of the engine's answers are never verified, so that a head would do nothing."""
    if engine.lossy:
        raise ConfigError(
            f"--draft mtp does not apply to {', '.join(engine.lossy)}: guesses are verified where nothing changes "
            f"tokens; leave one of them out"
        )
    if not engine.decoder.can_verify_draft:
        raise ConfigError(
            "--draft mtp needs kernels that give verified tokens the bits that each has alone: there are none for this "
            "machine, or for weights in this precision; use --draft none"
        )
