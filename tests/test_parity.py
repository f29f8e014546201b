"""Every family against the plain model with transformers' eager experts: the oracle is never our own output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from tiny import CONFIGS, oracle, write

FAMILIES = sorted(CONFIGS)
DECODERS = [family for family in FAMILIES if family != "switch_transformers"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in DTYPES], ids=lambda p: f"{p[0]}-{p[1]}"[:40])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, dtype, ours at 16 bits with a cache of one layer's experts or so, the oracle)."""
    family, dtype = request.param
    shard = "60KB" if dtype == torch.float32 else "5GB"
    directory = write(tmp_path_factory.mktemp(family), family, dtype, shard)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=2)
    yield family, dtype, ours, oracle(directory, family, dtype)
    ours.tiermoe.close()


def tokens(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, family: str, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    extra = {"decoder_input_ids": ids[:, :5]} if family == "switch_transformers" else {}
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, attention_mask=mask, **extra).logits
    return result


def test_many_tokens_are_bit_identical(pair: Any) -> None:
    family, _, ours, plain = pair
    ids = tokens(2, 11)
    assert torch.equal(logits(ours, family, ids), logits(plain, family, ids))


def test_left_padding_is_bit_identical(pair: Any) -> None:
    family, _, ours, plain = pair
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0
    ids[2, :1], mask[2, :1] = 0, 0
    mine, theirs = logits(ours, family, ids, mask), logits(plain, family, ids, mask)
    assert torch.equal(mine, theirs)


def test_one_token(pair: Any) -> None:
    family, dtype, ours, plain = pair
    ids = tokens(1, 1)
    mine, theirs = logits(ours, family, ids), logits(plain, family, ids)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_greedy_tokens(pair: Any) -> None:
    _, _, ours, plain = pair
    ids = tokens(2, 7, seed=3)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("family", DECODERS)
def test_prefetching_names_the_routers_own_choice_and_changes_nothing(family: str, tmp_path: Path) -> None:
    """The next layer's router is called as the model calls it; with every prediction right or wrong, same tokens."""
    directory = write(tmp_path, family, torch.float32)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="60%", preset="mixtral-offload")
    ids = tokens(1, 5, seed=4)
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = oracle(directory, family, torch.float32).generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert ours.tiermoe.controller.counts.speculative_loads > 0
    ours.tiermoe.close()


@pytest.mark.parametrize("option", [{"preset": "mixtral-offload"}, {"chunk": 16}])
def test_what_does_not_apply_to_an_encoder_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    directory = write(tmp_path, "switch_transformers", torch.float32)
    with pytest.raises(tiermoe.ConfigError, match="does not apply to Switch"):
        tiermoe.load(directory, memory="4GiB", device="cpu", **option)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_experts_per_token(k: int, tmp_path: Path) -> None:
    directory = write(tmp_path, "qwen3_moe", torch.float32, num_experts_per_tok=k, seed=k)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)
    ids = tokens(1, 16)
    assert torch.equal(logits(ours, "qwen3_moe", ids), logits(oracle(directory, "qwen3_moe", torch.float32), "", ids))
    ours.tiermoe.close()


def test_experts_with_no_one_and_many_tokens(tmp_path: Path) -> None:
    """Twelve times the same token and one other: some experts get none, some one, some many."""
    directory = write(tmp_path, "mixtral", torch.float32)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="15%")
    ids = torch.full((1, 13), 17)
    ids[0, 6] = 99
    assert torch.equal(logits(ours, "mixtral", ids), logits(oracle(directory, "mixtral", torch.float32), "", ids))
    ours.tiermoe.close()


def test_float16_checkpoint(tmp_path: Path) -> None:
    directory = write(tmp_path, "olmoe", torch.float16)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)
    ids = tokens(1, 8)
    assert torch.equal(logits(ours, "olmoe", ids), logits(oracle(directory, "olmoe", torch.float16), "", ids))
    ours.tiermoe.close()


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_precisions_equal_the_decoded_weights(family: str, bits: int, tmp_path: Path) -> None:
    """The oracle holds the same packed weights, decoded, as ordinary expert weights in fp32."""
    directory = write(tmp_path, family, torch.float32)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=bits, dense_bits=16)
    plain = oracle(directory, family, torch.float32)
    put_decoded_experts(ours.tiermoe, plain)
    ids = tokens(1, 9)
    mine, theirs = logits(ours, family, ids), logits(plain, family, ids)
    assert (mine - theirs).abs().max() <= 2e-4 * theirs.abs().max()
    ours.tiermoe.close()


def put_decoded_experts(engine: Any, plain: Any) -> None:
    """Overwrites the plain model's experts by what the store's precision stands for."""
    from tiermoe.tiers.reader import ExtentReader, aligned_memory
    from tiermoe.types import ExpertKey

    reader = ExtentReader()
    packed = engine._packed[engine.settings.bits]
    for index, layer in enumerate(engine.store.layers):
        form = packed.formats[index]
        for expert in range(layer.experts):
            stored, slot = (
                aligned_memory(form.stored.nbytes),
                torch.zeros(form.slot.nbytes, dtype=torch.uint8),
            )
            reader.read(packed.extents[index][expert], stored, ExpertKey(index, expert, 0))
            form.widen(torch.frombuffer(stored, dtype=torch.uint8), slot)
            views = form.slot.views(slot)
            for part in layer.parts:
                encoding = form.encodings.get(part.name)
                if encoding is None:
                    continue
                weight = encoding.decode(views[part.name], *part.out_in, torch.float32)
                target = plain.get_parameter(f"{layer.name}.{part.name}").data[expert]
                target.copy_(weight.t() if part.transposed else weight)
