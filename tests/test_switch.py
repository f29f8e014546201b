"""EdgeMoE on an encoder–decoder model: passes, the encoder's experts, exactness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from channel_wise import round_experts
from profiles import write_profile
from small_engines import OnRoute, finish
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload.profiles import Profile
from tiermoe.types import ExpertKey, Load
from tiny import oracle, write

FAMILY = "switch_transformers"
ENCODER, LAYERS, EXPERTS = 2, 4, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("switch"), FAMILY, torch.float32)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return oracle(checkpoint, FAMILY, torch.float32)


@pytest.fixture(scope="module")
def load(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Loads the checkpoint with the edgemoe preset. table: bits per expert, of every layer."""
    opened = []

    def opening(table: list[list[int]], cache: str) -> Any:
        store = tmp_path_factory.mktemp("store")
        write_calibration(store, checkpoint, table)
        model, _ = tiermoe.load(
            checkpoint, memory="4GiB", device="cpu", dense_bits=16, store=store, preset="edgemoe", cache=cache
        )
        opened.append(model)
        return model

    yield opening
    for model in opened:
        model.tiermoe.close()


@pytest.fixture(scope="module")
def exact(load: Any) -> Any:
    """All at 16 bits, with room for fewer experts than a layer has."""
    return load(uniform(16), "10%")


@pytest.fixture(scope="module")
def small(load: Any) -> Any:
    """All at 4 bits, with room for more experts than a layer has."""
    return load(uniform(4), "40%")


def write_calibration(store: Path, checkpoint: Path, table: list[list[int]]) -> None:
    """A calibration in which an expert of the last layer follows the expert of the same index of the layer before."""
    fingerprint = inspect_model(checkpoint, "switch").checkpoint.fingerprint()
    paths = {str(LAYERS - 1): {str(expert): {str(expert): 3} for expert in range(EXPERTS)}}
    data = {"table": table, "paths": paths, "frequencies": [[1.0] * EXPERTS] * LAYERS}
    write_profile(store, Profile("edgemoe", fingerprint, {}, {}, data))


def uniform(bits: int) -> list[list[int]]:
    return [[bits] * EXPERTS for _ in range(LAYERS)]


def tokens(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called with a model: the list of every load that begins from then on."""

    def noting(model: Any) -> list[Load]:
        loads: list[Load] = []
        link = model.tiermoe.link
        submit = link.submit

        def note(load: Load) -> None:
            loads.append(load)
            submit(load)

        monkeypatch.setattr(link, "submit", note)
        return loads

    return noting


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called with a model: the list of (phase, first MoE layer) of every pass that begins from then on, and
    ('new sequence', 0)."""

    def noting(model: Any) -> list[tuple[str, int]]:
        current = model.tiermoe.context
        noting = _Noting(current)
        monkeypatch.setattr(current, "scheduler", noting)
        return noting.seen

    return noting


class _Noting:
    """A scheduler that notes what begins."""

    def __init__(self, current: Any) -> None:
        self.seen: list[tuple[str, int]] = []
        self._scheduler = current.scheduler

    def begin_pass(self, tokens: int, forecasts: Any, phase: str, first: int = 0, resumed: bool = False) -> None:
        self.seen.append((phase, first))
        self._scheduler.begin_pass(tokens, forecasts, phase, first, resumed)

    def new_sequence(self) -> None:
        self.seen.append(("new sequence", 0))
        self._scheduler.new_sequence()

    def run_layer(self, routed: Any, forecasts: Any) -> Any:
        return self._scheduler.run_layer(routed, forecasts)


def resident(model: Any, layers: range, bits: int) -> set[ExpertKey]:
    keys = [ExpertKey(layer, expert, bits) for layer in layers for expert in range(EXPERTS)]
    return {key for key in keys if model.tiermoe.loader.cache.find(*key) is not None}


def test_beams_at_sixteen_bits_are_the_models_own(exact: Any, plain: Any) -> None:
    ids = tokens(2, 7)
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(exact.generate(ids, **beams), plain.generate(ids, **beams))


def test_generating_begins_one_pass_for_the_encoder_and_one_for_each_token(exact: Any, passes: Any) -> None:
    seen = passes(exact)
    exact.generate(tokens(1, 9), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert seen == [("new sequence", 0), ("prefill", 0), *[("decode", ENCODER)] * 3]


@torch.no_grad()
def test_a_forward_call_begins_the_same_passes(exact: Any, passes: Any) -> None:
    ids = tokens(1, 9)
    encoded = exact.get_encoder()(input_ids=ids)
    seen = passes(exact)
    first = exact(input_ids=ids, decoder_input_ids=ids[:, :4])
    exact(encoder_outputs=encoded, decoder_input_ids=ids[:, 4:5], past_key_values=first.past_key_values)
    assert seen == [("new sequence", 0), ("prefill", 0), ("prefill", ENCODER), ("decode", ENCODER)]
    seen.clear()
    exact(encoder_outputs=encoded, decoder_input_ids=ids[:, :1])
    assert seen == [("new sequence", 0), ("decode", ENCODER)], "the same prompt, answered anew"


@torch.no_grad()
def test_an_encoder_pass_loads_each_expert_at_most_once(exact: Any, submitted: Any) -> None:
    """Re-batching, where fewer experts fit than a layer has: 40 tokens share 8 experts a layer."""
    assert exact.tiermoe.loader.cache.slots < EXPERTS
    finish(exact)
    loads = submitted(exact)
    chosen: dict[int, set[int]] = {}
    exact.tiermoe.observe(OnRoute(lambda routed, _: chosen.setdefault(routed.layer, set(routed.tokens_per_expert()))))
    exact.get_encoder()(input_ids=tokens(8, 5))
    exact.tiermoe.observe(None)
    urgent = [load.key for load in loads if load.urgent]
    assert len(urgent) == len(set(urgent)) > 0
    assert {(key.layer, key.expert) for key in urgent} <= {
        (layer, expert) for layer, experts in chosen.items() for expert in experts
    }


@torch.no_grad()
def test_the_encoders_first_experts_are_read_in_order_when_a_request_begins(small: Any, submitted: Any) -> None:
    encoder = small.get_encoder()
    encoder(input_ids=tokens(8, 5))  # its second layer's experts take slots of the first's
    finish(small)
    assert len(resident(small, range(1), 4)) < EXPERTS
    loads = submitted(small)
    small.tiermoe.context.before_encoder((), {"input_ids": tokens(1, 9)})
    keys = [load.key for load in loads]
    assert keys == sorted(keys)
    assert {(key.layer, load.urgent) for key, load in zip(keys, loads, strict=True)} == {(0, False)}
    finish(small)
    assert len(resident(small, range(1), 4)) == EXPERTS
    before = small.tiermoe.snapshot()
    encoder.block[1](encoder.embed_tokens(tokens(1, 9)))  # the block of the first MoE layer
    counts = small.tiermoe.snapshot().since(before).counts
    assert (counts.misses, counts.hits > 0) == (0, True)


@torch.no_grad()
def test_a_decoder_follows_the_path_and_reads_no_encoder_expert(small: Any, submitted: Any) -> None:
    """While the third MoE layer runs its expert e, the calibration says e for the fourth."""
    encoded = small.get_encoder()(input_ids=tokens(1, 9))
    finish(small)
    chosen: dict[int, list[int]] = {}
    small.tiermoe.observe(OnRoute(lambda routed, _: chosen.__setitem__(routed.layer, list(routed.experts[0]))))
    ahead = 0
    for token in range(3, 40):
        loads = submitted(small)
        small(encoder_outputs=encoded, decoder_input_ids=torch.tensor([[token]]))
        finish(small)
        assert all(load.key.layer >= ENCODER for load in loads)
        speculative = [load.key for load in loads if not load.urgent]
        assert speculative in ([], [ExpertKey(3, expert, 4) for expert in chosen[2]])
        ahead += len(speculative)
    small.tiermoe.observe(None)
    assert ahead > 0


@torch.no_grad()
def test_mixed_bits_are_the_ones_of_the_table(load: Any, checkpoint: Path) -> None:
    """Every expert replaced by what its bitwidth makes of it, computed here from the paper's formula."""
    table = [[(2, 4, 8, 16)[(layer + expert) % 4] for expert in range(EXPERTS)] for layer in range(LAYERS)]
    ours, plain, ids = load(table, "100%"), oracle(checkpoint, FAMILY, torch.float32), tokens(2, 9)
    bits = {(layer, expert): table[layer][expert] for layer in range(LAYERS) for expert in range(EXPERTS)}
    round_experts(plain, ours.tiermoe.store.layers, bits)
    mine = ours(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
    theirs = plain(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
    assert (mine - theirs).abs().max() <= 2e-3 * theirs.abs().max()
    assert set(ours.tiermoe.precisions) == {2, 4, 8, 16}
