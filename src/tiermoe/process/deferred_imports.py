"""Postpones the imports that transformers' modules write at their top and that inference never uses.

``import transformers.models.X`` imports torch._dynamo (with sympy and, where installed, triton) for three
decorators and a context manager, and torch's distributed tensors, FSDP and checkpointing for ``isinstance``
tests that are false in a process without them. `install` puts a finder before the others. For the modules in
`POSTPONED`, and only where the importing module belongs to transformers, as told by its frames (`postponed`), it hands
out a module that runs at its first use, as ``importlib.util.LazyLoader`` does, and stand-ins for the names asked for.
Everyone else who touches such a module gets the real one, run in place: until then the process is one that has imported
torch alone. No file, class or function of a library is changed.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from tiermoe.process.postponed import POSTPONED, TRANSFORMERS_CODE, asking_frame, at_module_level

# What the import system reads from a module, or sets on it; that is no use of the module.
_IMPORT_ATTRIBUTES = frozenset(
    {"__spec__", "__path__", "__name__", "__loader__", "__package__", "__file__", "__cached__", "__class__"}
)
# The styles of parallel layers hold placements that are made, never used, while transformers is imported.
STYLES = "transformers.distributed.parallel_utils"


class _State:
    """What is kept of a postponed module until it has run."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.lock = threading.RLock()
        self.running = False
        self.stand_ins: dict[str, StandIn] = {}
        self.importers: list[dict[str, Any]] = []
        self.marked: list[tuple[str, Callable[..., Any]]] = []
        self.disabled: CodeType | None = None


_states: dict[str, _State] = {}
_sysconfig = threading.Lock()
_PATIENCE_S = 60.0


def run(name: str) -> ModuleType:
    """Runs a postponed module in place, once; other threads wait for it. Returns the module."""
    module = sys.modules[name]
    state = _states.get(name)
    if state is None:
        return module
    parent = name.rpartition(".")[0]
    if parent in _states:
        run(parent)
    # Two threads that import a package and its submodule at once can wait for each other; that must not hang.
    if not state.lock.acquire(timeout=_PATIENCE_S):
        raise ImportError(f"{name} is being imported by a thread that waits for this one", name=name)
    try:
        if state.running or name not in _states:  # its own imports ask for it, or another thread ran it
            return module
        _fill_sysconfig()
        state.running = True
        try:
            state.loader.exec_module(module)
        finally:
            state.running = False
        module.__class__ = ModuleType
        del _states[name]
    finally:
        state.lock.release()
    _hand_over(module, state)
    return module


def _fill_sysconfig() -> None:
    """Python before 3.12 fills sysconfig's table at its first use without a lock: a second thread reads it half filled.
    What is postponed here runs in the threads of its users, and triton reads that table while it is imported."""
    with _sysconfig:
        sysconfig.get_config_vars()


def _hand_over(module: ModuleType, state: _State) -> None:
    """Puts the real objects in the place of stand-ins and applies the decorators that were only noted."""
    for name, stand_in in state.stand_ins.items():
        real = getattr(module, name)
        for namespace in state.importers:
            for key in [key for key, value in namespace.items() if value is stand_in]:
                namespace[key] = real
    for decorator, function in state.marked:
        getattr(module, decorator)(function)
    if state.disabled is not None:  # as torch does with the wrapper of its own non-recursive disable
        module.decorators.skip_code(state.disabled)
    styles = sys.modules.get(STYLES)
    if styles is not None and any(stand_in.called for stand_in in state.stand_ins.values()):
        for style in styles.ALL_PARALLEL_STYLES.values():
            vars(style).update({key: _placed(value) for key, value in vars(style).items()})


def _placed(value: Any) -> Any:
    """`value`, with the real object where it is, or holds, a `StandInCall`."""
    if type(value) in (list, tuple):
        return type(value)(_placed(item) for item in value)
    return value._real() if type(value) is StandInCall else value


class PostponedModule(ModuleType):
    """A module that runs at the first attribute asked for, except where a stand-in does."""

    # ModuleType.__getattribute__ by name: once the module has run, self is no PostponedModule any more.
    def __getattribute__(self, name: str) -> Any:
        if name in _IMPORT_ATTRIBUTES:
            return ModuleType.__getattribute__(self, name)
        own_name: str = ModuleType.__getattribute__(self, "__name__")
        state = _states.get(own_name)
        if state is not None and not state.running:
            asker = asking_frame(own_name, sys._getframe(1))
            if asker is not None and own_name == "torch._dynamo" and name in _DECORATORS:
                return functools.partial(_DECORATORS[name], state)
            if asker is not None and name in POSTPONED[own_name]:
                if asker.f_code.co_name == "<module>":
                    state.importers.append(asker.f_globals)
                if asker.f_code.co_name in TRANSFORMERS_CODE:
                    return state.stand_ins.setdefault(name, StandIn(own_name, name))
        run(own_name)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a submodule to its package: no use of the package either.
        if name not in _IMPORT_ATTRIBUTES and not isinstance(value, ModuleType):
            run(self.__name__)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        run(self.__name__)
        super().__delattr__(name)


class StandIn:
    """Stands for one name of a postponed module; any use but ``isinstance`` runs the module."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name, self.called = module, name, False

    def _real(self) -> Any:
        return getattr(run(self._module), self._name)

    def __instancecheck__(self, instance: object) -> bool:
        # A class of a module that has not run has no instances.
        state = _states.get(self._module)
        if type(instance) is StandInCall:
            instance = instance._real()
        return (state is None or state.running) and isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        state = _states.get(self._module)
        return (state is None or state.running) and issubclass(subclass, self._real())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = _states.get(self._module)
        if state is not None and not state.running and at_module_level(sys._getframe(1)):
            self.called = True
            return StandInCall(self, args, kwargs)
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real(),)

    def __or__(self, other: Any) -> Any:
        return self._real() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._real()

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._real() == other)

    def __hash__(self) -> int:
        return hash(self._real())


class StandInCall:
    """What a module of transformers makes of a stand-in while being imported; any use makes the real one."""

    def __init__(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._make = functools.cache(lambda: stand_in._real()(*args, **kwargs))

    def _real(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._real() == other)

    def __hash__(self) -> int:
        return hash(self._real())


def _mark(decorator: str, state: _State, function: Callable[..., Any]) -> Callable[..., Any]:
    """For decorators that return the function itself: noted now, applied when torch._dynamo runs."""
    state.marked.append((decorator, function))
    return function


def _disable(
    state: _State, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
) -> Callable[..., Any]:
    """torch._dynamo.disable for a function: without torch._dynamo nothing is compiled, so it simply runs."""
    if fn is None:
        return functools.partial(_disable, state, recursive=recursive, **options)
    if not isinstance(fn, FunctionType):
        return cast(Callable[..., Any], run("torch._dynamo").disable(fn, recursive, **options))
    function, disabled = fn, functools.cache(lambda: run("torch._dynamo").disable(fn, recursive, **options))

    @functools.wraps(function)
    def postponed(*args: Any, **kwargs: Any) -> Any:
        return (function if "torch._dynamo" in _states else disabled())(*args, **kwargs)

    # By these torch._dynamo knows a function that it must leave alone (eval_frame.py, DisableContext).
    vars(postponed).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=options.get("reason"),
        _torchdynamo_orig_callable=function,
        _torchdynamo_wrapper_id=id(postponed),
        _torchdynamo_disable_recursive=recursive,
    )
    state.disabled = cast(FunctionType, postponed).__code__
    return postponed


_DECORATORS: dict[str, Callable[..., Any]] = {
    "allow_in_graph": functools.partial(_mark, "allow_in_graph"),
    "assume_constant_result": functools.partial(_mark, "assume_constant_result"),
    "disable": _disable,
}


class _PostponingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return PostponedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        _states[module.__name__] = _State(self.loader)


class _AdoptingLoader(Loader):
    """Yields a module that its package imported while it ran, so that it is not loaded a second time."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("torch."):
            return None
        package = name.rpartition(".")[0]
        free = package not in POSTPONED or package in _states  # a package that has run wants all its modules
        if name in POSTPONED and free and asking_frame(name, sys._getframe(1)) is not None:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _PostponingLoader(spec.loader)
            return spec
        return _run_packages(name)


def _run_packages(name: str) -> importlib.machinery.ModuleSpec | None:
    """Runs the postponed packages that `name` lies in, before it is found; they may import it themselves."""
    parts = name.split(".")
    packages = [".".join(parts[:end]) for end in range(1, len(parts))]
    postponed = [package for package in packages if package in _states and not _states[package].running]
    for package in postponed:
        run(package)
    module = sys.modules.get(name)
    if not postponed or module is None:
        return None
    # The import system goes by the spec of the module that it finds in sys.modules now.
    module.__spec__ = importlib.machinery.ModuleSpec(name, _AdoptingLoader(module))
    return module.__spec__


def install() -> None:
    """Postpones from now on; modules already imported stay as they are. Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
