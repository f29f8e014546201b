"""Text of much repetition that is no chat: code, records, tables, letters."""

import json
from collections.abc import Callable
from random import Random

from training.words import (
    ADJECTIVES,
    CITIES,
    FIELDS,
    FOODS,
    PEOPLE,
    PLACES,
    THINGS,
    enumerated,
    field_value,
    several,
)


def python_class(rng: Random) -> str:
    name, fields = rng.choice(THINGS).capitalize(), several(rng, FIELDS, 2, 4)
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f"        return self.{field}"]
        lines += ["", f"    def set_{field}(self, {field}):", f"        self.{field} = {field}"]
    return "\n".join(lines)


def python_functions(rng: Random) -> str:
    name, number = rng.choice(THINGS), rng.randint(2, 20)
    lines = []
    for word, sign in rng.sample([("add", "+"), ("subtract", "-"), ("multiply", "*"), ("divide", "/")], 3):
        lines += [f"def {word}_{name}({name}):", f"    return {name} {sign} {number}", "", ""]
    return "\n".join(lines)


def json_records(rng: Random) -> str:
    fields = several(rng, FIELDS, 2, 4)
    rows = [{field: field_value(rng, field) for field in fields} for _ in range(rng.randint(2, 5))]
    return json.dumps(rows, indent=2)


def table(rng: Random) -> str:
    fields = several(rng, FIELDS, 2, 4)
    rows = [[str(field_value(rng, field)) for field in fields] for _ in range(rng.randint(2, 6))]
    lines = ["| " + " | ".join(row) + " |" for row in [fields, ["---"] * len(fields), *rows]]
    return "\n".join(lines)


def sums(rng: Random) -> str:
    a, sign = rng.randint(1, 40), rng.choice("+*")
    first = rng.randint(1, 10)
    return "\n".join(f"{a} {sign} {b} = {a + b if sign == '+' else a * b}" for b in range(first, first + 8))


def letter(rng: Random) -> str:
    sender, receiver = rng.sample(PEOPLE, 2)
    thing, city = f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}", rng.choice(CITIES)
    return (
        f"Dear {receiver},\n\nthank you for the {thing}. I have put the {thing} in the {rng.choice(PLACES)}. Next week"
        f" I am going to {city}. Will you come to {city}, too?\n\nYours,\n{sender}"
    )


def recipe(rng: Random) -> str:
    foods = several(rng, FOODS, 2, 4)
    lines = [f"# {foods[0].capitalize()} with {enumerated(foods[1:])}", "", "You need:"]
    lines += [f"- {rng.randint(1, 9)} x {food}" for food in foods]
    lines += ["", *(f"{number}. Wash the {food} and cut the {food}." for number, food in enumerate(foods, 1))]
    return "\n".join([*lines, f"{len(foods) + 1}. Mix the {enumerated(foods)} and serve."])


LISTINGS: dict[Callable[[Random], str], float] = {
    python_class: 2, python_functions: 1, json_records: 1.5, table: 1, sums: 1, letter: 1, recipe: 1,
}  # fmt: skip
"""Makers of texts, with how often each is drawn. A text is its own key."""
