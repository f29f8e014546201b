"""Every family against the plain model with transformers' eager experts: the oracle is never our own output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from parity import ROUNDED, close, logits, put_decoded_experts, tokens
from patience import until
from tiermoe.kernels.linear import multiplies_bfloat16
from tiny import CONFIGS, OWN_DECODERS, oracle, write

Model = Callable[..., Path]
FAMILIES = sorted(CONFIGS)
DECODERS = [family for family in FAMILIES if family != "switch_transformers"]
DTYPES = [torch.float32, torch.bfloat16]


NARROW = ("deepseek_v3", "gpt_oss", "mixtral", "nemotron_h", "switch_transformers")
"""Families that transformers' own code runs in bfloat16 too, which every decoder of ours does."""
GENERIC = [
    (family, dtype, "generic") for family in FAMILIES for dtype in DTYPES if dtype == torch.float32 or family in NARROW
]
OWN = [(family, dtype, "auto") for family in OWN_DECODERS for dtype in DTYPES]
PAIRS = sorted([*GENERIC, *OWN], key=lambda pair: (pair[0], str(pair[1])))  # those of one oracle beside each other


ROW_BY_ROW = {"deepseek_v4", "minimax_m3_vl_text"}
"""Families whose own code takes padding for text: it compresses it too, or attends to other blocks of positions."""


WIDE_ROUTERS = {"ernie4_5_moe", "hunyuan_v1_moe"}
"""Families whose routers are float32 in every version of transformers."""


def model_of(family: str, dtype: torch.dtype, tiny_model: Model) -> Path:
    """Of many files in float32, of one in bfloat16."""
    return tiny_model(family, dtype, **({"shard": "60KB"} if dtype == torch.float32 else {}))


last_oracle = functools.lru_cache(maxsize=1)(oracle)


def greedy_tokens(model: Any) -> torch.Tensor:
    ids = tokens(2, 7, seed=3)
    found: torch.Tensor = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    return found


last_greedy_tokens = functools.lru_cache(maxsize=1)(greedy_tokens)


def reads_ahead(family: str, dtype: torch.dtype, decoder: str) -> bool:
    """Whether a pair prefetches: of each family the decoder that it has by default, in float32. An encoder cannot."""
    by_default = decoder == "auto" or family not in OWN_DECODERS
    return family in OWN_DECODERS and by_default and dtype == torch.float32


def name_of(pair: tuple[str, torch.dtype, str]) -> str:
    family, dtype, decoder = pair
    return f"{family}-{str(dtype)[6:]}-{decoder}"


@pytest.fixture(scope="module", params=PAIRS, ids=name_of)
def pair(request: pytest.FixtureRequest, tiny_model: Model) -> Any:
    """(family, dtype, ours at 16 bits with a cache that does not hold all experts, the oracle), by transformers' own
    code and by decoders of our own. Where it prefetches, the next layer's router is called as the model calls it."""
    family, dtype, decoder = request.param
    directory = model_of(family, dtype, tiny_model)
    options = {"cache": "60%", "preset": "mixtral-offload"} if reads_ahead(*request.param) else {"cache": "40%"}
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, lanes=2, decoder=decoder, **options)
    yield family, dtype, ours, last_oracle(directory, family, dtype)
    ours.tiermoe.close()


def agree(ours: Any, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit where transformers' code runs on torch's products in the same order; else up to rounding."""
    generic = ours.tiermoe.settings.decoder == "generic" and ours.config.model_type not in ROUNDED
    if generic and (mine.dtype != torch.bfloat16 or multiplies_bfloat16()):
        return torch.equal(mine, theirs)
    return close(mine, theirs)


def test_many_tokens(pair: Any) -> None:
    family, _, ours, plain = pair
    ids = tokens(2, 11)
    assert agree(ours, logits(ours, family, ids), logits(plain, family, ids))


def test_left_padding(pair: Any) -> None:
    family, _, ours, plain = pair
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    ids[0, :4], mask[0, :4] = 0, 0
    ids[2, :1], mask[2, :1] = 0, 0
    mine, theirs = logits(ours, family, ids, mask), logits(plain, family, ids, mask)
    if family in ROW_BY_ROW and ours.tiermoe.settings.decoder == "auto":
        for row, own in enumerate(mask.bool()):
            theirs[row, own] = logits(plain, family, ids[row : row + 1, own])[0]
    if ours.tiermoe.settings.decoder == "auto":  # padding is not computed
        theirs = theirs * mask[..., None]
    assert agree(ours, mine, theirs)


def test_one_token(pair: Any) -> None:
    """Each a call of its own: of one token alone a router may decide a near tie otherwise."""
    family, _, ours, plain = pair
    each = [tokens(1, 1, seed=seed) for seed in (1, 2, 3)]
    mine, theirs = (torch.cat([logits(model, family, ids) for ids in each]) for model in (ours, plain))
    assert close(mine, theirs)


def test_kernels_take_the_routers_that_come_in_the_models_dtype(pair: Any) -> None:
    """Whatever transformers widens: a wider matrix is computed by torch's operations."""
    family, dtype, ours, _ = pair
    if dtype == torch.bfloat16 and ours.tiermoe.settings.decoder == "auto" and family not in WIDE_ROUTERS:
        assert {router.weight.dtype for router in ours.tiermoe.decoder.routers if router} == {dtype}


def test_greedy_tokens(pair: Any) -> None:
    _, dtype, ours, plain = pair
    if dtype != torch.float32 and ours.tiermoe.settings.decoder == "auto":
        return  # rounding to bfloat16 decides between tokens of all but the same logit
    assert torch.equal(greedy_tokens(ours), last_greedy_tokens(plain))


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if reads_ahead(*pair)], indirect=True, ids=name_of)
def test_prefetching_happens_and_changes_nothing(pair: Any) -> None:
    """With every prediction right or wrong."""
    _, _, ours, plain = pair
    seeds = count(4)  # what one prompt needs may all be cached after it

    def read_ahead() -> int:
        ids = tokens(1, 5, seed=next(seeds))
        assert agree(ours, logits(ours, "", ids), logits(plain, "", ids))
        return ours.tiermoe.loader.counts.speculative_loads

    until(read_ahead)  # on a busy machine a prediction may be taken back before any lane has begun with it


@pytest.mark.parametrize("option", [{"preset": "mixtral-offload"}, {"chunk": 16}])
def test_what_does_not_apply_to_an_encoder_is_refused(option: dict[str, Any], tiny_model: Model) -> None:
    directory = model_of("switch_transformers", torch.float32, tiny_model)
    with pytest.raises(tiermoe.ConfigError, match="does not apply to Switch"):
        tiermoe.load(directory, memory="4GiB", device="cpu", **option)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_experts_per_token(k: int, tmp_path: Path) -> None:
    directory = write(tmp_path, "qwen3_moe", torch.float32, num_experts_per_tok=k, seed=k)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)
    ids = tokens(1, 16)
    assert torch.equal(logits(ours, "qwen3_moe", ids), logits(oracle(directory, "qwen3_moe", torch.float32), "", ids))
    ours.tiermoe.close()


def test_experts_with_no_one_and_many_tokens(tiny_model: Model) -> None:
    """Twelve times the same token and one other: some experts get none, some one, some many."""
    directory = model_of("mixtral", torch.float32, tiny_model)
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


@pytest.mark.parametrize(
    ("family", "bits"),
    [(family, 4) for family in DECODERS] + [(family, bits) for family in ("mixtral", "gpt_oss") for bits in (8, 3, 2)],
)
def test_packed_precisions_equal_the_decoded_weights(family: str, bits: int, tiny_model: Model) -> None:
    """The oracle holds the same packed weights, decoded, as ordinary expert weights in fp32."""
    directory = model_of(family, torch.float32, tiny_model)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=bits, dense_bits=16)
    plain = oracle(directory, family, torch.float32)
    put_decoded_experts(ours.tiermoe, plain)
    ids = tokens(1, 9)
    mine, theirs = logits(ours, family, ids), logits(plain, family, ids)
    assert (mine - theirs).abs().max() <= 2e-4 * theirs.abs().max()
    ours.tiermoe.close()
