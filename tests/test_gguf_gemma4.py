"""GGUF files of Gemma 4 with experts: what their configs are beside the entries, experts in NVFP4, and files that
contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValue, GGUFValueType

import gguf_files
from gguf_engines import engine_of, logits_of
from gguf_files import kinds
from parity import tokens
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

FAMILY = "gemma4_text"


def written(folder: Path, factors: Any = None, **entries: Any) -> tuple[Any, Path]:
    """transformers' model, and the file of it. factors: of the rotary embedding, in place of the model's."""
    model = gguf_files.model_of(FAMILY)
    own = {f"gemma4.{key}": value for key, value in entries.items()}
    file = gguf_files.write(folder / "model.gguf", model, FAMILY, kinds("q8_0"), **own)
    if factors is not None:
        found = next(each for each in gguf.GGUFReader(file, "r+").tensors if each.name == "rope_freqs.weight")
        found.data[:] = np.array(factors, dtype=np.float32)
    return model, file


def test_the_config_is_transformers(tmp_path: Path) -> None:
    model, file = written(tmp_path)
    found = inspect_model(file, "model", tmp_path / "store").config
    for name in (
        "layer_types", "sliding_window", "attention_k_eq_v", "num_experts",
        "top_k_experts", "moe_intermediate_size", "intermediate_size", "rope_parameters", "final_logit_softcapping",
        "hidden_size_per_layer_input", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(model.config, name), name
    for layer, wanted in enumerate(model.config.per_layer_config):
        assert found.of_layer(layer).head_dim == wanted.head_dim
        assert found.of_layer(layer).num_key_value_heads == wanted.num_key_value_heads


def test_experts_in_nvfp4_have_their_scales_in_their_factors(tmp_path: Path) -> None:
    """llama.cpp's converter multiplies an expert's scale into the factor of its last matrix."""
    model = gguf_files.model_of(FAMILY, moe_intermediate_size=64)
    folded = model.model.layers[0], model.model.layers[2]  # the writer gives the second no factors
    for layer in folded:
        del layer.router.per_expert_scale
    file = gguf_files.write(tmp_path / "model.gguf", model, FAMILY, kinds("nvfp4", "nvfp4", "q8_0"))
    for layer in folded:
        layer.router.per_expert_scale = torch.nn.Parameter(torch.ones(8))
    ids = tokens(1, 20)[0].tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    engine = engine_of(file, store=tmp_path / "store")
    found = logits_of(engine, ids)
    engine.close()
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()


NUMBER = GGUFValueType.UINT32


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_length_per_layer_input", 8, "has embeddings of each layer, which no Gemma 4 with experts has"),
        ("attention.shared_kv_layers", 2, "has layers that share keys and values, which no Gemma 4 with experts has"),
        ("attention.sliding_window_pattern", None, "does not say which of its layers have a window; download it again"),
        (
            "attention.head_count_kv",
            [1, 2, 2],
            r"does not say how many heads of keys layers of a kind have \(\[1, 2, 2",
        ),
        ("attention.head_count_kv", [1, 2], "does not say how many heads of keys layers of a kind have"),
        ("attention.key_length_swa", None, "says nothing of gemma4.attention.key_length_swa; convert the"),
        ("rope.freq_base_swa", None, "says nothing of gemma4.rope.freq_base_swa"),
        ("rope.dimension_count_swa", 8, "scales its rotary embedding, or rotates parts of heads, and no Gemma 4 does"),
    ],
)
def test_entries_that_no_model_has(key: str, value: Any, message: str, tmp_path: Path) -> None:
    kind = GGUFValue(value, GGUFValueType.ARRAY, NUMBER) if isinstance(value, list) else GGUFValue(value, NUMBER)
    entry = None if value is None else kind
    with pytest.raises(ModelError, match=message):
        inspect_model(written(tmp_path, **{key: entry})[1], "model", tmp_path / "store")


@pytest.mark.parametrize("factors", [[2.0] * 16, [1.0, 1e30] * 8, [1e30] * 16])
def test_factors_that_no_model_has(factors: list[float], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"divides the frequencies .* and Gemma 4 the first by 1 and all others by"):
        inspect_model(written(tmp_path, factors)[1], "model", tmp_path / "store")
