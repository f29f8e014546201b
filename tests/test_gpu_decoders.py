"""Our own decoders on a GPU: a pretended one, whose tensors hold values and do not mix with a CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiermoe
from fake_cuda import FakeCuda, on_device, values_of
from parity import close, logits, tokens
from serving import Letters
from small_engines import NATIVE
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.cli.describe import backend_of
from tiermoe.config import Settings, settings
from tiermoe.engine.load import plan_for, resolve_for
from tiermoe.engine.memory_plan import GpuMemoryPlan
from tiermoe.engine.needs import longest_request
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import ConfigError
from tiermoe.kernels.gpu import rms_norm
from tiermoe.model.attention.latent import LatentAttention
from tiermoe.model.decoder import Decoder, decoder_for
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiermoe.model.layer import Layer
from tiermoe.model.moe import NoExperts
from tiermoe.model.parts import Linear, PlainLinear, RootMeanSquare
from tiermoe.model.weights import ModuleWeights
from tiermoe.native import _native, available
from tiermoe.types import Use, Workload
from tiny import FAMILIES, auto_class, config_of, make_random, oracle

Model = Callable[..., Path]
OnFakeGpu = Callable[..., tuple[Any, Any]]
ON_GPU = sorted(name for name, family in FAMILIES.items() if family.on_gpu)
PAPERS = ("deepseek", "deepseek_v2", "gpt_oss", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
"""Families that the papers use and people run most."""
LATENT = {
    "hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}  # fmt: skip
"""Sizes of a latent attention that the native kernels take."""


# decoders


class OnDevice(ModuleWeights):
    """The weights of a model, on the pretended device."""

    def tensor(self, path: str) -> torch.Tensor:
        return on_device(super().tensor(path))

    def linear(self, path: str) -> Linear:
        module = self._model.get_submodule(path)
        return PlainLinear(on_device(module.weight), None if module.bias is None else on_device(module.bias))

    def embedding(self, path: str) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = self.tensor(f"{path}.weight")
        return lambda tokens: torch.nn.functional.embedding(tokens, weight)


class Scaling(NoExperts):
    """Experts that scale a token by its number and its weights."""

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (hidden * (index * weights).sum(1, keepdim=True)).to(hidden.dtype)


def decoders(model_type: str, dtype: torch.dtype, **sizes: int) -> list[Decoder]:
    """A decoder of a random model on the CPU, and one on the pretended device."""
    config = config_of(model_type, **sizes)
    torch.manual_seed(0)
    model = auto_class(model_type).from_config(config, dtype=dtype, experts_implementation="eager").eval()
    make_random(model)
    plain, found = Configs(config, config, False).plain(), []
    for weights in (ModuleWeights(model), OnDevice(model)):
        decoder = decoder_for(plain, weights, dtype)
        assert decoder is not None
        decoder.attach([Scaling() for layer in decoder.layers if layer.moe is not None])
        found.append(decoder)
    return found


def steps(decoder: Decoder) -> list[torch.Tensor]:
    """Logits of a prompt of three chunks, of two sequences' tokens, of tokens that are verified, of two that go on from
    some of them, of a sequence that was moved and grew, and of single tokens, which graphs compute from the third on:
    of two sequences, and before and after it grew."""
    cache = decoder.new_cache(3, 48, 16)
    one, other = cache.open(), cache.open()
    ids = [3 + (7 * at) % 120 for at in range(40)]

    def run(*rows: Any) -> torch.Tensor:
        return decoder.step(Batch(rows), cache, every=True)

    logits = [run(prompt(one, ids[at : at + 16], at)) for at in (0, 16, 32)]
    logits.append(run(prompt(other, ids[5:10])))
    logits += [run(decode(one, 40 + at, 7), decode(other, 5 + at, 9)) for at in range(2)]
    logits.append(run(verify(one, 42, [11, 12, 13])))
    cache.crop(one, 43)
    fork = cache.fork(one, 43)
    logits.append(run(decode(fork, 43, 7), prompt(other, [3, 4, 5], 7)))
    cache.select([other, one, fork])
    for at in range(4):
        logits += [run(decode(other, 43 + at, 8)), run(decode(fork, 44 + at, 6))]
    cache.reserve(60)
    logits += [run(decode(other, 47 + at, 8)) for at in range(4)]
    return logits


@pytest.mark.parametrize("model_type", ON_GPU)
def test_a_decoder_on_a_gpu_has_the_bits_of_torchs_operators(model_type: str, fake_cuda: FakeCuda) -> None:
    on_cpu, on_gpu = decoders(model_type, torch.float32)
    with sdpa_kernel(SDPBackend.MATH):  # what the pretended device computes
        expected = steps(on_cpu)
    found = [values_of(each) for each in steps(on_gpu)]
    assert on_gpu._graphs is not None
    assert on_gpu._graphs._graphs
    assert not on_gpu._graphs._refused
    if any(isinstance(layer.attention, LatentAttention) for layer in on_gpu.layers if isinstance(layer, Layer)):
        # a single token's queries are expanded, not the latents
        assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(found, expected, strict=True))
    else:
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_graphs_of_few_caches_are_kept(fake_cuda: FakeCuda) -> None:
    """Of as many as a program makes; each attends to its own."""
    decoder, kept, found = decoders("qwen3_moe", torch.float32)[1], [], []
    for _ in range(7):
        kept.append(decoder.new_cache(1, 16, 8))
        slab = kept[-1].open()
        decoder.step(Batch((prompt(slab, [3, 4, 5]),)), kept[-1])
        found += [values_of(decoder.step(Batch((decode(slab, 3 + at, 9),)), kept[-1])) for at in range(3)]
    assert all(torch.equal(*pair) for pair in zip(found[3:], found, strict=False))
    assert decoder._graphs is not None
    assert 3 * len(decoder.layers) < len(decoder._graphs._graphs) < 6 * len(decoder.layers)


def test_parts_that_are_watched_are_called(fake_cuda: FakeCuda) -> None:
    decoder = decoders("qwen3_moe", torch.float32)[1]
    cache = decoder.new_cache(1, 16, 8)
    slab, graphs = cache.open(), []

    def run(first: int) -> None:
        fake_cuda.clear()
        decoder.step(Batch((decode(slab, first, 9),)), cache)
        graphs.append(sum(each.operator == "graph" for each in fake_cuda.events))

    for at in range(3):
        run(at)
    undo = decoder.watch(lambda part: part)
    for at in range(3, 6):
        run(at)
    undo()
    run(6)
    assert graphs[2] == graphs[6] > sum(graphs[3:6]) == 0


@pytest.mark.parametrize(("model_type", "sizes"), [("qwen3_moe", NATIVE), ("deepseek_v2", LATENT)])
def test_no_native_kernel_is_given_a_gpus_tensor(
    model_type: str, sizes: dict[str, int], fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and a dtype that the native kernels take on a CPU."""
    on_cpu, on_gpu = decoders(model_type, torch.bfloat16, **sizes)
    assert all(layer.fused_attention is not None for layer in on_cpu.layers) == available()
    for name in ("attend", "attend_prompt", "choose", "logits", "norm", "product", "route"):
        monkeypatch.setattr(_native, name, lambda *_: pytest.fail("a native kernel was called"))
    assert all(bool(values_of(each).isfinite().all()) for each in steps(on_gpu))
    assert not on_gpu.batch_invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("late", [False, True])
def test_the_fused_norm_has_the_bits_of_separate_steps(dtype: torch.dtype, late: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 48, generator=generator).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    steps = RootMeanSquare(weight, 1e-5, late, by_kernel=False)
    assert torch.equal(rms_norm(x, weight, 1e-5, late), steps(x))


# engines


@pytest.mark.parametrize("model_type", PAPERS)
def test_an_engine_on_a_gpu_agrees_with_transformers(
    model_type: str, tiny_model: Model, on_fake_gpu: OnFakeGpu, fake_cuda: FakeCuda
) -> None:
    """With padding, a cache that does not hold all experts and chunks, through transformers' protocol."""
    directory = tiny_model(model_type, torch.float32)
    loaded, _ = on_fake_gpu(directory, bits=16, cache="60%", chunk=4, preset="lru")
    plain = oracle(directory, model_type, torch.float32)
    assert isinstance(loaded.tiermoe.decoder, Decoder)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    mine = values_of(logits(loaded, model_type, on_device(ids), on_device(mask)))
    assert close(mine, logits(plain, model_type, ids, mask) * mask[..., None])
    found = loaded.generate(on_device(ids), attention_mask=on_device(mask), max_new_tokens=6, do_sample=False)
    assert torch.equal(values_of(found), plain.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))


def test_a_step_waits_for_what_is_chosen_alone(gpu_model: Path, on_fake_gpu: OnFakeGpu, fake_cuda: FakeCuda) -> None:
    """Once for each layer, and for the logits, in a step of one token."""
    loaded, _ = on_fake_gpu(gpu_model, bits=16, preset="lru")
    engine, cache = loaded.tiermoe, loaded.tiermoe.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, [5, 6, 7]),)), cache)
    fake_cuda.clear()
    engine.step(Batch((decode(slab, 3, 8),)), cache)
    waits = {where: count for where, count in fake_cuda.waits.items() if not where.startswith("engine/steps")}
    assert sum(waits.values()) == len(engine.layers)
    assert not any(where.startswith("model/") for where in waits)


def test_a_token_takes_fewer_operators_than_in_transformers_code(
    gpu_model: Path, on_fake_gpu: OnFakeGpu, fake_cuda: FakeCuda
) -> None:
    asked = []
    for decoder in ("auto", "generic"):
        loaded, _ = on_fake_gpu(gpu_model, bits=16, preset="lru", decoder=decoder)
        engine, cache = loaded.tiermoe, loaded.tiermoe.new_cache()
        slab = cache.open()
        engine.step(Batch((prompt(slab, [5, 6, 7]),)), cache)
        fake_cuda.clear()
        engine.step(Batch((decode(slab, 3, 8),)), cache)
        asked.append(len(fake_cuda.events))
    assert asked[0] < asked[1]


def answers(engine: Any, asked: Sequence[Sequence[list[int]]], rows: int) -> tuple[list[list[int]], int]:
    """Greedy answers to prompts, some of them at once and then others, and how many tokens of theirs were cached."""
    loop, found = RequestLoop(engine, Letters(), rows, frozenset()), dict[int, list[int]]()
    for ids in [ids for together in asked for ids in (*together, None)]:
        if ids is not None:
            found[loop.add(Request(ids, Sampling(max_tokens=5)))] = []
        while ids is None and not loop.scheduler.idle:
            for piece in loop.step():
                found[piece.number].extend(piece.tokens)
    return list(found.values()), loop.counts.cached_tokens


def test_requests_on_a_gpu_share_prefixes_and_steps(gpu_model: Path, on_fake_gpu: OnFakeGpu) -> None:
    """The answers of a CPU, of two requests at once and of one that begins with what another left."""
    options = {"bits": 16, "cache": "60%", "batch": 2, "chunk": 4, "context": 64, "preset": "lru"}
    text = tokens(1, 20)[0].tolist()
    first, second, third = text[:14], text[5:12], text[:14] + text[3:6]
    on_cpu, _ = tiermoe.load(gpu_model, device="cpu", memory="4GiB", **options)
    expected, _ = answers(on_cpu.tiermoe, [[first], [second], [third]], 1)
    on_cpu.tiermoe.close()
    on_gpu, _ = on_fake_gpu(gpu_model, **options)
    found, cached = answers(on_gpu.tiermoe, [[first, second], [third]], 2)
    assert found == expected
    assert cached == len(first)


def test_a_step_that_was_interrupted_leaves_nothing(gpu_model: Path, on_fake_gpu: OnFakeGpu) -> None:
    loaded, _ = on_fake_gpu(gpu_model, bits=16, preset="lru", chunk=4)
    engine, cache = loaded.tiermoe, loaded.tiermoe.new_cache(2)
    one, other, ids = cache.open(), cache.open(), tokens(1, 10)[0].tolist()
    expected = engine.step(Batch((prompt(one, ids),)), cache)
    layer = engine.decoder.layers[1].moe
    experts = layer.experts
    layer.experts = SimpleNamespace(block=lambda *_: None, route=_interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step(Batch((prompt(other, ids),)), cache)
    layer.experts = experts
    again = engine.step(Batch((prompt(other, ids),)), cache)
    assert torch.equal(values_of(again), values_of(expected))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# plans


def on_gpu(**options: object) -> Settings:
    return settings(memory="4GiB", device="cuda:0", **options)


def test_a_plan_counts_the_cache_of_our_decoder(tiny: Path, fake_cuda: FakeCuda) -> None:
    blueprint = inspect_model(tiny, "tiny")
    plan, more = (plan_for(blueprint, on_gpu(context=100, batch=batch)) for batch in (1, 3))
    assert isinstance(plan, GpuMemoryPlan)
    config = blueprint.config
    position = 2 * config.num_key_value_heads * config.head_dim * 4
    assert plan.kv_cache == 100 * config.num_hidden_layers * position
    assert more.kv_cache == 3 * plan.kv_cache
    said = {need.what: need.nbytes for need in plan.needs if need.part == "activations"}
    assert said["attention in one call"] == said["what products know of their tokens"] == 0
    sizes, load = blueprint.planned_layers[0].sizes, Workload(100, 16, 1, 4, 1)
    there, here = (sizes.prompt_bytes(replace(load, on_cpu=on_cpu), torch.float32) for on_cpu in (False, True))
    assert there - here == 2 * 100 * config.num_attention_heads * config.head_dim * 4  # each head's keys and values
    assert said["attention"] >= there - here
    assert plan.prompt_chunks == 1


def test_what_a_gpu_gets_is_said(tiny: Path, fake_cuda: FakeCuda) -> None:
    blueprint = inspect_model(tiny, "tiny")
    for decoder, expected in (("auto", "tiermoe's own, for qwen3_moe"), ("generic", "--decoder generic")):
        assert expected in backend_of(blueprint, resolve_for(blueprint, on_gpu(decoder=decoder))).decoder


def test_a_family_without_a_decoder_for_gpus_gets_transformers_code(tiny_model: Model, fake_cuda: FakeCuda) -> None:
    blueprint = inspect_model(tiny_model("qwen3_next", torch.float32), "tiny")
    backend = backend_of(blueprint, resolve_for(blueprint, on_gpu()))
    assert backend.decoder == "transformers' code (tiermoe's decoder for qwen3_next computes on a CPU): slower"
    assert not backend.ours


def test_sequences_on_a_gpu_share_no_memory(tiny: Path, fake_cuda: FakeCuda) -> None:
    blueprint, asked = inspect_model(tiny, "tiny"), on_gpu()
    assert longest_request(blueprint, asked, 256, "cuda") is None
    with pytest.raises(ConfigError, match=r"own decoders on a CPU, and Qwen3-MoE runs here on cuda.*leave --kv-memory"):
        plan_for(blueprint, asked, Use(kv_memory=1 << 20))


def test_keys_and_values_on_a_gpu_may_be_codes(tiny: Path, fake_cuda: FakeCuda) -> None:
    whole, codes = (tiermoe.plan(tiny, memory="4GiB", kv_bits=bits) for bits in (16, 8))
    assert codes.kv_cache < whole.kv_cache
    with pytest.raises(ConfigError, match=r"kv_bits=8 is for tiermoe's own decoders, and .* by transformers' code"):
        tiermoe.plan(tiny, memory="4GiB", kv_bits=8, decoder="generic")
