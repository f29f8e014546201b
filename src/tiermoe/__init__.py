"""tiermoe runs Mixture-of-Experts language models larger than the memory they run in, exactly.

    import tiermoe
    with tiermoe.load("path-or-hub-id", memory="6GiB", bits=4) as (model, tokenizer):
        model.generate(...)      # a transformers model
        model.tiermoe.stats()    # hits, misses, bytes, seconds waited, peak memory

The heavy libraries (torch, transformers) are imported at the first use of a name here.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("tiermoe needs a POSIX system (Linux, macOS); on Windows install and run it in WSL")

from tiermoe.errors import (
    BudgetError,
    ConfigError,
    LoadError,
    ModelError,
    PackError,
    PromptError,
    StoreError,
    TiermoeError,
)
from tiermoe.platform.threads import limit_spinning
from tiermoe.version import VERSION

if TYPE_CHECKING:
    from tiermoe.engine.generate import Report, generate
    from tiermoe.engine.load import load, plan
    from tiermoe.engine.memory_plan import MemoryPlan
    from tiermoe.engine.sampling import Sampling

limit_spinning()
__version__ = VERSION

__all__ = [
    "BudgetError",
    "ConfigError",
    "LoadError",
    "MemoryPlan",
    "ModelError",
    "PackError",
    "PromptError",
    "Report",
    "Sampling",
    "StoreError",
    "TiermoeError",
    "__version__",
    "generate",
    "load",
    "plan",
]

_HOMES = {
    "load": "tiermoe.engine.load",
    "plan": "tiermoe.engine.load",
    "generate": "tiermoe.engine.generate",
    "Sampling": "tiermoe.engine.sampling",
    "Report": "tiermoe.engine.generate",
    "MemoryPlan": "tiermoe.engine.memory_plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tiermoe' has no attribute '{name}'")
    from tiermoe.platform import process_memory

    process_memory.import_libraries()
    return getattr(importlib.import_module(_HOMES[name]), name)
