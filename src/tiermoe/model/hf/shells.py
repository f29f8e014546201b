"""Shells: experts modules without experts, which are transformers' own classes with no expert weights in them.

A shell keeps everything of its class (activation, gate, flags, config) and drops the stacked expert parameters, whose
shapes it remembers in `expert_shapes`. So a model can be built and loaded without ever holding its experts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from transformers.activations import ACT2FN, GELUTanh, ReLUSquaredActivation, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tiermoe.errors import ModelError
from tiermoe.kernels.experts import Activation
from tiermoe.kernels.gates import ClampedGate, LimitedSilu, gelu_gate, relu_squared, silu_gate
from tiermoe.model.families.family import Family
from tiermoe.model.hf.adapters import ADAPTERS, drop_parameters
from tiermoe.model.moe import ExpertGate

IMPLEMENTATION = "tiermoe"
_ROUTERS = ("gate", "router")
_USUAL = ("_default_apply_gate", "usual_gate")  # of the interface, of our adapters
_CLAMPED = "GptOssExperts._apply_gate"
_CLAMPED_HALVES = "MiniMaxM3VLExperts._apply_gate"
_SILU = (torch.nn.SiLU, SiLUActivation)
_LIMITED = {
    "DeepseekV4Experts._apply_gate": "limit", "Glm5NextTextExperts._apply_gate": "swiglu_limit",
    "HYV4Experts._apply_gate": "swiglu_limit",
}  # fmt: skip
"""Gates that are a `LimitedSilu` → the attribute that has its limit."""

# modelling modules are global to the process
_building = threading.Lock()


@contextlib.contextmanager
def experts_left_out(family: Family, config: Any) -> Iterator[None]:
    """Context in which transformers builds `family`'s models with shells, which replace the experts' classes in the
    modelling module. (`register_patch_mapping` does the same to every module of transformers, which
    takes a second.) Holds a process-wide lock; restores the module also where building fails."""
    module = modelling_module(config)
    with _building:
        own = classes_of(module)
        if family.adapter is None:
            instead = {name: shell_of(cls) for name, cls in own.items() if is_experts_class(cls)}
        else:
            instead = ADAPTERS[family.adapter](own)
        kept = {name: own[name] for name in instead}
        vars(module).update(instead)
        try:
            yield
        finally:
            vars(module).update(kept)


def modelling_module(config: Any) -> ModuleType:
    """The module in which the classes of a (text) config's family are defined: of its class, or of one that it is
    derived from."""
    modules = (cls.__module__ for cls in type(config).__mro__)
    name = next((name for name in modules if "configuration_" in name), type(config).__module__)
    return importlib.import_module(name.replace("configuration_", "modeling_"))


def classes_of(module: ModuleType) -> dict[str, type[torch.nn.Module]]:
    """The modules that `module` itself defines, by name."""
    own = vars(module).values()
    return {
        each.__name__: each
        for each in own
        if isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == module.__name__
    }


def is_experts_class(cls: type[torch.nn.Module]) -> bool:
    """Whether transformers' experts interface computes this class (`use_experts_implementation`)."""
    return hasattr(cls, "_apply_gate") and hasattr(cls.forward, "__wrapped__")


def shell_of(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of an experts class that drops its expert parameters after construction."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            cls.__init__(self, *args, **kwargs)
        if self.has_post_expert_norm:
            raise ModelError(
                f"{cls.__name__} normalises what each expert gives before it is weighted; no kernel of tiermoe does"
            )
        drop_parameters(self, self.num_experts)
        self._is_hf_initialized = True

    return type(cls.__name__, (cls,), {"__init__": __init__, "run_experts": None})


def register() -> None:
    """Makes transformers' experts modules call `run_experts`, which the engine gives shells (`engine.attachment`)."""

    def forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.run_experts(hidden, index, weights)
        return result

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def shells_of(model: Any) -> dict[str, Any]:
    """Path → shell of a model, in the order of its layers."""
    return {path: module for path, module in model.named_modules() if is_shell(module)}


def routers_of(model: Any) -> list[tuple[str, Any]]:
    """Of each shell in the order of layers: what the router beside it is called in their block, and the router;
    ('', None) where there is none."""
    beside: dict[Any, tuple[str, Any]] = {}
    for block in model.modules():
        shell = getattr(block, "experts", None)
        if isinstance(shell, torch.nn.Module) and is_shell(shell):
            found = ((name, getattr(block, name, None)) for name in _ROUTERS)
            beside[shell] = next(((name, it) for name, it in found if isinstance(it, torch.nn.Module)), ("", None))
    return [beside.get(shell, ("", None)) for shell in shells_of(model).values()]


def is_shell(module: torch.nn.Module) -> bool:
    """True for an experts module built inside `experts_left_out`."""
    return hasattr(module, "expert_shapes")


def activation_of(module: Any) -> Activation:
    """hidden features (T, ·) after the first matrix → features before the second: gate and up for gated experts, the
    activation alone for others. The class's own, or one of the same operations that our kernels know."""
    if hasattr(module, "expert_template"):
        activation: Activation = module.expert_template[0].act
        return activation
    if module.has_gate:
        name, act = type(module)._apply_gate.__qualname__, getattr(module, "act_fn", None)
        if name in _USUAL:
            if act is torch.nn.functional.silu or type(act) in _SILU:
                return silu_gate
            if isinstance(act, GELUTanh) and isinstance(act.act, functools.partial):  # torch's, not its formula
                return gelu_gate
        if name == _CLAMPED:
            return ClampedGate(float(module.limit), float(module.alpha))
        if name == _CLAMPED_HALVES:
            return ClampedGate(float(module.swiglu_limit), float(module.swiglu_alpha), halves=True)
        limit = _LIMITED.get(name)
        if limit is not None and (act is None or type(act) in _SILU):
            return LimitedSilu(float(getattr(module, limit)))
        gate: Activation = module._apply_gate
        return gate
    plain: Activation = getattr(module, "act_fn", None) or ACT2FN[module.config.hidden_act]
    return relu_squared if isinstance(plain, ReLUSquaredActivation) else plain


def gate_of(module: Any) -> ExpertGate:
    """The gate of an experts module."""
    elementwise = None
    if getattr(module, "has_gate", False) and type(module)._apply_gate.__qualname__ in _USUAL:
        elementwise = module.act_fn
    return ExpertGate(module.num_experts, activation_of(module), elementwise, type(module).__name__)
