"""Fields of sampling in a request: OpenAI's, vLLM's and llama-server's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from tiermoe.engine.sampling import LONGEST_BREAKER, MOST_BREAKERS, RANGES
from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import Bias, from_json

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "repeat_last_n", "min_tokens", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
"""Fields that `Sampling` has under the same names."""
_LAST_N = 64
"""`repeat_last_n` of a repeat_penalty without one, as in llama-server."""


def _within(name: str) -> Any:
    """A field that may be absent, within the range of `Sampling`."""
    least, largest = RANGES[name]
    return Field(None, ge=least, le=largest)


def _strings(value: Any) -> Any:
    """SillyTavern sends the list as a JSON text."""
    return from_json(value) if isinstance(value, str) and value else value or None


_Breaker = Annotated[str, Field(max_length=LONGEST_BREAKER)]
_Breakers = Annotated[tuple[_Breaker, ...], Field(max_length=MOST_BREAKERS, fail_fast=True)]


class SamplerFields(BaseModel):
    """How the tokens of an answer are chosen."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = _within("min_p")
    typical_p: float | None = _within("typical_p")
    top_n_sigma: float | None = Field(None, ge=-1, le=RANGES["top_n_sigma"][1])
    xtc_probability: float | None = _within("xtc_probability")
    xtc_threshold: float | None = _within("xtc_threshold")
    presence_penalty: float | None = _within("presence_penalty")
    frequency_penalty: float | None = _within("frequency_penalty")
    repetition_penalty: float | None = _within("repetition_penalty")
    repeat_penalty: float | None = _within("repetition_penalty")
    repeat_last_n: int | None = _within("repeat_last_n")
    dry_multiplier: float | None = _within("dry_multiplier")
    dry_base: float | None = _within("dry_base")
    dry_allowed_length: int | None = _within("dry_allowed_length")
    dry_penalty_last_n: int | None = _within("dry_penalty_last_n")
    dry_sequence_breakers: Annotated[_Breakers | None, BeforeValidator(_strings)] = None
    logit_bias: Bias | None = None
    min_tokens: int | None = _within("min_tokens")
    ignore_eos: bool | None = None

    def named(self, most: int) -> dict[str, Any]:
        """Fields of `Sampling` that the request names. most: tokens that the answer may have. Refused where two of its
        fields contradict each other."""
        values = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        for name in ("top_k", "top_n_sigma"):  # -1 is off
            if name in values:
                values[name] = max(values[name], 0)
        if self.repeat_penalty is not None:
            if self.repetition_penalty not in (None, self.repeat_penalty):
                both = f"repeat_penalty is {self.repeat_penalty}, repetition_penalty {self.repetition_penalty}"
                raise Refused(400, f"{both}; send one of them", "repeat_penalty")
            values = {"repeat_last_n": _LAST_N, **values, "repetition_penalty": self.repeat_penalty}
        if (self.min_tokens or 0) > most:
            raise Refused(400, f"min_tokens is {self.min_tokens:,}, the answer ends at {most:,}", "min_tokens")
        if self.ignore_eos:
            values["min_tokens"] = most
        return values
