"""`tiermoe serve A B`: several models behind one address and in one budget, each in a process of its own.

`python -m tiermoe.cli.serve_models serve MODEL …` is such a process: that command, which ends when its standard input
does, and so when the router has ended, however it ended. `… serve_models budgets` plans all models in a process of its
own, since planning needs torch and the router has none."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.cli.listening import SOCKET, Listener, wait_for_a_signal
from tiermoe.cli.output import cause, note, spinner
from tiermoe.config import MIB, Settings, format_size
from tiermoe.errors import ConfigError
from tiermoe.model.hf.local_models import check_local
from tiermoe.offload.plugins import load_named

if TYPE_CHECKING:
    from tiermoe.serve.loaded_models import Model, ModelProcess

_ROUTER_GROWS = 32 * MIB  # bytes of connections and of what answers bring in, without bodies: 14 MiB with them measured
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, None: 1}


def serve_models(
    models: Sequence[str],
    folder: Path | None,
    aliases: Iterable[str],
    keep_alive: str,
    most_loaded: int | None,
    options: dict[str, Any],
    passed: Mapping[str, Any],
    sampling: Mapping[str, Any],
    listener: Listener,
) -> None:
    """Serves the models, and those of a folder, until a signal. options: of each engine, with the budget of all.
    passed: other options of each model's server, with those of sampling. ConfigError where the options cannot be, a
    model that is named cannot be served, or none can; ModelError as `check_local`."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("several models need Unix sockets, which this system does not have; name one model")
    keep_alive_s = _seconds(keep_alive)
    places = _places(models, folder)
    others = _aliases(aliases, list(places))
    for model in models:
        check_local(model)
    from tiermoe.platform.process_memory import resident_bytes
    from tiermoe.serve.intake import intake_bytes
    from tiermoe.serve.loaded_models import LoadedModels
    from tiermoe.serve.router import create_router

    with spinner("planning the models"):
        asked = {"models": list(places.values()), "options": options, "kv_memory": passed.get("kv_memory")}
        planned = _ask_for_budgets(asked | {"sampling": sampling})
    ranges = dict(zip(places, planned["ranges"], strict=True))
    if any(each.get("on_gpu") for each in ranges.values()) and most_loaded is None:
        note("note: on a GPU one model is loaded at a time")
        most_loaded = 1
    context = max(each.get("context", 0) for each in ranges.values())
    router = resident_bytes() + intake_bytes(context) + _ROUTER_GROWS
    budget = _Budget(planned["budget"], planned["source"], router, most_loaded)
    with tempfile.TemporaryDirectory(prefix="tiermoe-") as sockets:  # for this user alone
        served = []
        for number, (name, place) in enumerate(places.items()):
            words = [place, "--name", name, *_words(options, passed)]
            served.append(_model(name, ranges[name], budget, others[name], _starter(words, Path(sockets), number)))
        _check(served, len(models))
        _note_turns(served, budget, most_loaded)
        loaded = LoadedModels(served, budget.models, most_loaded, keep_alive_s, passed["max_queue"], note)
        with listener.serving(create_router(loaded, context, **listener.access)):
            note(f"{', '.join(places)} at {listener}; {budget}; Ctrl-C ends the server")
            try:
                wait_for_a_signal()
            finally:
                loaded.close()


# --- names ---


def _places(models: Sequence[str], folder: Path | None) -> dict[str, str]:
    """Name → path or hub id, of the models named and of those in a folder. ConfigError for a name that occurs
    twice, and if there is no model."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--models-dir {folder} is no folder; name the folder that has the models' folders or files")
    places: dict[str, str] = {}
    for model in [*models, *(_models_in(folder) if folder is not None else ())]:
        name = name_of(model)
        if name in places:
            raise ConfigError(
                f"two models are called {name}: {places[name]} and {model}; rename one, or serve one of them"
            )
        places[name] = model
    if not places:
        raise ConfigError(f"--models-dir {folder} has no models: no folder with a config.json, and no GGUF file")
    return places


def name_of(model: str) -> str:
    """What clients call a model that was named so: its file or folder, else its name on the hub."""
    return Path(model).name if Path(model).exists() else model


def _models_in(folder: Path) -> Iterator[str]:
    """The models of a folder: its GGUF files, those of its folders, and its folders with a config.json. A folder with
    neither gets a line."""
    from tiermoe.model.hf.local_models import gguf_models

    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for first, *_ in gguf_models(entry.name for entry in entries if entry.is_file()).values():
        yield str(folder / first)
    for inner in filter(Path.is_dir, entries):
        names = os.listdir(inner)
        files = {} if any(name.endswith(".safetensors") for name in names) else gguf_models(names)
        yield from (str(inner / first) for first, *_ in files.values())
        if not files and "config.json" in names:
            yield str(inner)
        elif not files:
            note(f"note: {inner} has no model (no config.json, no GGUF file) and is left out")


def _aliases(given: Iterable[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Model → its other names. ConfigError for one that is not NAME=MODEL, names no model, or is a name already."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for text in given:
        alias, _, model = map(str.strip, text.partition("="))
        if not (alias and model):
            raise ConfigError(f"--alias {text} is not NAME=MODEL; write it like --alias small={names[0]}")
        if model not in found:
            near = difflib.get_close_matches(model, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"--alias {text}: there is no model {model}; {hint}")
        if alias in found:
            raise ConfigError(f"--alias {text}: {alias} is the name of a model; choose another alias")
        if other := next((name for name, aliases in found.items() if alias in aliases), None):
            raise ConfigError(f"--alias {text}: {alias} is an alias of {other} already; choose another one")
        found[model].append(alias)
    return found


# --- the budget ---


class _Budget:
    """The memory budget of a server, in bytes: `models` for all processes of models, the rest for the router; `largest`
    for one model."""

    def __init__(self, nbytes: int, source: str, router: int, most_loaded: int | None) -> None:
        self.models = max(nbytes - router, 0)
        self.largest = self.models // (most_loaded or 1)
        self._nbytes, self._source, self._router, self._most_loaded = nbytes, source, router, most_loaded or 1

    def __str__(self) -> str:
        return f"{format_size(self.models)} for them and {format_size(self._router)} for the router ({self._source})"

    def problem(self, least: int) -> str:
        """Why a model that needs `least` bytes can never be loaded; empty if it can."""
        if least <= self.largest:
            return ""
        needed = -(-(least * self._most_loaded + self._router) // MIB)
        part = f"one of {self._most_loaded} parts" if self._most_loaded > 1 else "what is left"
        return (
            f"it needs {format_size(least)}, and {part} of {format_size(self._nbytes)} without the router's "
            f"{format_size(self._router)} is {format_size(self.largest)}; use --memory {needed}MiB or more"
            + (", or a smaller --models-max" if self._most_loaded > 1 else ", or a smaller --context")
        )


def _model(
    name: str,
    planned: Mapping[str, Any],
    budget: _Budget,
    aliases: Sequence[str],
    process_of: Callable[[int], ModelProcess],
) -> Model:
    """A model that may be loaded, by its plan."""
    from tiermoe.serve.loaded_models import Model

    if problem := planned.get("problem"):
        return Model(name, 0, 0, 0, process_of, aliases, problem)
    problem = budget.problem(planned["least"])
    return Model(name, planned["enough"], planned["most"], planned["context"], process_of, aliases, problem)


def _check(served: Sequence[Model], named: int) -> None:
    """ConfigError where one of the first `named` models cannot be served, or none can. Others get a line."""
    for index, model in enumerate(served):
        if model.problem and (index < named or all(each.problem for each in served)):
            raise ConfigError(f"{model.name} cannot be served: {model.problem}")
        if model.problem:
            note(f"note: {model.name} cannot be loaded: {model.problem}")


def _note_turns(served: Sequence[Model], budget: _Budget, most_loaded: int | None) -> None:
    """A line where not all models can be loaded at the same time."""
    room = sorted(min(model.enough, budget.largest) for model in served if not model.problem)
    fitting = sum(sum(room[: index + 1]) <= budget.models for index in range(len(room)))
    at_once = min(fitting, most_loaded or len(room))
    if at_once < len(room):
        fit = "one of these models fits" if at_once == 1 else f"{at_once} of these models fit"
        note(f"note: {fit} {format_size(budget.models)} at a time; they are loaded by turns, as requests name them")


# --- processes ---


def _words(options: Mapping[str, Any], passed: Mapping[str, Any]) -> list[str]:
    """Options of a model's server, but for its own ones, as words of a command."""
    words = [word for part, value in options.get("set", {}).items() for word in ("--set", f"{part}={value}")]
    for option, value in {**options, **passed}.items():
        if option not in ("set", "memory"):
            words.append("--max-batch" if option == "batch" else f"--{option.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def _starter(words: Sequence[str], sockets: Path, number: int) -> Callable[[int], ModelProcess]:
    """Makes a model's process, given its bytes: the command `tiermoe serve` on a socket, which is new each time."""
    from tiermoe.serve.loaded_models import ModelProcess

    starts = count()

    def process_of(nbytes: int) -> ModelProcess:
        path = sockets / f"{number}-{next(starts)}{SOCKET}"
        full = [sys.executable, "-m", "tiermoe.cli.serve_models", "serve", *words, "--host", str(path)]
        return ModelProcess([*full, "--memory", str(nbytes)], path, nbytes, lambda line: note(f"{words[2]}: {line}"))

    return process_of


def _seconds(text: str) -> float | None:
    """Seconds of '90s', '10m', '2h' or a plain number; None for 'never'. ConfigError for anything else."""
    if text == "never":
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--keep-alive {text!r} is not a time; write it like 90s, 10m, 2h or never")
    return float(match[1]) * _SECONDS[match[2]]


def _ask_for_budgets(asked: dict[str, Any]) -> dict[str, Any]:
    """What `_budgets` answers in another process. ConfigError where that fails."""
    words = [sys.executable, "-m", "tiermoe.cli.serve_models", "budgets"]
    done = subprocess.run(words, input=json.dumps(asked, default=str), stdout=subprocess.PIPE, text=True)
    answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"refused": "planning has failed"}
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    found: dict[str, Any] = answer
    return found


def _budgets(
    models: list[str], options: dict[str, Any], kv_memory: str | None, sampling: dict[str, Any]
) -> dict[str, Any]:
    """The memory budget with its source, and for each model the budgets that it can use, or why it can use none.
    ConfigError for values of `sampling` that are out of range."""
    import tiermoe.serve.app  # noqa: F401 — a server holds it when it plans
    from tiermoe.config import parse_size, settings
    from tiermoe.engine.budget import memory_budget
    from tiermoe.engine.sampling import Sampling

    Sampling(**sampling)
    asked = settings(**options)
    kv_bytes = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    budget, source = memory_budget(asked)
    ranges = []
    for model in models:
        try:
            ranges.append(_range(model, asked, "batch" in options, kv_bytes))
        except Exception as error:
            ranges.append({"problem": cause(error)})
    return {"budget": budget, "source": source, "ranges": ranges}


def _range(model: str, asked: Settings, batch_named: bool, kv_bytes: int | None) -> dict[str, Any]:
    from tiermoe.model.hf.hub import inspect_without_download
    from tiermoe.model.tokenizer import load_tokenizer
    from tiermoe.serve.batch_limits import budget_range, require_decoder

    blueprint, download = inspect_without_download(model, asked.store)
    require_decoder(blueprint)
    tokenizer = load_tokenizer(blueprint.directory) if download is None else None
    found = asdict(budget_range(blueprint, asked, batch_named, kv_bytes))
    del tokenizer  # held until here: a server holds it when it plans
    return found


def _print_budgets() -> None:
    """One JSON object in, one out."""
    from tiermoe.platform.process_memory import import_libraries

    import_libraries(own_process=True)
    try:
        load_named()
        answer = _budgets(**json.load(sys.stdin))
    except Exception as error:
        answer = {"refused": cause(error)}
    print(json.dumps(answer))


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # nobody is left to answer; a thread that hangs would keep Python from it


if __name__ == "__main__":
    if sys.argv[1:] == ["budgets"]:
        _print_budgets()
    else:
        threading.Thread(target=_end_with_input, name="tiermoe-router-lives", daemon=True).start()
        from tiermoe.cli.main import main

        main()
