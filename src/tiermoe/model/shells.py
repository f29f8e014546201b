"""Experts modules without experts: transformers' own classes, instantiated with no expert weights in them.

A shell keeps everything of its class (activation, gate, flags, config) and drops the stacked expert parameters, whose
shapes it remembers in `expert_shapes`. So a model can be built and loaded without ever holding its experts.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from transformers.activations import ACT2FN, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from tiermoe.families import Family
from tiermoe.kernels.expert import Activation
from tiermoe.kernels.gates import ClampedGate, silu_gate
from tiermoe.model.expert_gates import refused

IMPLEMENTATION = "tiermoe"
_CLAMPED = "GptOssExperts._apply_gate"
_SILU = (torch.nn.SiLU, SiLUActivation)

# modelling modules are global to the process
_building = threading.Lock()


@contextlib.contextmanager
def experts_left_out(family: Family, config: Any) -> Iterator[None]:
    """While open, transformers builds `family`'s models with shells: they stand in the modelling module in the place of
    the classes that its blocks name. (`register_patch_mapping` does the same to every module of transformers, which
    takes a second.) Holds a process-wide lock; restores the module also where building fails."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    with _building:
        own = {each.__name__: each for each in _classes_of(module)}
        instead = {family.experts: shell_of(own[family.experts], family)}
        if family.adapter:
            # weight initialisation of these blocks reaches into the experts that are not there
            instead |= {name: _initialised(cls) for name, cls in own.items() if name.endswith("SparseMLP")}
        vars(module).update(instead)
        try:
            yield
        finally:
            vars(module).update({name: own[name] for name in instead})


def _classes_of(module: ModuleType) -> list[type[torch.nn.Module]]:
    return [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]


def shell_of(cls: type[torch.nn.Module], family: Family) -> type[torch.nn.Module]:
    """A subclass of an experts class that drops its expert parameters after construction."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            cls.__init__(self, *args, **kwargs)
        if family.adapter:
            _drop_modules(self)
        else:
            _drop_parameters(self)
        self._is_hf_initialized = True

    members: dict[str, Any] = {"__init__": __init__, "run_experts": None}
    if family.adapter:
        members["forward"] = _adapter_forward
    return type(cls.__name__, (cls,), members)


def register() -> None:
    """Makes transformers' experts modules call `run_experts`, which shells are given (`attachment.attach`)."""

    def forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.run_experts(hidden, index, weights)
        return result

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def shells_of(model: Any) -> list[Any]:
    """The shells of a model in the order of its layers."""
    return [module for module in model.modules() if is_shell(module)]


def is_shell(module: torch.nn.Module) -> bool:
    """True for an experts module built inside `experts_left_out`."""
    return hasattr(module, "expert_shapes")


def _drop_parameters(module: Any) -> None:
    stacked = {name: p for name, p in module._parameters.items() if p is not None and p.shape[0] == module.num_experts}
    module.expert_shapes = {name: tuple(parameter.shape[1:]) for name, parameter in stacked.items()}
    for name, parameter in stacked.items():
        del module._parameters[name]
        # questions about shape and dtype are still answered
        module.__dict__[name] = parameter.detach()


def _drop_modules(module: Any) -> None:
    first = module["expert_0"]
    module.expert_shapes = {name: tuple(parameter.shape) for name, parameter in first.named_parameters()}
    # held in a list: a registered submodule would count its own (meta) parameters
    module.expert_template = [first]
    module._modules.clear()
    module.is_transposed = module.has_gate = False


def _adapter_forward(self: Any, hidden: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Switch's call: mask (T, 1, E) one-hot, zero where the expert's capacity overflowed; weights (T, 1)."""
    chosen = mask[:, 0]
    index = torch.where(chosen.any(-1), chosen.argmax(-1), self.num_experts)
    run: Callable[..., torch.Tensor] = self.run_experts
    return run(hidden, index[:, None], weights)


def activation_of(module: Any) -> Activation:
    """hidden features (T, ·) after the first matrix → features before the second: gate and up for gated experts, the
    activation alone for others. The class's own, or one of the same operations that our kernels know."""
    if hasattr(module, "expert_template"):
        activation: Activation = module.expert_template[0].act
        return activation
    if module.has_gate:
        if type(module)._apply_gate is _default_apply_gate and type(module.act_fn) in _SILU:
            return silu_gate
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


def _initialised(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        self._is_hf_initialized = True

    return type(cls.__name__, (cls,), {"__init__": __init__})
