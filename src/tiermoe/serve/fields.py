"""Fields of a request's body, for all dialects: bounds of texts and lists, JSON, texts and tools that several dialects
have, and fields that this server does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import pydantic_core
from pydantic import BaseModel, BeforeValidator, Field

from tiermoe.serve.errors import Refused

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


def from_json(text: bytes | str) -> Any:
    """Value of a JSON text, without NaN and half surrogate pairs. ValueError where it is no such text, or nested deeper
    than 200 levels."""
    return pydantic_core.from_json(text, allow_inf_nan=False, cache_strings="keys")


def readable_object(text: str) -> dict[str, Any]:
    """The object of a JSON text, as far as it can be read: an unfinished string counts as far as it is there. Empty
    where the text is no object."""
    try:
        found = pydantic_core.from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _readable(arguments: Any) -> Any:
    return readable_object(arguments or "{}") if isinstance(arguments, str | None) else arguments


CallArguments = Annotated[
    dict[str, Any], BeforeValidator(_readable, json_schema_input_type=str | dict[str, Any] | None)
]
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


def thinking_variables(effort: str | None) -> dict[str, Any]:
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
    "request_id", "priority", "cache_salt", "cache_prompt", "id_slot", "n_keep", "timings_per_token", "return_progress",
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
    "early_stopping": (False,), "min_keep": (0, 1),
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
    """Refused where a body has a field that this server does not know, unless the field changes no answer or its value
    asks for nothing. asked: a model that keeps unknown fields."""
    for name, value in (asked.model_extra or {}).items():
        nothing = value is None or value in ("", [], {}) or value in NEUTRAL.get(name, ())
        if name in PASSED or nothing:
            continue
        instead = _INSTEAD.get(name)
        if name in _UNKEPT and "input" in type(asked).model_fields:
            raise Refused(400, f"this server keeps no responses; send all items in input, without {name}", name)
        if instead in type(asked).model_fields:
            raise Refused(400, f"{name} is not supported by this server; use {instead}", name)
        raise Refused(400, f"{name} is not supported by this server; leave it out", name)
