"""Plugins: Python of the user's, which adds policies and presets to the tables. A file runs because the user names it;
an installed package says with an entry point of `GROUP` which module registers. Nothing else is ever run: neither what
lies beside a checkpoint, nor what lies in the working directory."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from tiermoe.errors import ConfigError, TiermoeError, reason

VARIABLE = "TIERMOE_PLUGINS"
"""Environment variable: plugin files, parted as in PATH. Processes that a command starts find those of --plugin in
it."""

GROUP = "tiermoe.plugins"
"""Entry points of packages: importing the module that one names registers."""

_LARGEST = 1 << 20  # bytes of a file

_packages_loaded = False


def load_files(paths: Sequence[Path]) -> None:
    """Runs each of the files that has not run in this process, and names them for processes that it starts.
    ConfigError for a file that cannot be read, is no Python, or fails, with the line."""
    absolute = [str(path.resolve()) for path in paths]
    for path in absolute:
        if os.pathsep in path:
            raise ConfigError(f"the plugin {path} has a {os.pathsep!r} in its path; move it")
        if path not in sys.modules:
            _run(path)
    if absolute:
        os.environ[VARIABLE] = os.pathsep.join(absolute)


def named_files() -> list[Path]:
    """The files that the environment names."""
    return [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def load_named() -> None:
    """`load_files` of those, in a process that a command has started."""
    load_files(named_files())


def load_packages() -> bool:
    """Imports what installed packages register, once, and says whether there was any. Asked where a name is unknown
    or all are wanted: it takes 50 ms to look for them. ConfigError, with the package, for one that fails."""
    global _packages_loaded
    if _packages_loaded:
        return False
    _packages_loaded = True
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    for entry in found:
        package = entry.dist.name if entry.dist else entry.value
        try:
            entry.load()
        except Exception as error:
            raise ConfigError(f"the plugin {entry.name} of the package {package} failed: {_said(error)}") from error
    return bool(found)


def _run(path: str) -> None:
    try:
        with open(path, "rb") as file:
            source = file.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"the plugin {path} cannot be read: {error.strerror}; name a Python file") from error
    if len(source) > _LARGEST:
        raise ConfigError(f"the plugin {path} has more than {_LARGEST:,} bytes; name a Python file")
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ConfigError(f"the plugin {path} is no Python in line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # a byte of 0
        raise ConfigError(f"the plugin {path} is no Python: {reason(error)}") from error
    spec = ModuleSpec(path, None, origin=path)
    module = sys.modules[path] = module_from_spec(spec)  # where dataclasses look for the names in annotations
    module.__file__ = path
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[path]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        raise ConfigError(f"the plugin {path} failed in line {lines[-1]}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, TiermoeError) else f"{type(error).__name__}: {reason(error)}"
