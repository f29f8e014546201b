"""Layers of linear attention, Kimi's and both kinds of Mamba against transformers' eager layers on the same weights, by
torch and by the native kernel of each instruction set; and what a cache of states can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tiny
from small_engines import engine_of
from tiermoe import native
from tiermoe.batch import Batch, Row, decode, prompt
from tiermoe.config import settings
from tiermoe.engine.load import resolve_for
from tiermoe.engine.needs import expanding_needs
from tiermoe.model.attention import linear as delta
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.families import FAMILIES as ALL_FAMILIES
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiermoe.model.rotary import Rotary
from tiermoe.model.step import Step
from tiermoe.model.weights import ModuleWeights, Scope, text_part

KIMI = ("kimi_linear", "glm5_next_text", "bailing_hybrid")
FAMILIES = ["qwen3_next", "qwen3_5_moe_text", *KIMI]
MAMBA, MAMBA_1 = "granitemoehybrid", "jamba"
BLOCKS = {MAMBA: "mamba", MAMBA_1: "mamba", **dict.fromkeys(KIMI, "self_attn")}
LAYERS = {"layer_types": ["linear_attention"], "mlp_only_layers": None}
WIDE = {**LAYERS, "linear_value_head_dim": 80}  # more than a strip of columns
SIZES = {
    "kimi_linear": {**LAYERS, "linear_head_dim": 80, "mlp_layer_types": ["dense"]},
    "glm5_next_text": {**LAYERS, "linear_head_dim": 80, "mlp_layer_types": ["dense"]},
    "bailing_hybrid": {**LAYERS, "head_dim": 80, "mlp_layer_types": ["dense"]},
    MAMBA_1: {"attn_layer_period": 2},  # of which the second one has attention
}
LENGTH = 150  # of a prompt: more than two chunks of either way
LAYER = "model.layers.0"
ROTARY = Rotary(torch.ones(1), 1.0, torch.float32)


class Case:
    """A layer of a family, transformers' and ours on the same weights."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        config = tiny.config_of(family, num_hidden_layers=1, **SIZES.get(family, WIDE))
        torch.manual_seed(0)
        model = tiny.auto_class(family).from_config(config, dtype=dtype).eval()
        layer = getattr(model.model, "language_model", model.model).layers[0]
        self.eager: Any = getattr(layer, BLOCKS.get(family, "linear_attn"))
        for name, parameter in self.eager.named_parameters():
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.3)
        of = ALL_FAMILIES[family]
        w = Scope(text_part(ModuleWeights(model)), config, dtype, of.norms).at(LAYER)
        self.block: Any = of.layer(w, Configs(config, config, False).plain(), 0).attention
        self.sizes = self.block.sizes
        self.x = torch.randn(2, LENGTH + 4, config.hidden_size).to(dtype)

    @torch.no_grad()
    def want(self) -> torch.Tensor:
        """transformers' outputs of both sequences."""
        found: torch.Tensor = self.eager(hidden_states=self.x)
        return found

    def cache(self, slabs: int = 2) -> KVCache:
        return KVCache([self.sizes.shape], slabs, 2 * LENGTH, LENGTH, self.x.dtype)

    @torch.no_grad()
    def run(self, cache: KVCache, *rows: Row, finish: bool = True) -> torch.Tensor:
        """The outputs of a step's rows, of which slab i has sequence i."""
        for row in rows:
            cache.begin_write(row.slab, row.end)
        step = Step(Batch(rows), cache, ROTARY)
        found = self.block(torch.cat([self.x[row.slab, row.first : row.end] for row in rows]), 0, step)
        for row in rows if finish else ():
            cache.end_write(row.slab, row.end)
        return found


def row_of(slab: int, first: int, end: int) -> Row:
    return prompt(slab, range(end - first), first)


def error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.fixture(scope="module")
def case() -> Callable[[str, torch.dtype], Case]:
    made: dict[tuple[str, torch.dtype], Case] = {}

    def get(family: str, dtype: torch.dtype) -> Case:
        if (family, dtype) not in made:
            made[family, dtype] = Case(family, dtype)
        return made[family, dtype]

    return get


def check_agreement(it: Case, most: float) -> None:
    """Prompts of different lengths, one in two chunks, then tokens of both at once."""
    cache, want = it.cache(), it.want()
    slabs = [cache.open(), cache.open()]
    assert slabs == [0, 1]
    found = [it.run(cache, row_of(0, 0, 1)), it.run(cache, row_of(0, 1, LENGTH))]
    assert error(torch.cat(found), want[0, :LENGTH]) < most
    assert error(it.run(cache, row_of(1, 0, 70)), want[1, :70]) < most
    for at in range(4):
        both = it.run(cache, decode(0, LENGTH + at, 1), decode(1, 70 + at, 1))
        assert error(both, torch.stack((want[0, LENGTH + at], want[1, 70 + at]))) < 2 * most


@pytest.mark.parametrize("family", [*FAMILIES, MAMBA, MAMBA_1])
def test_torch_agrees_with_transformers_eager_layer(family: str, case: Callable[..., Case]) -> None:
    check_agreement(case(family, torch.float32), 1e-5)


@pytest.mark.parametrize("columns", [1, 8], ids=["of heads", "of channels"])
@pytest.mark.parametrize("tokens", [1, delta.CHANNEL_CHUNK, delta.CHUNK + 5])
def test_the_delta_rule_is_the_recurrence(tokens: int, columns: int) -> None:
    """Of tokens some of which make a head, or a channel, forget all."""
    generator = torch.Generator().manual_seed(tokens)
    query, key = (F.normalize(torch.randn(tokens, 6, 8, generator=generator), dim=-1) for _ in range(2))
    value, state = torch.randn(tokens, 6, 16, generator=generator), torch.randn(6, 8, 16, generator=generator)
    decay = torch.where(torch.rand(tokens, 6, columns, generator=generator) < 0.1, -2000.0, -0.01)
    beta = torch.rand(tokens, 6, generator=generator)
    wide, want = state.double(), []
    for at in range(tokens):
        wide = decay[at, ..., None].double().exp() * wide
        read = (key[at, ..., None].double() * wide).sum(1)
        wide = wide + key[at, ..., None] * (beta[at, :, None] * (value[at] - read))[:, None]
        want.append((query[at, ..., None].double() * wide).sum(1))
    found = delta.delta_rule(query, key, value, decay, beta, state)
    assert error(found, torch.stack(want)) < 1e-6
    assert error(state, wide) < 1e-6


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.usefixtures("instruction_set")
class TestNative:
    @pytest.mark.parametrize("family", [*FAMILIES, MAMBA, MAMBA_1])
    def test_it_agrees_with_transformers_eager_layer(self, family: str, case: Callable[..., Case]) -> None:
        check_agreement(case(family, torch.bfloat16), 0.01)

    @pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "glm5_next_text", MAMBA, MAMBA_1])
    def test_neither_other_tokens_nor_threads_change_a_bit(self, family: str, case: Callable[..., Case]) -> None:
        it = case(family, torch.bfloat16)
        whole, parts = it.cache(), it.cache()
        for cache in (whole, parts):
            cache.open()
            cache.open()
        want = [it.run(whole, row_of(slab, 0, LENGTH)) for slab in (0, 1)]
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        together = it.run(parts, row_of(0, 0, 40), row_of(1, 0, 70))
        torch.set_num_threads(before)
        assert torch.equal(together, torch.cat((want[0][:40], want[1][:70])))
        assert torch.equal(it.run(parts, row_of(0, 40, LENGTH)), want[0][40:])
        for at in range(70, 74):
            assert torch.equal(it.run(parts, decode(1, at, 1)), want[1][at : at + 1])


# Mamba


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_prompts_have_a_least_time_step_as_transformers_code_has_it(
    dtype: torch.dtype, most: float, tmp_path: Path
) -> None:
    """One that acts on many heads; generated tokens have none."""
    directory = tiny.write(tmp_path, "nemotron_h", dtype, time_step_min=0.7)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=40)
    plain, theirs = tiny.oracle(directory, "nemotron_h", dtype), None
    ids = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(2))
    cache = engine.new_cache(1, 60)
    slab = cache.open()
    for row in (prompt(slab, ids[:50].tolist()), *(decode(slab, at, int(ids[at])) for at in range(50, 60))):
        with torch.no_grad():
            output = plain(ids[None, row.first : row.end], past_key_values=theirs, use_cache=True)
        theirs = output.past_key_values
        assert error(engine.step(Batch((row,)), cache)[0], output.logits[0, -1]) < most
    engine.close()


# the cache


@pytest.fixture
def small(case: Callable[..., Case]) -> Case:
    return case("qwen3_next", torch.float32)


def test_a_step_that_fails_or_is_taken_back_leaves_what_it_began_with(small: Case) -> None:
    cache = small.cache()
    cache.open()
    small.run(cache, row_of(0, 0, 9))
    want = small.run(cache, decode(0, 9, 1))
    cache.crop(0, 9)
    assert cache.length(0) == 9
    small.run(cache, decode(0, 9, 1), finish=False)
    assert torch.equal(small.run(cache, decode(0, 9, 1)), want)
    assert torch.equal(small.run(cache, decode(0, 9, 1)), want)  # once more, as where a token was unsure


def test_a_state_that_is_not_kept_is_refused(small: Case) -> None:
    cache = small.cache()
    cache.open()
    for first, end in ((0, 6), (6, 9), (9, 10)):
        small.run(cache, row_of(0, first, end))
    assert [cache.kept(0, length) for length in (5, 8, 9, 10)] == [0, 0, 9, 10]
    assert [length for length in range(11) if cache.can_crop(0, length)] == [0, 9, 10]
    with pytest.raises(ValueError, match="recurrent state cannot be wound back to 6"):
        cache.crop(0, 6)
    with pytest.raises(ValueError, match="cannot go on from position 6"):
        small.run(cache, row_of(0, 6, 9))
    cache.crop(0, 0)
    assert error(small.run(cache, row_of(0, 0, 5)), small.want()[0, :5]) < 1e-5


def test_a_slab_that_comes_back_is_empty(small: Case) -> None:
    cache = small.cache(1)
    for _ in range(2):
        cache.open()
        assert error(small.run(cache, row_of(0, 0, 5)), small.want()[0, :5]) < 1e-5
        cache.close(0)


def test_beams_change_places_with_their_states(small: Case) -> None:
    cache = small.cache()
    for length in (9, 10):
        small.run(cache, row_of(cache.open(), 0, length))
    states = cache.recurrent
    assert states is not None
    before = [[bytes(part) for part in states.memory(slab, length)] for slab, length in ((0, 9), (1, 10))]
    cache.select([1, 0])
    assert (cache.length(0), cache.length(1)) == (10, 9)
    assert [[bytes(part) for part in states.memory(slab, length)] for slab, length in ((1, 9), (0, 10))] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_short_convolutions_taps_take_is_in_the_plan(dtype: torch.dtype, tmp_path: Path) -> None:
    blueprint = inspect_model(tiny.write(tmp_path, "lfm2_moe", dtype), "taps")
    resolved = resolve_for(blueprint, settings(memory="1GiB", device="cpu"))
    (need,) = expanding_needs(blueprint, resolved.settings, "cpu")
    assert need.nbytes == 2 * 3 * 64 * 4  # two layers, three taps
