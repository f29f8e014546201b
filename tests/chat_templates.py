"""Chat templates of our own making, one for each way in which model families write calls of tools and thoughts. Those of
a folder that CHAT_TEMPLATES names are tried as well, llama.cpp's models/templates for example."""

# ruff: noqa: E501

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tiermoe.model.chat.format import ChatFormat
from tiermoe.model.chat.jinja import render
from tiermoe.model.chat.learn import learned
from tiermoe.model.chat.template import ChatTemplate

_TOOLS = "{% if tools %}<|s|>tools {{ tools | tojson }}<|e|>\n{% endif %}"
_TALK = (
    "{% if m.role == 'tool' %}<|s|>tool {{ m.content }}<|e|>\n"
    "{% elif m.role != 'assistant' %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% else %}"
)


def _template(
    call: str, *, before: str = "", after: str = "", between: str = "", thought: str = "", text: str = ""
) -> str:
    """A template from how it writes one call (`c`, its number `n`), what is around all calls, a thought and a text."""
    thought = thought or "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' if m.reasoning_content }}"
    text = text or "{{ m.content or '' }}"
    calls = (
        f"{{% if m.tool_calls %}}{before}{{% for t in m.tool_calls %}}{{% set c = t.function %}}{{% set n = loop.index0 %}}"
        f"{call}{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{after}{{% endif %}}"
    )
    return (
        f"{_TOOLS}{{% for m in messages %}}{_TALK}<|s|>assistant\n{thought}{text}{calls}<|e|>\n{{% endif %}}"
        "{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
    )


_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_TEXT = "{{ v if v is string else v | tojson }}"
_EACH = "{% for k, v in c.arguments.items() %}"
_NESTED = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, e in v.items() %}<!{{ k }}>{{ nested(e) }}</!{{ k }}>"
    "{% endfor %}{% elif v is iterable and v is not string %}{% for e in v %}<!item>{{ nested(e) }}</!item>{% endfor %}"
    "{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
)
_GEMMA = (
    "{% macro own(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{% raw %}{{% endraw %}"
    "{% for k, e in v.items() %}{{ k }}:{{ own(e) }}{{ ',' if not loop.last }}{% endfor %}{% raw %}}{% endraw %}"
    "{% elif v is iterable %}[{% for e in v %}{{ own(e) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
OWN = {
    "json": _template(f"\n<tool_call>\n{_JSON}\n</tool_call>"),
    "json-list": _template(_JSON, before="<calls>[", between=", ", after="]</calls>"),
    "json-numbered": _template(
        '{"tool_call_id": "{{ n }}", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}',
        before="<|act|>[\n", between=",\n", after="\n]<|act_end|>",
        thought="{{ '<|think|>' ~ m.reasoning_content ~ '<|think_end|>' if m.reasoning_content }}",
        text="{{ '<|text|>' ~ m.content ~ '<|text_end|>' if m.content }}",
    ),
    "json-with-id": _template(
        '{% if t.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}'
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ t.id }}"}',
        before="[CALLS][", between=", ", after="]",
    ),
    "json-name-is-key": _template('{"{{ c.name }}": {{ c.arguments | tojson }}}', before="<|t|>[", between=", ", after="]<|/t|>"),
    "name-json": _template(
        "<｜call｜>{{ c.name }}<｜sep｜>{{ c.arguments | tojson }}<｜end｜>", before="<｜calls｜>", after="<｜ends｜>"
    ),
    "name-json-text": _template("[CALL]{{ c.name }}[ARGS]{{ c.arguments }}"),
    "id-alone": _template(
        "<|call|>{{ t.id }}<|args|>{{ c.arguments | tojson }}<|call_end|>", before="<|calls|>", after="<|calls_end|>"
    ),
    "parameters": _template(
        f"\n<tool_call>\n<function={{{{ c.name }}}}>\n{_EACH}<parameter={{{{ k }}}}>\n{_TEXT}\n</parameter>\n{{% endfor %}}"
        "</function>\n</tool_call>"
    ),
    "keys-and-values": _template(
        f"\n<tool_call>{{{{ c.name }}}}\n{_EACH}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_TEXT}</arg_value>\n{{% endfor %}}"
        "</tool_call>"
    ),
    "invoke": _template(
        f'<invoke name="{{{{ c.name }}}}">\n{_EACH}<parameter name="{{{{ k }}}}">{_TEXT}</parameter>\n{{% endfor %}}</invoke>\n',
        before="<calls>\n", after="</calls>",
    ),
    "typed": _template(
        f'<｜M｜invoke name="{{{{ c.name }}}}">\n{_EACH}<｜M｜parameter name="{{{{ k }}}}" string="{{{{ \'true\' if v is string else '
        f"'false' }}}}\">{_TEXT}</｜M｜parameter>\n{{% endfor %}}</｜M｜invoke>\n",
        before="\n\n<｜M｜calls>\n", after="</｜M｜calls>",
    ),
    "nested": _NESTED.replace("!", "]x[")
    + _template(
        f"<]x[invoke name=\"{{{{ c.name }}}}\">{_EACH}<]x[{{{{ k }}}}>{{{{ nested(v) }}}}</]x[{{{{ k }}}}>{{% endfor %}}"
        "</]x[invoke>\n",
        before="<]x[calls>\n", after="</]x[calls>",
    ),
    "python": _template(
        f"{{{{ c.name }}}}({_EACH}{{{{ k }}}}={{{{ v | tojson }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}})",
        before="<|calls|>[", between=", ", after="]<|calls_end|>",
    ),
    "own-quotes": _GEMMA
    + _template("<|call>call:{{ c.name }}{{ own(c.arguments) }}<call|>", thought="{{ '<|ch>thought\n' ~ m.reasoning_content ~ '<ch|>' if m.reasoning_content }}"),
    "headers": (
        f"{_TOOLS}{{% for m in messages %}}{_TALK}<|s|>assistant"
        "{{ ' to=self<|m|>' ~ m.reasoning_content ~ '<|n|><|s|>assistant' if m.reasoning_content }}"
        "{{ ' to=user<|m|>' ~ m.content if m.content }}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        f'{{{{ "<|n|><|s|>assistant" if m.content or not loop.first }}}} to={{{{ c.name }}}}<|m|>{{{{ c.arguments | tojson }}}}'
        "{% endfor %}<|e|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|s|>assistant{% endif %}"
    ),
    "opened": (
        f"{_TOOLS}{{% for m in messages %}}{_TALK}<|s|>assistant\n<think>\n{{{{ m.reasoning_content or '' }}}}\n</think>\n"
        "{{ m.content or '' }}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        f"\n<tool_call>\n{_JSON}\n</tool_call>{{% endfor %}}<|e|>\n{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}"
        "<|s|>assistant\n<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n{% endif %}{% endif %}"
    ),
}  # fmt: skip
"""Name of a way → a template."""
SPECIAL = ("<|s|>", "<|e|>", "[e~[", "]~b]")  # the last two are MiniMax's


def found() -> dict[str, str]:
    """All templates: our own, and those of the folder that the environment names."""
    folder = os.environ.get("CHAT_TEMPLATES")
    files = sorted(Path(folder).glob("*.jinja")) if folder else []
    return OWN | {file.stem: file.read_text() for file in files}


TEMPLATES = found()
NAMED = {"bos_token": "<BOS>", "eos_token": "<EOS>"}


@cache
def format_of(name: str) -> ChatFormat:
    template = TEMPLATES[name]

    def rendered(messages: Any, **more: Any) -> str:
        return render(template, messages, NAMED, **more)

    return learned(rendered, template, [*SPECIAL, *NAMED.values()])


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], format_of(name), "", NAMED, {})


def call_of(name: str, arguments: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {key: {"type": kind, "description": "d"} for key, kind in kinds.items()},
        "required": list(kinds),
    }}}
    for name, kinds in {
        "get_weather": {"city": "string", "days": "integer", "fast": "boolean"}, "stop": {},
    }.items()
]  # fmt: skip
