"""Shells: experts modules without experts, which are transformers' own classes with no expert weights in them.

A shell keeps everything of its class (activation, gate, flags, config) and drops the stacked expert parameters, whose
shapes it remembers in `expert_shapes`. So a model can be built and loaded without ever holding its experts.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from transformers.activations import ACT2FN, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from tiermoe.errors import ModelError
from tiermoe.kernels.gates import GATES, Gate, gate_named, other_gate, usual_gate
from tiermoe.model.families.table import Family
from tiermoe.model.hf.adapters import ADAPTERS, drop_parameters
from tiermoe.model.moe import ExpertGate

IMPLEMENTATION = "tiermoe"
_ROUTERS = ("gate", "router")
_CLAMPED = "GptOssExperts._apply_gate"
_CLAMPED_HALVES = "MiniMaxM3VLExperts._apply_gate"
_SILU = (torch.nn.SiLU, SiLUActivation)
_LIMITED = {
    "DeepseekV4Experts._apply_gate": "limit", "Glm5NextTextExperts._apply_gate": "swiglu_limit",
    "HYV4Experts._apply_gate": "swiglu_limit",
}  # fmt: skip
"""Gates that are a "limited silu" → the attribute that has its limit."""

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
    """The module in which the classes of a (text) config's family are defined."""
    return importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))


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


def expert_gate(module: Any) -> Gate:
    """What experts of a module compute between their matrices: the gate of `kernels.gates` with the same operations,
    else the class's own."""
    if hasattr(module, "expert_template"):
        return other_gate(type(module).__name__, module.expert_template[0].act)
    if not module.has_gate:
        act = getattr(module, "act_fn", None) or ACT2FN[module.config.hidden_act]
        return _usual_gate(act, gated=False) or other_gate(type(module).__name__, act)
    if type(module)._apply_gate is _default_apply_gate:
        act = module.act_fn
        return _usual_gate(act, gated=True) or other_gate(type(module).__name__, module._apply_gate, act)
    own, act = type(module)._apply_gate.__qualname__, getattr(module, "act_fn", None)
    if own == _CLAMPED:
        return gate_named("clamped", module.limit, module.alpha)
    if own == _CLAMPED_HALVES:
        return gate_named("clamped in halves", module.swiglu_limit, module.swiglu_alpha)
    if own in _LIMITED and (act is None or type(act) in _SILU):
        return gate_named("limited silu", getattr(module, _LIMITED[own]))
    return other_gate(type(module).__name__, module._apply_gate)


def _usual_gate(act: Any, gated: bool) -> Gate | None:
    """The gate of an activation of transformers, found by the class that its name in configs stands for."""
    if act is torch.nn.functional.silu or type(act) in _SILU:
        name = "silu"
    else:
        known = [kind.act for kind in GATES.values() if kind.act in ACT2FN and _same(ACT2FN[kind.act], act)]
        name = next(iter(known), "")
    found = usual_gate(name)
    return found if found and found.kind.gated == gated else None


def _same(known: Any, act: Any) -> bool:
    """Whether two activations are of one class; of GELU by tanh, whether both are torch's, or its formula."""
    return type(known) is type(act) and type(getattr(known, "act", None)) is type(getattr(act, "act", None))


def gate_of(module: Any) -> ExpertGate:
    """The gate of an experts module."""
    return ExpertGate(module.num_experts, expert_gate(module))
