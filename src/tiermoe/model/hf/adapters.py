"""Adapters of experts outside transformers' experts interface: classes that replace those of a modelling module.

An adapter takes a module's classes by name and returns those to replace. Each shell has what the shells of the
interface have: `num_experts`, `expert_shapes`, `is_transposed`, `has_gate`, an activation, and `run_experts`, which it
calls with hidden (T, H), index (T, K) and weights (T, K); an index of `num_experts` or more names no expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError

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


def usual_gate(module: Any, features: Tensor) -> Tensor:
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

    members = {"__init__": __init__, "run_experts": None, "_apply_gate": usual_gate}
    return {
        experts.__name__: type(experts.__name__, (experts,), members),
        router.__name__: type(router.__name__, (router,), {"forward": choose}),
        block.__name__: type(block.__name__, (block,), {"forward": forward}),
    }


ADAPTERS: dict[str, Callable[[Classes], dict[str, type[torch.nn.Module]]]] = {"switch": _switch, "llama4": _llama4}
"""What `Family.adapter` names."""
