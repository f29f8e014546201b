"""Models that are an encoder alone: their class and its hidden states, EdgeMoE's buffer, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SwitchTransformersEncoderModel

import tiermoe
from benchmarks.serving import free_port
from commands import Command
from profiles import write_profile
from small_engines import OnRoute, finish
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload.profiles import Profile
from tiny import config_of, make_random, write, write_tokenizer

LAYERS, EXPERTS = 2, 8
EXACT: dict[str, Any] = {"memory": "4GiB", "device": "cpu", "dense_bits": 16, "lanes": 1}
FREQUENCIES = [[5, 0, 90, 1, 7, 2, 3, 80], [70, 4, 0, 6, 60, 0, 8, 9]]
MOST_USED = [(0, 2), (0, 7), (1, 0), (1, 4), (1, 7), (1, 6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder") / "model"
    torch.manual_seed(0)
    config = config_of("switch_transformers")
    model = SwitchTransformersEncoderModel._from_config(config, dtype=torch.float32, experts_implementation="eager")
    make_random(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    opened = []

    def opening(directory: Path, **options: Any) -> Any:
        model, _ = tiermoe.load(directory, **EXACT, **options)
        opened.append(model)
        return model

    yield opening
    for model in opened:
        model.tiermoe.close()


@pytest.fixture
def edgemoe(checkpoint: Path, tmp_path: Path, load: Callable[..., Any]) -> Callable[..., Any]:
    """Loads the checkpoint with that preset. bits: of every expert."""

    def opening(bits: int, **options: Any) -> Any:
        fingerprint = inspect_model(checkpoint, "encoder").checkpoint.fingerprint()
        data = {"table": [[bits] * EXPERTS] * LAYERS, "paths": {}, "frequencies": FREQUENCIES}
        write_profile(tmp_path, Profile("edgemoe", fingerprint, {}, {}, data))
        return load(checkpoint, preset="edgemoe", store=tmp_path, **options)

    return opening


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def plain(directory: Path) -> Any:
    model = SwitchTransformersEncoderModel.from_pretrained(directory, experts_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


@torch.no_grad()
def same(mine: Any, theirs: Any) -> bool:
    """Whether hidden states are equal bit for bit, of more tokens than an expert's capacity, some of them padding."""
    ids = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1, :1]}):
        if not torch.equal(mine(**given).last_hidden_state, theirs(**given).last_hidden_state):
            return False
    return True


@pytest.mark.parametrize(("preset", "cache"), [("default", "10%"), ("lru", "40%"), ("load-on-demand", "100%")])
def test_hidden_states_are_transformers_own(
    checkpoint: Path, load: Callable[..., Any], preset: str, cache: str
) -> None:
    model = load(checkpoint, bits=16, preset=preset, cache=cache)
    assert isinstance(model, SwitchTransformersEncoderModel)
    assert same(model, plain(checkpoint))
    assert model.tiermoe.stats()["expert_hits"] + model.tiermoe.stats()["expert_misses"] > 0


def test_hidden_states_of_edgemoe(checkpoint: Path, edgemoe: Callable[..., Any]) -> None:
    assert same(edgemoe(16, cache="10%"), plain(checkpoint))


@pytest.mark.parametrize("encoder_decoder", [True, False])
def test_a_whole_models_checkpoint_whose_config_names_its_encoder(
    tmp_path: Path, load: Callable[..., Any], encoder_decoder: bool
) -> None:
    directory = write(tmp_path / "whole", "switch_transformers", torch.float32)
    edit_config(directory, architectures=["SwitchTransformersEncoderModel"], is_encoder_decoder=encoder_decoder)
    blueprint = inspect_model(directory, "whole")
    assert not [key for key in blueprint.dense_keys if key.startswith(("decoder.", "lm_head."))]
    assert not blueprint.outline.tables, "a bias of attention is no table of tokens"
    model = load(directory, bits=16, cache="40%")
    assert len(model.tiermoe.store.layers) == LAYERS
    assert same(model, plain(directory))


@torch.no_grad()
def test_a_pass_loads_each_expert_once_and_reads_the_next_layer_ahead(edgemoe: Callable[..., Any]) -> None:
    """40 tokens share 8 experts a layer, and fewer than 8 fit."""
    model = edgemoe(4, cache="25%", warm=False)
    loads, submit = [], model.tiermoe.link.submit
    model.tiermoe.link.submit = lambda load: (loads.append(load), submit(load))
    chosen: set[tuple[int, int]] = set()
    model.tiermoe.observe(
        OnRoute(lambda routed, _: chosen.update((routed.layer, each) for each in routed.tokens_per_expert()))
    )
    model(input_ids=torch.randint(3, 128, (8, 5), generator=torch.Generator().manual_seed(1)))
    finish(model)
    urgent = [(load.key.layer, load.key.expert) for load in loads if load.urgent]
    assert len(urgent) == len(set(urgent)) > 0
    assert set(urgent) <= chosen
    assert {load.key.layer for load in loads if not load.urgent} == {0, 1}


@pytest.mark.parametrize("bits", [4, 8])
def test_the_buffer_begins_with_the_experts_of_the_highest_frequency(edgemoe: Callable[..., Any], bits: int) -> None:
    """In the bits of the table, not the run's own."""
    model = edgemoe(bits, cache="40%")
    controller = model.tiermoe.loader
    while controller.filling:
        controller.record(controller.link.wait())
    cache = controller.cache
    assert cache.slots == len(MOST_USED)
    assert all(cache.find(layer, expert, bits) is not None for layer, expert in MOST_USED)


def test_a_cold_start_has_an_empty_buffer(edgemoe: Callable[..., Any]) -> None:
    controller = edgemoe(4, cache="40%", warm=False).tiermoe.loader
    assert not controller.filling
    assert len(controller.cache) == 0


def test_a_plan_has_no_keys_and_values_and_the_whole_prompts_activations(checkpoint: Path, tmp_path: Path) -> None:
    directories = [Path(shutil.copytree(checkpoint, tmp_path / "encoder")), tmp_path / "whole"]
    write(directories[1], "switch_transformers", torch.float32)
    for directory in directories:
        edit_config(directory, max_position_embeddings=4096)
    alone, whole = (tiermoe.plan(directory, **EXACT, context=4096) for directory in directories)

    def held(plan: Any, part: str) -> int:
        return sum(need.nbytes for need in plan.needs if need.part == part)

    assert held(alone, "kv cache") == 0 < held(whole, "kv cache")
    assert held(alone, "activations") == held(whole, "activations")
    with pytest.raises(tiermoe.TiermoeError, match="an encoder reads its prompt at once"):
        tiermoe.plan(checkpoint, **EXACT, chunk=64)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "MODEL", "hi"),
        ("chat", "MODEL"),
        ("serve", "MODEL", "--port", free_port()),
        ("eval", "MODEL", "--text", "TEXT", "--tokens", "128", "--window", "64"),
        ("bench", "MODEL", "--peers", "none"),
        ("trace", "MODEL", "--text", "TEXT", "--out", "OUT", "--tokens", "256", "--sequence", "128"),
        ("calibrate", "MODEL", "--text", "TEXT", "--for", "edgemoe", "--tokens", "1024", "--sequence", "128"),
    ],
    ids=lambda words: words[0],
)
def test_what_writes_text_is_refused(
    words: tuple[str, ...], checkpoint: Path, tmp_path: Path, tiermoe_: Command
) -> None:
    text = tmp_path / "text"
    text.write_text("a few words of a text, " * 100)
    places = {"MODEL": checkpoint, "TEXT": text, "OUT": tmp_path / "out.trace"}
    outcome = tiermoe_(*(places.get(word, word) for word in words))
    assert outcome.code == 2
    assert "is an encoder alone and writes no text" in outcome.cause
    assert outcome.err.count("\n") == 1
    assert not outcome.out


def test_show_plan_and_pack(checkpoint: Path, tmp_path: Path, tiermoe_: Command) -> None:
    directory = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    store = tmp_path / "store"
    refused = tiermoe_("pack", directory, "--quantizer", "gptq", "--out", store)
    assert "a model with an encoder cannot be calibrated for gptq" in refused.cause
    assert "Switch Transformers (encoder alone)" in tiermoe_("show", directory).out
    assert tiermoe_("plan", directory, "--memory", "4GiB").code == 0
    assert tiermoe_("pack", directory, "--bits", "4", "--out", store).code == 0
    assert "Switch Transformers (encoder alone)" in tiermoe_("show", directory, "--store", store).out
