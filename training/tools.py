"""Questions that a tool answers: its signature, the call, what it returns, the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.words import CITIES, FOODS, PEOPLE, ROOMS, THINGS, enumerated, sentence, several

Values = dict[str, Any]


@dataclass(frozen=True)
class Use:
    """A question for a tool: one pair (arguments, result) for each call, and the answer."""

    question: str
    calls: tuple[tuple[Values, Values], ...]
    answer: str


@dataclass(frozen=True)
class Tool:
    """A tool as a chat describes it; ``types`` maps its parameters, all required, to JSON types."""

    name: str
    description: str
    types: dict[str, str]
    use: Callable[[Random], Use]

    @property
    def signature(self) -> Values:
        """The tool in OpenAI's form."""
        properties = {parameter: {"type": kind} for parameter, kind in self.types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.types)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy"]


def weather(rng: Random) -> Tool:
    name = rng.choice(["get_weather", "get_weather", "weather", "find_weather", "get_current_weather"])
    place = rng.choice(["city", "city", "location"])

    def use(rng: Random) -> Use:
        cities = several(rng, CITIES, 1, 2) if rng.random() < 0.3 else [rng.choice(CITIES)]
        found = [{"temperature": rng.randint(-5, 35), "sky": rng.choice(SKIES)} for _ in cities]
        told = [
            f"{result['temperature']} degrees and {result['sky']} in {city}"
            for city, result in zip(cities, found, strict=True)
        ]
        question = rng.choice(["What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"])
        calls = tuple(({place: city}, result) for city, result in zip(cities, found, strict=True))
        return Use(question.format(enumerated(cities)), calls, f"It is {enumerated(told)}.")

    return Tool(name, "The weather of a city.", {place: "string"}, use)


PROPERTIES: tuple[tuple[str, list[str], int], ...] = (
    ("price", THINGS, 900), ("weight", THINGS, 90), ("stock", FOODS, 500), ("age", PEOPLE, 90), ("height", PEOPLE, 200),
    ("population", CITIES, 9000), ("score", PEOPLE, 100), ("distance", CITIES, 3000), ("temperature", ROOMS, 30),
    ("size", ROOMS, 60),
)  # fmt: skip


def look_up(rng: Random) -> Tool:
    """A tool for one property of many things; its name is drawn, so that it has to be read."""
    prop, subjects, most = rng.choice(PROPERTIES)
    name = f"{rng.choice(['get', 'find', 'read', 'look_up', 'check'])}_{prop}"
    parameter = rng.choice(["name", "of", "item", "what"])

    def use(rng: Random) -> Use:
        subject, value = rng.choice(subjects), rng.randint(1, most)
        of = subject if subject[0].isupper() else f"the {subject}"
        question = rng.choice(["What is the {} of {}?", "Tell me the {} of {}.", "Look up the {} of {}."])
        if rng.random() < 0.07:
            answer = f"I could not find the {prop} of {of}."
            return Use(question.format(prop, of), (({parameter: subject}, {"error": "not found"}),), answer)
        answer = f"The {prop} of {of} is {value}."
        return Use(question.format(prop, of), (({parameter: subject}, {prop: value}),), answer)

    return Tool(name, f"The {prop} of something.", {parameter: "string"}, use)


def calculator(rng: Random) -> Tool:
    name = rng.choice(["calculate", "calculator", "compute"])

    def use(rng: Random) -> Use:
        a, b = rng.randint(100, 9999), rng.randint(100, 9999)
        sign, result = rng.choice([("+", a + b), ("-", a - b), ("*", a * b)])
        term = f"{a} {sign} {b}"
        question = rng.choice(["What is {}?", "Calculate {}.", "How much is {}?"])
        return Use(question.format(term), (({"expression": term}, {"result": result}),), f"{term} = {result}")

    return Tool(name, "Calculates an expression.", {"expression": "string"}, use)


def messages(rng: Random) -> Tool:
    name = rng.choice(["send_message", "send_mail", "notify"])

    def use(rng: Random) -> Use:
        who, text = rng.choice(PEOPLE), sentence(rng)
        question = rng.choice(["Tell {} that {}.", "Send {} a message: {}"]).format(who, text)
        return Use(question, (({"to": who, "text": text}, {"sent": True}),), f"I have sent {who} the message.")

    return Tool(name, "Sends a person a text.", {"to": "string", "text": "string"}, use)


def timers(rng: Random) -> Tool:
    unit = rng.choice(["minutes", "seconds", "hours"])

    def use(rng: Random) -> Use:
        count = rng.randint(2, 60)
        question = rng.choice(["Set a timer for {} {}.", "Wake me in {} {}."]).format(count, unit)
        return Use(question, (({unit: count}, {"ok": True}),), f"The timer is set to {count} {unit}.")

    return Tool("set_timer", "Starts a timer.", {unit: "integer"}, use)


def lights(rng: Random) -> Tool:
    name = rng.choice(["switch_light", "set_light", "light"])

    def use(rng: Random) -> Use:
        room, on = rng.choice(ROOMS), rng.random() < 0.5
        word = "on" if on else "off"
        question = f"Turn {word} the light in the {room}."
        return Use(question, (({"room": room, "on": on}, {"ok": True}),), f"The light in the {room} is {word}.")

    return Tool(name, "Turns a light on or off.", {"room": "string", "on": "boolean"}, use)


def path(rng: Random) -> str:
    return f"{rng.choice(THINGS)}.{rng.choice(['txt', 'md', 'py', 'json'])}"


def read_file(rng: Random) -> Tool:
    def use(rng: Random) -> Use:
        file, text = path(rng), sentence(rng)
        question = rng.choice(["Read {}.", "What is in {}?", "Show me {}."]).format(file)
        return Use(question, (({"path": file}, {"text": text}),), f"{file} says: {text}")

    return Tool("read_file", "Reads a file.", {"path": "string"}, use)


def write_file(rng: Random) -> Tool:
    def use(rng: Random) -> Use:
        file, text = path(rng), sentence(rng)
        question = f"Write to {file}: {text}"
        return Use(question, (({"path": file, "text": text}, {"ok": True}),), f"I have written {file}.")

    return Tool("write_file", "Writes a text to a file.", {"path": "string", "text": "string"}, use)


def list_files(rng: Random) -> Tool:
    def use(rng: Random) -> Use:
        folder, files = rng.choice(ROOMS), [path(rng) for _ in range(rng.randint(1, 4))]
        question = rng.choice(["Which files are in {}?", "List the files of {}."]).format(folder)
        return Use(question, (({"folder": folder}, {"files": files}),), f"{folder} holds {enumerated(files)}.")

    return Tool("list_files", "Lists the files of a folder.", {"folder": "string"}, use)


TOOLS: dict[Callable[[Random], Tool], float] = {
    weather: 2.5, look_up: 4, calculator: 2, messages: 1, timers: 1, lights: 1, read_file: 1, write_file: 1,
    list_files: 1,
}  # fmt: skip
"""Makers of tools, with how often each is drawn."""
