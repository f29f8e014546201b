"""Jinja in a sandbox, as chat templates are written for it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    **variables: Any,
) -> str:
    """The rendered conversation.

    messages: role and content of each. special_tokens: template variable ('eos_token') → token. tools: as OpenAI has
    them. variables: further ones of the template. Raises jinja2's errors; a template rejects messages by
    `TemplateError`."""
    given = copy.deepcopy({"messages": [dict(each) for each in messages], "tools": list(tools) or None})
    more = {"documents": None, "add_generation_prompt": add_generation_prompt, **special_tokens, **variables}
    return _compiled(template).render(**given, **more)


def check_template(template: str) -> None:
    """ValueError, with the line, where a text is no chat template: no Jinja, or without the messages."""
    try:
        parsed = _environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except RecursionError:
        raise ValueError("its blocks are nested too deeply") from None
    if "messages" not in jinja2.meta.find_undeclared_variables(parsed):
        raise ValueError(f"none of its {len(template.splitlines())} lines names the variable messages")


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> SandboxedEnvironment:
    """As transformers has it, but that a template may change lists: they are copies of its own."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, "from_json": json.loads, "fromjson": json.loads}
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, **named: Any) -> str:
    """jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **named)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what the model said: its text, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the type's attributes, by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace without attributes that begin with an underscore."""

    def __init__(self, /, *args: Any, **named: Any) -> None:
        values = dict(*args, **named)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"chat templates cannot set {name!r} on a namespace")
