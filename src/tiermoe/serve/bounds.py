"""Bounds of what clients send: of texts and lists in a body, and of JSON."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import Field

_T = TypeVar("_T")

Several = Annotated[list[_T], Field(max_length=2048, fail_fast=True)]
"""Messages, items, parts of a content, prompts. The first wrong one ends the check: errors take memory too."""
Tools = Annotated[list[_T], Field(max_length=512, fail_fast=True)]
TokenIds = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
"""As many as the longest contexts have: the model's own context is checked where it is known."""
StopString = Annotated[str, Field(max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=16, fail_fast=True)]
Bias = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
"""Token id → what is added to its logit."""
Options = Annotated[dict[str, _T], Field(max_length=64)]
"""Variables of a template, metadata."""


def from_json(text: bytes | str) -> Any:
    """The value of a JSON text, strictly: no NaN, no half surrogate pairs. ValueError where it is none, or nested
    deeper than 200 levels."""
    return pydantic_core.from_json(text, allow_inf_nan=False, cache_strings="keys")
