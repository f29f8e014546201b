"""The compiled kernels of an installation, looked at without importing torch; and the rule that measurements have
them."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from tiermoe.config import NATIVE_SWITCH
from tiermoe.errors import ConfigError

_SOURCES = Path(__file__).parents[2]


def instruction_sets() -> list[str]:
    """`native.instruction_sets()`, from the compiled module alone."""
    spec = _compiled(_SOURCES)
    if spec is None or spec.loader is None:
        return []
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.instruction_sets()
    return found


def require_kernels(without: bool, sources: Path = _SOURCES) -> None:
    """ConfigError where a measurement would run without the compiled kernels and nobody has asked for that. without:
    asks, and keeps them out of this process and those that it starts, as NATIVE_SWITCH=0 does. sources: the folder
    with the package; that of this one."""
    if without:
        os.environ[NATIVE_SWITCH] = "0"
    if os.environ.get(NATIVE_SWITCH) != "0" and _compiled(sources) is None:
        raise ConfigError(
            f"the compiled kernels are missing from {sources}: torch would compute, about eighty times slower; build "
            f"them with 'pip install -e .' in the checkout, or measure torch with --without-kernels"
        )


def _compiled(sources: Path) -> ModuleSpec | None:
    return PathFinder.find_spec("_native", [str(sources / "tiermoe" / "native")])
