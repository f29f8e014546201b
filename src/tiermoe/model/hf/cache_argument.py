"""What transformers calls the cache in the arguments of a `forward`, in what it returns, and in those of `generate()`:
`cache` from 5.24 on, `past_key_values` before."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""The names, the newest first: later versions take the older one too, with a warning."""


def cache_name(names: Container[str]) -> str:
    """The name among those of a function's parameters, or of an output's fields; the newest where none is there, as of
    an encoder."""
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among named arguments, or in an output object; None where there is none."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
