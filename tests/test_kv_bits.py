"""Keys and values at 8 bits: codes, caches of them, and models that run on such a cache."""

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
from tiermoe.config import Settings
from tiermoe.engine.load import plan_for
from tiermoe.errors import ConfigError
from tiermoe.model import kv_memory
from tiermoe.model.hf.blueprint import inspect_model
from tiny import write


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("kv bits"), "qwen3_moe", torch.bfloat16, **NATIVE)


@pytest.fixture(scope="module")
def engines(small: Path) -> Iterator[dict[int, Any]]:
    """One at 16, one at 8 bits."""
    made = {bits: engine_of(small, bits=4, dense_bits=4, kv_bits=bits, chunk=80) for bits in (16, 8)}
    yield made
    for engine in made.values():
        engine.close()


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def test_a_code_is_the_nearest_and_the_largest_is_127() -> None:
    rows = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[7] = 0
    codes, scales = kv_memory.encode_kv(rows)
    assert codes.dtype == torch.int8
    assert torch.equal(codes.abs().amax(-1) == 127, (rows != 0).any(-1))
    error = (kv_memory.decode_kv(codes, scales, torch.float32) - rows.float()).abs()
    # half a step, and what a scale's own rounding leaves of the largest
    assert bool((error <= 0.5 * scales.float() * 1.0001 + rows.float().abs() / 256).all())
    assert not codes[7].any()


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
@pytest.mark.parametrize("count", [5, 70], ids=["few tokens", "a prompt"])
def test_what_is_kept_are_the_codes_of_what_16_bits_keep(count: int, engines: dict[int, Any]) -> None:
    """Of the first layer, whose keys and values no attention comes before."""
    caches = {}
    for bits, engine in engines.items():
        caches[bits] = engine.new_cache()
        engine.step(Batch((prompt(caches[bits].open(), tokens(count)),)), caches[bits])
    for name in ("keys", "values"):
        wide, kept = (getattr(caches[bits], name)[0][0, :, :count] for bits in (16, 8))
        codes, scales = kv_memory.encode_kv(wide)
        assert torch.equal(kept, codes)
        its = {"keys": "key_scales", "values": "value_scales"}[name]
        assert torch.equal(getattr(caches[8], its)[0][0, :, :count], scales)


def test_logits_are_near_those_of_16_bits_and_not_them(engines: dict[int, Any]) -> None:
    ids = tokens(170)
    whole, half = (alone(engines[bits], ids, 150) for bits in (16, 8))
    assert 0 < difference(half, whole) < 0.1


def test_verified_tokens_and_rows_of_a_batch_have_the_bits_that_each_has_alone(engines: dict[int, Any]) -> None:
    engine = engines[8]
    if not engine.decoder.can_verify_draft:
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


def test_a_fork_goes_on_as_its_sequence(engines: dict[int, Any], tmp_path: Path) -> None:
    engine, ids = engines[8], tokens(40)
    want = alone(engine, ids, 39)
    cache = engine.new_cache(3)
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:39]),)), cache)
    other = cache.fork(slab)
    cache.save(slab, tmp_path / "sequence")
    for each in (other, cache.load(tmp_path / "sequence")):
        assert torch.equal(engine.step(Batch((decode(each, 39, ids[39]),)), cache), want)


@pytest.mark.parametrize(("family", "changes"), [("qwen3_moe", {}), ("gpt_oss", {"sliding_window": 8})])
def test_torchs_operators_read_codes_too(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In float32, which no native kernel takes; with windows in rings."""
    directory, ids = write(tmp_path, family, torch.float32, **changes), tokens(40)
    found = []
    for bits in (16, 8):
        engine = engine_of(directory, bits=16, dense_bits=16, kv_bits=bits, chunk=16)
        found.append(alone(engine, ids, 30))
        engine.close()
    assert 0 < difference(found[1], found[0]) < 0.15  # random weights make much of little


def test_a_cache_needs_what_it_allocates_and_less_than_at_16_bits(small: Path, engines: dict[int, Any]) -> None:
    blueprint, planned = inspect_model(small, "small"), {}
    for bits, engine in engines.items():
        planned[bits] = plan_for(blueprint, Settings(memory=1 << 32, device="cpu", context=64, kv_bits=bits, batch=2))
        cache = engine.new_cache(2, 64)
        kept = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
        assert planned[bits].kv_cache == sum(tensor.nbytes for tensor in kept)
    assert planned[8].kv_cache == planned[16].kv_cache * 34 // 64  # of 32 columns codes and a scale
    assert ("key/value cache", planned[8].kv_cache, "64 tokens of context at 8 bits") in planned[8].rows()


def test_a_report_says_that_tokens_can_change(engines: dict[int, Any]) -> None:
    assert engines[8].lossy == ["kv_bits=8"]
    assert engines[16].lossy == []
    assert engines[8].stats()["kv_bits"] == 8


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("qwen3_moe", {"decoder": "generic"}, "transformers' code.*leave --kv-bits out"),
        ("deepseek_v3", {}, "latents, which are compressed.*leave --kv-bits out"),
    ],
)
def test_what_has_16_bits_alone_is_refused(family: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"kv_bits=8 .*{reason}"):
        tiermoe.load(write(tmp_path, family, torch.bfloat16), memory="4GiB", device="cpu", kv_bits=8, **options)


@pytest.mark.parametrize("bits", [4, "8", True])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match=r"^kv_bits must be"):
        Settings(kv_bits=bits)


def test_a_sequence_of_other_bits_is_refused(engines: dict[int, Any], tmp_path: Path) -> None:
    cache = engines[16].new_cache()
    slab = cache.open()
    engines[16].step(Batch((prompt(slab, tokens(5)),)), cache)
    cache.save(slab, tmp_path / "sequence")
    with pytest.raises(tiermoe.errors.ModelError, match="another model"):
        engines[8].new_cache().load(tmp_path / "sequence")
