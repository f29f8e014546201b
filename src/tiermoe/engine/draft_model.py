"""Draft model: a small model of the same vocabulary, whose likeliest next tokens are guesses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from tiermoe.batch import Batch, Row, decode, prompt
from tiermoe.config import Settings, format_size
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import plan_for
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.speculation import LEAST, Chances, Speculation
from tiermoe.errors import BudgetError, ModelError
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.prefix_cache import common_prefix

_BOUNDS = (0.4, 0.7, 0.9)  # of the draft model's probability of a token, between the kinds of guesses
_CHANCES = (0.25, 0.5, 0.75, 0.92)  # of a guess of each kind


class DraftModel:
    """Drafts of all sequences by one engine: what `Speculation` makes drafters with. Its KV cache has a slab for each
    of `rows` sequences; one more takes that of the sequence that was drafted longest ago.

    vocabulary: of the model that verifies. context: most tokens of a sequence."""

    def __init__(self, engine: Engine, vocabulary: int, rows: int, context: int) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._rows = rows
        self._cache = engine.new_cache(rows, context)
        self._chances = Chances(_CHANCES)
        self._ran: OrderedDict[ModelDrafter, tuple[int, list[int]]] = OrderedDict()
        """Drafter → its slab and the tokens there, by when it drafted."""

    def __call__(self, speculation: Speculation) -> ModelDrafter:
        return ModelDrafter(self, speculation, Chances(_CHANCES, self._chances))

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


class ModelDrafter:
    """Drafts of one sequence by a draft model: its likeliest token, and again, while that is worth verifying."""

    def __init__(self, model: DraftModel, speculation: Speculation, chances: Chances) -> None:
        self._model = model
        self._speculation = speculation
        self._chances = chances
        self._guesses: list[tuple[int, int]] = []  # of the last draft, with their kinds
        self._at = 0  # tokens before them

    def draft(self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int) -> list[int]:
        tokens = [*prompt, *answer]
        self._chances.learn(self._guesses, tokens[self._at :])
        self._guesses, self._at = [], len(tokens)
        if most < LEAST or not self._speculation.allows(rows):
            return []
        if not self._model.follows(self):
            self._model.run(self, tokens)
            self._speculation.ignore_step()
            return []
        chance = 1.0
        while len(self._guesses) < most:
            probability, token = self._model.run(self, list(tokens)).max(dim=0)
            kind = sum(float(probability) >= bound for bound in _BOUNDS)
            self._guesses.append((int(token), kind))
            chance *= self._chances.of(kind)
            if chance < self._speculation.share:
                break
            tokens.append(int(token))
        worth = [token for token, _ in self._guesses][: len(tokens) - self._at]
        return worth if len(worth) >= LEAST else []


def check_vocabulary(own: dict[str, int], draft: dict[str, int], name: str) -> None:
    """ModelError where a draft model's tokens, by their ids, are not those of the model that verifies. name: the draft
    model's."""
    wrong = sorted(id for token, id in draft.items() if own.get(token) != id)
    if wrong or len(own) != len(draft):
        first = f", the first of them {wrong[0]}" if wrong else ""
        raise ModelError(
            f"{name} cannot draft for this model: of its {len(draft):,} tokens {len(wrong):,} have other ids or are "
            f"missing here, where there are {len(own):,}{first}; a draft model has the same tokenizer"
        )


def plan_draft(blueprint: Blueprint, settings: Settings, name: str) -> MemoryPlan:
    """The plan of a draft model that is in memory whole. BudgetError where it does not fit."""
    blueprint.require_text()
    plan = plan_for(blueprint, settings)
    if plan.slots < plan.all_slots:
        raise BudgetError(
            f"the draft model {name} does not fit in memory whole: {plan.slots} of its {plan.all_slots} experts do in "
            f"{format_size(plan.budget)}; name a smaller one, or more --memory"
        )
    return plan
