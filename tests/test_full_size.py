"""GGUF files of real models' shapes with a recorded trace's routing, and the benchmark that runs them."""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from benchmark_commands import Printed, benchmark_runner
from benchmarks import full_size_child
from benchmarks.full_size import cases_of, check_routing, replayed, tokens_of
from benchmarks.random_gguf import Pool, expert_types, one_hot_blocks, routing_for, tensors, text_of, type_of, write
from benchmarks.random_model import KINDS, Config, config_of, specs
from benchmarks.recorded_routing import AMPLITUDE, GROUPS, Routing, routing_of
from small_traces import decode, layer, prompt, trace_of, write_trace
from tiermoe.errors import ConfigError, TraceError
from tiermoe.formats.gguf_file import open_gguf
from tiermoe.lab.bench.child import CaseFailed
from tiermoe.lab.trace import Trace
from tiermoe.model.gguf.checkpoint import open_checkpoint
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.tokenizer import load_tokenizer

_SMALL = {"vocab_size": 4224, "hidden_size": 256, "intermediate_size": 256, "num_experts_per_tok": 3}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_EXPERTS, _LAYERS = 8, 3
TINY: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {**_SMALL, **_HEADS, "num_experts": _EXPERTS, "moe_intermediate_size": 256},
    "gpt-oss-20b": {**_SMALL, **_HEADS, "num_local_experts": _EXPERTS, "hidden_size": 96},
    "deepseek-v2-lite": {
        **_SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": _EXPERTS,
        "kv_lora_rank": 64, "moe_intermediate_size": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
    "glm-4.5-air": {**_SMALL, **_HEADS, "n_routed_experts": _EXPERTS, "moe_intermediate_size": 64},
}  # fmt: skip
TINY["gpt-oss-120b"] = TINY["gpt-oss-20b"]


def recorded(layers: int = _LAYERS, decoded: int = 12) -> Trace:
    """A trace of 2 experts a token: a prompt of three tokens, whose last layer runs for one, and decoded ones."""
    draw = random.Random(5)

    def chosen(tokens: int) -> list[list[int]]:
        return [draw.sample(range(_EXPERTS), 2) for _ in range(tokens)]

    first = prompt(*(layer(*chosen(3 if number < layers - 1 else 1)) for number in range(layers)))
    return trace_of([first, *(decode(*(layer(*chosen(1)) for _ in range(layers))) for _ in range(decoded))], _EXPERTS)


def small(kind: str, layers: int = _LAYERS) -> Config:
    return config_of(kind, layers, **TINY[kind])


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.trace", recorded())


@pytest.fixture
def run_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    return benchmark_runner(monkeypatch, capsys)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_what_its_architecture_has(kind: str, tmp_path: Path) -> None:
    out, config = tmp_path / "out.gguf", small(kind)
    nbytes = write(kind, out, config)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("out.gguf", nbytes)]
    blueprint = inspect_model(out, str(out), None)
    assert blueprint.known is not None
    assert blueprint.known.whole
    found = {name: tensor.shape for name, tensor in open_checkpoint(open_gguf(out)).tensors.items()}
    expected = {name: spec.shape for name, spec in specs(kind, config) if ".experts." not in name}
    assert expected == {name: shape for name, shape in found.items() if ".experts." not in name}
    for name in ("rms_norm_eps", "num_experts_per_tok", "max_position_embeddings", "routed_scaling_factor"):
        assert getattr(blueprint.config, name, None) == config.get(name)


def test_layers_with_more_bits_are_llama_cpps() -> None:
    more = [*range(6), *range(8, 42, 3), *range(42, 48)]  # of a published Qwen3-30B-A3B-Q4_K_M.gguf
    config = config_of("qwen3-30b-a3b")
    found: dict[str, list[int]] = {}
    sizes = {Type.F32: 4.0, Type.Q4_K: 144 / 256, Type.Q6_K: 210 / 256}
    nbytes = 0.0
    for name, spec in tensors("qwen3-30b-a3b", config):
        kind = type_of(name, spec, config)
        nbytes += sizes[kind] * math.prod(spec.shape)
        if kind is Type.Q6_K and name.startswith("blk."):
            _, number, part, _ = name.split(".")
            found.setdefault(part, []).append(int(number))
    assert found == {"attn_v": more, "ffn_down_exps": more}
    assert nbytes == pytest.approx(18.55e9, rel=1e-3)


def test_experts_have_the_types_that_are_asked_for() -> None:
    config = config_of("qwen3-30b-a3b", 2)
    types = {"ffn_gate_exps": Type.IQ2_XXS, "ffn_up_exps": Type.IQ2_XXS, "ffn_down_exps": Type.IQ3_S}
    for name, spec in tensors("qwen3-30b-a3b", config):
        asked = types.get(name.removesuffix(".weight").rpartition(".")[2], type_of(name, spec, config))
        assert type_of(name, spec, config, expert_types("iq2_xxs,iq3_s")) is asked
    with pytest.raises(argparse.ArgumentTypeError, match="iq2 is no pair of types"):
        expert_types("iq2")


_IQ = [Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_XS]


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q6_K, Type.Q5_0, Type.Q8_0, Type.MXFP4, *_IQ])
def test_blocks_have_their_deviation_and_tensors_differ(kind: Type) -> None:
    pool = Pool(kind, 1 / 64, np.random.default_rng(0))
    first, second = (pool.draw((32, 1024)) for _ in range(2))
    weights = dequantize(first, kind)
    assert weights.shape == (32, 1024)
    assert abs(weights.mean()) < 1 / 1000
    assert weights.std() == pytest.approx(1 / 64, rel=0.5 if kind is Type.MXFP4 else 0.05)  # whole powers of two
    assert not np.array_equal(first, second)


def test_one_hot_blocks_are_what_gguf_decodes() -> None:
    columns = np.random.default_rng(0).permuted(np.tile(np.arange(512), (40, 1)), axis=1)[:, :3]
    expected = np.zeros((40, 512), np.float32)
    np.put_along_axis(expected, columns, AMPLITUDE, axis=1)
    np.testing.assert_allclose(dequantize(one_hot_blocks(columns, 512), Type.Q4_K), expected, rtol=1e-3)


def test_routers_choose_what_was_recorded_and_forecast_a_share_of_it() -> None:
    trace = recorded()
    routing = routing_of(trace, _LAYERS, _EXPERTS, top_k=3, recall=0.0)
    assert (routing.classes, routing.prompt) == (15, 3)
    codes = torch.zeros(15, 256).scatter_(1, torch.from_numpy(routing.codes(15)), AMPLITUDE)
    tokens = [[each.layers[number].experts for number in range(_LAYERS)] for each in trace.passes]
    for number in range(_LAYERS):
        seen = codes * torch.from_numpy(routing.norm(number, 256))
        chosen = (seen @ torch.from_numpy(routing.router(number, 256)).T).topk(3).indices.tolist()
        written = [set(row) for row in chosen]
        assert written == [set(each[number]) for each in routing.chosen]
        assert all(set(tokens[1 + token][number][0]) <= written[3 + token] for token in range(12))
        if number + 1 < _LAYERS:
            ahead = (seen @ torch.from_numpy(routing.router(number + 1, 256)).T).topk(3).indices.tolist()
            assert [set(row) for row in ahead] == [set(each[number + 1]) for each in routing.forecast[1]]
    assert [set(each[0]) for each in tokens[0][:1]] == [set(tokens[0][0][0])]
    right = routing_of(trace, _LAYERS, _EXPERTS, top_k=3, recall=1.0)
    assert all(each == right.chosen for each in right.forecast.values())
    assert len(right.forecast) == GROUPS - 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 4}, "has 3 MoE layers, the model 4"),
        ({"experts": 16}, "has 8 experts a layer, the model 16"),
        ({"top_k": 1}, "has 2 experts a token, the model 1"),
    ],
)
def test_a_trace_of_another_model_is_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        routing_of(recorded(), **{"layers": _LAYERS, "experts": _EXPERTS, "top_k": 3, **changes})


def test_a_model_without_room_for_a_trace_is_refused(trace_file: Path) -> None:
    config = small("qwen3-30b-a3b")
    with pytest.raises(ConfigError, match="15 tokens, too many for a hidden size of 256"):
        routing_for(trace_file, config)
    with pytest.raises(ConfigError, match="a multiple of 256, not 96"):
        routing_for(trace_file, {**config, "hidden_size": 96})


def test_replays_read_what_a_brute_force_lru_misses() -> None:
    routing: Routing = routing_of(recorded(), _LAYERS, _EXPERTS, top_k=3)
    tokens = tokens_of(routing, 8, None)
    assert (tokens.prompt, tokens.before, tokens.measured) == ([0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10])
    order: list[tuple[int, int]] = []  # the last used one at the end
    misses = 0
    for step in [tokens.prompt, *([each] for each in [*tokens.before, *tokens.measured])]:
        for number in range(_LAYERS):
            for key in sorted({(number, expert) for token in step for expert in routing.chosen[token][number]}):
                misses += key not in order and step[0] in tokens.measured
                order = [*(other for other in order if other != key), key][-14:]
    found = replayed(routing, tokens, 14, [100] * _LAYERS)
    assert found["lru"] == pytest.approx(100 * misses / 4, rel=0.1)  # within a layer the order is the engine's
    assert found["belady"] <= found["lru"]
    assert replayed(routing, tokens, 24, [100] * _LAYERS)["lru"] <= found["lru"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("gpt-oss")])
def test_an_engine_routes_tokens_as_they_were_recorded(kind: str, tmp_path: Path, trace_file: Path) -> None:
    config = {**small(kind), "hidden_size": 512}
    config["num_hidden_layers"] += config.get("first_k_dense_replace", 0)
    routing = routing_for(trace_file, config)
    write(kind, tmp_path / "out.gguf", config, routing=routing)
    tokens = tokens_of(routing, 6, None)
    found = full_size_child.run(str(tmp_path / "out.gguf"), {"threads": 1}, **vars(tokens), again=1)
    check_routing(found["chosen"], routing, tokens.measured[-1])
    assert found["resident"]["hits"] == 1


def test_words_are_tokens_of_the_trace_in_its_order(tmp_path: Path, trace_file: Path) -> None:
    config = {**small("qwen3-30b-a3b"), "hidden_size": 512}
    routing = routing_for(trace_file, config)
    write("qwen3-30b-a3b", tmp_path / "model.gguf", config, routing=routing)
    ids = load_tokenizer(tmp_path / "model.gguf").encode(text_of(routing), add_special_tokens=False)
    assert [token % routing.classes for token in ids] == list(range(routing.classes))
    assert ids != list(range(routing.classes))  # words, not bytes


def test_a_file_runs_and_prints_what_a_token_takes(tmp_path: Path, trace_file: Path, run_: Printed) -> None:
    """With its experts in fewer bits, which are packed before the clock begins."""
    config = {**small("qwen3-30b-a3b"), "hidden_size": 512}
    file = tmp_path / "out.gguf"
    write("qwen3-30b-a3b", file, config, routing=routing_for(trace_file, config))
    words = ["--trace", trace_file, "--memory", "1GiB", "--tokens", 8, "--rounds", 1, "--bits", 3]
    found, err = run_("benchmarks.full_size", file, *words)
    (row,) = found["rows"]
    assert row["case"] == "1GiB, 3 bits"
    assert row["slots"] == row["all_slots"] == _LAYERS * _EXPERTS
    assert 0 < row["hit_rate"] <= 1
    assert row["computing_ms"] > 0
    assert row["ms"]["median"] == pytest.approx(row["wait_ms"] + row["computing_ms"] + row["deciding_ms"])
    assert row["belady_bytes_per_token"] <= row["lru_bytes_per_token"]
    assert "resident tok/s" in err
    assert f"{row['slots']} of {row['all_slots']}" in err
    assert row["bits"] == 3
    assert row["rounds"][0]["expert_bytes"] == [3 * 256 * 512 * (3 / 8 + 2 / 64)] * _LAYERS


def test_each_preset_at_each_precision_is_a_case() -> None:
    asked = {"memory": ["1GiB"], "preset": ["default", "nimble"], "bits": [16, 3], "set": ["prefetch=none"]}
    cases = cases_of(argparse.Namespace(**asked, beside=None))
    names = ["1GiB, 16 bits", "1GiB, 3 bits", "1GiB, nimble, 16 bits", "1GiB, nimble, 3 bits"]
    assert [case.name for case in cases] == [name + more for name in names for more in ("", ", prefetch=none")]
    (plain,) = cases_of(argparse.Namespace(memory=["1GiB"], preset=None, bits=None, set=[], beside=None))
    assert (plain.name, plain.preset, plain.bits) == ("1GiB", "default", None)


def test_a_file_of_another_trace_is_refused() -> None:
    routing = routing_of(recorded(), _LAYERS, _EXPERTS, top_k=3)
    chosen = [list(each) for each in routing.chosen[5]]
    check_routing([each[::-1] for each in chosen], routing, 5)
    chosen[1] = [each for each in range(_EXPERTS) if each not in chosen[1]][:3]
    with pytest.raises(CaseFailed, match="MoE layer 1"):
        check_routing(chosen, routing, 5)


def test_a_file_that_is_there_is_refused(tmp_path: Path, run_: Printed, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.gguf").touch()
    with pytest.raises(SystemExit):
        run_("benchmarks.random_gguf", "gpt-oss-20b", tmp_path / "out.gguf")
    assert "is there already" in capsys.readouterr().err
