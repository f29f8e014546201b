"""Experts of transformers' models left out: shells in their place, and adapters for experts outside transformers'
interface."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tiermoe.errors import ModelError
from tiermoe.kernels.gates import GATES, Gate, gate_named, other_gate, usual_gate
from tiermoe.model.families.family import Family
from tiermoe.model.moe import ExpertGate

Classes = Mapping[str, type[torch.nn.Module]]


def drop_parameters(module: Any, experts: int) -> None:
    """Takes the parameters with a row for each of so many experts off a module; `expert_shapes` remembers an
    expert's."""
    stacked = {name: p for name, p in module._parameters.items() if p is not None and p.shape[0] == experts}
    module.expert_shapes = {name: tuple(parameter.shape[1:]) for name, parameter in stacked.items()}
    for name, parameter in stacked.items():
        del module._parameters[name]
        # questions about shape and dtype are still answered
        module.__dict__[name] = parameter.detach()


def default_gate(module: Any, features: Tensor) -> Tensor:
    """The gate that transformers gives experts of its interface that have none of their own."""
    gate, up = features.chunk(2, dim=-1)
    gated: Tensor = module.act_fn(gate) * up
    return gated


def _switch(own: Classes) -> dict[str, type[torch.nn.Module]]:
    """A ModuleDict of small modules that is called with one-hot masks."""
    cls = own["SwitchTransformersExperts"]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            cls.__init__(self, *args, **kwargs)
        first = self["expert_0"]
        self.expert_shapes = {name: tuple(parameter.shape) for name, parameter in first.named_parameters()}
        # in a list: a registered submodule would count its own (meta) parameters
        self.expert_template = [first]
        self._modules.clear()
        self.is_transposed = self.has_gate = False
        self._is_hf_initialized = True

    def forward(self: Any, hidden: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        """mask (T, 1, E) one-hot, zero where the expert's capacity overflowed; weights (T, 1)."""
        chosen = mask[:, 0]
        index = torch.where(chosen.any(-1), chosen.argmax(-1), self.num_experts)
        result: Tensor = self.run_experts(hidden, index[:, None], weights)
        return result

    shell = type(cls.__name__, (cls,), {"__init__": __init__, "forward": forward, "run_experts": None})
    # weight initialisation of these blocks reaches into the experts that are not there
    return {cls.__name__: shell} | {
        name: _initialised(each) for name, each in own.items() if name.endswith("SparseMLP")
    }


def _initialised(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        self._is_hf_initialized = True

    return type(cls.__name__, (cls,), {"__init__": __init__})


def _llama4(own: Classes) -> dict[str, type[torch.nn.Module]]:
    """Experts that are all run on all tokens, scaled by a router's score, which is 0 but for the chosen one's."""
    experts, router, block = (own[f"Llama4{name}"] for name in ("TextExperts", "Router", "TextMoe"))

    def __init__(self: Any, config: Any) -> None:
        if config.num_experts_per_tok != 1:
            raise ModelError(
                f"this Llama 4 chooses {config.num_experts_per_tok} experts a token and scales the input of each; "
                f"tiermoe runs those that choose one, as all that were published do"
            )
        with torch.device("meta"):
            experts.__init__(self, config)
        drop_parameters(self, self.num_experts)
        self.is_transposed = self.has_gate = True
        self._is_hf_initialized = True

    def choose(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (T, H) → logits (T, E), scores (T, 1) and experts (T, 1)."""
        logits = torch.nn.functional.linear(hidden, self.weight)
        largest, index = logits.topk(self.top_k, dim=1)
        return logits, largest.float().sigmoid().to(logits.dtype), index

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden.reshape(-1, self.hidden_dim)
        logits, scores, index = self.router(hidden)
        routed = self.experts.run_experts(hidden * scores, index, torch.ones_like(scores))
        return self.shared_expert(hidden).add_(routed), logits

    members = {"__init__": __init__, "run_experts": None, "_apply_gate": default_gate}
    return {
        experts.__name__: type(experts.__name__, (experts,), members),
        router.__name__: type(router.__name__, (router,), {"forward": choose}),
        block.__name__: type(block.__name__, (block,), {"forward": forward}),
    }


ADAPTERS: dict[str, Callable[[Classes], dict[str, type[torch.nn.Module]]]] = {"switch": _switch, "llama4": _llama4}
"""What `Family.adapter` names."""


IMPLEMENTATION = "tiermoe"
_ROUTERS = ("gate", "router")
_DEFAULT = ("_default_apply_gate", "default_gate")  # of the interface, of our adapters
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
    """Makes transformers' experts modules call `run_experts`, which the engine gives shells (`engine.loading`)."""

    def forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.run_experts(hidden, index, weights)
        return result

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def shells_of(model: Any) -> dict[str, Any]:
    """Path → shell of a model, in the order of its layers."""
    return {path: module for path, module in model.named_modules() if is_shell(module)}


def routers_of(model: Any) -> list[tuple[str, Any]]:
    """Of each shell in the order of layers: what the router beside it is called in their block, and the router;
    ('', None) if there is none."""
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
    own, act = type(module)._apply_gate.__qualname__, getattr(module, "act_fn", None)
    if own in _DEFAULT:
        return _usual_gate(act, gated=True) or other_gate(type(module).__name__, module._apply_gate, act)
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
