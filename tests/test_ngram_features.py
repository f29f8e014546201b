"""Qwen3.8's n-gram features, residual streams and attention by blocks, against transformers' eager code: in chunks, in
batches, after a cached prefix and after steps that are taken back; and its tables on the drive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiermoe
from parity import close, logits
from small_engines import engine_of, tokens
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.errors import ModelError
from tiermoe.model.attention.ngrams import NgramHashes
from tiermoe.model.decoder import Decoder
from tiermoe.model.families import decoder_family
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiermoe.model.hf.generic import GenericDecoder
from tiermoe.model.stored_weights import EmbeddingOnDisk
from tiny import config_of, oracle, write

FAMILY = "qwen4_exp_text"
END = 2  # the token that ends a text
LENGTH = 40  # more than attention chooses by far
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    """Tokens with ends of texts among them, alone and two in a row."""
    ids = tokens(length, seed)
    for at in (3, 11, 12, 20):
        ids[at] = END
    return ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen4"), FAMILY, torch.float32)


@pytest.fixture(scope="module")
def plain(directory: Path) -> Any:
    return oracle(directory, FAMILY, torch.float32)


@pytest.fixture(scope="module", params=[5, 64])
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Any]:
    made = engine_of(directory, bits=16, dense_bits=16, chunk=request.param, context=64, batch=3)
    assert isinstance(made.decoder, Decoder)
    yield made
    made.close()


def wanted(plain: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = plain(torch.tensor([ids])).logits[0]
    return found


def test_chunks_and_tokens_alone_agree_with_transformers(engine: Any, plain: Any) -> None:
    ids = ids_of(1)
    cache = engine.new_cache()
    slab = cache.open()
    rows = [prompt(slab, ids[:30]), verify(slab, 30, ids[30:34]), *(decode(slab, at, ids[at]) for at in range(34, 40))]
    mine = torch.cat([engine.step(Batch((row,)), cache, every=True) for row in rows])
    assert close(mine, wanted(plain, ids))


@pytest.mark.parametrize("ragged", [False, True])
def test_sequences_of_a_batch_keep_their_own_tokens(engine: Any, plain: Any, ragged: bool) -> None:
    cache = engine.new_cache(3)
    three = [ids_of(2), ids_of(3), ids_of(4)]
    slabs, lengths = [cache.open() for _ in range(3)], (37, 1, 14)
    found: list[list[torch.Tensor]] = [[], [], []]
    first = engine.step(Batch(tuple(prompt(s, three[s][: lengths[s]]) for s in slabs), ragged), cache)
    for at in range(3):
        for slab in slabs:
            found[slab].append(first[slab])
        rows = tuple(decode(s, lengths[s] + at, three[s][lengths[s] + at]) for s in slabs)
        first = engine.step(Batch(rows, ragged), cache)
    for slab in slabs:
        want = wanted(plain, three[slab][: lengths[slab] + 2])[-3:]
        assert close(torch.stack(found[slab]), want)


def test_a_prefix_a_fork_and_a_saved_sequence_go_on_with_the_tokens_before_them(
    engine: Any, plain: Any, tmp_path: Path
) -> None:
    """And so does a sequence whose last step was taken back."""
    ids, other = ids_of(5), ids_of(6)
    cache = engine.new_cache(3)
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:17]),)), cache)
    fork = cache.fork(slab)
    engine.step(Batch((decode(slab, 17, 99),)), cache)
    cache.crop(slab, 17)
    mine = engine.step(Batch((prompt(slab, ids[17:], 17),)), cache, every=True)
    assert close(mine, wanted(plain, ids)[17:])
    changed = [*ids[:17], *other[17:]]
    mine = engine.step(Batch((prompt(fork, changed[17:25], 17),)), cache, every=True)
    cache.save(fork, tmp_path / "saved")
    again = cache.load(tmp_path / "saved")
    last = engine.step(Batch((prompt(again, changed[25:], 25),)), cache, every=True)
    assert close(torch.cat((mine, last)), wanted(plain, changed)[17:])


def test_many_tokens_are_those_of_transformers(directory: Path, plain: Any) -> None:
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1, chunk=16)
    ids = torch.tensor([tokens(9, 1), tokens(9, 2)])
    options = {"max_new_tokens": 64, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))
    ours.tiermoe.close()


def test_hashes_are_those_of_every_n_gram() -> None:
    """By hand, n-gram for n-gram, up to four tokens long."""
    multipliers, rows = [3, 5, 7, 11], [13, 17, 19, 23, 29, 31]
    begins = [0, 13, 30, 49, 72, 101]
    hashes = NgramHashes(*(torch.tensor(each) for each in (multipliers, rows, begins)), END)
    history = [-1, -1, 9, 4, 6, END, 8, 5, 7, 3]
    want = []
    for at in range(3, len(history)):
        gram, mixed, row = [history[at]], history[at] * 3, []
        for back in (1, 2, 3):
            earlier, ended = history[at - back], len(gram) > 1 and gram[-1] == END
            gram.append(END if earlier < 0 or ended else earlier)
            mixed ^= gram[-1] * multipliers[back]
            row += [mixed % rows[2 * back - 2 + head] + begins[2 * back - 2 + head] for head in (0, 1)]
        want.append(row)
    assert hashes(torch.tensor(history)).tolist() == want


@pytest.mark.parametrize("kv_bits", [8, 16])
def test_attention_by_blocks_in_bfloat16(kv_bits: int, tmp_path: Path) -> None:
    """Beyond what is chosen, with keys and values as codes too."""
    directory = write(tmp_path, FAMILY, torch.bfloat16)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=16, context=64, kv_bits=kv_bits)
    ids, cache = ids_of(7), engine.new_cache()
    mine = engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    engine.close()
    assert close(mine, wanted(oracle(directory, FAMILY, torch.bfloat16), ids))


def test_a_gate_by_sigmoid(tmp_path: Path) -> None:
    directory = write(tmp_path, FAMILY, torch.float32, output_gate_type="sigmoid")
    engine = engine_of(directory, bits=16, dense_bits=16, context=64)
    ids, cache = ids_of(8), engine.new_cache()
    mine = engine.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    engine.close()
    assert close(mine, wanted(oracle(directory, FAMILY, torch.float32), ids))


def test_a_config_that_no_block_computes_is_run_by_transformers(tmp_path: Path) -> None:
    changes = {"hidden_act": "quick_gelu", "output_gate_type": "silu"}
    config = config_of(FAMILY, **changes)
    assert decoder_family(Configs(config, config, False).plain()) is None
    directory = write(tmp_path, FAMILY, torch.float32, **changes)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)
    assert isinstance(ours.tiermoe.decoder, GenericDecoder)
    ids = torch.tensor([tokens(9)])
    assert torch.equal(logits(ours, FAMILY, ids), logits(oracle(directory, FAMILY, torch.float32), FAMILY, ids))
    ours.tiermoe.close()


# tables


def test_a_decoder_reads_the_rows_that_tokens_take(
    directory: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row once a step, of a table that nothing else reads."""
    found = inspect_model(directory, "tiny")
    table = EmbeddingOnDisk(found.checkpoint, found.outline.tables[f"{TABLE}.weight"], torch.float32)
    read: list[int] = []
    whole = found.checkpoint.read

    def counted(name: str, row: int | None = None) -> torch.Tensor:
        assert row is not None
        read.append(row)
        return whole(name, row)

    monkeypatch.setattr(found.checkpoint, "read", counted)
    ids = torch.tensor([[3, 70, 3, 201]])
    want = plain.get_submodule(TABLE)(ids)
    assert torch.equal(table(ids), want)
    assert len(read) == 3


def test_a_table_that_is_cut_short_is_named_with_its_numbers(tmp_path: Path) -> None:
    """A file that ends early, and a table with fewer rows than the config's n-grams have."""
    directory = write(tmp_path, FAMILY, torch.float32)
    file = directory / "model.safetensors"
    with safe_open(file, "pt") as kept:
        parts = sorted(name for name in kept.keys() if name.startswith(f"{TABLE}"))  # noqa: SIM118
    assert len(parts) == 2
    tensors = load_file(file)
    rows = len(tensors[parts[1]])
    tensors[parts[1]] = tensors[parts[1]][: rows - 3].clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{TABLE}.*{2 * rows - 3:,} rows.*{2 * rows:,}"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"is truncated: model\.layers\..* ends at byte [\d,]+, the file has [\d,]+"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)
