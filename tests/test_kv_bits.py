"""Keys and values at 8 and 4 bits: codes, caches of them, and models that run on such a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from small_engines import NATIVE, alone, engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.config import KV_BITS, Settings
from tiermoe.engine.load import plan_for
from tiermoe.errors import ConfigError
from tiermoe.model.cache import memory as kv_memory
from tiermoe.model.hf.blueprint import inspect_model
from tiny import write


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("kv bits"), "qwen3_moe", torch.bfloat16, **NATIVE)


@pytest.fixture(scope="module")
def engines(small: Path) -> Iterator[dict[int, Any]]:
    """Bits of keys and values → engine."""
    made = {bits: engine_of(small, bits=4, dense_bits=4, kv_bits=bits, chunk=80) for bits in KV_BITS}
    yield made
    for engine in made.values():
        engine.close()


CODED = pytest.mark.parametrize("bits", [8, 4])
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NEAR = {8: 0.1, 4: 0.5}  # relative error of logits; random weights make much of little


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def test_a_code_is_the_nearest_and_the_largest_is_127() -> None:
    rows = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[7] = 0
    codes, scales = kv_memory.encode_kv(rows, 8)
    assert codes.dtype == torch.int8
    assert torch.equal(codes.abs().amax(-1) == 127, (rows != 0).any(-1))
    error = (kv_memory.decode_kv(codes, scales, torch.float32) - rows.float()).abs()
    # half a step, and what a scale's own rounding leaves of the largest
    assert bool((error <= 0.5 * scales.float() * 1.0001 + rows.float().abs() / 256).all())
    assert not codes[7].any()


@pytest.mark.parametrize("columns", [32, 96, 128])
def test_a_code_of_4_bits_is_the_nearest_to_the_hadamard_transform(columns: int) -> None:
    rows = torch.randn(50, 3, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[7] = 0
    codes, scales = kv_memory.encode_kv(rows, 4)
    assert (codes.dtype, codes.shape) == (torch.uint8, (50, 3, columns // 2))
    length = 128 if columns == 128 else 32
    hadamard = torch.ones(1, 1)
    while len(hadamard) < length:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
    blocks = rows.float().unflatten(-1, (-1, length))
    want = (blocks @ hadamard).flatten(-2)
    largest = want.gather(-1, want.abs().argmax(-1, keepdim=True))
    assert torch.equal(scales, (largest / -127).bfloat16())
    numbers = torch.tensor(IQ4_NL)
    nearest = numbers[(numbers * scales.float()[..., None] - want[..., None]).abs().argmin(-1)] * scales.float()
    back = (nearest.unflatten(-1, (-1, length)) @ hadamard / length).flatten(-2)
    found = kv_memory.decode_kv(codes, scales, torch.float32)
    assert torch.allclose(found, back, atol=1e-5)
    assert not found[7].any()


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@CODED
@pytest.mark.parametrize("count", [5, 70], ids=["few tokens", "a prompt"])
def test_what_is_kept_are_the_codes_of_what_16_bits_keep(count: int, bits: int, engines: dict[int, Any]) -> None:
    """Of the first layer, whose keys and values no attention comes before."""
    caches = {}
    for each in (16, bits):
        caches[each] = engines[each].new_cache()
        engines[each].step(Batch((prompt(caches[each].open(), tokens(count)),)), caches[each])
    for name in ("keys", "values"):
        wide, kept = (getattr(caches[each], name)[0][0, :, :count] for each in (16, bits))
        codes, scales = kv_memory.encode_kv(wide, bits)
        assert torch.equal(kept, codes)
        its = {"keys": "key_scales", "values": "value_scales"}[name]
        assert torch.equal(getattr(caches[bits], its)[0][0, :, :count], scales)


@CODED
def test_logits_are_near_those_of_16_bits_and_not_them(bits: int, engines: dict[int, Any]) -> None:
    ids = tokens(170)
    whole, less = (alone(engines[each], ids, 150) for each in (16, bits))
    assert 0 < difference(less, whole) < NEAR[bits]


@CODED
def test_verified_tokens_and_rows_of_a_batch_have_the_bits_that_each_has_alone(
    bits: int, engines: dict[int, Any]
) -> None:
    engine = engines[bits]
    if not engine.decoder.batch_invariant:
        pytest.skip("this machine has no native kernels")
    ids, others = tokens(90), tokens(21, seed=2)
    want, theirs = alone(engine, ids, 83), alone(engine, others, 20)
    cache = engine.new_cache(2)
    slab, other = cache.open(), cache.open()
    engine.step(Batch((prompt(slab, ids[:83]),)), cache)
    engine.step(Batch((prompt(other, others[:20]),)), cache)
    assert torch.equal(engine.step(Batch((verify(slab, 83, ids[83:]),)), cache, every=True), want)
    cache.crop(slab, 83)
    both = Batch((decode(slab, 83, ids[83]), decode(other, 20, others[20])))
    assert torch.equal(engine.step(both, cache), torch.cat([want[:1], theirs]))


@CODED
def test_a_fork_goes_on_as_its_sequence(bits: int, engines: dict[int, Any], tmp_path: Path) -> None:
    engine, ids = engines[bits], tokens(40)
    want = alone(engine, ids, 39)
    cache = engine.new_cache(3)
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:39]),)), cache)
    other = cache.fork(slab)
    cache.save(slab, tmp_path / "sequence")
    for each in (other, cache.load(tmp_path / "sequence")):
        assert torch.equal(engine.step(Batch((decode(each, 39, ids[39]),)), cache), want)


@CODED
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"head_dim": 32}),
        ("gpt_oss", {"sliding_window": 8, "head_dim": 32}),
        ("qwen4_exp_text", {"head_dim": 32, "indexer_head_dim": 32}),
    ],
)
def test_torchs_operators_read_codes_too(family: str, changes: dict[str, Any], bits: int, tmp_path: Path) -> None:
    """In float32, which no native kernel takes; of windows in rings, and of chosen blocks."""
    directory, ids = write(tmp_path, family, torch.float32, **changes), tokens(40)
    found = []
    for each in (16, bits):
        engine = engine_of(directory, bits=16, dense_bits=16, kv_bits=each, chunk=16)
        found.append(alone(engine, ids, 30))
        engine.close()
    assert 0 < difference(found[1], found[0]) < 1.5 * NEAR[bits]


def test_a_cache_needs_what_it_allocates_and_less_than_at_16_bits(small: Path, engines: dict[int, Any]) -> None:
    blueprint, planned = inspect_model(small, "small"), {}
    for bits, engine in engines.items():
        planned[bits] = plan_for(blueprint, Settings(memory=1 << 32, device="cpu", context=64, kv_bits=bits, batch=2))
        cache = engine.new_cache(2, 64)
        kept = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
        assert planned[bits].kv_cache == sum(tensor.nbytes for tensor in kept)
    for bits, nbytes in ((8, 34), (4, 18)):  # of 32 columns codes and a scale
        assert planned[bits].kv_cache == planned[16].kv_cache * nbytes // 64
        row = "key/value cache", planned[bits].kv_cache, f"64 tokens of context at {bits} bits"
        assert row in planned[bits].rows()


def test_a_report_says_that_tokens_can_change(engines: dict[int, Any]) -> None:
    assert engines[16].lossy == []
    for bits in (8, 4):
        assert engines[bits].lossy == [f"kv_bits={bits}"]
        assert engines[bits].stats()["kv_bits"] == bits


@pytest.mark.parametrize(
    ("family", "changes", "options", "reason"),
    [
        ("qwen3_moe", {}, {"decoder": "generic"}, "kv_bits=8 .*transformers' code.*leave --kv-bits out"),
        ("deepseek_v3", {}, {}, "kv_bits=8 .*latents, which are compressed.*leave --kv-bits out"),
        ("deepseek_v4", {}, {}, "kv_bits=8 .*compressed already"),
        (
            "qwen3_moe", {"head_dim": 16}, {"kv_bits": 4},
            r"kv_bits=4 takes heads of a multiple of 32.*heads of 16; use --kv-bits 8",
        ),
    ],
)  # fmt: skip
def test_what_has_no_codes_is_refused(
    family: str, changes: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = write(tmp_path, family, torch.bfloat16, **changes)
    with pytest.raises(ConfigError, match=reason):
        tiermoe.load(directory, memory="4GiB", device="cpu", **{"kv_bits": 8, **options})


def test_a_sequence_of_other_bits_is_refused(engines: dict[int, Any], tmp_path: Path) -> None:
    cache = engines[16].new_cache()
    slab = cache.open()
    engines[16].step(Batch((prompt(slab, tokens(5)),)), cache)
    cache.save(slab, tmp_path / "sequence")
    for bits in (8, 4):
        with pytest.raises(tiermoe.errors.ModelError, match="another model"):
            engines[bits].new_cache().load(tmp_path / "sequence")
