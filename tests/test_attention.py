"""Kinds of attention, of states and of residual streams against transformers' eager code on the same weights: prompts
in chunks, tokens that are verified and decoded, sequences side by side, and those that are cut, forked and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

import tiermoe
from native_experts import checkpoint
from parity import close
from small_engines import alone, engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.config import settings
from tiermoe.engine.load import load_blueprint, start
from tiermoe.errors import ModelError
from tiermoe.model.attention.ngrams import NgramHashes
from tiermoe.model.families import not_computed
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiny import config_of, oracle, write

COMPRESSED, NGRAMS, GROUPS = "deepseek_v4", "qwen4_exp_text", "minimax_m3_vl_text"
SPARSE = {"index_topk": 3, "sliding_window": 6}
"""40 tokens are more than what is attended to in every layer."""
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5}
STATES = ("qwen3_next", "kimi_linear", "bailing_hybrid", "granitemoehybrid", "jamba", "nemotron_h")
"""Families whose sums over tokens, chunk by chunk or one after the other, round differently: `near` in all."""
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPRESSED, {}),
    (COMPRESSED, SPARSE),
    (COMPRESSED, {"rope_parameters": YARN}),
    (COMPRESSED, {"swiglu_limit": 0.05, "scoring_func": "sigmoid"}),
    (COMPRESSED, {"compress_rates": RATES, "hc_mult": 3}),
    ("deepseek_v32", {"index_topk": 6}),
    ("deepseek_v32", {"index_topk": 64}),
    ("glm_moe_dsa", {"index_topk": 6}),
    ("hy_v4", {"index_topk": 6}),
    ("hy_v4", {"index_topk": 64, "indexer_types": ["full", "full", "shared"]}),
    ("glm5_next_text", {"index_topk": 6, "index_kpool": 3}),
    ("glm5_next_text", {"index_topk": 64, "linear_lower_bound": None}),
    (GROUPS, {}),
    (GROUPS, {"index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 2}),
    (GROUPS, {"index_topk_blocks": 64}),
    (NGRAMS, {}),
    (NGRAMS, {"output_gate_type": "sigmoid"}),
    ("lfm2_moe", {"conv_L_cache": 5, "conv_bias": True}),
    *((family, {}) for family in STATES),
]
END = 2  # the token that ends a text, beyond which no n-gram reaches


def text(seed: int, length: int = 40) -> list[int]:
    """Tokens with ends of texts among them, alone and two in a row."""
    ids = tokens(length, seed)
    for at in (3, 11, 12, 20):
        ids[at] = END
    return ids


def near(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((mine - theirs).norm() < 1e-5 * theirs.norm())


class Model:
    """An engine in float32 that reads prompts seven tokens at a time, and transformers' model."""

    def __init__(self, directory: Path, family: str) -> None:
        self.engine = engine_of(directory, bits=16, dense_bits=16, chunk=7, context=64)
        self.step = self.engine.step
        self._plain, self._near = oracle(directory, family, torch.float32), near if family in STATES else close

    def agrees(self, mine: torch.Tensor, ids: list[int], at: slice | list[int] = slice(None)) -> bool:
        """Whether some of the logits of a sequence are transformers' but for rounding."""
        with torch.no_grad():
            return self._near(mine, self._plain(torch.tensor([ids])).logits[0][at])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} {' '.join(case[1])}".strip())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    family, changes = request.param
    made = Model(write(tmp_path_factory.mktemp("attention"), family, torch.float32, **changes), family)
    yield made
    made.engine.close()


def test_chunks_and_tokens_alone_agree_with_transformers(model: Model) -> None:
    ids, cache = text(1), model.engine.new_cache()
    slab = cache.open()
    rows = [prompt(slab, ids[:20]), prompt(slab, ids[20:30], 20), verify(slab, 30, ids[30:34])]
    rows += [decode(slab, at, ids[at]) for at in range(34, 40)]
    mine = torch.cat([model.step(Batch((row,)), cache, every=True) for row in rows])
    assert model.agrees(mine, ids)


def test_sequences_side_by_side_are_what_each_is_alone(model: Model) -> None:
    """A long one, a fork of it, and a short one whose prompt runs beside their tokens."""
    long, short, cache = text(6), tokens(9, seed=7), model.engine.new_cache(3)
    one = cache.open()
    model.step(Batch((prompt(one, long[:36]),)), cache)
    two, three = cache.fork(one), cache.open()
    rows = (decode(one, 36, long[36]), decode(two, 36, 5), prompt(three, short[:5]))
    first = model.step(Batch(rows), cache)
    rows = (decode(one, 37, long[37]), decode(two, 37, 6), prompt(three, short[5:], 5))
    then = model.step(Batch(rows), cache)
    for at, (ids, before) in enumerate(((long[:38], 37), ([*long[:36], 5, 6], 37), (short, 5))):
        assert model.agrees(torch.stack((first[at], then[at])), ids, [before - 1, -1])


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_sequence_that_is_cut_forked_or_saved_goes_on_as_before(model: Model, length: int, tmp_path: Path) -> None:
    """Amid the positions of an entry and between two, with other tokens written behind the place before."""
    ids, others, cache = text(2), text(3), model.engine.new_cache(4)
    slab = cache.open()
    model.step(Batch((prompt(slab, ids[:length]),)), cache)
    for at in range(length, length + (5 if cache.recurrent is None else 1)):
        model.step(Batch((decode(slab, at, others[at]),)), cache)
    fork = cache.fork(slab, length)
    cache.crop(slab, length)
    cache.save(slab, tmp_path / "sequence")
    for each in (slab, fork, cache.load(tmp_path / "sequence")):
        found = [model.step(Batch((prompt(each, ids[length : length + 3], length),)), cache, every=True)]
        found += [model.step(Batch((decode(each, at, ids[at]),)), cache) for at in range(length + 3, 40)]
        assert model.agrees(torch.cat(found), ids, slice(length, None))


# equal scores

EQUAL = [
    ("deepseek_v32", {"index_topk": 8, "index_n_heads": 1}), ("glm_moe_dsa", {"index_topk": 8, "index_n_heads": 1}),
    ("hy_v4", {"index_topk": 8, "index_n_heads": 1}), (COMPRESSED, {"index_topk": 2, "index_n_heads": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), EQUAL)
def test_a_prompt_with_equal_scores_is_what_transformers_gives_one_by_one(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """With one head half of the scores are 0, and where its weight is negative those are the largest. Which of them
    `torch.topk` finds depends on a row's length, and in a prompt transformers' rows have all its positions: its own
    logits differ between a prompt and its tokens."""
    directory = write(tmp_path, family, torch.float32, **changes)
    plain, ids = oracle(directory, family, torch.float32), tokens(40)
    kept, one_by_one = DynamicCache(config=plain.config), []
    with torch.no_grad():
        whole = plain(torch.tensor([ids])).logits[0]
        for each in ids:
            one_by_one.append(plain(torch.tensor([[each]]), past_key_values=kept, use_cache=True).logits[0])
    want = torch.cat(one_by_one)
    assert close(whole[:8], want[:8])
    assert not close(whole, want)
    engine = engine_of(directory, bits=16, dense_bits=16, chunk=40, context=64)
    for chunk in (7, 40):
        cache = engine.new_cache()
        slab = cache.open()
        rows = [prompt(slab, ids[at : at + chunk], at) for at in range(0, 40, chunk)]
        assert close(torch.cat([engine.step(Batch((row,)), cache, every=True) for row in rows]), want)
    engine.close()


# native kernels

NATIVE = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "q_lora_rank": 64, "index_head_dim": 128, "intermediate_size": 128,
}  # fmt: skip
"""Sizes that the native kernels take."""
MOST = 12  # positions that are chosen


@pytest.fixture(scope="module")
def shares_choices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """At 4 bits, on native kernels; a layer takes what the one before it chose."""
    if not native.available():
        pytest.skip("needs the native kernels")
    directory = checkpoint(tmp_path_factory.mktemp("sparse"), "glm_moe_dsa", **NATIVE, index_topk=MOST)
    made = engine_of(directory, bits=4, dense_bits=4, context=128)
    assert made.decoder.batch_invariant
    yield made
    made.close()


def test_tokens_have_the_bits_that_each_has_alone(shares_choices: Any, tmp_path: Path) -> None:
    """Verified at once, beside a sequence that is shorter than what is chosen, in a fork and in a sequence that was
    saved."""
    engine, ids, short = shares_choices, tokens(50), tokens(MOST - 2, seed=2)
    want, theirs = alone(engine, ids, 8), alone(engine, short, len(short) - 1)
    cache = engine.new_cache(4)
    slab, other = cache.open(), cache.open()
    engine.step(Batch((prompt(slab, ids[:8]),)), cache)
    assert torch.equal(engine.step(Batch((verify(slab, 8, ids[8:]),)), cache, every=True), want)
    engine.step(Batch((prompt(other, short[:-1]),)), cache)
    cache.crop(slab, 40)
    fork = cache.fork(slab)
    cache.save(slab, tmp_path / "sequence")
    both = Batch((decode(slab, 40, ids[40]), decode(other, len(short) - 1, short[-1])))
    assert torch.equal(engine.step(both, cache), torch.cat((want[32:33], theirs)))
    for each in (fork, cache.load(tmp_path / "sequence")):
        assert torch.equal(engine.step(Batch((decode(each, 40, ids[40]),)), cache), want[32:33])


def test_a_long_prompt_is_near_its_tokens_read_one_by_one(shares_choices: Any) -> None:
    """More tokens than the kernel for few takes, of which some attend to all before them."""
    ids, cache = tokens(100), shares_choices.new_cache()
    found = shares_choices.step(Batch((prompt(cache.open(), ids),)), cache, every=True)
    want = alone(shares_choices, ids, 1)
    error = (found[1:] - want).float().norm(dim=-1) / want.float().norm(dim=-1)
    assert error.median() < 0.1  # routers and indexers may decide near ties otherwise


# tables of tokens


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


def test_a_start_without_transformers_knows_the_tables_of_experts(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", COMPRESSED, torch.float32)
    options = settings(memory="4GiB", device="cpu", bits=16, dense_bits=16, store=tmp_path / "store", warm=False)
    load_blueprint(inspect_model(directory, "tiny", options.store), options).tiermoe.close()
    engine = start(inspect_model(directory, "tiny", options.store), options)
    assert engine.service.hash_layers == (0, 1)
    assert [router is None for router in engine.decoder.routers] == [True, True, False]
    engine.close()


def test_a_table_with_an_expert_that_is_not_there_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, COMPRESSED, torch.float32)
    change_tensors(directory, lambda found: next(found[name] for name in found if name.endswith("tid2eid"))[5].fill_(8))
    with pytest.raises(ModelError, match="names experts from 0 to 8, and the layer has 8"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)


def test_a_table_of_n_grams_with_too_few_rows_is_named_with_its_numbers(tmp_path: Path) -> None:
    directory = write(tmp_path, NGRAMS, torch.float32)
    path, rows = "model.layers.0.ple.ple_embedding.ngram_embedding", 0

    def shorten(found: dict[str, torch.Tensor]) -> None:
        nonlocal rows
        parts = sorted(name for name in found if name.startswith(path))
        rows = sum(len(found[name]) for name in parts)
        found[parts[1]] = found[parts[1]][:-3].clone()

    change_tensors(directory, shorten)
    with pytest.raises(ModelError, match=rf"{path}.*{rows - 3:,} rows.*{rows:,}"):
        tiermoe.load(directory, memory="4GiB", device="cpu", bits=16)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    found = load_file(file)
    change(found)
    save_file(found, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "changes", "lacking"),
    [
        (COMPRESSED, {"scoring_func": "tanh"}, "routers that score by 'tanh'"),
        (GROUPS, {"index_n_heads": 4}, "an indexer of other groups of heads than share keys and values"),
        (NGRAMS, {"hidden_act": "quick_gelu", "output_gate_type": "silu"}, "quick_gelu, rotary embedding 'default'"),
        ("granitemoehybrid", {}, ""),
        ("granitemoehybrid", {"time_step_limit": (0.001, 0.1)}, "time steps within 0.001 and 0.1"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "gelu in layers of Mamba"),
    ],
)
def test_what_no_block_computes_is_left_to_transformers_code(
    family: str, changes: dict[str, Any], lacking: str
) -> None:
    config = config_of(family, **changes)
    assert not_computed(Configs(config, config, False).plain()) == lacking
