"""Experts modules without experts: transformers' own classes, instantiated with no expert weights in them.

A shell keeps everything of its class (activation, gate, flags, config) and drops the stacked expert parameters, whose
shapes it remembers in `expert_shapes`. So a model can be built and loaded without ever holding its experts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers.activations import ACT2FN, GELUTanh, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from tiermoe.errors import ModelError
from tiermoe.families import Family
from tiermoe.kernels.expert import Activation
from tiermoe.kernels.gates import ClampedGate, gelu_gate, silu_gate
from tiermoe.model.adapters import ADAPTERS, drop_parameters
from tiermoe.model.discovery import classes_of, is_experts_class, modelling_module
from tiermoe.model.expert_gates import refused

IMPLEMENTATION = "tiermoe"
_ROUTERS = ("gate", "router")
_CLAMPED = "GptOssExperts._apply_gate"
_SILU = (torch.nn.SiLU, SiLUActivation)

# modelling modules are global to the process
_building = threading.Lock()


@contextlib.contextmanager
def experts_left_out(family: Family, config: Any) -> Iterator[None]:
    """While open, transformers builds `family`'s models with shells: they stand in the modelling module in the place of
    the classes that its blocks name. (`register_patch_mapping` does the same to every module of transformers, which
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
    """Makes transformers' experts modules call `run_experts`, which shells are given (`attachment.attach`)."""

    def forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.run_experts(hidden, index, weights)
        return result

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def shells_of(model: Any) -> list[Any]:
    """The shells of a model in the order of its layers."""
    return [module for module in model.modules() if is_shell(module)]


def routers_of(model: Any) -> list[tuple[str, Any]]:
    """Of each shell in the order of layers: what the router beside it is called in their block, and the router;
    ('', None) where there is none."""
    beside: dict[Any, tuple[str, Any]] = {}
    for block in model.modules():
        shell = getattr(block, "experts", None)
        if isinstance(shell, torch.nn.Module) and is_shell(shell):
            found = ((name, getattr(block, name, None)) for name in _ROUTERS)
            beside[shell] = next(((name, it) for name, it in found if isinstance(it, torch.nn.Module)), ("", None))
    return [beside.get(shell, ("", None)) for shell in shells_of(model)]


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
        if type(module)._apply_gate is _default_apply_gate:
            act = module.act_fn
            if act is torch.nn.functional.silu or type(act) in _SILU:
                return silu_gate
            if isinstance(act, GELUTanh) and isinstance(act.act, functools.partial):  # torch's, not its formula
                return gelu_gate
        if type(module)._apply_gate.__qualname__ == _CLAMPED:
            return ClampedGate(float(module.limit), float(module.alpha))
        gate: Activation = module._apply_gate
        return gate
    plain: Activation = getattr(module, "act_fn", None) or ACT2FN[module.config.hidden_act]
    return plain


def gate_activation_of(module: Any) -> Activation:
    """act of an experts module whose experts are W2 (act(W1 x) * W3 x). ModelError where its class gates otherwise."""
    if getattr(module, "has_gate", False) and type(module)._apply_gate is _default_apply_gate:
        activation: Activation = module.act_fn
        return activation
    raise refused(type(module).__name__)


class ShellGate:
    """`expert_gates.ExpertGate` of a shell."""

    def __init__(self, shell: Any) -> None:
        self.experts: int = shell.num_experts
        self._shell = shell

    def activation(self) -> Activation:
        return activation_of(self._shell)

    def alone(self) -> Activation:
        return gate_activation_of(self._shell)
