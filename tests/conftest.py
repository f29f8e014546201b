"""Shared fixtures. Tests run on one compute thread: the machine that runs them may have no more."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import tiny
from commands import Command, command_runner
from tiermoe import native
from tiermoe.engine import machine_rates
from tiermoe.offload import plugins, probe
from tiermoe.offload.policies.allotment import ALLOTMENTS
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.policies.precision import PRECISIONS
from tiermoe.offload.policies.prediction import PREDICTIONS
from tiermoe.offload.presets import PRESETS
from tiermoe.platform import process_memory

pytest_plugins = ["fake_cuda", "gpu_models", "gpu_rig", "serving", "sharded"]
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"
hypothesis.settings.register_profile(
    "whatever the machine does beside", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("whatever the machine does beside")

SHIPPED = Path(__file__).parent.parent / "models" / "stories-7m"


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stores of the tests go to a temporary cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TIERMOE_CACHE"] = str(folder)
    yield folder
    del os.environ["TIERMOE_CACHE"]


@pytest.fixture(autouse=True, scope="session")
def _short_looks_at_the_drive() -> None:
    """How fast this machine and its drive are is of no interest here."""
    probe.SECONDS = 0.002
    machine_rates.ALONE_SHARE = 0


@pytest.fixture(autouse=True, scope="session")
def _loads_are_quick() -> Iterator[None]:
    """Half the time of loading a tiny model goes into what helps a user's process, and files against power cuts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_memory, "clean_library_pages", list)
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _garbage_is_collected_in_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _imports_are_no_garbage() -> None:
    """Every load collects garbage twice: half a second with torch and transformers among it. What earlier modules have
    frozen stays so: a search through all of it before each of 200 modules takes longer than many of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, dtype, what `tiny.write` takes) → a random checkpoint, written once and, as its store lies in the cache
    folder of all tests, packed once. For tests that only read; who damages or moves one writes their own."""
    made: dict[tuple[Any, ...], Path] = {}

    def model(family: str, dtype: torch.dtype, **options: Any) -> Path:
        key = (family, dtype, *sorted(options.items()))
        if key not in made:
            made[key] = tiny.write(tmp_path_factory.mktemp(family), family, dtype, **options)
        return made[key]

    return model


@pytest.fixture(scope="session", name="tiny")
def _tiny(tiny_model: Callable[..., Path]) -> Path:
    """A tiny checkpoint in float32, without a chat template."""
    return tiny_model("qwen3_moe", torch.float32)


@pytest.fixture(scope="session")
def mixtral(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("mixtral", torch.float32)


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The model that the project ships."""
    return SHIPPED


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled kernels and no native threads, as with TIERMOE_NATIVE=0."""
    monkeypatch.delenv(native.ISA, raising=False)
    monkeypatch.setenv(native.SWITCH, "0")
    native.available.cache_clear()
    yield
    monkeypatch.undo()
    native.available.cache_clear()


@pytest.fixture(scope="module", params=native.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Native kernels of one instruction set after the other, of those that this machine has."""
    before = native.instruction_set()
    assert before is not None
    native.use(request.param)
    yield request.param
    native.use(before)


@pytest.fixture
def on_every_set() -> Iterator[Callable[[Callable[[], Any]], list[Any]]]:
    """What a function gives under each instruction set of this machine."""
    before = native.instruction_set()

    def each(compute: Callable[[], Any]) -> list[Any]:
        found = []
        for name in native.instruction_sets():
            native.use(name)
            found.append(compute())
        return found

    yield each
    if before is not None:
        native.use(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices here are small, and threads that wait for each other make them slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plain_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What plugins have added leaves again, and each can be loaded once more."""
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.setattr(plugins, "_packages_loaded", False)
    tables, modules = (EVICTIONS, PREDICTIONS, PRECISIONS, ALLOTMENTS, PRESETS), set(sys.modules)
    before = [dict(table.data) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.data = entries
    for name in set(sys.modules) - modules:
        if name.endswith(".py"):
            del sys.modules[name]


@pytest.fixture
def tiermoe_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process: arguments → how it ended."""
    return command_runner(monkeypatch, capsys)
