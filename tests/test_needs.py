"""What owners of memory say they need, against what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from tiermoe import native
from tiermoe.config import settings
from tiermoe.engine.budget import plan_memory
from tiermoe.engine.load import resolve_for
from tiermoe.engine.memory_plan import total
from tiermoe.engine.needs import expanding_needs
from tiermoe.engine.request_loop import use_of
from tiermoe.kernels.attention import Slabs, Step
from tiermoe.kernels.delta import DeltaKernel, DeltaSizes
from tiermoe.kernels.scan import ScanKernel
from tiermoe.model.attention.grouped import GroupedSizes
from tiermoe.model.attention.latent import LatentSizes
from tiermoe.model.attention.linear import LinearSizes
from tiermoe.model.attention.mamba import MambaSizes
from tiermoe.model.cache.kv import KVCache, needs
from tiermoe.model.decoder import Decoder, decoder_for, plan_layers
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiermoe.model.weights import ModuleWeights
from tiermoe.native import _native
from tiermoe.types import FEW_TOKENS, USUAL, Phase, Use, Workload
from tiny import CONFIGS, OWN_DECODERS, auto_class, config_of, oracle, write

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# columns that the native kernel takes
SUITABLE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 128, "head_dim": 64},
    "gpt_oss": {"hidden_size": 128, "head_dim": 64, "sliding_window": 300},
    "qwen3_next": {
        "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 1, "layer_types": ["full_attention"],
        "mlp_only_layers": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "deepseek_v2": {
        "hidden_size": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 64,
        "q_lora_rank": 64,
    },
}  # fmt: skip


def model_of(
    kind: str, dtype: torch.dtype, **changes: Any
) -> tuple[Any, Decoder, list[GroupedSizes | LatentSizes | LinearSizes]]:
    config = config_of(kind, **changes)
    model = auto_class(kind).from_config(config, dtype=dtype).eval()
    plain = Configs(config, config, False).plain()
    layers = plan_layers(plain, {name: tuple(each.shape) for name, each in model.state_dict().items()}, dtype)
    decoder = decoder_for(plain, ModuleWeights(model), dtype)
    assert decoder is not None
    assert layers is not None
    return model, decoder, [layer.sizes for layer in layers]


@pytest.mark.parametrize("kind", sorted(set(OWN_DECODERS) & set(CONFIGS)))
@pytest.mark.parametrize("window", [None, 8])
def test_a_cache_needs_what_it_allocates(kind: str, window: int | None) -> None:
    """Of every family with a decoder of ours: windows, latents and recurrent states too."""
    _, decoder, sizes = model_of(kind, torch.bfloat16, **({"sliding_window": window} if window else {}))
    assert [each.shape for each in sizes] == decoder.shapes
    cache = decoder.new_cache(2, 40, 6)
    assert isinstance(cache, KVCache)
    taken = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values, *cache.index_keys))
    if cache.recurrent is not None:
        its, tensors = cache.recurrent, cache.recurrent.tensors.values()
        taken += sum(
            tensor.nbytes for kept in (*tensors, its.verified, its.verified_ngrams) for tensor in kept.values()
        )
    planned = needs(decoder.shapes, Workload(40, 6, 2, 2, 1))
    assert sum(need.nbytes for need in planned if need.part == "kv cache") == taken > 0
    if kind == "gpt_oss":
        assert [each.sinks for each in sizes if isinstance(each, GroupedSizes)] == [True] * 3
        assert len({tensor.shape[2] for tensor in cache.keys}) == (2 if window else 1)


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.parametrize("kind", sorted(SUITABLE))
@pytest.mark.parametrize(
    ("tokens", "positions", "threads"), [(1, 1, 1), (16, 200, 2), (64, 256, 1), (64, 3000, 4), (300, 400, 2)]
)
def test_attention_takes_no_more_than_is_said(kind: str, tokens: int, positions: int, threads: int) -> None:
    _, decoder, sizes = model_of(kind, torch.bfloat16, **SUITABLE[kind])
    cache = decoder.new_cache(tokens, positions, 1)
    last = torch.full((tokens,), positions - 1)
    for layer, (each, its) in enumerate(zip(decoder.layers, sizes, strict=True)):
        assert each.fused_attention is not None
        slabs: Slabs = cache.native[layer]
        turned = torch.zeros(tokens, 64, dtype=torch.bfloat16)
        said = its.fused_bytes(Workload(positions, 1, tokens, 2, threads, use=Use(0)), 128)
        assert said <= its.fused_bytes(
            Workload(positions, 500, tokens, 2, threads, use=Use(1)), 128
        )  # a step of fewer, too
        ways = [(torch.arange(tokens), last)]
        if tokens <= positions and not its.shape.window:  # of one sequence after each other: by blocks of queries
            ways.append((torch.zeros(tokens, dtype=torch.int64), torch.arange(positions - tokens, positions)))
        if 8 < tokens <= positions and not its.shape.window:  # some so, the others by tiles
            ways.append((torch.arange(tokens).clamp_min(7) - 7, last - (7 - torch.arange(tokens)).clamp_min(0)))
        taken = [
            _native.workspace(
                each.fused_attention._packed, Step(slab, at, turned, turned).packed, slabs.packed, threads
            )
            for slab, at in ways
        ]
        assert max(taken) <= said
        if len(ways) == 3 and tokens == 64 and positions == 3000:
            assert said <= 1.5 * max(taken)


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_what_expands_latents_is_in_the_plan(tmp_path: Path) -> None:
    _, decoder, sizes = model_of("deepseek_v2", torch.bfloat16, **SUITABLE["deepseek_v2"])
    kept = 0
    for layer in decoder.layers:
        assert layer.fused_attention is not None
        matrices = (layer.fused_attention.weights.key_up, layer.fused_attention.weights.value_up)  # type: ignore[union-attr]
        kept += sum(matrix.fields["weight"].nbytes for matrix in matrices)
    assert kept == sum(each.expanding_bytes for each in sizes if isinstance(each, LatentSizes)) > 0
    blueprint = inspect_model(write(tmp_path, "deepseek_v2", torch.bfloat16, **SUITABLE["deepseek_v2"]), "latent")
    resolved = resolve_for(blueprint, settings(memory="1GiB", device="cpu"))
    assert sum(need.nbytes for need in expanding_needs(blueprint, resolved.settings, "cpu")) == kept
    plan = plan_memory(blueprint, resolved, None)
    assert plan.fixed == total(plan.needs, Phase.RUNNING) == sum(plan.parts().values()) - plan.experts
    assert plan.loading == total(plan.needs, Phase.LOADING)
    assert plan.packing == total(plan.needs, Phase.PACKING) > 0


def test_what_is_planned_for_follows_from_the_use(tmp_path: Path) -> None:
    """A server reads one prompt at a time beside its rows, and may score all that it reads."""
    assert [Workload(40, 6, 3, 2, 1, use=Use(prompts)).tokens for prompts in (None, 2, 1)] == [18, 15, 9]
    assert Workload(40, 6, 9, 2, 1, use=Use(prompts=1)).tokens == 15  # a chunk, and a token of each row
    blueprint = inspect_model(write(tmp_path, "qwen3_moe", torch.bfloat16), "served")
    resolved = resolve_for(blueprint, settings(memory="1GiB", device="cpu", batch=4, chunk=16, context=64))

    def activations(use: Use) -> int:
        needs = plan_memory(blueprint, resolved, None, use).needs
        return sum(need.nbytes for need in needs if need.part == "activations" and need.phase is Phase.RUNNING)

    logits = torch.empty(16, blueprint.config.vocab_size, dtype=torch.bfloat16)
    alone = activations(Use(prompts=1))
    assert alone < activations(USUAL)
    assert activations(use_of(blueprint.config.vocab_size, 16)) - alone >= logits.nbytes


def test_latents_are_attended_to_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what all heads at once give."""
    from tiermoe.batch import prompt
    from tiermoe.model.attention import base as attention

    generator = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn(*shape, generator=generator) for shape in ((9, 5, 24), (5, 30, 24), (5, 30, 16)))
    for row in (prompt(0, range(9), 21), prompt(0, range(9))):
        held = row.end
        found = []
        for scores in (1 << 22, 1):
            monkeypatch.setattr(attention, "SCORES_AT_ONCE", scores)
            found.append(attention.attend(query, keys[:, :held], values[:, :held], 0.2, None, None))
        assert torch.equal(*found)


RUN = r"""
import json, sys
from pathlib import Path
import tiermoe
from tiermoe.batch import Batch, decode, prompt
from tiermoe.platform.process_memory import peak_resident_bytes, resident_bytes
folder = sys.argv[1]
plan = tiermoe.plan(folder, memory="4GiB", device="cpu", threads=1, store=folder + "/store")
memory = plan.total + (8 << 20)
model, _ = tiermoe.load(folder, memory=memory, device="cpu", threads=1, store=folder + "/store", warm=False)
engine = model.tiermoe
cache = engine.new_cache()
slab = cache.open()
engine.step(Batch((prompt(slab, [5 + i % 90 for i in range(600)]),)), cache)
for position in range(600, 604):
    engine.step(Batch((decode(slab, position, 7),)), cache)
print(json.dumps({"peak": peak_resident_bytes(), "budget": engine.plan.budget, "total": engine.plan.total}))
"""


PLANNED = r"""
import json, sys
import torch, tiermoe
folder, ids = sys.argv[1], torch.tensor([[5, 9, 31]])
options = {"device": "cpu", "threads": 1, "bits": 16, "store": folder + "/store"}
plan = tiermoe.plan(folder, memory="4GiB", **options)
with tiermoe.load(folder, memory=plan.total, **options) as (model, tokenizer):
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
    loaded = model.tiermoe.plan
print(json.dumps({"tokens": tokens, "slots": [plan.slots, loaded.slots]}))
"""


def answer_of(folder: Path, run: str = RUN) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", run, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_a_scan_takes_no_more_than_is_said() -> None:
    sizes = MambaSizes(6, 32, 2, 24, 3)
    norm = torch.ones(sizes.values).bfloat16()
    kernel = ScanKernel(torch.ones(6), torch.ones(6), torch.ones(6), norm, 1e-6, sizes.groups, sizes.state)
    load = Workload(FEW_TOKENS, FEW_TOKENS, 1, 2, 1)
    assert kernel.workspace(FEW_TOKENS) == sizes.prompt_bytes(load, torch.bfloat16)


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_linear_attention_takes_no_more_than_is_said() -> None:
    sizes = DeltaSizes(2, 6, 32, 48, 3)
    weights = torch.zeros(4, sizes.channels).bfloat16(), torch.zeros(6), torch.zeros(6), torch.zeros(48).bfloat16()
    kernel = DeltaKernel(sizes, *weights, 1e-6)
    assert kernel.workspace(FEW_TOKENS) == sizes.workspace
    its = LinearSizes(sizes)
    assert its.taps_bytes == weights[0].nbytes
    assert its.prompt_bytes(Workload(512, 64, 1, 2, 1), torch.bfloat16) == sizes.workspace
    assert its.prompt_bytes(Workload(512, 64, 1, 4, 1), torch.float32) > sizes.workspace


@linux
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v2"])
def test_a_prompt_of_600_tokens_with_a_large_vocabulary_stays_within_the_plan(kind: str, tmp_path: Path) -> None:
    """Of 100,000 words: the logits of all its tokens would take 114 MiB, the scores of all heads 176."""
    changes = {
        "vocab_size": 100_000,
        "max_position_embeddings": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
    }
    heads = {"num_key_value_heads": 64} if kind == "deepseek_v2" else {}
    write(tmp_path, kind, torch.bfloat16, **{**changes, **heads})
    found = answer_of(tmp_path)
    assert found["peak"] <= found["budget"]


TOGETHER = r"""
import json, sys
import tiermoe
from tiermoe.batch import Batch, prompt
from tiermoe.engine.observer import Observer
from tiermoe.platform.process_memory import resident_bytes
folder = sys.argv[1]
options = {"device": "cpu", "threads": 1, "chunk": 128, "context": 2048, "bits": 16, "store": folder + "/store"}
plan = tiermoe.plan(folder, memory="4GiB", **options)
memory = plan.total - plan.idle_activations - plan.experts // 2
engine = tiermoe.load(folder, memory=memory, warm=False, **options)[0].tiermoe  # nothing comes in the background
class Watch(Observer):
    def on_route(self, routed, hidden):
        taken.append(resident_bytes())
def read(chunks):
    cache = engine.new_cache()
    engine.step(Batch((prompt(cache.open(), [5 + i % 90 for i in range(128 * chunks)]),)), cache)
read(engine.plan.prompt_chunks)
for _ in range(3):
    read(1)  # lends nothing, and fills the slots again
taken = [resident_bytes()]
engine.observe(Watch())
read(engine.plan.prompt_chunks)
plan = engine.plan
lent = plan.lent(plan.prompt_chunks, large=True) * plan.slot_bytes
print(json.dumps({
    "chunks": plan.prompt_chunks, "freed": taken[0] - taken[1], "lent": lent, "out_of_use": engine.loader.cache.lent,
}))
"""


@linux
def test_chunks_that_go_through_a_layer_together_take_the_memory_of_slots(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "head_dim": 64,
        "num_hidden_layers": 4, "max_position_embeddings": 2048,
    }  # fmt: skip
    write(tmp_path, "qwen3_moe", torch.bfloat16, **sizes)
    found = answer_of(tmp_path, TOGETHER)
    assert found["chunks"] > 4
    assert found["lent"] > 8 << 20
    assert found["freed"] > found["lent"] // 3  # hidden states of before the first layer's experts aside
    assert found["out_of_use"] == 0


@linux
def test_a_packed_model_loads_in_the_memory_that_its_plan_takes(tmp_path: Path) -> None:
    """transformers' modelling code, 110 MiB, is imported by `tiermoe.load` alone: a plan has counted it."""
    write(tmp_path, "qwen3_moe", torch.float32)
    options: dict[str, Any] = {"device": "cpu", "memory": "4GiB", "bits": 16, "store": tmp_path / "store"}
    tiermoe.load(tmp_path, **options).model.tiermoe.close()  # packs it
    found = answer_of(tmp_path, PLANNED)
    plain = oracle(tmp_path, "qwen3_moe", torch.float32)
    assert found["tokens"] == plain.generate(torch.tensor([[5, 9, 31]]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert found["slots"] == [24, 24]
