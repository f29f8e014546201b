"""A text's own tokens fed to a transformers model: the routing of real text, the same for every engine."""

from __future__ import annotations

from typing import Any


class Feeding:
    """Rows of token ids `ids` (batch, prompt + output) for `model`. chunk: tokens of the prompt that run at once, None
    all of them. Begins with an empty key/value cache. Call it without gradients."""

    def __init__(self, model: Any, ids: Any, prompt: int, chunk: int | None = None) -> None:
        self._model, self._ids, self._prompt = model, ids, prompt
        self._chunk = chunk or prompt
        self._cache: Any = None

    def prompt(self) -> None:
        """The rows' prompts."""
        for begin in range(0, self._prompt, self._chunk):
            self._run(begin, min(begin + self._chunk, self._prompt))

    def decode(self, until: int) -> None:
        """The tokens from the prompt's end to position `until`, one of each row at a time."""
        for at in range(self._prompt, until):
            self._run(at, at + 1)

    def _run(self, begin: int, end: int) -> None:
        output = self._model(
            input_ids=self._ids[:, begin:end], past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = output.past_key_values
