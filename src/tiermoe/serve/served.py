"""What a server answers with, and what every dialect asks of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.generation.sampling import Sampling
from tiermoe.serve.errors import Refused
from tiermoe.serve.grammar import Grammars
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
        """Token ids of a text, with the tokens that every text begins with unless not `special`."""
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        except (UnicodeEncodeError, TypeError) as error:  # half a surrogate pair: JSON has it, UTF-8 does not
            raise Refused(400, "the text has half a surrogate pair, which is no character", "prompt") from error
        return ids

    def chat_ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        told: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation (role, content) in the model's chat template, ready for the answer. A model of
        texts, without a template, is given what was said, one after the other. told: variables of the template;
        those that it does not know are left out. Refused where the template does not take the messages."""
        template, render = self.template, self.tokenizer.apply_chat_template
        if template is None:
            return self.text_ids("\n".join(message["content"] for message in messages))
        own = inspect.signature(render).parameters
        variables = {name: value for name, value in (told or {}).items() if name in template and name not in own}
        try:
            encoded = render(
                messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=True, **variables
            )
        except Exception as error:  # a template refuses what it does not know with errors of its own
            raise Refused(
                400, f"the model's chat template does not take these messages: {error}", "messages"
            ) from error
        ids: list[int] = encoded["input_ids"]
        return ids
