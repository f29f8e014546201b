"""Published systems and their baselines on the real engine, on tiny checkpoints of the families they were made for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from profiles import write_profile
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.formats.store import open_store
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.prepare_store import store_root
from tiermoe.offload.policies.prediction import count_paths, paths_to_json
from tiermoe.offload.presets import PRESETS
from tiermoe.offload.profiles import Profile
from tiny import write

FAMILIES = ["qwen2_moe", "deepseek_v2"]
"""Shared experts; weights that are not normalised, latent attention. The others run a lossy preset each."""
OTHERS = {"mixtral": "hobbit", "phimoe": "mobile", "qwen3_moe": "fate", "olmoe": "hobbit"}
SETTINGS: dict[str, dict[str, Any]] = {
    "hobbit": {"t1": 0.4, "t2": 0.8, "weights": "0.4,0.3,0.2,0.1"},
    "fate": {"window": 2, "boundary": 1, "low_popularity": 0.3},
    "mobile": {"gamma": 0.1},
    "adapmoe": {"layer_recall": "0,0.8", "layer_uses": "2,1.5"}, "moe-infinity": {}, "hybrimoe": {}, "pregated": {},
    "moe-stream": {},
    "mixtral-offload": {}, "load-on-demand": {}, "io-free": {}, "io-qexp": {}, "sti": {}, "lru": {}, "default": {},
}  # fmt: skip
"""Presets that need no table of a calibration, with settings for tiny random models."""
EXACT: dict[str, dict[str, Any]] = {
    "hobbit": {"precision": "fixed", "low_share": 0, "weights": "0.4,0.3,0.2,0.1"},
    "fate": {"precision": "fixed", "window": 2, "boundary": 1},
    "mobile": {"routing": "all"},
    "adapmoe": {"routing": "all", **SETTINGS["adapmoe"]},
    "llama-cpu-moe": {"misses": "load", "room": 1},
}
"""Lossy ones with every lossy part off."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param, torch.bfloat16)


@pytest.fixture(scope="module")
def answer() -> Any:
    """(checkpoint, preset, options) → (tokens, logits of every step, statistics)."""

    def run(directory: Path, preset: str, changes: dict[str, Any] | None = None, **options: Any) -> Any:
        options = {"memory": "4GiB", "device": "cpu", "bits": 4, "cache": "55%", **options}
        changes = SETTINGS.get(preset, {}) if changes is None else changes
        model, _ = tiermoe.load(directory, preset=preset, set=changes, **options)
        ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(2))
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        stats = model.tiermoe.stats()
        model.tiermoe.close()
        return done.sequences, torch.stack(done.logits), stats

    return run


@pytest.fixture(scope="module")
def expected(checkpoint: Path, answer: Any) -> Any:
    """The exact preset's answer."""
    return answer(checkpoint, "default")


@pytest.fixture
def calibrated(checkpoint: Path) -> Path:
    """The checkpoint with profiles beside its store, as `tiermoe calibrate` would write them: two and four bits by
    turns, and paths of made-up routing."""
    blueprint = inspect_model(checkpoint, str(checkpoint))
    layers = blueprint.layers
    routings = [[[(token + layer) % 8, (token * 3 + layer) % 8] for layer in range(len(layers))] for token in range(16)]
    data = {
        "table": [[2 if expert % 2 else 4 for expert in range(layer.experts)] for layer in layers],
        "frequencies": [[1.0] * layer.experts for layer in layers],
        "paths": paths_to_json(count_paths(routings, 2)),
    }
    for name in ("edgemoe", "fate", "corm", "fiddler"):
        settings = {"theta": 0.02, "boundary": 1, "window": 2, "low_popularity": 0.3}
        settings |= {"quantizer": "linear"} if name == "edgemoe" else {}
        profile = Profile(name, blueprint.checkpoint.fingerprint(), {}, settings, data)
        write_profile(store_root(blueprint, None), profile)
    return checkpoint


@pytest.mark.parametrize("checkpoint", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize("preset", ["edgemoe", "corm", "eap", "fate"])
def test_runs_from_a_profile_and_without_its_lossy_parts_exactly(preset: str, calibrated: Path, answer: Any) -> None:
    _, logits, stats = answer(calibrated, preset)
    assert torch.isfinite(logits).all()
    assert stats["lossy"] == ", ".join(PRESETS[preset].lossy)
    if preset == "corm":
        assert 0 < stats["neurons_active"] < 1
    off = {"precision": "fixed", "unit": "expert", "on_mispredict": "reload"}
    options = {"quantizer": PRESETS[preset].quantizer, "dense_bits": PRESETS[preset].dense_bits}
    expected = answer(calibrated, "lru", **options)
    found = answer(calibrated, preset, off)
    assert found[2]["lossy"] == ""
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("checkpoint", FAMILIES[:1], indirect=True)
def test_a_placement_by_popularity_runs_exactly_without_a_gpu_if_misses_load(calibrated: Path, answer: Any) -> None:
    with pytest.raises(ConfigError, match=r"misses=measured computes .* what a GPU lacks.*--set misses=load"):
        answer(calibrated, "fiddler")
    found = answer(calibrated, "fiddler", {"misses": "load", "room": 1})
    assert found[2]["lossy"] == ""
    assert torch.equal(found[1], answer(calibrated, "lru")[1])


@pytest.mark.parametrize("checkpoint", FAMILIES[:1], indirect=True)
def test_corm_quantises_scales_again_unless_the_user_asks_for_hqq(calibrated: Path, answer: Any) -> None:
    root = store_root(inspect_model(calibrated, str(calibrated)), None)
    for options in {"quantizer": "hqq"}, {}:
        assert torch.isfinite(answer(calibrated, "corm", **options)[1]).all()
    found = {key for key in open_store(root).precisions if key.endswith("-neuron")}
    assert found == {"4-hqq-neuron", "4-hqq-double-neuron", "2-hqq-neuron"}


@pytest.mark.parametrize("checkpoint", FAMILIES[:1], indirect=True)
def test_a_preset_brings_options_of_its_own_and_what_the_user_gives_comes_first(calibrated: Path, answer: Any) -> None:
    """EdgeMoE's paper never quantises what is no expert. The bits of its table hold for one quantiser."""

    def dense(changes: dict[str, Any], **options: Any) -> Any:
        return answer(calibrated, "edgemoe", changes, **options)[2]["dense_bits"]

    assert dense({}) == 16
    assert dense({}, dense_bits=4) == dense({"dense_bits": 4}, dense_bits=8) == 4
    assert answer(calibrated, "lru", {})[2]["dense_bits"] == 4
    with pytest.raises(ProfileError, match="found for linear, not for hqq; calibrate with --bitwidth-quantizer hqq"):
        dense({}, quantizer="hqq")


@pytest.mark.parametrize("preset", sorted(SETTINGS))
def test_runs_and_gives_the_exact_presets_bits_where_it_is_exact(
    preset: str, expected: Any, checkpoint: Path, answer: Any
) -> None:
    sequences, logits, stats = answer(checkpoint, preset)
    assert sequences.shape == (2, 15)
    assert torch.isfinite(logits).all()
    assert stats["preset"] == preset
    assert stats["lossy"] == ", ".join(PRESETS[preset].lossy)
    if preset not in EXACT and preset not in ("io-qexp", "sti"):
        assert torch.equal(logits, expected[1])
    if preset in ("load-on-demand", "io-qexp"):
        assert stats["hit_rate"] == 0
    if preset == "io-free":  # others may find nothing where a step goes round more experts than there are slots
        assert stats["hit_rate"] > 0.5


@pytest.mark.parametrize("preset", EXACT)
def test_with_every_lossy_part_off_it_gives_the_exact_presets_bits(
    preset: str, expected: Any, checkpoint: Path, answer: Any
) -> None:
    found = answer(checkpoint, preset, EXACT[preset])
    assert found[2]["lossy"] == ""
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("family", "preset"), OTHERS.items())
def test_other_families_lossy_and_exact(family: str, preset: str, tiny_model: Callable[..., Path], answer: Any) -> None:
    directory = tiny_model(family, torch.bfloat16)
    expected, lossy = answer(directory, "default"), answer(directory, preset)
    found = answer(directory, preset, EXACT[preset])
    assert torch.isfinite(lossy[1]).all()
    assert lossy[2]["lossy"] == ", ".join(PRESETS[preset].lossy)
    assert found[2]["lossy"] == ""
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, answer: Any) -> Any:
    """(a checkpoint, its answer with a plain LRU cache)."""
    directory = write(tmp_path_factory.mktemp("plain"), "qwen3_moe", torch.bfloat16)
    return directory, answer(directory, "lru")


PARTS = [
    {"prefetch": part} for part in ("none", "next-gate", "stacked-gates", "layer")
] + [{"cache": part} for part in ("random", "fifo", "lfu", "lhu", "fld", "distance", "arc")] + [
    {"prefetch": "percentile", "window": 2}, {"cache": "weighted", "weights": "0.25,0.25,0.25,0.25"},
    {"allotment": "even"}, {"allotment": "shallow", "boundary": 1}, {"start": "together"},
    {"cache": "lfu", "records": "sequence"}, {"mask": "false", "prefetch": "next-gate"},
]  # fmt: skip


@pytest.mark.parametrize("changes", PARTS, ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()))
def test_each_exact_part_alone_changes_no_bit(changes: dict[str, str], plain: Any, answer: Any) -> None:
    directory, expected = plain
    assert torch.equal(answer(directory, "lru", changes)[1], expected[1])


def test_what_everything_in_memory_needs_is_refused_with_the_numbers(shipped: Path, answer: Any) -> None:
    with pytest.raises(tiermoe.BudgetError) as too_little:
        answer(shipped, "lru", memory="100MiB", bits=16)
    enough = re.search(r"Use --memory (\d+)MiB", str(too_little.value))
    assert enough is not None
    with pytest.raises(tiermoe.BudgetError, match="keeps all 256 experts in memory"):
        answer(shipped, "io-free", memory=f"{enough[1]}MiB", bits=16)
