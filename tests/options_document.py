"""docs/options.md, made of the declarations of the commands: `python tests/options_document.py` writes it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from tiermoe.cli.main import COMMANDS
from tiermoe.cli.options import ENGINE

FILE = Path(__file__).parent.parent / "docs" / "options.md"

_HEAD = """# Commands and options

Written by `python tests/options_document.py` from the declarations in `src/tiermoe/cli/`, and checked by
`tests/test_cli.py`. `tiermoe COMMAND --help` prints the same. `tiermoe.load` takes the options of the engine under the
same names, with `_` for `-`.

## Options of the engine

| option | value | default | what it sets |
|---|---|---|---|
"""
_VALUES = {int: "integer", float: "number", str: "text", Path: "path", bool: "", list: "NAME=VALUE, several times"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command's function."""

    name: str
    kind: type
    info: Any  # typer's OptionInfo or ArgumentInfo
    default: Any

    @property
    def setting(self) -> str | None:
        """The setting of the engine; None for an option of the command's own."""
        name = self.name.removesuffix("_")
        return name if name in ENGINE and ENGINE[name].__metadata__[0] is self.info else None

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, ArgumentInfo)

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def row(self) -> str:
        named = [
            self.info.default,
            *(self.info.param_decls or []),
        ]  # in an annotation the first flag lands in `default`
        named = [flag for each in named if isinstance(each, str) for flag in each.split("/")]
        flags = ", ".join(f"`{flag}`" for flag in named or [_flag(self.name)])
        limits = f", {self.info.min} to {self.info.max}" if self.info.max else f", from {self.info.min}"
        value = self.info.metavar or _VALUES[self.kind] + (limits if self.info.min is not None else "")
        variable = f" Environment: `{self.info.envvar}`." if self.info.envvar else ""
        return f"| {flags} | {value} | {self._default()} | {_cell(self.info.help)}{variable} |"

    def _default(self) -> str:
        """The default, where the help does not say it."""
        if self.is_required:
            return "required"
        if isinstance(self.info.show_default, str):
            return self.info.show_default
        if self.kind is bool:
            return "on" if self.default else "off"
        return "" if self.default is None or not self.info.show_default else f"`{self.default}`"


def _parameters(command: str) -> list[Parameter]:
    function = _function(command)
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        declared, info = get_args(hints[name])
        kinds = [kind for kind in get_args(declared) or (declared,) if kind is not type(None)]
        found.append(Parameter(name, getattr(kinds[0], "__origin__", kinds[0]), info, parameter.default))
    return found


def _function(command: str) -> Any:
    module, _, function = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(module), function)


def document() -> str:
    """The text of docs/options.md."""
    commands = {name: _parameters(name) for name in COMMANDS}
    rows = [each.row() for each in commands["run"] if each.setting]
    assert len(rows) == len(ENGINE)  # `run` takes all settings
    told: dict[str, str] = {}
    return _HEAD + _lines(rows) + "".join(_section(name, parameters, told) for name, parameters in commands.items())


def _section(name: str, parameters: list[Parameter], told: dict[str, str]) -> str:
    """One command; `told` has the rows of earlier ones, with the command that has each."""
    arguments = [each for each in parameters if each.is_argument]
    rows = [each.row() for each in parameters if not each.is_argument and not each.setting]
    again: dict[str, list[str]] = {}
    for row in rows:
        if row in told:
            again.setdefault(told[row], []).append(row.split("|")[1].strip())
    own = [row for row in rows if row not in told]
    told.update(dict.fromkeys(own, name))
    engine = [each.setting for each in parameters if each.setting]
    usage = [each.name.upper() if each.is_required else f"[{each.name.upper()}]" for each in arguments]
    text = f"\n## {name}\n\n    {' '.join(['tiermoe', name, *usage, '[OPTIONS]'])}\n"
    text += f"\n{inspect.getdoc(_function(name))}\n\n"
    text += _lines(f"* {argument.name.upper()}: {_cell(argument.info.help)}" for argument in arguments)
    if engine:
        left_out = [_flag(setting) for setting in ENGINE if setting not in engine]
        few = len(left_out) > len(engine)
        said = ", ".join(f"`{_flag(setting)}`" for setting in engine) if few else "all"
        text += f"\nOptions of the engine: {said}"
        text += f" but {', '.join(f'`{flag}`' for flag in left_out)}.\n" if left_out and not few else ".\n"
    text += "".join(f"\nAs in `{command}`: {', '.join(flags)}.\n" for command, flags in again.items())
    if own:
        text += "\n| option | value | default | what it sets |\n|---|---|---|---|\n" + _lines(own)
    return text


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_").replace("_", "-")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(document())
