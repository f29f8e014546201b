"""Where guesses at next tokens come from (`--draft`): what each source adds to the model, to its plan and to the loops
of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tiermoe.config import Settings

LOOKUP, MTP, NONE = "lookup", "mtp", "none"


def names_model(draft: str) -> bool:
    """Whether guesses come from a model of their own."""
    return draft not in (LOOKUP, MTP, NONE)


def planned_draft(draft: str, tokenizer: Any, blueprint: Any, asked: Settings) -> tuple[tuple[Any, Settings], Settings]:
    """((blueprint, settings) of a draft model, settings of the model with the memory that it leaves). ModelError where
    its tokenizer is another, BudgetError where it does not fit whole."""
    from tiermoe.engine.budget import context_of
    from tiermoe.engine.drafts import check_vocabulary, plan_draft
    from tiermoe.model.hf.blueprint import inspect_model
    from tiermoe.model.hf.hub import resolve_model
    from tiermoe.model.hf.tokenizers import load_tokenizer

    directory = resolve_model(draft)
    check_vocabulary(tokenizer.get_vocab(), load_tokenizer(directory).get_vocab(), draft)
    small = inspect_model(directory, draft, asked.store)
    longest = min(filter(None, (context_of(blueprint, asked), small.max_context())))
    own = Settings(
        memory=asked.memory, context=longest, batch=asked.batch, threads=asked.threads, store=asked.store,
        device=asked.device,
    )  # fmt: skip
    plan = plan_draft(small, own, draft)
    return (small, own), replace(asked, memory=plan.budget - (plan.total - plan.interpreter))


def speculation_of(draft: str, drafting: Any, engine: Any, progress: Callable[[str, int, int], None]) -> Any:
    """The `Speculation` of request loops over an engine; None: no guesses."""
    if draft == NONE:
        return None
    from tiermoe.engine.prompt_lookup import Lookup
    from tiermoe.engine.speculation import Speculation

    if draft == MTP:
        from tiermoe.engine.drafts import MtpDrafts, require_verification

        require_verification(engine)
        drafts = MtpDrafts(engine, Lookup())
        return Speculation(drafts, drafts.draft_batch)
    if drafting is None:
        return Speculation(Lookup())
    from tiermoe.engine.drafts import DraftModel
    from tiermoe.engine.load import start

    blueprint, settings = drafting
    small = start(blueprint, settings, progress)
    engine.before_closing(small.close)
    vocabulary = min(small.config.vocab_size, engine.config.vocab_size)
    return Speculation(DraftModel(small, vocabulary, settings.batch, settings.context))
