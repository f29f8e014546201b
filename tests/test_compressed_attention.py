"""Attention over compressed positions, residual streams and hash-routed layers (DeepSeek-V4), against transformers'
eager code: prompts in chunks, tokens one by one, ragged batches, and sequences that are cut, forked and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

import tiermoe
from parity import tokens as rows_of
from small_engines import alone, engine_of, tokens
from tiermoe.batch import Batch, decode, prompt
from tiermoe.config import settings
from tiermoe.engine.load import load_blueprint, start
from tiermoe.errors import ConfigError, ModelError
from tiermoe.model.families import not_computed
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiny import config_of, oracle, write

FAMILY = "deepseek_v4"
SPARSE = {"index_topk": 3, "sliding_window": 6}
"""A context of 40 tokens is longer than what is attended to in every layer."""
YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip


def near(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((mine - theirs).abs().max() <= 1e-5 * theirs.abs().max())


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("compressed"), FAMILY, torch.float32, **SPARSE)


@pytest.fixture(scope="module")
def engine(sparse: Path) -> Iterator[Any]:
    made = engine_of(sparse, bits=16, dense_bits=16, chunk=16, context=128)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(sparse: Path) -> Any:
    return oracle(sparse, FAMILY, torch.float32)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        SPARSE,
        YARN,
        {"swiglu_limit": 0.05, "scoring_func": "sigmoid"},
        {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}, "hc_mult": 3},
    ],
    ids=["all", "chosen", "yarn", "limits", "rates"],
)
def test_chunks_and_tokens_alone_agree_with_transformers(changes: dict[str, Any], chunk: int, tmp_path: Path) -> None:
    directory, ids = write(tmp_path, FAMILY, torch.float32, **changes), tokens(40)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=chunk, context=64)
    cache = engine.new_cache()
    slab = cache.open()
    rows = [prompt(slab, ids[:30]), *(decode(slab, at, ids[at]) for at in range(30, 40))]
    mine = torch.cat([engine.step(Batch((row,)), cache, every=True) for row in rows])
    engine.close()
    with torch.no_grad():
        assert near(mine, oracle(directory, FAMILY, torch.float32)(torch.tensor([ids])).logits[0])


def test_a_prompt_with_equal_scores_is_what_transformers_gives_one_by_one(tmp_path: Path) -> None:
    """With one head half of the scores are 0. Which of them `torch.topk` finds depends on a row's length: in a prompt
    transformers' rows have all of its entries."""
    directory, ids = write(tmp_path, FAMILY, torch.float32, index_n_heads=1, index_topk=2), tokens(40)
    plain, one_by_one = oracle(directory, FAMILY, torch.float32), []
    kept = DynamicCache(config=plain.config)
    with torch.no_grad():
        whole = plain(torch.tensor([ids])).logits[0]
        for each in ids:
            one_by_one.append(plain(torch.tensor([[each]]), past_key_values=kept, use_cache=True).logits[0])
    want = torch.cat(one_by_one)
    assert not near(whole, want)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=7, context=64)
    cache = engine.new_cache()
    assert near(engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True), want)
    engine.close()


def test_greedy_tokens_are_those_of_transformers(sparse: Path, plain: Any) -> None:
    ours, _ = tiermoe.load(sparse, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    ids = rows_of(2, 21, seed=3)
    options = {"max_new_tokens": 64, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))
    ours.tiermoe.close()


def test_a_ragged_batch_gives_what_its_rows_give_alone(engine: Any) -> None:
    """A prompt beside tokens of other sequences, of which one is shorter than what is chosen."""
    long, short, third = tokens(41), tokens(9, seed=2), tokens(30, seed=3)
    cache = engine.new_cache(3)
    slabs = [cache.open() for _ in range(3)]
    for slab, ids in zip(slabs, (long, short), strict=False):
        engine.step(Batch((prompt(slab, ids[:-1]),)), cache)
    rows = (
        decode(slabs[0], 40, long[40]), decode(slabs[1], 8, short[8]), prompt(slabs[2], third[:16]),
        prompt(slabs[2], third[16:], 16),
    )  # fmt: skip
    got = engine.step(Batch(rows, ragged=True), cache)
    want = [alone(engine, long, 40), alone(engine, short, 8)]
    fresh = engine.new_cache()
    want.append(engine.step(Batch((prompt(fresh.open(), third),)), fresh))
    assert near(got, torch.cat(want))


@pytest.mark.parametrize("length", [31, 32, 33, 36])
def test_a_sequence_that_is_cut_forked_or_saved_goes_on_as_before(engine: Any, length: int, tmp_path: Path) -> None:
    """Amid the positions of an entry and between two, with other tokens written behind the place before."""
    ids, others = tokens(48), tokens(48, seed=5)
    want = alone(engine, ids, length)
    cache = engine.new_cache(4)
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:length]),)), cache)
    for at in range(length, length + 8):
        engine.step(Batch((decode(slab, at, others[at]),)), cache)
    fork = cache.fork(slab, length)
    cache.crop(slab, length)
    cache.save(slab, tmp_path / "sequence")
    for each in (slab, fork, cache.load(tmp_path / "sequence"), cache.fork(fork)):
        found = [engine.step(Batch((decode(each, at, ids[at]),)), cache) for at in range(length, 48)]
        assert near(torch.cat(found), want)
        cache.close(each)


def test_what_its_windows_no_longer_hold_is_refused(engine: Any) -> None:
    cache = engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, tokens(60)),)), cache)
    with pytest.raises(ValueError, match="wound back to 30 of 60"):
        cache.crop(slab, 30)
    assert cache.kept(slab, 30) == 0


def test_keys_and_values_stay_at_16_bits(sparse: Path) -> None:
    with pytest.raises(ConfigError, match="compressed already"):
        tiermoe.load(sparse, memory="4GiB", device="cpu", bits=16, kv_bits=8)


def test_a_start_without_transformers_knows_the_tables(sparse: Path, tmp_path: Path) -> None:
    options = settings(memory="4GiB", device="cpu", bits=16, dense_bits=16, store=tmp_path, warm=False)
    load_blueprint(inspect_model(sparse, "tiny", tmp_path), options).tiermoe.close()
    engine = start(inspect_model(sparse, "tiny", tmp_path), options)
    assert engine.service.hash_layers == (0, 1)
    assert [router is None for router in engine.decoder.routers] == [True, True, False]
    engine.close()


def test_a_table_with_an_expert_that_is_not_there_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILY, torch.float32)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    table = next(tensor for name, tensor in tensors.items() if name.endswith("tid2eid"))
    table[5, 1] = 8
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="names experts from 0 to 8, and the layer has 8"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)


def test_routers_of_another_score_are_left_to_transformers() -> None:
    config = config_of(FAMILY, scoring_func="tanh")
    assert not_computed(Configs(config, config, False).plain()) == "routers that score by 'tanh'"
