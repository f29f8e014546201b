"""Draft model: a small model of the same vocabulary, whose likeliest next tokens are guesses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from tiermoe.batch import Batch, Row, decode, prompt
from tiermoe.config import Settings, format_size
from tiermoe.engine.engine import Engine
from tiermoe.engine.likeliest_tokens import CHANCES, LikeliestTokens
from tiermoe.engine.load import plan_for
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.speculation import Chances, Place, Speculation
from tiermoe.errors import BudgetError, ModelError
from tiermoe.model.cache.prefix import common_prefix
from tiermoe.model.hf.blueprint import Blueprint


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
        self, prompt: Sequence[int], answer: Sequence[int], most: int, rows: int, place: Place | None = None
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
