"""Constraints: what a request says that its answer must be, by the fields of OpenAI, vLLM, llama-server and SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiermoe.serve.errors import Refused
from tiermoe.serve.fields import from_json
from tiermoe.serve.grammar import choice_rule, json_rule, regex_rule


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be."""

    field: str  # of the request
    term: str = "grammar"  # in a grammar's rules; the rule `grammar` is the grammar below
    grammar: str = ""  # in llama.cpp's GBNF, or llguidance's Lark


def json_constraint(schema: Mapping[str, Any] | None, field: str = "response_format") -> Constraint | None:
    """JSON of a schema; None without one."""
    return None if schema is None else Constraint(field, json_rule(schema))


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="ignore")

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # llama-server's, of a json_object

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """Schema of the JSON that is asked for; None: any text. Refused where none is named and one is needed."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self.schema_ or {"type": "object"}
        if self.json_schema is None:
            raise Refused(400, "a response_format of type json_schema needs json_schema", "response_format")
        return self.json_schema.schema_


_Choices = Annotated[list[str], Field(max_length=1024, fail_fast=True)]


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstraintFields(BaseModel):
    """What the answer must be; at most one field says it. Empty values ask for nothing."""

    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    regex: str | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    grammar: str | None = None
    guided_grammar: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be; None: any text. Refused where two fields say it, or a schema is no JSON."""
        schema = None if self.response_format is None else self.response_format.schema_of_answer
        found = [json_constraint(schema)]
        named = {name: getattr(self, name) for name in _READ if name in ConstraintFields.model_fields}
        if self.structured_outputs is not None:
            outputs = self.structured_outputs.model_dump(by_alias=True)
            named |= {f"structured_outputs.{name}": value for name, value in outputs.items()}
        found += [_READ[name.rpartition(".")[2]](value, name) for name, value in named.items() if value]
        said = [each for each in found if each is not None]
        if len(said) > 1:
            first, second = said[0].field, said[1].field
            raise Refused(400, f"{first} and {second} both say what the answer must be; send one of them", second)
        return said[0] if said else None


def _from_schema(schema: Mapping[str, Any] | str, field: str) -> Constraint | None:
    if isinstance(schema, str):
        try:
            schema = from_json(schema)
        except ValueError as error:
            raise Refused(400, f"{field} is no JSON: {error}", field) from error
        if not isinstance(schema, dict):
            raise Refused(400, f"{field} is no JSON schema: a schema is an object", field)
    return json_constraint(schema, field)


def _from_regex(regex: str, field: str) -> Constraint:
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise Refused(400, f"{field} ends with a lone backslash", field)
    return Constraint(field, regex_rule(regex))


def _from_choices(choices: Sequence[str], field: str) -> Constraint:
    return Constraint(field, choice_rule(choices))


def _from_grammar(grammar: str, field: str) -> Constraint:
    return Constraint(field, grammar=grammar)


_READ: dict[str, Callable[[Any, str], Constraint | None]] = {
    **dict.fromkeys(("json_schema", "guided_json", "json"), _from_schema),
    **dict.fromkeys(("regex", "guided_regex"), _from_regex),
    **dict.fromkeys(("guided_choice", "choice"), _from_choices),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), _from_grammar),
    "json_object": lambda _, field: json_constraint({"type": "object"}, field),
}
"""Field, or a field of structured_outputs → how its value is read."""
