"""Grammars that answers must follow (JSON, a regular expression, a call of a tool): the fields of a request that ask
for one, and their compiler over llguidance.

A grammar is compiled in a thread, after a trial in a process of its own (`grammar_trial.py`);
one beyond the limits here is refused. Applying it to an answer's tokens (`engine.sampling.Grammar`) has llguidance's
limits."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tiermoe.engine.sampling import Grammar, own_words
from tiermoe.errors import ConfigError
from tiermoe.serve.dialects import Json, Refused, from_json

MOST_TEXT = 128 << 10
"""Characters of a grammar; a step may take time in proportion."""
MOST_SECONDS = 2
"""Of processor time in a trial, that of starting it included."""
MOST_MEMORY = 64 << 20
"""Bytes that a grammar may take in a trial."""
MOST_WAITING = 16
"""Grammars that are compiled, or wait for that."""
# a state has 1 to 2 KB; llguidance allows 250,000
_LIMITS: Json = {"max_lexer_states": 20_000, "verbose_errors": False}
_STARVED_S = 60  # on a machine that gives a trial no time, or has no limits of processor time
_KNOWN = 256  # outcomes of trials that are remembered
_BETWEEN = r"\n? {0,16}"  # a model may not go on with blanks for ever
_TOKEN = re.compile(r"<\[\d+\]>")  # a special token by its id
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)  # one that no backslash precedes


def json_rule(schema: Mapping[str, Any], lenient: bool = False) -> str:
    """The term for JSON of a schema in the rules of a grammar. lenient: what no grammar can say is left free."""
    options = {"whitespace_pattern": _BETWEEN, **({"lenient": True} if lenient else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def regex_rule(regex: str) -> str:
    """The term for text that a regular expression (of Rust's crate regex) matches as a whole."""
    return "/" + _SLASH.sub(lambda found: found[1] or r"\/", regex) + "/"


def choice_rule(choices: Sequence[str]) -> str:
    """The term for one of several texts."""
    return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)})"


Compiling = Callable[[int], Awaitable[list[Grammar]]]
"""Compiles a grammar for so many answers."""


class Grammars:
    """Compiler of grammars over a tokenizer. vocabulary: tokens that the model has logits for. ends: tokens that end an
    answer."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._threads = ThreadPoolExecutor(2, "tiermoe-grammar")
        self._under_way = 0
        self._faults: dict[bytes, str] = {}
        self._lock = Lock()

    async def compiled(self, rules: str, count: int, grammar: str = "") -> list[Grammar]:
        """`compile`, in a thread. Refused if too many grammars wait."""
        if self._under_way >= MOST_WAITING:
            raise Refused(503, f"{MOST_WAITING} grammars are being compiled; ask again later")
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile, rules, count, grammar)
        finally:
            self._under_way -= 1

    def compile(self, rules: str, count: int = 1, grammar: str = "") -> list[Grammar]:
        """A grammar for each of `count` answers. rules: in llguidance's form of Lark. grammar: what their rule
        `grammar` is, if they name it, in GBNF or Lark. ConfigError if the rules, or a JSON schema in them, cannot
        be followed within the limits."""
        from llguidance import LLMatcher, LLParserLimits

        if grammar:
            rules = f"{rules}\ngrammar: %lark {{\n{_as_lark(grammar)}\n}}"
        _check_length(rules)
        if fault := self._fault(rules):
            raise _unfollowed(fault)
        with self._lock:
            tokens = self._tokens
        matcher = LLMatcher(tokens, rules, log_level=0, limits=LLParserLimits(**_LIMITS))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _unfollowed(own_words(matcher.get_error()))
        return [Grammar(matcher), *(Grammar(matcher.deep_copy()) for _ in range(count - 1))]

    @cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = self._ends or None
        vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocabulary, ends))
        return LLTokenizer(vocabulary, n_vocab=self._vocabulary, eos_token=ends)

    def _fault(self, rules: str) -> str:
        """What a trial of the rules finds, or has found before; empty where nothing is wrong."""
        key = hashlib.sha256(rules.encode(errors="replace")).digest()
        fault = self._faults.get(key)
        if fault is None:
            added = self._tokenizer.added_tokens_decoder.values()
            special = [each.content for each in added if each.special and each.content in rules]
            tried = _TOKEN.sub('"#"', rules)  # a trial's vocabulary has no such ids
            found, fault = _run_trial({"rules": tried, "special": special, "limits": _LIMITS})
            fault = fault or own_words(found)
            with self._lock:
                self._faults[key] = fault
                if len(self._faults) > _KNOWN:
                    del self._faults[next(iter(self._faults))]
        return fault


class _Vocabulary:
    """The tokens of a tokenizer of transformers as llguidance takes them, special where the tokenizer says so.

    llguidance by itself takes every added token in angle brackets for special, as Qwen3's `<tool_call>`: it lets the
    token come where a grammar has its text, and then finds that the token is not that text. vocabulary: tokens. ends:
    those that end an answer; None: the tokenizer's own."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocabulary: int, ends: list[int] | None) -> None:
        from llguidance.hf import from_tokenizer

        found = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends)
        texts = {token for token, added in tokenizer.added_tokens_decoder.items() if not added.special}
        self.eos_token_id = found.eos_token
        self.tokens = [found.decode_bytes([token]) for token in range(found.vocab_size)]
        self.special_token_ids = [
            token for token in range(found.vocab_size) if found.is_special_token(token) and token not in texts
        ]
        self._backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True  # the text of a special token is not the token

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text. TypeError for bytes: llguidance then sends none."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


@functools.lru_cache(maxsize=16)
def _as_lark(grammar: str) -> str:
    """A grammar in GBNF or Lark, in Lark. It is converted in a trial's process: that may take time in proportion to the
    square of its length. ConfigError if it cannot be."""
    _check_length(grammar)
    lark, fault = _run_trial({"grammar": grammar})
    if fault:
        raise _unfollowed(fault)
    return str(lark)


def _run_trial(asked: Json) -> tuple[Any, str]:
    """(result, what is wrong) of `grammar_trial.py`; nothing is wrong where the second is empty. Refused if the
    machine is too busy."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("grammar_trial.py"))]
    given = json.dumps({**asked, "seconds": MOST_SECONDS, "memory": MOST_MEMORY})
    try:
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_STARVED_S)
    except subprocess.TimeoutExpired as error:
        text = f"compiling the JSON schema or grammar took more than {_STARVED_S} s; simplify it, or ask again later"
        raise Refused(503, text) from error
    if ended.returncode == 0:
        return json.loads(ended.stdout), ""
    if ended.returncode > 0:
        return None, f"compiling it fails: {ended.stderr.strip().rpartition(chr(10))[2]}"
    if ended.returncode == -signal.SIGXCPU:
        return None, f"compiling it takes more than {MOST_SECONDS} s of processor time"
    return None, f"compiling it needs more than {MOST_MEMORY >> 20} MiB"


def _check_length(text: str) -> None:
    if len(text) > MOST_TEXT:
        raise _unfollowed(f"it has {len(text):,} characters as a grammar, {MOST_TEXT:,} at most")


def _unfollowed(why: str) -> ConfigError:
    return ConfigError(f"the JSON schema or grammar cannot be followed: {why}")


# --- fields of a request ---


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

    schema_: Json = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Json | None = Field(None, alias="schema")  # llama-server's, of a json_object

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

    json_: Json | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstraintFields(BaseModel):
    """What the answer must be; at most one field says it. Empty values ask for nothing."""

    response_format: ResponseFormat | None = None
    json_schema: Json | None = None
    guided_json: Json | str | None = None
    regex: str | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    grammar: str | None = None
    guided_grammar: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be; None: any text. Refused if two fields say it, or a schema is no JSON."""
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


_READ: dict[str, Callable[[Any, str], Constraint | None]] = {
    **dict.fromkeys(("json_schema", "guided_json", "json"), _from_schema),
    **dict.fromkeys(("regex", "guided_regex"), _from_regex),
    **dict.fromkeys(("guided_choice", "choice"), lambda choices, field: Constraint(field, choice_rule(choices))),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), lambda text, field: Constraint(field, grammar=text)),
    "json_object": lambda _, field: json_constraint({"type": "object"}, field),
}
"""Field, or a field of structured_outputs → how its value is read."""
