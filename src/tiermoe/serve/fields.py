"""Fields of a request's body, for all dialects: bounds of texts and lists, JSON, tools, sampling, and fields that this
server does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_args

import pydantic_core
from pydantic import BaseModel, BeforeValidator, Field

from tiermoe.engine.sampling import LONGEST_BREAKER, MOST_BREAKERS, RANGES, TRUNCATIONS, Sampling
from tiermoe.serve.dialects import Json, Refused, from_json

_T = TypeVar("_T")

Several = Annotated[list[_T], Field(max_length=2048, fail_fast=True)]
"""Messages, items, parts of a content, prompts. The first wrong entry ends the check: errors take memory too."""
Tools = Annotated[list[_T], Field(max_length=512, fail_fast=True)]
TokenIds = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
"""As many as the longest contexts have: the model's own context is checked where it is known."""
StopString = Annotated[str, Field(max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=16, fail_fast=True)]


class StopFields(BaseModel):
    stop: StopString | StopStrings | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)


Bias = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
"""Token id → what is added to its logit."""
Options = Annotated[dict[str, _T], Field(max_length=64)]
"""Variables of a template, metadata."""


def readable_object(text: str) -> Json:
    """The object of a JSON text, or of one that is a string of JSON itself, as far as it can be read: an unfinished
    string counts as far as it is there. Empty where the text is no object."""
    found: Any = text
    for _ in range(2):
        try:
            found = pydantic_core.from_json(found, allow_inf_nan=False, allow_partial="trailing-strings")
        except ValueError:
            return {}
        if not isinstance(found, str):
            break
    return found if isinstance(found, dict) else {}


def _readable(arguments: Any) -> Any:
    return readable_object(arguments or "{}") if isinstance(arguments, str | None) else arguments


CallArguments = Annotated[Json, BeforeValidator(_readable, json_schema_input_type=str | Json | None)]
"""Arguments of a call that a client sends back, as an object or as JSON. Templates take an object. What a model wrote
and a client sends back with every turn may be no JSON: the readable part stands for it, so that a session goes on."""


_TextKind = Literal["text", "input_text", "output_text"]


def text_alone(part: Any, kinds: Sequence[str] = get_args(_TextKind)) -> Any:
    """The part of a content. ValueError for one that is of none of these kinds: an image, a file."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise ValueError(f"this server reads text alone, no {kind}")
    return part


class _TextPart(BaseModel):
    type: _TextKind
    text: str


TextPart = Annotated[_TextPart, BeforeValidator(text_alone)]


def text_of(content: str | list[Any] | None) -> str:
    """The text of a content, or of its parts that have `text`."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def thinking_variables(effort: str | None) -> Json:
    """Template variables that say how much to think."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


PASSED = frozenset({
    # OpenAI's
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "prediction", "verbosity", "stream_options", "client_metadata", "max_tool_calls",
    # Anthropic's
    "anthropic_version", "betas", "cache_control", "context_management", "diagnostics", "fallbacks", "inference_geo",
    "speed", "user_profile_id", "workspace_id",
    # vLLM's, llama-server's, Ollama's
    "request_id", "priority", "id_slot", "n_keep", "timings_per_token", "return_progress",
    "keep_alive", "num_keep", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "vocab_only", "use_mmap",
    "use_mlock", "num_thread", "numa", "guided_decoding_backend",
    # of gateways and agents
    "chat_id", "session_id", "trace_id", "provider", "usage", "timeout",
    # that say how much of what another field asks for
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau",
    "mirostat_eta", "dynatemp_exponent", "smoothing_curve", "repeat_last_n",
})  # fmt: skip
"""Fields that clients send and that change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repeat_penalty", "typical_p", "tfs_z", "length_penalty", "guidance_scale", "best_of"), (1,)),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "dynatemp_range", "smoothing_factor", "mirostat"), (0,)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_tokens", "n_probs"), (0,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)),
    "early_stopping": (False,), "min_keep": (0, 1), "truncate": (False,), "shift": (False,),
    **dict.fromkeys(("background", "echo"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "parse_tool_calls", "include_reasoning"), (True,)),
    "function_call": ("none",), "modalities": (["text"],), "reasoning_format": ("auto", "deepseek"),
    "spaces_between_special_tokens": (False, True), "top_n_sigma": (-1, 0), "truncate_prompt_tokens": (-1,),
    "truncation": ("auto", "disabled"), "penalize_newline": (True,),
}  # fmt: skip
"""Field → neutral values."""
_INSTEAD = {
    **dict.fromkeys(("n_predict", "max_new_tokens", "max_length", "num_predict", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("enable_thinking", "thinking"), "chat_template_kwargs"),
    "max_completion_tokens": "max_tokens", "functions": "tools", "format": "response_format",
    "function_call": "tool_choice", "n_probs": "logprobs", "reasoning": "reasoning_effort", "stop_sequences": "stop",
    "stop": "stop_sequences", "max_tokens": "max_output_tokens", "response_format": "text",
}  # fmt: skip
"""Field → what this server has in its place, where the request has that."""
_UNKEPT = ("previous_response_id", "conversation", "prompt", "background")


def check_fields(asked: BaseModel) -> None:
    """Refused if a body has a field that this server does not know, unless the field changes no answer or its value
    asks for nothing. asked: a model that keeps unknown fields."""
    for name, value in (asked.model_extra or {}).items():
        nothing = value is None or value in ("", [], {}) or value in NEUTRAL.get(name, ())
        if name in PASSED or nothing or (isinstance(asked, SamplerFields) and name in asked.own):
            continue
        instead = _INSTEAD.get(name)
        if name in _UNKEPT and "input" in type(asked).model_fields:
            raise Refused(400, f"this server keeps no responses; send all items in input, without {name}", name)
        if instead in type(asked).model_fields:
            raise Refused(400, f"{name} is not supported by this server; use {instead}", name)
        raise Refused(400, f"{name} is not supported by this server; leave it out", name)


# --- sampling ---


_SAME = tuple(each.name for each in fields(Sampling) if each.name not in ("max_tokens", "own"))
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
    top_p: float | None = Field(None, ge=0, le=1)
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

    @property
    def own(self) -> dict[str, float]:
        """Numbers of rules that are no field here. Refused if one is out of its rule's range."""
        found = {name: value for name, value in (self.model_extra or {}).items() if name in TRUNCATIONS}
        for name, value in found.items():
            rule = TRUNCATIONS[name]
            if not isinstance(value, int | float) or not rule.least <= value <= rule.largest:
                raise Refused(400, f"{name} must be from {rule.least:g} to {rule.largest:g}, got {value!r}", name)
        return found

    def named(self, most: int) -> Json:
        """Fields of `Sampling` that the request names. most: tokens that the answer may have. Refused if two of its
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
        return {**values, "own": own} if (own := self.own) else values
