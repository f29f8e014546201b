"""Rules of a grammar by which a model calls a tool, as its chat format writes calls, in llguidance's form of Lark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiermoe.model.chat.format import ID, INDEX, KEY, NAME, VALUE, CallFormat
from tiermoe.model.chat.literals import json_text
from tiermoe.model.chat.parameters import TYPES, kinds_of, properties
from tiermoe.serve.dialects import Json
from tiermoe.serve.grammar import json_rule

Terms = Callable[[str], list[str]]
"""The terms of a text in which special tokens are tokens."""

_SLOTS = {ID: "/[a-zA-Z0-9]{9}/", INDEX: "/[0-9]{1,3}/"}
_PYTHON = {"boolean": '("True" | "False")', "null": '"None"'}
_FREE = "/(.|\\n)*/"
_DEPTH = 24
"""Schemas within each other that are looked at."""
_AROUND = re.compile(r"\(\?<?[=!]")
_UNTOLD = frozenset({
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "propertyNames",
})  # fmt: skip
"""Keywords of JSON Schema that grammars of llguidance leave out."""


def terms_with(special: Mapping[str, int]) -> Terms:
    """Makes terms of texts. special: special token → its id."""
    split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def terms(text: str) -> list[str]:
        found, at = list[str](), 0
        for token in split.finditer(text):
            found += [json_text(text[at : token.start()])] if token.start() > at else []
            found.append(f"<[{special[token[0]]}]>")
            at = token.end()
        return [*found, *([json_text(text[at:])] if text[at:] else [])]

    return terms


def free_text(name: str, after: list[str]) -> tuple[str, str]:
    """The rule `name` of any text up to the terms `after`, and what of these the rule leaves to come."""
    if after[0].startswith("<["):  # text has no special tokens
        return f"{name}: {name.upper()}\n{name.upper()}: {_FREE}", " ".join(after)
    return f"{name}[suffix={after[0]}]: {_FREE}", " ".join(after[1:])


def call_rule(form: CallFormat, functions: Sequence[Mapping[str, Any]], terms: Terms) -> str:
    """The rule `call`: one call of one of the functions. Arguments follow a function's schema, as far as a grammar can
    say it (`expressible`)."""
    each = [_FunctionRules(form, function, f"f{number}", terms) for number, function in enumerate(functions)]
    either = " | ".join(rules.name for rules in each)
    begin, end = " ".join(terms(form.begin.lstrip())), " ".join(terms(form.end))
    return "\n".join([f"call: {begin} ({either}) {end}", *(rule for rules in each for rule in rules.made())])


class _FunctionRules:
    """Rules of one function's call. name: the first one's."""

    def __init__(self, form: CallFormat, function: Mapping[str, Any], name: str, terms: Terms) -> None:
        self.name = name
        self._form, self._terms = form, terms
        self._function = str(function["name"])
        self._schema = expressible(function.get("parameters") or {})[0]
        self._rules = list[str]()

    def made(self) -> list[str]:
        form = self._form
        head, tail = map(self._slotted, (form.head if form.begin.strip() else form.head.lstrip(), form.tail))
        arguments = {"json": self._json, "tags": self._tags, "literals": self._literals}[form.style]()
        return [f"{self.name}: {head} {arguments} {tail}", *self._rules]

    def _literal(self, text: str) -> str:
        return " ".join(self._terms(text))

    def _slotted(self, text: str) -> str:
        """Terms of a text of the format."""
        quoted = f'"{NAME}"' in text
        parts = re.split(
            f"([{ID}{INDEX}])", text.replace(NAME, json_text(self._function)[1:-1] if quoted else self._function)
        )
        return " ".join(_SLOTS.get(part) or self._literal(part) for part in parts if part)

    def _json(self) -> str:
        return json_rule({"type": "object", **(self._schema or {"additionalProperties": False})}, lenient=True)

    def _required(self) -> set[str]:
        named = self._schema.get("required")
        return set(map(str, named)) if isinstance(named, list) else set()

    def _properties(self) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """Parameters, their schemas and the names of their rules; all others, too, where there are none."""
        for number, (key, schema) in enumerate(properties(self._schema).items()):
            yield key, schema, f"{self.name}v{number}"

    def _value(self, schema: Mapping[str, Any]) -> str:
        words = schema.get("enum")
        if words and all(isinstance(word, str) for word in words) and self._form.style == "tags":
            return "(" + " | ".join(map(json_text, words)) + ")"
        kinds = kinds_of(schema, self._schema)
        if self._form.python and kinds and kinds <= {"boolean", "null"}:
            return " | ".join(_PYTHON[kind] for kind in TYPES if kind in kinds)
        definitions: Json = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        return json_rule({**schema, **definitions}, lenient=True)

    def _tags(self) -> str:
        parts, required = list[str](), self._required()
        for key, schema, rule in self._properties():
            kinds = kinds_of(schema, self._schema)
            kind = next((each for each in TYPES if each in kinds), "string")
            text = self._form.parameter[kind][0].replace(KEY, key)
            before, _, after = text.partition(VALUE)
            nested = KEY in self._form.parameter[kind][0].partition(VALUE)[2] and kind in ("array", "object")
            if (kind == "string" and not schema.get("enum")) or nested:
                value, after = self._free(rule, after)
                part = f"{self._literal(before)} {value} {after}"
            else:
                self._rules.append(f"{rule}: {self._value(schema)}")
                part = f"{self._literal(before)} {rule} {self._literal(after)}"
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts)

    def _free(self, rule: str, after: str) -> tuple[str, str]:
        """A rule for any text up to what follows it, and the terms that follow the rule."""
        made, rest = free_text(rule, self._terms(after))
        self._rules.append(made)
        return rule, rest

    def _literals(self) -> str:
        """Entries in the order of the schema, required ones first, with commas between those that are there."""
        begin, end, sign = ("{", "}", ":") if self._form.quote else ("(", ")", "=")
        required, comma = self._required(), "," if self._form.quote else ", "
        entries = sorted(self._properties(), key=lambda entry: entry[0] not in required)
        must = 0
        for key, schema, rule in entries:
            self._rules.append(f"{rule}: {json_text(key + sign)} {self._literal_value(schema)}")
            must += key in required
        rest = ""
        for at in range(len(entries) - 1, -1, -1):
            rule = entries[at][2]
            follows = f"{rule}r: {json_text(comma)} {rule} {rest}"
            self._rules.append(follows if at < must else f"{rule}r: ({json_text(comma)} {rule})? {rest}")
            rest = f"{rule}r"
        names = [entry[2] for entry in entries]
        after = [*(f"{name}r" for name in names[1:]), ""]
        firsts = [f"{name} {follow}" for name, follow in zip(names, after, strict=False)]
        body = firsts[0] if must else f"({' | '.join(firsts)})?" if firsts else ""
        return f"{json_text(begin)} {body} {json_text(end)}"

    def _literal_value(self, schema: Mapping[str, Any]) -> str:
        """JSON, which is as well read, where strings have no quotes of their own."""
        quote = self._form.quote
        if not quote:
            return self._value(schema)
        mark = self._literal(quote)
        kinds = kinds_of(schema, self._schema)
        value, text = f"{self.name}any", f"{self.name}text"
        if not any(rule.startswith(f"{text}:") for rule in self._rules):
            string, after = self._free(f"{text}s", quote)
            self._rules += [
                f"{text}: {mark} {string} {after}",
                f'{value}: {text} | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null" | {value}l | {value}o',
                f'{value}l: "[" ({value} ("," {value})*)? "]"',
                f'{value}o: "{{" ({value}e ("," {value}e)*)? "}}"',
                f'{value}e: /[A-Za-z_][A-Za-z_0-9.-]*/ ":" {value}',
            ]
        words = schema.get("enum")
        if words and all(isinstance(word, str) for word in words):
            return "(" + " | ".join(f"{mark} {json_text(word)} {mark}" for word in words) + ")"
        named = {
            "string": text, "array": f"{value}l", "object": f"{value}o", "integer": "/-?[0-9]+/",
            "number": "/-?[0-9]+(\\.[0-9]+)?/", "boolean": '("true" | "false")', "null": '"null"',
        }  # fmt: skip
        return " | ".join(named[kind] for kind in TYPES if kind in kinds) or value


def expressible(schema: Any) -> tuple[Json, list[str]]:
    """A schema of a tool without what no grammar can say, and what that is: keywords with their paths. What is left out
    leaves the value free."""
    left_out = list[str]()

    def cleaned(each: Any, path: str, depth: int) -> Any:
        if isinstance(each, list):
            return [cleaned(part, path, depth) for part in each]
        if not isinstance(each, Mapping):
            return each
        if depth > _DEPTH:
            left_out.append(f"{path}: nested deeper than {_DEPTH}")
            return {}
        made: Json = {}
        for key, value in each.items():
            at = f"{path}.{key}" if path else str(key)
            if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
                made[key] = {name: cleaned(part, f"{at}.{name}", depth + 1) for name, part in value.items()}
            elif key in ("enum", "const", "default", "examples", "required"):
                made |= {key: value} if key != "required" or isinstance(value, list) else {}
            elif key == "type":
                said = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
                made |= (
                    {key: said if isinstance(value, list) else said[0]} if all(name in TYPES for name in said) else {}
                )
            elif (key == "pattern" and isinstance(value, str) and _AROUND.search(value)) or (
                key == "$ref" and (not isinstance(value, str) or not value.startswith("#/"))
            ):
                left_out.append(at)
            elif value is not None:
                if key in _UNTOLD:
                    left_out.append(at)
                else:
                    made[key] = cleaned(value, at, depth + 1)
        return made

    found = cleaned(schema, "", 0)
    return (found if isinstance(found, dict) else {}), left_out
