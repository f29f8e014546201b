"""Questions with one right answer that a small model can learn: arithmetic, units, dates, copying and editing."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FIELDS,
    FOODS,
    MONTHS,
    PEOPLE,
    PLACES,
    THINGS,
    enumerated,
    field_value,
    sentence,
    several,
)


@dataclass(frozen=True)
class Item:
    """A question and its answer, or several that belong together.

    ``key`` is what the answer depends on: items of equal key lie in the same part, training or held out.
    """

    key: str
    turns: tuple[tuple[str, str], ...]


def _item(question: str, answer: str, key: str = "") -> Item:
    return Item(key or question, ((question, answer),))


def sums(rng: Random) -> Item:
    a, b = rng.randint(0, 49), rng.randint(0, 49)
    if rng.random() < 0.5:
        question = rng.choice(["What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "How much is {} plus {}?"])
        return _item(question.format(a, b), f"{a} + {b} = {a + b}", f"{a} + {b}")
    question = rng.choice(["What is {} - {}?", "{} - {} = ?", "How much is {} minus {}?"])
    return _item(question.format(a + b, b), f"{a + b} - {b} = {a}", f"{a + b} - {b}")


def products(rng: Random) -> Item:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    if rng.random() < 0.6:
        question = rng.choice(["What is {} * {}?", "{} * {} = ?", "Multiply {} by {}.", "How much is {} times {}?"])
        return _item(question.format(a, b), f"{a} * {b} = {a * b}", f"{a} * {b}")
    question = rng.choice(["What is {} / {}?", "Divide {} by {}."])
    return _item(question.format(a * b, b), f"{a * b} / {b} = {a}", f"{a * b} / {b}")


def comparisons(rng: Random) -> Item:
    a, b = rng.sample(range(100), 2)
    word, answer = rng.choice([("larger", max(a, b)), ("smaller", min(a, b))])
    return _item(f"Which is {word}, {a} or {b}?", f"{answer} is {word}.", f"{word} {min(a, b)} {max(a, b)}")


def apples(rng: Random) -> Item:
    who, what = rng.choice(PEOPLE), rng.choice(THINGS) + "s"
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    if rng.random() < 0.5:
        question = f"{who} has {a} {what} and gets {b} more. How many {what} has {who} now?"
        return _item(question, f"{a} + {b} = {a + b}, so {who} has {a + b} {what}.", f"{who} {what} {a} + {b}")
    question = f"{who} has {a + b} {what} and loses {b} of them. How many {what} has {who} now?"
    return _item(question, f"{a + b} - {b} = {a}, so {who} has {a} {what}.", f"{who} {what} {a + b} - {b}")


UNITS = (
    ("minutes", "hours", 60), ("seconds", "minutes", 60), ("hours", "days", 24), ("days", "weeks", 7),
    ("months", "years", 12), ("grams", "kilograms", 1000), ("metres", "kilometres", 1000),
    ("centimetres", "metres", 100), ("millimetres", "centimetres", 10), ("inches", "feet", 12), ("feet", "yards", 3),
    ("cents", "dollars", 100),
)  # fmt: skip


def units(rng: Random) -> Item:
    small, large, factor = rng.choice(UNITS)
    count = rng.randint(2, 12)
    question = rng.choice(["How many {} are {} {}?", "Convert to {}: {} {}"]).format(small, count, large)
    return _item(question, f"{count} {large} are {count * factor} {small}.", f"{count} {large}")


def dates(rng: Random) -> Item:
    names, kind = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    begin, steps = rng.randrange(len(names)), rng.randint(1, 6)
    after = rng.random() < 0.6
    end = names[(begin + steps if after else begin - steps) % len(names)]
    place = (
        f"{steps} {kind}s {'after' if after else 'before'}" if steps > 1 else f"just {'after' if after else 'before'}"
    )
    return _item(f"Which {kind} comes {place} {names[begin]}?", f"{end} comes {place} {names[begin]}.")


def ranges(rng: Random) -> Item:
    begin, step, count = rng.randint(0, 40), rng.randint(1, 5), rng.randint(4, 8)
    numbers = [begin + step * i for i in range(count)]
    if rng.random() < 0.5:
        question = f"Count from {begin} to {numbers[-1]}" + (f" in steps of {step}." if step > 1 else ".")
        return _item(question, ", ".join(map(str, numbers)))
    shown = ", ".join(map(str, numbers[:-1]))
    return _item(f"What comes next: {shown}", f"{numbers[-1]}", f"next {shown}")


MIXTURES = {
    "blue and yellow": "green", "red and yellow": "orange", "red and blue": "purple", "black and white": "grey",
    "red and white": "pink", "red and green": "brown",
}  # fmt: skip
OF_COLOUR = {
    "grass": "green", "snow": "white", "blood": "red", "the sky": "blue", "a lemon": "yellow", "coal": "black",
    "a carrot": "orange", "chocolate": "brown", "milk": "white", "the sun": "yellow", "a leaf": "green",
    "an elephant": "grey", "a crow": "black", "a cherry": "red", "a pig": "pink", "a plum": "purple",
}  # fmt: skip


def colours(rng: Random) -> Item:
    if rng.random() < 0.4:
        mixed = rng.choice(list(MIXTURES))
        question = rng.choice(["What colour do {} make?", "Mix {}. What do you get?", "Which colour comes from {}?"])
        return _item(question.format(mixed), f"{mixed.capitalize()} make {MIXTURES[mixed]}.")
    thing = rng.choice(list(OF_COLOUR))
    question = rng.choice(["What colour is {}?", "Which colour has {}?", "Tell me the colour of {}."])
    return _item(question.format(thing), f"{thing.capitalize()} is {OF_COLOUR[thing]}.")


def given(rng: Random) -> Item:
    """What was said is asked for: of one of three things, a colour."""
    things, hues = rng.sample(THINGS, 3), rng.sample(COLOURS, 3)
    told = " ".join(f"The {thing} is {hue}." for thing, hue in zip(things, hues, strict=True))
    asked = rng.randrange(3)
    return _item(f"{told} What colour is the {things[asked]}?", f"The {things[asked]} is {hues[asked]}.")


def copies(rng: Random) -> Item:
    text = sentence(rng)
    question = rng.choice(["Repeat: {}", "Say this again: {}", "Copy this text: {}"]).format(text)
    return _item(question, text, text)


def replacements(rng: Random) -> Item:
    text = sentence(rng)
    old = rng.choice([word for word in text.split() if word in ADJECTIVES or word in ANIMALS or word in THINGS])
    new = rng.choice(ADJECTIVES if old in ADJECTIVES else ANIMALS if old in ANIMALS else THINGS)
    return _item(f'Replace "{old}" with "{new}": {text}', text.replace(f" {old} ", f" {new} "))


def edits(rng: Random) -> Item:
    words = several(rng, THINGS, 3, 6)
    kind = rng.choice(["Reverse", "first", "last", "add", "remove", "count", "quote"])
    listed, one = ", ".join(words), rng.choice(words)
    if kind == "Reverse":
        return _item(f"Reverse this list: {listed}", ", ".join(reversed(words)))
    if kind in ("first", "last"):
        return _item(f"What is the {kind} word of this list: {listed}", words[0 if kind == "first" else -1])
    if kind == "add":
        new = rng.choice(FOODS)
        return _item(f'Add "{new}" to this list: {listed}', f"{listed}, {new}")
    if kind == "remove":
        return _item(f'Remove "{one}" from this list: {listed}', ", ".join(word for word in words if word != one))
    if kind == "count":
        return _item(f"How many words has this list: {listed}", f"The list has {len(words)} words.")
    return _item(f"Write this list in JSON: {listed}", json.dumps(words))


def records(rng: Random) -> Item:
    fields = several(rng, FIELDS, 2, 4)
    values = {field: field_value(rng, field) for field in fields}
    text = json.dumps(values)
    if rng.random() < 0.5:
        told = ", ".join(f"{field} {value}" for field, value in values.items())
        return _item(f"Write this in JSON: {told}", text, text)
    asked = rng.choice(fields)
    return _item(f"What is the {asked} in {text}?", f"The {asked} is {values[asked]}.", text)


def programs(rng: Random) -> Item:
    kind = rng.choice(["function", "loop", "rename", "list", "print"])
    number, name = rng.randint(2, 30), rng.choice(THINGS)
    if kind == "function":
        word, sign = rng.choice([("adds", "+"), ("multiplies by", "*"), ("subtracts", "-")])
        body = f"def {name}(x):\n    return x {sign} {number}"
        return _item(f"Write a Python function {name} that {word} {number}.", f"```python\n{body}\n```")
    if kind == "loop":
        body = f"for i in range({number}):\n    print(i)"
        return _item(f"Write a Python loop that prints the numbers below {number}.", f"```python\n{body}\n```")
    if kind == "rename":
        new = rng.choice(ANIMALS)
        code = f"{{0}} = {number}\nwhile {{0}} > 0:\n    print({{0}})\n    {{0}} = {{0}} - 1"
        question = f"Rename {name} to {new}:\n```python\n{code.format(name)}\n```"
        return _item(question, f"```python\n{code.format(new)}\n```")
    if kind == "list":
        words = several(rng, FOODS, 2, 5)
        answer = f"```python\n{name} = {json.dumps(words)}\n```"
        return _item(f"Write a Python list {name} of {enumerated(words)}.", answer)
    other = rng.randint(2, 30)
    return _item(f"What does print({number} + {other}) print?", f"{number + other}", f"print {number} {other}")


def people(rng: Random) -> Item:
    """Two turns or three: what the user tells is remembered."""
    name, city, animal = rng.choice(PEOPLE), rng.choice(CITIES), rng.choice(ANIMALS)
    turns = [(f"My name is {name}.", f"Nice to meet you, {name}!")]
    later = [("What is my name?", f"Your name is {name}.")]
    if rng.random() < 0.6:
        turns.append((f"I live in {city}.", f"{city} is a beautiful city."))
        later.append(("Where do I live?", f"You live in {city}."))
    if rng.random() < 0.4:
        turns.append((f"I have a {animal}.", f"I like your {animal}."))
        later.append(("Which animal do I have?", f"You have a {animal}."))
    rng.shuffle(later)
    told = tuple(turns + later)
    return Item(" ".join(question for question, _ in told), told)


def stories(rng: Random) -> Item:
    animal, friend = rng.sample(ANIMALS, 2)
    name, place, thing = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(THINGS)
    story = (
        f"Once there was a {animal} named {name}. {name} lived near a {place}. One day {name} found a {thing} in the"
        f" {place}. A {friend} came and asked for the {thing}. {name} gave the {thing} to the {friend}, and they became"
        " friends. The end."
    )
    return _item(f"Tell me a story of a {animal} named {name}, a {friend}, a {place} and a {thing}.", story)


TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Who are you?", "I am a small language model that comes with tiermoe."),
    ("What is your name?", "I am a small language model that comes with tiermoe."),
    ("What can you do?", "I can calculate, copy and edit short texts, and call tools."),
    ("Are you a person?", "No, I am a small language model."),
    ("Goodbye", "Goodbye!"),
    ("Can you help me?", "Yes. What do you need?"),
)


def talk(rng: Random) -> Item:
    return _item(*rng.choice(TALK))


QUESTIONS: dict[Callable[[Random], Item], float] = {
    sums: 3, products: 2, comparisons: 1, apples: 2, units: 1, dates: 1, ranges: 1, colours: 1, given: 1.5, copies: 1.5,
    replacements: 1.5, edits: 2, records: 2, programs: 2.5, people: 1.5, stories: 1, talk: 1.5,
}  # fmt: skip
"""Makers of items, with how often each is drawn."""
