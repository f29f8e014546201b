"""Presets, samplers and the request loop on the pretended GPU: the CPU's tokens, no stray tensor, one wait a layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from fake_cuda import Event, FakeCuda, on_device, values_of
from fake_gpu import FakeGpu
from patience import within
from serving import Letters, ids
from tiermoe.batch import Batch, Kind, decode, prompt
from tiermoe.engine.request import Request, RequestState
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import ConfigError
from tiermoe.kernels.experts import Grouped
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.composition import changed, require_device
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import Profile, profile_path, to_json
from tiermoe.serve.grammar import Grammars, json_rule

LAYERS, EXPERTS, MORE = 3, 8, 4
PROMPTS = [ids(count, seed=count) for count in (9, 5, 7)]
SETTINGS = {
    "t1": 0.5, "t2": 0.8, "weights": [0.1, 0.2, 0.3, 0.4], "low_popularity": 0.3, "window": 3, "boundary": 1,
    "gamma": 0.3, "threshold": 0.05, "sensitivity": [1.0] * LAYERS, "layer_recall": [0.5] * LAYERS,
    "layer_uses": [1.5] * LAYERS, "theta": 0.1,
}  # fmt: skip
TABLES = {
    "table": [[4, 2] * (EXPERTS // 2)] * LAYERS, "frequencies": [[*range(EXPERTS)]] * LAYERS,
    "paths": {"1": {"0,1,2": {"2": 3}}, "2": {"0,1,2": {"1": 3}}},
}  # fmt: skip
OF_A_STEP = ("engine/steps.py", "engine/rerouting.py", "model/hf/generic.py", "kernels/graphs.py")
"""Files whose code waits once or twice a step: to give tokens to the device, and to look at logits. Or once for each
graph: to compare its bits."""
FATE = {"precision": "fixed", "boundary": 1, "window": 2}
DETERMINED = {"mobile", "adapmoe", "edgemoe", "nimble", "nimble-3bit"}
"""Lossy presets whose tokens do not depend on what is cached, or which cache the same here as on a CPU."""


def calibrated(model: Path, store: Path, name: str) -> dict[str, Any]:
    """Options of a preset, whose calibration is written where it needs one."""
    preset = PRESETS[name]
    options: dict[str, Any] = {"preset": name, "store": store, "memory": "4GiB", "warm": False}
    if preset.needs_profile:
        open_ones = {each: SETTINGS[each] for each in preset.missing()}
        profile = Profile(name, inspect_model(model, "tiny").checkpoint.fingerprint(), {}, open_ones, TABLES)
        path = profile_path(store, preset.profile)
        path.parent.mkdir(parents=True)
        path.write_bytes(to_json(profile))
    if preset.quantizer:
        options["quantizer"] = "nonlinear"  # its own packs experts by a text
    return options | {"dense_bits": 16} | ({} if preset.bits else {"bits": 4})


def answers(engine: Any, prompts: Sequence[list[int]] = PROMPTS, more: int = MORE) -> list[list[int]]:
    """Greedy tokens after each prompt, one after the other."""
    found = []
    for each in prompts:
        cache = engine.new_cache()
        slab = cache.open()
        logits, answer = engine.step(Batch((prompt(slab, each),)), cache), list[int]()
        for at in range(len(each), len(each) + more):
            answer.append(int(logits[-1].cpu().argmax()))
            logits = engine.step(Batch((decode(slab, at, answer[-1]),)), cache)
        found.append(answer)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_three_prompts_of_every_preset(
    name: str, gpu_model: Path, tmp_path: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], fake_cuda: FakeCuda
) -> None:
    """The second prompt finds records of the first. Tokens are the CPU's; the host waits once a layer in decode, with
    CORM twice: for active neurons too."""
    options = calibrated(gpu_model, tmp_path, name)
    cache = {} if PRESETS[name].cache in ("all", "none", "double") or name == "sti" else {"cache": "60%"}
    loaded, _ = on_fake_gpu(gpu_model, 6, **options, **cache)
    engine = loaded.tiermoe
    found = within(lambda: answers(engine))
    if not engine.lossy or name in DETERMINED:
        alone = {**options, "preset": "lru"} if PRESETS[name].misses != "load" else options
        plain, _ = tiermoe.load(gpu_model, device="cpu", **alone)
        assert found == answers(plain.tiermoe)
        plain.tiermoe.close()
    assert not engine.decoder._graphs._refused
    waits = decoding_waits(engine, fake_cuda)
    passes = 1 + (name == "corm" or (name == "mobile" and engine.confident.fallback_ratio > 0))
    assert waits <= passes * LAYERS * MORE, fake_cuda.waits


def decoding_waits(engine: Any, device: FakeCuda, rows: int = 1) -> int:
    """How many times the host waits within layers while `MORE` tokens of so many sequences are decoded."""
    cache = engine.new_cache(rows)
    slabs = [cache.open() for _ in range(rows)]
    for slab in slabs:
        engine.step(Batch((prompt(slab, PROMPTS[0]),)), cache)
    device.clear()
    for at in range(MORE):
        engine.step(Batch(tuple(decode(slab, len(PROMPTS[0]) + at, 7 + slab) for slab in slabs)), cache)
    return sum(count for where, count in device.waits.items() if not where.startswith(OF_A_STEP))


@pytest.mark.parametrize(
    ("changes", "cache", "host_slots"),
    [
        ({}, "60%", 6),
        ({"theta": 0.0}, "60%", 2),
        ({"theta": 0.3, "upper_limit": 1.0}, "20%", 24),
        ({"theta": 0.3, "prefetch": "none"}, "60%", 6),
        ({"theta": 0.3, "upper_limit": 1.0, "prefetch": "none"}, "100%", 2),
    ],
    ids=str,
)
def test_active_neurons_give_the_cpus_tokens(
    changes: dict[str, Any],
    cache: str,
    host_slots: int,
    gpu_model: Path,
    tmp_path: Path,
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]],
) -> None:
    """And without prefetch, which takes its time, the CPU's counts of single tokens."""
    alone = changes.get("prefetch") == "none"
    prompts = [[3], [7], [9]] if alone else PROMPTS
    options = calibrated(gpu_model, tmp_path, "corm")
    options |= {"set": {"on_mispredict": "reload"} | changes, "cache": cache}
    loaded, _ = on_fake_gpu(gpu_model, host_slots, **options)
    found = within(lambda: answers(loaded.tiermoe, prompts))
    plain, _ = tiermoe.load(gpu_model, device="cpu", **options)
    assert found == answers(plain.tiermoe, prompts)
    here, there = (each.tiermoe.service.unit.stats() for each in (loaded, plain))
    assert here["neurons_left_out"] == 0
    if alone:
        assert here == there
        assert all(0 < here[f"neurons_{name}"] < 1 for name in ("active", "there", "spared"))
    plain.tiermoe.close()


def test_what_goes_on_with_its_prediction_is_counted_on_the_gpu(
    gpu_model: Path, tmp_path: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    options = calibrated(gpu_model, tmp_path, "corm") | {"cache": "60%", "set": {"theta": 0.3, "upper_limit": 1.0}}
    loaded, _ = on_fake_gpu(gpu_model, 24, **options)
    within(lambda: answers(loaded.tiermoe))
    found = loaded.tiermoe.service.unit.stats()
    assert 0 < found["neurons_left_out"] < 1 - found["neurons_there"] + 1e-9


@pytest.mark.parametrize("family", ["mixtral", "phimoe", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_three_prompts_of_other_families(
    family: str, tiny_model: Callable[..., Path], on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]
) -> None:
    options = {"preset": "default", "cache": "60%", "bits": 4, "dense_bits": 16, "memory": "4GiB", "warm": False}
    model = tiny_model(family, torch.float32)
    engine = on_fake_gpu(model, 6, **options)[0].tiermoe
    found = within(lambda: answers(engine))
    assert not engine.decoder._graphs._refused
    plain, _ = tiermoe.load(model, device="cpu", **options)
    assert found == answers(plain.tiermoe)
    plain.tiermoe.close()


def test_gaps_between_neurons_do_not_apply_to_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"gap is for .* leave it out"):
        require_device(changed(PRESETS["corm"], {"gap": "4KiB"}), "cuda")


@pytest.mark.parametrize(
    ("preset", "cache", "changes"),
    [
        ("lru", "100%", {}), ("lru", "60%", {}), ("default", "60%", {"speculate": "always"}), ("fate", "60%", FATE),
        ("nimble", "60%", {}), ("lru", "60%", {"prefetch": "next-gate", "on_mispredict": "predicted"}),
        ("default", "60%", {"routing": "cached", "prior": 0.5, "always": 1}),
        ("lru", "30%", {"routing": "cached", "prior": 0.5, "always": 1, "misses": "cpu"}),
        ("lru", "20%", {"unit": "neuron", "theta": 0.3}),  # all experts are loaded for the token
    ],
)  # fmt: skip
def test_a_layer_lets_the_host_wait_once(
    preset: str,
    cache: str,
    changes: dict[str, Any],
    gpu_model: Path,
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]],
    fake_cuda: FakeCuda,
) -> None:
    loaded, _ = on_fake_gpu(gpu_model, 6, bits=4, preset=preset, cache=cache, warm=False, batch=2, set=changes)
    engine = loaded.tiermoe
    answers(engine)
    alone = "unit" in changes or "misses" in changes  # neurons are loaded, hidden states copied back, for one token
    for rows in (1,) if alone else (1, 2):
        assert decoding_waits(engine, fake_cuda, rows) == LAYERS * MORE
    assert (engine.loader.counts.displaced > 0) == bool(engine.scheduler.moves_choices)


def three_sequences(model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]) -> tuple[Any, Any, list[int]]:
    """An engine with all experts on the GPU, a cache, and three of its slabs."""
    engine = on_fake_gpu(model, bits=4, preset="lru", cache="100%", batch=3)[0].tiermoe
    cache = engine.new_cache(3)
    return engine, cache, [cache.open() for _ in range(3)]


def test_sequences_that_decode_together_are_one_call_with_the_bits_of_each(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], fake_cuda: FakeCuda
) -> None:
    engine, cache, slabs = three_sequences(gpu_model, on_fake_gpu)
    for slab, each in zip(slabs, PROMPTS, strict=True):
        engine.step(Batch((prompt(slab, each),)), cache)
    rows = [decode(slab, len(each), 7 + slab) for slab, each in zip(slabs, PROMPTS, strict=True)]
    alone = [values_of(engine.step(Batch((row,)), cache)) for row in rows]  # written again by what follows
    for _ in range(3):
        fake_cuda.clear()
        together = engine.step(Batch(tuple(rows)), cache)
        assert torch.equal(values_of(together), torch.cat(alone))
        launched = Counter(each.operator for each in fake_cuda.events)
        assert launched["grouped_linear"] == 2 * LAYERS
    # of each sequence attention, router and end; of all what is read back
    assert launched["graph"] == (3 * len(rows) + 1) * LAYERS


EXPERTS_LAUNCH = ("copy_", "index", "grouped_linear", "silu", "mul", "weighted_sums")
"""Operators of a layer's experts, views aside."""


def test_what_a_layer_launches_for_its_experts(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], fake_cuda: FakeCuda
) -> None:
    """Figures of docs/architecture.md, whatever the number of experts; one more copy brings the choices to the host."""
    engine, cache, slabs = three_sequences(gpu_model, on_fake_gpu)

    def launched(*rows: Any) -> Counter[str]:
        fake_cuda.clear()
        engine.step(Batch(rows), cache)
        places = ("engine/expert_sums.py", "kernels/gates.py", "kernels/gpu.py")
        found = Counter(
            each.operator
            for each in fake_cuda.events
            if each.where.startswith(places) and (each.operator != "mul" or "gates" in each.where)
        )
        return Counter({name: found[name] / LAYERS for name in EXPERTS_LAUNCH if found[name]})

    for slab, count in zip(slabs, (100, 12, 60), strict=True):  # the first one brings all experts
        prompted = launched(prompt(slab, ids(count, seed=1)))
        calls, matrices = prompted["index"], prompted.pop("grouped_linear")
        assert calls == 1 or count == 100
        assert prompted == {"copy_": 2 * calls + 2, "index": calls, "silu": calls, "mul": calls, "weighted_sums": 1}
        assert 2 * calls <= matrices <= 6 * calls
    token = {"grouped_linear": 2, "silu": 1, "mul": 1, "weighted_sums": 1}
    both = launched(decode(slabs[1], 12, 7), decode(slabs[2], 60, 7))
    assert both == {**token, "copy_": 4, "index": 1}
    assert launched(decode(slabs[0], 100, 7)) == {**token, "copy_": 1}  # and one by `kernels.graphs`


def test_what_a_layer_launches_by_graphs(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], fake_cuda: FakeCuda
) -> None:
    """Five graphs, what the host has to know and what it decided; the rest does not grow with the layers."""
    loaded, _ = on_fake_gpu(gpu_model, bits=4, preset="lru", cache="100%", warm=True)
    engine = loaded.tiermoe
    cache = engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, PROMPTS[0]),)), cache)
    for at in range(2):
        engine.step(Batch((decode(slab, len(PROMPTS[0]) + at, 7),)), cache)
    fake_cuda.clear()
    engine.step(Batch((decode(slab, len(PROMPTS[0]) + 2, 9),)), cache)
    launched = Counter(each.operator for each in fake_cuda.events)
    of_a_step = 4  # tokens and places, cos, sin, the hidden states
    assert (launched["graph"], launched["copy_"]) == (5 * LAYERS, 2 * LAYERS + of_a_step)
    assert sum(launched.values()) < 8 * LAYERS + 20


def test_what_the_gates_of_later_layers_launch(
    gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]], fake_cuda: FakeCuda
) -> None:
    """Figures of docs/architecture.md, of float32: bfloat16 takes one more, which widens the logits."""
    loaded, _ = on_fake_gpu(gpu_model, bits=4, preset="default", cache="60%", set={"speculate": "always"})
    decoding_waits(loaded.tiermoe, fake_cuda)  # what is asked for is known from then on
    decoding_waits(loaded.tiermoe, fake_cuda)
    loaded.tiermoe.decoder.watch(lambda part: part)  # without graphs
    decoding_waits(loaded.tiermoe, fake_cuda)
    asked = [each.operator for each in fake_cuda.events if each.where.startswith("engine/forecasts.py")]
    views = {"view", "slice", "t", "alias", "detach"}
    assert [each for each in asked if each not in views] == ["mm", "_softmax", "topk"] * ((LAYERS - 1) * MORE)


def test_what_comes_next_is_decided_when_the_layer_is_launched(
    gpu_model: Path,
    on_fake_gpu: Callable[..., tuple[Any, FakeGpu]],
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer's order: the next layer's gate, the copy of both routers' choices, the resident experts, the policy."""
    loaded, _ = on_fake_gpu(gpu_model, bits=4, preset="mixtral-offload", cache="80%", warm=False)
    engine = loaded.tiermoe
    answers(engine)
    prefetch, launch = engine.scheduler.prediction.candidates, engine.forecaster.launch

    def launched() -> list[torch.Tensor]:
        said = launch()
        fake_cuda.events += [Event("forecast", "forecaster")] if said else []
        return said

    def noted(*arguments: Any) -> Any:
        fake_cuda.events.append(Event("policy", "scheduler"))
        return prefetch(*arguments)

    def computed(compute: Any) -> Any:
        def compute_and_note(*arguments: Any) -> Any:
            fake_cuda.events.append(Event("experts", "kernels"))
            return compute(*arguments)

        return compute_and_note

    for name in ("sum_one", "forward_one"):
        monkeypatch.setattr(Grouped, name, computed(getattr(Grouped, name)))
    monkeypatch.setattr(engine.scheduler.prediction, "candidates", noted)
    monkeypatch.setattr(engine.forecaster, "launch", launched)
    decoding_waits(engine, fake_cuda)

    def letter(each: Event) -> str:
        return "c" if each.waits else {"experts": "e", "policy": "p", "forecast": "f"}.get(each.operator, "")

    order = "".join(letter(each) for each in fake_cuda.events if not each.where.startswith(OF_A_STEP))
    assert re.fullmatch(rf"(p(fce+p){{{LAYERS - 1}}}ce+p){{{MORE}}}", order), order  # nothing follows the last layer


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.5, "repeat_last_n": 4},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {5: 2.0, 7: -100}},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1},
        {"min_tokens": 4},
        *({"temperature": 1.0, "seed": 3, **each} for each in (
            {}, {"typical_p": 0.5}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.8},
            {"top_n_sigma": 1.0}, {"xtc_probability": 1.0, "xtc_threshold": 0.05}, {"dry_multiplier": 0.8},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_every_sampling_field_chooses_from_a_gpus_logits_what_it_chooses_from_the_cpus(
    fields: dict[str, Any], gpu_model: Path, fake_cuda: FakeCuda
) -> None:
    asked = Request([3, 4, 3, 4], Sampling(max_tokens=12, **fields), logprobs=3)
    check_choices(asked, asked, load_tokenizer(gpu_model))


def test_a_grammar_restricts_a_gpus_logits(gpu_model: Path, fake_cuda: FakeCuda) -> None:
    tokenizer = load_tokenizer(gpu_model)
    first, second = Grammars(tokenizer, 128, frozenset({2})).compile(f"start: {json_rule({'type': 'boolean'})}", 2)
    sampling = Sampling(max_tokens=12)
    chosen = check_choices(*(Request([3], sampling, grammar=each) for each in (first, second)), tokenizer)
    assert tokenizer.decode(chosen).strip() in ("true", "false")


def check_choices(one: Request, other: Request, tokenizer: Any) -> list[int]:
    """The tokens, log probabilities too, that random logits give, which must be the same on both devices."""
    generator = torch.Generator().manual_seed(1)
    states = [RequestState(0, each, tokenizer, None) for each in (one, other)]
    for state in states:
        state.contents.add(state.request.ids, Kind.PROMPT)
    pieces: list[Any] = [None, None]
    while pieces[0] is None or pieces[0].finish is None:
        logits = torch.randn(128, generator=generator).bfloat16()
        pieces = [
            state.choose(on(logits), frozenset({2}), 64)
            for state, on in zip(states, (lambda each: each, on_device), strict=True)
        ]
        assert [pieces[0].tokens, pieces[0].logprobs] == [pieces[1].tokens, pieces[1].logprobs]
        for state in states:
            state.contents.add(state.answer[-1:], Kind.DECODE)
    return states[0].answer


def test_two_requests_at_once(gpu_model: Path, on_fake_gpu: Callable[..., tuple[Any, FakeGpu]]) -> None:
    """One samples, one asks for the log probabilities of its prompt too."""
    asked = [
        Request(PROMPTS[0], Sampling(max_tokens=4, temperature=1.0, seed=2, frequency_penalty=0.5)),
        Request(PROMPTS[1], Sampling(max_tokens=4), logprobs=2, prompt_logprobs=True),
    ]
    options = {"bits": 16, "dense_bits": 16, "preset": "default", "cache": "60%", "batch": 2, "memory": "4GiB"}
    engines = on_fake_gpu(gpu_model, 6, **options)[0], tiermoe.load(gpu_model, device="cpu", **options)[0]
    found = []
    for engine in (each.tiermoe for each in engines):
        loop, pieces = RequestLoop(engine, Letters(), 2, frozenset()), []
        for each in asked:
            loop.add(each)
        while not loop.scheduler.idle:
            pieces += within(loop.step)
        assert not any(piece.error for piece in pieces)
        found.append(sorted((piece.number, piece.tokens) for piece in pieces))
    assert found[0] == found[1]
    engines[1].tiermoe.close()
