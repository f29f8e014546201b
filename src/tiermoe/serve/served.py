"""What a server answers with, and what every dialect asks of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tiermoe.generation.sampling import Sampling
from tiermoe.memory.other_budgets import OtherBudget, other_budgets
from tiermoe.serve.errors import TOO_LONG, Refused
from tiermoe.serve.grammar import Grammars
from tiermoe.serve.intake import hold_tokens, longest_text
from tiermoe.serve.metrics import Metrics
from tiermoe.serve.worker import Worker


@dataclass(slots=True)
class Served:
    """name: the model's, for clients. sampling: where a request says nothing. created: seconds since the epoch."""

    name: str
    tokenizer: Any
    worker: Worker
    metrics: Metrics
    engine: Any
    sampling: Sampling
    created: int
    grammars: Grammars

    @property
    def context(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self.worker.batcher.context

    @property
    def other_budgets(self) -> list[OtherBudget]:
        """What other memory budgets would bring, by what answers have taken so far; empty where that says nothing."""
        plan = self.engine.plan
        curve = self.engine.scheduler.size_curve(plan.slots, self.worker.batcher.decoding)
        return [] if curve is None else other_budgets(plan, curve)

    @property
    def template(self) -> str | None:
        """The model's chat template."""
        found: str | None = getattr(self.tokenizer, "chat_template", None) or None
        return found

    def check_model(self, name: str) -> None:
        """Refused where a client names another model than this one."""
        if name and name != self.name:
            raise Refused(
                404,
                f"the model '{name}' does not exist; this server has '{self.name}'",
                "model",
                code="model_not_found",
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refused where an id is no token's."""
        most = len(self.tokenizer)
        wrong = next((token for token in ids if not 0 <= token < most), None)
        if wrong is not None:
            raise Refused(400, f"there is no token {wrong}; the vocabulary has {most:,}", param)

    def text_ids(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with the tokens that every text begins with unless not `special`. Refused where it is
        longer than `longest_text`."""
        size, most = len(text.encode()), longest_text(self.context)
        if size > most:
            raise Refused(
                400,
                f"the text is too long: {size:,} bytes, {most:,} at most with a context of {self.context:,} tokens",
                "prompt",
                code=TOO_LONG,
            )
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        hold_tokens(len(ids))
        return ids

    def chat_ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        told: Mapping[str, Any] | None = None,
        new_turn: bool = False,
    ) -> list[int]:
        """Token ids of a conversation (role, content) in the model's chat template, ready for the answer: which
        continues the last message where it is `continued`, unless it is to be a `new_turn`. A model of texts, without a
        template, is given what was said, one after the other. told: variables of the template; those that it does not
        know are left out. Where the template does not take the messages, it is given `system_first`. Refused where it
        does not take that either."""
        goes_on = continued(messages) and not new_turn
        template, render = self.template, self.tokenizer.apply_chat_template
        if template is None:
            return self.text_ids("\n".join(message["content"] for message in messages))
        own = inspect.signature(render).parameters
        variables = {name: value for name, value in (told or {}).items() if name in template and name not in own}

        def rendered(its: Sequence[dict[str, Any]]) -> str:
            ending = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
            text: str = render(its, tools=list(tools) or None, tokenize=False, **ending, **variables)
            return text

        refused = None
        for its in (messages, system_first(messages)):
            try:
                text = rendered(its)
            except Exception as error:  # a template refuses what it does not know with errors of its own
                refused = refused or error
            else:
                return self.text_ids(text, special=False)
        why = str(refused).partition("\n")[0]  # one that cannot continue a message tells the conversation after it
        raise Refused(400, f"the model's chat template does not take these messages: {why}", "messages") from refused


def continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation ends with what the assistant said, which the answer continues."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with one system message at the most, at its beginning: those that it begins with in one, later
    ones as the user's. Agents send several, and some in the middle."""
    first = list(takewhile(_is_system, messages))
    later = [{**each, "role": "user"} if _is_system(each) else each for each in messages[len(first) :]]
    text = "\n\n".join(each["content"] for each in first)
    return [{"role": "system", "content": text}, *later] if first else later


def _is_system(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "system")
