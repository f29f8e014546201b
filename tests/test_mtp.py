"""MTP heads: drafts are those of transformers' layers, no draft changes a token, and a head is one more layer of the
store, the cache and the plan, or nothing where nobody asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import gguf_files
import mtp_models
import tiny
from commands import Command
from fake_link import SHAPE, FakeLink, Said, keys, run
from mtp_models import blueprint_with_head, engine_with_head
from native_experts import native_changes
from serving import Counted, Letters, WrappedEngine
from small_engines import tokens
from test_speculation import Eager, answers, with_preemptions
from test_speculation import requests as longer
from tiermoe import native
from tiermoe.batch import Batch, decode, prompt, verify
from tiermoe.config import settings
from tiermoe.engine.drafts import Lookup, MtpDrafts, require_verification
from tiermoe.engine.engine import numerics
from tiermoe.engine.load import start
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.errors import ConfigError, LoadError, ModelError
from tiermoe.formats.store import open_store
from tiermoe.model.families import FAMILIES
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.mtp_head import DraftToken
from tiermoe.offload.assembly import PrecisionSlots, assemble
from tiermoe.offload.policies.prefetch_trial import PrefetchTrial
from tiermoe.offload.presets import compose

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "q_lora_rank": 64,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    family: {**native_changes(family), "intermediate_size": 64, **more}
    for family, more in (("glm4_moe", {}), ("deepseek_v3", LATENT), ("qwen3_next", {"mlp_only_layers": None}))
}
"""Sizes that the kernels take."""
PACKED = {"bits": 4, "dense_bits": 4, "chunk": 16, "batch": 3, "context": 120}


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.mtp_head is not None])
def test_drafts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """After a prompt of two chunks, and after tokens that were decoded with drafts between them and without."""
    model, head = mtp_models.write(tmp_path, family, torch.float32)
    engine = engine_with_head(tmp_path, bits=16, dense_bits=16, chunk=16, context=120)
    ids, cache = tokens(30), engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:20]),)), cache)
    for end in range(20, 26):
        if end != 23:
            expected = mtp_models.drafts(model, head, ids[: end + 1], 3)
            found = engine.draft(cache, [DraftToken(slab, end, ids[end])])
            while len(found) < len(expected):
                likeliest = int(expected[len(found) - 1].argmax())
                found += engine.draft(cache, [DraftToken(slab, end, likeliest, found[-1])])
            torch.testing.assert_close([each.logits for each in found], expected, rtol=1e-4, atol=1e-4)
        engine.step(Batch((decode(slab, end, ids[end]),)), cache)
    engine.close()


def test_drafts_of_a_head_beside_the_text_part_of_a_larger_model(tmp_path: Path) -> None:
    """As Qwen3.5 is published, beside a part that reads pictures."""
    model, head = mtp_models.write(tmp_path, "qwen3_5_moe_text", torch.float32)
    text, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    sees = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    whole = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=sees, dtype="float32")
    whole.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    whole.save_pretrained(tmp_path)
    inside = {
        f"model.language_{name}" if name.startswith("model.") else name: each for name, each in load_file(file).items()
    }
    save_file(inside, file, {"format": "pt"})
    engine = engine_with_head(tmp_path, bits=16, dense_bits=16, context=120)
    ids, cache = tokens(21), engine.new_cache()
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:20]),)), cache)
    (found,) = engine.draft(cache, [DraftToken(slab, 20, ids[20])])
    (expected,) = mtp_models.drafts(model, head, ids, 1)
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-4)
    engine.close()


def test_drafts_of_several_sequences_are_those_of_each(tmp_path: Path) -> None:
    """One pass over sequences of several lengths, of which the head has not read one token or three, and another."""
    model, head = mtp_models.write(tmp_path, "glm4_moe", torch.float32)
    engine = engine_with_head(tmp_path, bits=16, dense_bits=16, chunk=16, context=120, batch=3)
    ids, ends = [tokens(30, seed) for seed in (3, 4, 5)], (20, 23, 27)
    cache = engine.new_cache(3)
    slabs = [cache.open() for _ in ids]
    for slab, own in zip(slabs, ids, strict=True):
        engine.step(Batch((prompt(slab, own[:20]),)), cache)
    engine.step(Batch((verify(slabs[1], 20, ids[1][20:23]),)), cache)
    for at in range(20, 27):
        engine.step(Batch((decode(slabs[2], at, ids[2][at]),)), cache)
    expected = [mtp_models.drafts(model, head, own[: end + 1], 2) for own, end in zip(ids, ends, strict=True)]
    last = [own[end] for own, end in zip(ids, ends, strict=True)]
    first = engine.draft(cache, [DraftToken(*each) for each in zip(slabs, ends, last, strict=True)])
    likeliest = [int(each[0].argmax()) for each in expected]
    second = engine.draft(cache, [DraftToken(*each) for each in zip(slabs, ends, likeliest, first, strict=True)])
    found = [[one.logits, other.logits] for one, other in zip(first, second, strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    engine.close()


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp")
    mtp_models.write(directory, request.param, torch.bfloat16, **SIZES[request.param])
    return directory


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Any]:
    """The model without its head."""
    engine = start(inspect_model(checkpoint, "tiny"), settings(memory="4GiB", device="cpu", lanes=1, **PACKED))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(plain: Any, checkpoint: Path) -> Iterator[Any]:
    engine = engine_with_head(checkpoint, **PACKED, cache="50%")
    assert engine.decoder.batch_invariant is native.available()
    yield engine
    engine.close()


def requests(seed: int | None = None) -> list[Request]:
    """Few tokens: of each step's sixteen guesses by random weights nearly all are wrong."""
    return [replace(each, sampling=replace(each.sampling, max_tokens=14)) for each in longer(seed)]


def drafting(engine: Any, lookup: bool = False) -> Eager:
    drafts = MtpDrafts(engine, Lookup() if lookup else None)
    return Eager(drafts, drafts.draft_batch)


ONE = pytest.mark.parametrize("checkpoint", ["glm4_moe"], indirect=True)


@pytest.mark.parametrize(("rows", "lookup"), [(1, False), (3, True)])
def test_a_head_changes_no_token(plain: Any, engine: Any, rows: int, lookup: bool) -> None:
    for seed in (None, 1):
        expected = answers(RequestLoop(plain, Letters(), rows, set()), requests(seed))
        loop = RequestLoop(engine, Letters(), rows, set(), speculation=drafting(engine, lookup))
        assert answers(loop, requests(seed)) == expected
        assert not native.available() or loop.counts.guessed_tokens > 30


@ONE
def test_a_head_changes_no_token_in_a_small_cache(plain: Any, checkpoint: Path) -> None:
    small = engine_with_head(checkpoint, **PACKED, cache=f"{100 * 6 // 32}%")
    expected = answers(RequestLoop(plain, Letters(), 3, set()), requests())
    assert answers(RequestLoop(small, Letters(), 3, set(), speculation=drafting(small)), requests()) == expected
    assert small.snapshot().counts.misses > 0
    small.close()


def test_a_preempted_answer_goes_on(plain: Any, engine: Any) -> None:
    found = with_preemptions(RequestLoop(engine, Letters(), 3, set(), speculation=drafting(engine)), requests())
    assert found == answers(RequestLoop(plain, Letters(), 3, set()), requests())


@ONE
def test_an_answer_does_not_fail_by_a_damaged_head(plain: Any, engine: Any) -> None:
    class Damaged(WrappedEngine):
        def draft(self, *_: Any) -> Any:
            raise LoadError("an expert of the head is damaged")

    damaged = Damaged(engine)
    loop = RequestLoop(engine, Letters(), 1, set(), speculation=drafting(damaged))
    assert answers(loop, requests()[:1]) == answers(RequestLoop(plain, Letters(), 1, set()), requests()[:1])


@pytest.mark.skipif(not native.available(), reason="tokens are verified by the native kernels")
def test_wrong_guesses_leave_nothing_in_a_head(engine: Any) -> None:
    """A sequence with guesses that were taken back, and one without."""
    ids, cache = tokens(40), engine.new_cache(2)
    guessed, alone = cache.open(), cache.open()
    for slab in (guessed, alone):
        engine.step(Batch((prompt(slab, ids[:20]),)), cache)
    engine.draft(cache, [DraftToken(guessed, 20, ids[20])])
    engine.step(Batch((verify(guessed, 20, [*ids[20:23], 5, 6]),)), cache)
    cache.crop(guessed, 23)
    for at in range(20, 23):
        engine.step(Batch((decode(alone, at, ids[at]),)), cache)
    one, other = engine.draft(cache, [DraftToken(slab, 23, ids[23]) for slab in (guessed, alone)])
    torch.testing.assert_close(one.logits, other.logits, rtol=2e-2, atol=2e-2)
    engine.step(Batch((verify(guessed, 23, [ids[23], 7]),)), cache)
    cache.crop(guessed, 24)
    engine.step(Batch((decode(alone, 23, ids[23]),)), cache)
    for slab in (guessed, alone):
        engine.step(Batch((prompt(slab, ids[24:30], 24),)), cache)
    one, other = engine.draft(cache, [DraftToken(slab, 30, ids[30]) for slab in (guessed, alone)])
    torch.testing.assert_close(one.logits, other.logits, rtol=2e-2, atol=2e-2)


def test_a_forked_sequence_has_nothing_of_what_its_slab_had_before(engine: Any) -> None:
    """The hidden state before its first token is not known, and drafts go on."""
    ids, found = tokens(40), list[torch.Tensor]()
    for used in (False, True):
        cache = engine.new_cache(2)
        first = cache.open()
        engine.step(Batch((prompt(first, ids[:12]),)), cache)
        if used:
            before = cache.open()
            engine.step(Batch((prompt(before, tokens(12, 5)),)), cache)
            cache.close(before)
        other = cache.fork(first, 12)
        for slab in (first, other):
            engine.step(Batch((prompt(slab, ids[12:20], 12),)), cache)
        found += [
            each.logits.float()
            for each in engine.draft(cache, [DraftToken(slab, 20, ids[20]) for slab in (first, other)])
        ]
    assert torch.nn.functional.cosine_similarity(found[0], found[1], dim=0) > 0.9
    assert torch.equal(found[1], found[3])


class Recorded(PrefetchTrial):
    """A trial in which every pass prefetches; keeps what it learns."""

    def __init__(self) -> None:
        super().__init__(True)
        self.seconds = list[float]()

    def record(self, seconds: float, layer_s: float = 0.0) -> None:
        self.seconds.append(seconds)


def test_a_pass_that_drafts_reads_nothing_ahead_and_is_not_timed() -> None:
    """Of three layers the last one is a head's: passes through the two others are timed, and nothing is predicted for
    it."""
    trial, link = Recorded(), FakeLink()
    scheduler = assemble(
        compose("default", {"prefetch": "next-gate"}), replace(SHAPE, drafting=1), [PrecisionSlots((4,), 6)], link, 4,
        trial=lambda: trial,
    )  # fmt: skip
    said = Said({layer: [(3, 0.7), (2, 0.3)] for layer in (1, 2)})
    for passes in range(1, 4):
        scheduler.begin_pass(1, said, "decode")
        for layer in (0, 1):
            run(scheduler, layer, [0, 1], [0.5, 0.5], said)
        scheduler.begin_pass(1, said, "decode", 2, resumed=True)
        assert len(trial.seconds) == passes
        run(scheduler, 2, [0, 1], [0.5, 0.5], said)
        assert scheduler.clock.token == passes
    assert {key.layer for key in keys(link, urgent=False)} == {1}
    scheduler.begin_pass(1, said, "decode")
    assert len(trial.seconds) == passes
    assert scheduler.uses.counts[2] == [3, 3, 0, 0]


# the store and the plan


def test_the_command_packs_a_head(tmp_path: Path, tiermoe_: Command) -> None:
    """Beside a store that stays, after which a run packs nothing; what is damaged or cut short is said and not run."""
    directory, root = tmp_path / "model", tmp_path / "store"
    mtp_models.write(directory, "glm4_moe", torch.bfloat16, **SIZES["glm4_moe"])
    bits, store = ("--bits", 4, "--dense-bits", 4), ("--store", root)
    assert "pack has --draft mtp alone" in tiermoe_("pack", directory, *bits, *store, "--draft", "lookup").cause
    calibrated = tiermoe_("pack", directory, *bits, *store, "--draft", "mtp", "--quantizer", "gptq").cause
    assert "does not apply to --quantizer gptq" in calibrated
    assert not root.exists()
    assert tiermoe_("pack", directory, *bits, *store).code == 0
    before = {file.name: file.read_bytes() for file in root.glob("*-*")}
    assert before
    assert not (root / "mtp").exists()
    packed = tiermoe_("pack", directory, *bits, *store, "--draft", "mtp")
    assert packed.code == 0, packed.err
    assert {file.name: file.read_bytes() for file in root.glob("*-*")} == before
    assert packed.out.strip() == str(root)
    assert "the MTP head at 4 bits" in packed.err
    words = ("run", directory, "abcabcab", "--raw", "--max-tokens", 4, "--memory", "4GiB", *bits, *store)
    run = tiermoe_(*words, "--draft", "mtp")
    assert run.code == 0, run.err
    assert "packed" not in run.err
    shown = tiermoe_("show", root, "--verify", "--json")
    assert shown.code == 0, shown.err
    document = json.loads(shown.out)
    packed_layers = [each["layers"] for part in (root, root / "mtp") for each in open_store(part).dense.values()]
    assert document["checked"] == 3 * 8 + sum(map(len, packed_layers))
    names = [each["precision"] for each in document["precisions"]]
    assert names == [*names[:2], *(f"MTP head: {name}" for name in names[:2])]
    for kind in ("experts-*", "dense-*"):
        file = next((root / "mtp").glob(kind))
        whole = file.read_bytes()
        file.write_bytes(whole[:-5000])
        assert f"{file.name}" in (cause := tiermoe_(*words, "--draft", "mtp").cause)
        assert "the next run with --draft mtp packs the head anew" in cause
        assert tiermoe_(*words, "--draft", "none").code == 0
        file.write_bytes(bytes([whole[0]]) + bytes(len(whole) - 1))
        damaged = tiermoe_("show", root, "--verify")
        assert "extents are damaged" in damaged.cause
        file.write_bytes(whole)


def test_the_plan_counts_a_head(checkpoint: Path, plain: Any, engine: Any) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    own = {name: each for name, each in tensors.items() if ".layers.3." in name or name.startswith("mtp.")}
    dense = sum(tensor.numel() for name, tensor in own.items() if "experts." not in name or "shared" in name)
    head = engine.decoder.shapes[-1].row_bytes(2) * engine.plan.context * 3
    assert engine.plan.kv_cache == plain.plan.kv_cache + head
    assert 0.5 * dense < engine.plan.dense - plain.plan.dense < 2 * dense
    assert engine.plan.all_slots == plain.plan.all_slots + 8


@ONE
def test_a_head_runs_where_files_are_mapped(plain: Any, checkpoint: Path) -> None:
    mapped = engine_with_head(checkpoint, **PACKED)
    assert mapped.service.mapped is plain.service.mapped
    loop = RequestLoop(mapped, Letters(), 1, set(), speculation=drafting(mapped))
    assert answers(loop, requests()[:1]) == answers(RequestLoop(plain, Letters(), 1, set()), requests()[:1])
    mapped.close()


def test_experts_in_place(tmp_path: Path) -> None:
    """At 16 bits the experts of model and head stay in the checkpoint."""
    model, head = mtp_models.write(tmp_path, "glm4_moe", torch.bfloat16)
    engine = engine_with_head(tmp_path, bits=16, dense_bits=16, context=120)
    assert engine.store.precisions["16"].in_place
    ids, cache = tokens(20), engine.new_cache()
    engine.step(Batch((prompt(cache.open(), ids[:19]),)), cache)
    expected = mtp_models.drafts(model, head, ids, 1)[0]
    torch.testing.assert_close(
        engine.draft(cache, [DraftToken(0, 19, ids[19])])[0].logits, expected, rtol=5e-2, atol=0.15
    )
    engine.close()


@pytest.mark.parametrize(
    ("name", "own"),
    [(f"{each} with a head", True) for each in (
        "glm4_moe", "exaone_moe", "mimo_v2_flash", "hy_v3", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v32",
    )] + [("glm4_moe with a head", False)],
)  # fmt: skip
def test_a_head_of_a_gguf_file(tmp_path: Path, name: str, own: bool) -> None:
    """NextN's tensors as llama.cpp's converter writes them, in the file's types or packed; two have no experts."""
    model = gguf_files.model_of(name)
    head = mtp_models.attach_head(model)
    file = gguf_files.write(tmp_path / "tiny.gguf", model, name, gguf_files.kinds("q8_0"))
    model.model.layers = model.model.layers[:-1]
    store, packed = tmp_path / "store", {} if own else {"bits": 8, "dense_bits": 8}
    blueprint = blueprint_with_head(file, store)
    engine = start(blueprint, settings(memory="4GiB", device="cpu", store=store, context=120, **packed))
    ids, cache = tokens(20), engine.new_cache()
    engine.step(Batch((prompt(cache.open(), ids[:19]),)), cache)
    expected = mtp_models.drafts(model, head, ids, 1)[0]
    found = engine.draft(cache, [DraftToken(0, 19, ids[19])])[0].logits.float()
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.99
    assert found[expected.argmax()] > found.max() - 0.3
    engine.close()


@ONE
def test_plan_says_what_a_run_with_a_head_takes(checkpoint: Path, engine: Any, tiermoe_: Command) -> None:
    words = ("plan", checkpoint, "--memory", "4GiB", "--context", PACKED["context"])
    found = tiermoe_(*words, "--bits", 4, "--dense-bits", 4, "--draft", "mtp", "--json")
    assert found.code == 0, found.err
    plan = json.loads(found.out)
    assert plan["all_slots"] == engine.plan.all_slots
    assert plan["dense"] == engine.plan.dense
    assert plan["kv_cache"] * PACKED["batch"] == engine.plan.kv_cache
    for draft in ("lookup", "none", checkpoint):
        refused = tiermoe_(*words, "--draft", draft)
        assert refused.code == 2
        assert "plan has --draft mtp alone" in refused.err


@ONE
def test_the_command_says_the_same_with_a_head(checkpoint: Path, tiermoe_: Command) -> None:
    words = ("run", checkpoint, "abcabcab", "--raw", "--max-tokens", 12, "--memory", "4GiB", "--temperature", 0)
    plain, drafted = (tiermoe_(*words, "--json", "--draft", draft) for draft in ("none", "mtp"))
    assert plain.code == drafted.code == 0, drafted.err
    assert json.loads(drafted.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    for options, says in (
        (("--decoder", "generic"), "--draft mtp runs on tiermoe's own decoder"),
        (("--preset", "frugal", "--cache", "50%"), "--draft mtp does not apply to"),
    ):
        assert says in tiermoe_(*words, "--draft", "mtp", *options).cause


# what is refused


def edited(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


HEAD = "model.layers.3"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: [own.pop(name) for name in list(own) if name.startswith(HEAD)], "has no MTP head"),
        (lambda own: own.pop(f"{HEAD}.eh_proj.weight"), rf"lacks 1 tensors .* {HEAD}.eh_proj.weight"),
        (lambda own: own.pop(f"{HEAD}.shared_head.norm.weight"), rf"lacks 1 .* {HEAD}.shared_head.norm.weight"),
        (lambda own: own.pop(f"{HEAD}.self_attn.k_proj.weight"), rf"lacks 1 .* {HEAD}.self_attn.k_proj.weight"),
        (lambda own: [own.pop(name) for name in list(own) if f"{HEAD}.mlp.experts" in name], "lacks .* expert"),
        (
            lambda own: own.update({f"{HEAD}.eh_proj.weight": own[f"{HEAD}.eh_proj.weight"][:, :64].clone()}),
            rf"{HEAD}.eh_proj.weight has shape \(64, 64\) .* \(64, 128\)",
        ),
        (
            lambda own: own.update({f"{HEAD}.self_attn.q_proj.weight": torch.zeros(3, 64)}),
            rf"{HEAD}.self_attn.q_proj.weight has shape \(3, 64\)",
        ),
    ],
)
def test_a_head_that_is_not_whole_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    mtp_models.write(tmp_path, "glm4_moe", torch.bfloat16)
    edited(tmp_path, change)
    with pytest.raises(ModelError, match=says):
        blueprint_with_head(tmp_path)


def test_a_family_without_heads_is_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path, "qwen3_moe", torch.bfloat16)
    with pytest.raises(ModelError, match=r"family Qwen3-MoE, of which tiermoe runs no MTP head.*--draft lookup"):
        blueprint_with_head(tmp_path)


def test_what_verifies_nothing_is_refused(engine: Any) -> None:
    class Lossy(Counted):
        lossy = ("kv_bits=8",)

    if native.available():
        require_verification(engine)
    with pytest.raises(ConfigError, match="--draft mtp does not apply to kv_bits=8"):
        require_verification(Lossy(engine))


def test_a_config_may_say_nothing_of_its_head(tmp_path: Path) -> None:
    mtp_models.write(tmp_path, "deepseek_v3", torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(blueprint_with_head(tmp_path).layers) == 3


@pytest.mark.parametrize("family", ["mellum", "exaone_moe"])
def test_a_head_of_another_kind_changes_no_token(tmp_path: Path, tiermoe_: Command, family: str) -> None:
    """Heads with a window, of Mellum with experts and of EXAONE without; EXAONE's is packed without experts too."""
    mtp_models.write(tmp_path / "model", family, torch.bfloat16, **native_changes(family), intermediate_size=64)
    options = {"memory": "4GiB", "device": "cpu", "lanes": 1, "store": tmp_path / "store", **PACKED}
    plain = start(inspect_model(tmp_path / "model", "tiny", options["store"]), settings(**options))
    expected = answers(RequestLoop(plain, Letters(), 3, set()), requests(1))
    packed = list[str]()
    for again in range(2):
        blueprint = blueprint_with_head(tmp_path / "model", options["store"])
        engine = start(blueprint, settings(**options), lambda what, *_: packed.append(what))
        assert bool(packed) is not bool(again)
        assert len(engine.layers) - len(plain.layers) == (family == "mellum")
        assert numerics(engine) != numerics(plain)
        loop = RequestLoop(engine, Letters(), 3, set(), speculation=drafting(engine))
        assert answers(loop, requests(1)) == expected
        assert not native.available() or loop.counts.guessed_tokens > 30
        engine.close()
        packed.clear()
    plain.close()
    words = ("--store", options["store"], "--bits", 4, "--dense-bits", 4, "--draft", "mtp")
    found = tiermoe_("pack", tmp_path / "model", *words)
    assert found.code == 0, found.err
    assert ("the MTP head at 4 bits" in found.err) is (family == "mellum")
