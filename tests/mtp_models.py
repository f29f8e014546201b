"""Tiny checkpoints with an MTP head, engines over them, and drafts by transformers' own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

import tiny
from tiermoe.config import settings
from tiermoe.engine.load import start
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.mtp_blueprint import with_mtp

BESIDE = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
"""What `MtpLayer` has beside its decoder layer → its name in a checkpoint."""
_ABOVE = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm", "": "mtp.layers.0",
}  # fmt: skip
_MIMO = {"shared_head.norm": "model.mtp.layers.0.final_layernorm", "": "model.mtp.layers.0"}
PUBLISHED = {
    "hy_v3": {"shared_head.norm": "model.layers.3.final_layernorm"}, "mellum": _ABOVE, "exaone_moe": _ABOVE,
    "qwen3_next": _ABOVE, "qwen3_5_moe_text": _ABOVE,
    "mimo_v2_flash": {**_MIMO, "post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm"},
}  # fmt: skip
"""Family → a head's modules, by their names in layer 3 → their names in published checkpoints, as llama.cpp's converter
and transformers' `MtpModel` read them; '' stands for the others."""
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_WINDOWED, _DENSE = (
    {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2]},
    {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
)
KINDS: dict[str, dict[str, list[str]]] = {
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full", "full"]}, "mellum": _WINDOWED,
    "qwen3_next": _LINEAR, "qwen3_5_moe_text": _LINEAR,
    "exaone_moe": _WINDOWED | _DENSE, "mimo_v2_flash": _WINDOWED | _DENSE,
}  # fmt: skip
"""Family → the kinds of a model's four layers, the last of which is the head's."""


def write(directory: Path, family: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Writes a model of one layer less than its config says, whose last layer is that of an MTP head, and returns the
    head as transformers computes it, in front of the model: (model, head)."""
    changes = {"num_hidden_layers": 4, **KINDS.get(family, {}), **changes}
    tiny.write(directory, family, dtype, **changes)
    whole = tiny.oracle(directory, family, dtype)
    head = head_of(whole)
    whole.model.layers.pop(-1)
    _add_head(directory, head, changes["num_hidden_layers"] - 1, PUBLISHED.get(family, {}))
    return whole, head


def head_of(whole: Any) -> Any:
    """A random head, as transformers computes it, around the last layer of a model."""
    layer, norm = whole.model.layers[-1], type(whole.model.norm)
    head = MtpLayer(whole.config, type(layer), norm, whole.config.num_hidden_layers - 1).to(whole.dtype).eval()
    head.mtp_block = _Alone(layer)
    torch.manual_seed(9)
    with torch.no_grad():
        for name in BESIDE:
            weight = getattr(head, name).weight
            torch.nn.init.normal_(weight, std=0.1) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return head


class _Alone(torch.nn.Module):
    """A decoder layer that gives its output alone, where others also give what their indexers chose."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        output = self.layer(*arguments, **named)
        return output[0] if isinstance(output, tuple) else output


def attach_head(whole: Any) -> Any:
    """Puts a random head's modules into the last layer of a model, under their names in a checkpoint; the head."""
    head, last = head_of(whole), whole.model.layers[-1]
    last.shared_head = torch.nn.Module()
    for part, called in BESIDE.items():
        parent, _, child = called.rpartition(".")
        last.get_submodule(parent).add_module(child, getattr(head, part))
    return head


def _add_head(directory: Path, head: Any, layer: int, published: dict[str, str]) -> None:
    file = directory / "model.safetensors"
    tensors, prefix = load_file(file), f"model.layers.{layer}"
    tensors |= {f"{prefix}.{name}.weight": getattr(head, own).weight.detach().clone() for own, name in BESIDE.items()}
    tensors = {_published(name, f"{prefix}.", published): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    _without_last(config)
    (directory / "config.json").write_text(json.dumps(config))


def publish_head(family: str, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Takes the last layer of a saved model for a head's, by its published names."""
    _without_last(config)
    config["num_nextn_predict_layers"] = 1
    prefix = f"model.layers.{config['num_hidden_layers']}."
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensors[_published(name, prefix, PUBLISHED.get(family, {}))] = tensors.pop(name)


def _without_last(config: dict[str, Any]) -> None:
    config["num_hidden_layers"] -= 1
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if kinds := config.get(name):
            config[name] = kinds[:-1]


def _published(name: str, prefix: str, published: dict[str, str]) -> str:
    if not name.startswith(prefix):
        return name
    path = name.removeprefix(prefix)
    module = path.rpartition(".")[0]
    if module in published:
        return f"{published[module]}.weight"
    return f"{published['']}.{path}" if "" in published else name


@torch.no_grad()
def drafts(model: Any, head: Any, ids: list[int], count: int) -> list[torch.Tensor]:
    """Logits (vocabulary) of so many drafts of what follows `ids`, by the likeliest token of each: everything is
    computed again for each of them, without a cache."""
    kinds = getattr(model.config, "layer_types", None) or [""]
    window = model.config.sliding_window if kinds[-1] == "sliding_attention" else len(ids) + count
    by_kind = kinds[-1:] if hasattr(model.model.rotary_emb, "layer_types") else ()
    hidden = model.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    tokens, found = list(ids[1:]), list[torch.Tensor]()
    while len(found) < count:
        embedded = model.model.embed_tokens(torch.tensor([tokens]))
        positions = torch.arange(len(tokens))[None]
        far = positions.T - positions
        mask = torch.zeros(far.shape, dtype=hidden.dtype).masked_fill((far < 0) | (far >= window), float("-inf"))
        angles = model.model.rotary_emb(embedded, positions, *by_kind)
        output = head(embedded, hidden, angles, mask[None, None], positions, None)
        found.append(model.lm_head(output[0, -1]))
        tokens.append(int(found[-1].argmax()))
        hidden = torch.cat((hidden, output[:, -1:]), dim=1)
    return found


def blueprint_with_head(directory: Path, store: Path | None = None) -> Any:
    return with_mtp(inspect_model(directory, str(directory), store), store)


def engine_with_head(directory: Path, **options: Any) -> Any:
    options = {"memory": "4GiB", "device": "cpu", "lanes": 1, **options}
    return start(blueprint_with_head(directory), settings(**options))
