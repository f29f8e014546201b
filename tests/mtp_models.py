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


def write(directory: Path, family: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Writes a model of one layer less than its config says, whose last layer is that of an MTP head, and returns the
    head as transformers computes it, in front of the model: (model, head)."""
    layers = tiny.config_of(family, **changes).num_hidden_layers
    tiny.write(directory, family, dtype, **changes)
    whole = tiny.oracle(directory, family, dtype)
    head = head_of(whole)
    whole.model.layers.pop(-1)
    _add_head(directory, head, layers - 1)
    return whole, head


def head_of(whole: Any) -> Any:
    """A random head, as transformers computes it, around the last layer of a model."""
    layer, norm = whole.model.layers[-1], type(whole.model.norm)
    head = MtpLayer(whole.config, type(layer), norm, whole.config.num_hidden_layers - 1).to(whole.dtype).eval()
    head.mtp_block = layer
    torch.manual_seed(9)
    with torch.no_grad():
        for name in BESIDE:
            weight = getattr(head, name).weight
            torch.nn.init.normal_(weight, std=0.1) if weight.dim() > 1 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return head


def _add_head(directory: Path, head: Any, layer: int) -> None:
    file = directory / "model.safetensors"
    tensors, prefix = load_file(file), f"model.layers.{layer}"
    tensors |= {f"{prefix}.{name}.weight": getattr(head, own).weight.detach().clone() for own, name in BESIDE.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = layer
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := config.get(name):
            config[name] = kinds[:layer]
    (directory / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def drafts(model: Any, head: Any, ids: list[int], count: int) -> list[torch.Tensor]:
    """Logits (vocabulary) of so many drafts of what follows `ids`, by the likeliest token of each: everything is
    computed again for each of them, without a cache."""
    hidden = model.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    tokens, found = list(ids[1:]), list[torch.Tensor]()
    while len(found) < count:
        embedded = model.model.embed_tokens(torch.tensor([tokens]))
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        angles = model.model.rotary_emb(embedded, positions)
        output = head(embedded, hidden, angles, mask, positions, None)
        found.append(model.lm_head(output[0, -1]))
        tokens.append(int(found[-1].argmax()))
        hidden = torch.cat((hidden, output[:, -1:]), dim=1)
    return found


def blueprint_with_head(directory: Path, store: Path | None = None) -> Any:
    return with_mtp(inspect_model(directory, str(directory), store), store)


def engine_with_head(directory: Path, **options: Any) -> Any:
    options = {"memory": "4GiB", "device": "cpu", "lanes": 1, **options}
    return start(blueprint_with_head(directory), settings(**options))
