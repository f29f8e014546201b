"""Models in GGUF files with headers that llama.cpp's converter wrote: configs, tensors, logits and tokens are those of
transformers' eager model with the weights that the gguf package dequantises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
from gguf_cases import CASES
from gguf_engines import agree, eager, eager_greedy, engine_of, logits_of
from gguf_files import kinds
from parity import close, tokens
from small_engines import greedy
from tiermoe.batch import Batch, decode, prompt
from tiermoe.model.gguf.outline import outline_of
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.model_config import ModelConfig
from tiny import GRANITE_GROUPS

ELSE_ORDERED = ("gpt_oss", "llama4", "llama4 of other layers", "llama4 of 128 experts", "qwen3_next")
"""Models whose matrices are not in the order of transformers' parameters."""
LEFT = (
    "deepseek_v4", "deepseek_v4 yarn", "hy_v4", "hy_v4 yarn", "lfm2_moe", "qwen4_exp", "qwen4_exp of longer n-grams",
    "qwen4_exp without n-grams", "gemma4", "gemma4 with values of their own", "glm5_next",
    "glm5_next of shared choices",
)  # fmt: skip
"""Models whose outlines are left to transformers' code."""
ELSEWHERE = ("transformers_version", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "architectures")
"""Config entries that the tokenizer's entries say, or no entry."""
_DENSE = {"intermediate_size"}  # of dense layers, which these models do not have
_NGRAMS = {"ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts"}
OTHERWISE: dict[str, set[str]] = {
    **dict.fromkeys(("qwen3_moe", "qwen3_moe tied", "qwen2_moe", "hy_v3 of more shared experts"), _DENSE),
    **dict.fromkeys(("mellum", "mellum of another factor", "mellum without windows"), _DENSE),
    "mixtral": {"head_dim"},  # None stands for what the entry says
    "deepseek_v2": {"n_group", "topk_group"},  # None stands for 1
    "deepseek_v2 lite": {"n_group", "topk_group"},
    "deepseek_v4 yarn": {"compress_rates"},  # of layers that it does not have
    "qwen3_next": {"model_type"},  # read as Qwen3.5, which has the matrices in the file's order
    "glm4_moe_lite": {"model_type"},  # read as DeepSeek-V3, which it is but for the MTP head
    "dots1": {"max_window_layers"},  # of windows that it does not have
    "dots1 with biases": {"max_window_layers"},
    "ling3": {"first_k_dense_replace"},  # `mlp_layer_types` says it
    "llama4": {"interleave_moe_layer_step"},  # `moe_layers` says it
    "llama4 of 128 experts": {"interleave_moe_layer_step"},
    "llama4 of other layers": {"intermediate_size_mlp"},
    "granitemoehybrid": {"mamba_chunk_size"},  # how it is computed
    "nemotron_h": {"chunk_size"},
    "nemotron_h without latents": {"chunk_size", "tie_word_embeddings"},
    "jamba of other periods": {"attn_layer_period"},  # of one layer with attention
    "qwen4_exp": _NGRAMS,  # what hashes follow from: the file has the hashes
    "qwen4_exp of longer n-grams": {*_NGRAMS, "seed"},
    "qwen4_exp without n-grams": {*_NGRAMS, "ple_embed_dim", "heads_per_ngram"},
}
"""Models → entries in which the file's config is another, without a difference in what is computed."""


FIRST = {case.family: name for name, case in reversed(CASES.items())}.values()
"""The first model of each family."""
_WIDENED = {"afmoe": ("mlp.expert_bias",), "kimi_linear": ("forget_gate.dt_bias", "gate.e_score_correction_bias")}
"""Model → ends of parameters, a few numbers each, that transformers keeps in float32 from 5.24 on, and older ones do
not."""


@dataclass
class Written:
    """A model in a file, loaded once for all that is asked of it."""

    name: str
    model: Any  # transformers'
    file: Path
    blueprint: Blueprint
    engine: Any


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    name, folder = request.param, tmp_path_factory.mktemp("gguf")
    if name == "granitemoehybrid" and GRANITE_GROUPS == 1:
        pytest.skip("the header's model has several groups, which this transformers normalises together")
    model = gguf_files.model_of(name)
    file = gguf_files.write(folder / "model.gguf", model, name, kinds("q8_0", "q5_0", "q4_0"))
    blueprint = inspect_model(file, str(file), folder / "store")
    engine = engine_of(file, store=folder / "store")
    yield Written(name, model, file, blueprint, engine)
    engine.close()


def test_the_config_is_transformers(written: Written) -> None:
    found, wanted = written.blueprint.config, written.model.config.get_text_config()
    compared = 0
    wanted.allow_global_per_layer_attribute_access = True
    for layer in map(int, found.fields.get("per_layer_config", ())):  # of Gemma 4
        mine, theirs = found.of_layer(layer), wanted.per_layer_config[layer]
        assert (mine.head_dim, mine.num_key_value_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    for name in found.fields.keys() - {"per_layer_config"}:
        if name not in ELSEWHERE and name not in OTHERWISE.get(written.name, ()) and hasattr(wanted, name):
            mine, theirs = (_plain(name, getattr(each, name), wanted) for each in (found, wanted))
            assert mine == theirs, name
            compared += 1
    assert compared > 15


def _plain(name: str, value: Any, config: Any) -> Any:
    """A value of a config as it is compared: rotated columns, not which share of a head they are."""
    if isinstance(value, dict) and name == "rope_parameters":
        columns = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shares = {key: int(share * columns) for key, share in value.items() if key == "partial_rotary_factor"}
        whole = {"partial_rotary_factor": columns, **value, **shares}
        return {key: _plain(name, each, config) for key, each in whole.items()}
    return list(value) if isinstance(value, tuple) else value


def test_logits_and_tokens_are_those_of_the_dequantised_weights(written: Written) -> None:
    ids = tokens(1, 40)[0].tolist()
    assert agree(logits_of(written.engine, ids), eager(written.model, ids))
    assert greedy(written.engine, ids[:16], 8) == eager_greedy(written.model, ids[:16], 8)


def test_tensors_are_the_dequantised_ones_bit_for_bit(written: Written) -> None:
    if written.name in ELSE_ORDERED:
        return
    wanted = written.model.state_dict()
    for path in written.blueprint.checkpoint.tensors:
        assert torch.equal(written.blueprint.checkpoint.read(path).to(wanted[path].dtype), wanted[path]), path


def test_a_ragged_batch_and_a_forked_prefix(written: Written) -> None:
    """Sequences of other lengths than a window or the blocks that an indexer chooses, in one step: of each family."""
    if written.name not in FIRST:
        return
    long, short, third = (tokens(1, count, seed=count)[0].tolist() for count in (41, 6, 30))
    engine = written.engine
    cache = engine.new_cache(4, 48)
    slabs = [cache.open() for _ in range(3)]
    engine.step(Batch((prompt(slabs[0], long[:-1]),)), cache)
    fork = cache.fork(slabs[0])
    engine.step(Batch((prompt(slabs[1], short[:-1]),)), cache)
    rows = (decode(slabs[0], 40, long[40]), decode(slabs[1], 5, short[5]), prompt(slabs[2], third), decode(fork, 40, 7))
    found = engine.step(Batch(rows), cache)
    for logits, ids in zip(found, (long, short, third, [*long[:-1], 7]), strict=True):
        assert close(logits, eager(written.model, ids)[-1])


def test_names_and_shapes_tell_what_transformers_code_does(written: Written) -> None:
    found = written.blueprint.known
    assert (found is None) == (written.name in LEFT)
    if found is not None:
        wanted = replace(written.blueprint, known=None).outline
        widens = _WIDENED.get(written.name, ())
        widened = {path: found.tensors[path] for path in wanted.tensors if path.endswith(widens)}
        wanted = replace(wanted, tensors={**wanted.tensors, **widened})
        assert abs(found.dense_bytes - wanted.dense_bytes) < 1024  # without buffers of rotary embeddings
        assert sorted(found.packable) == sorted(wanted.packable)
        assert replace(found, dense_bytes=0, packable=()) == replace(wanted, dense_bytes=0, packable=())


def test_a_file_that_is_not_as_its_config_says_is_left_to_transformers_code(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.model_of("qwen3_moe"), "qwen3_moe", kinds("q8_0"))
    blueprint = inspect_model(file, str(file), tmp_path / "store")
    fewer = {"num_experts": 4, "num_local_experts": 4}
    for changes in ({"head_dim": 32}, fewer, {"hidden_act": "gelu"}, {"num_hidden_layers": 2}):
        config = ModelConfig({**blueprint.config.fields, **changes}, {})
        assert outline_of(blueprint.checkpoint, config, torch.bfloat16) is None
    assert outline_of(blueprint.checkpoint, blueprint.config, torch.float16) is None


START = """
import sys
from pathlib import Path
from tiermoe.platform import process_memory
process_memory.import_libraries(own_process=True)
from tiermoe.config import settings
from tiermoe.engine.load import start
from tiermoe.model.hf.blueprint import inspect_model
asked = settings(threads=1, memory="4GiB", store=sys.argv[2])
engine = start(inspect_model(Path(sys.argv[1]), sys.argv[1], asked.store), asked)
assert not [name for name in sys.modules if name.startswith("transformers.models.qwen3_moe.modeling")]
engine.close()
"""


def test_the_first_start_imports_no_modelling_code(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.model_of("qwen3_moe"), "qwen3_moe", kinds("q8_0"))
    done = subprocess.run(
        [sys.executable, "-c", START, file, tmp_path / "store"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
