"""What CONTRIBUTING.md says an addition costs: each is built outside of the package, registered by a line, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiermoe
import tiny
from additions.batching import serve
from additions.eviction import MostRecentlyUsed
from additions.family import Mine, MineConfig, MineForCausalLM
from additions.gate import RELU
from additions.native import GATE, INSTRUCTION_SET, ROUTER_FIELD, Changes, change
from additions.precision import FirstHigh
from additions.prediction import LikeliestExpert, SameAgain
from additions.sampling import EpsilonCutoff
from additions.speculation import speculate
from c_builds import LIBRARIES, STRICT, built, compiler, ran
from commands import Command
from parity import close, logits, put_decoded_experts, tokens
from patience import until
from serving import Counted
from small_engines import NATIVE, greedy
from small_traces import EVERYTHING, decode, layer, replayed, trace_of
from tiermoe import config, native
from tiermoe.engine.sampling import TRUNCATIONS, Sampler, Sampling
from tiermoe.errors import ConfigError, TraceError
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.kernels.gates import GATES, gate_named, slow_gate
from tiermoe.kernels.linear import linear_for
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.lab.trace import Trace
from tiermoe.model.decoder import Decoder
from tiermoe.model.families import FAMILIES
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.policies.precision import PRECISIONS
from tiermoe.offload.policies.prediction import PREDICTIONS
from tiermoe.offload.presets import PRESETS, compose
from tiny import oracle

Model = Callable[..., Path]


def engine_of(directory: Path, **options: Any) -> Any:
    """At 16 bits with a cache of part of the experts, unless other options are given."""
    given = {"memory": "4GiB", "device": "cpu", "lanes": 1, "bits": 16, "cache": "40%"}
    return tiermoe.load(directory, **(given | options))[0].tiermoe


def answered(directory: Path, **options: Any) -> tuple[list[int], Any, dict[str, Any]]:
    """Tokens, counts and stats of a short answer under a composition."""
    engine = engine_of(directory, **options)
    found = greedy(engine, tokens(1, 6)[0].tolist(), 16)
    counts, stats = engine.loader.counts, engine.stats()
    engine.close()
    return found, counts, stats


@pytest.fixture(scope="module")
def qwen(tiny_model: Model) -> Path:
    return tiny_model("qwen3_moe", torch.float32)


def circle(rounds: int, experts: int = 1) -> Trace:
    """Three layers whose tokens always choose the same experts."""
    same = layer(list(range(experts)))
    return trace_of([decode(same, same, same) for _ in range(rounds)], top_k=experts)


# an eviction policy


def test_an_eviction_policy_in_the_engine(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cache cannot be 'mru'"):
        compose("lru", {"cache": "mru"})
    monkeypatch.setitem(EVICTIONS, "mru", MostRecentlyUsed)
    expected, usual, _ = answered(qwen, preset="lru")
    found, counts, _ = answered(qwen, preset="lru", set={"cache": "mru"})
    assert found == expected
    assert counts.misses > 0
    assert counts.hits != usual.hits


def test_an_eviction_policy_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts in a circle through two slots: the newest leaves, so each comes back every third round."""
    monkeypatch.setitem(EVICTIONS, "mru", MostRecentlyUsed)
    trace, held, hits = circle(8), [], 0
    for key in [0, 1, 2] * 8:
        hits += key in held
        held = _after(held, key)
    assert hits_of(trace, "mru", 2, 4).decode.counts.hits == hits > 0
    assert hits_of(trace, "lru", 2, 4).decode.counts.hits == 0
    result = replayed(trace, slots=2, changes={"cache": "mru"})
    assert result.hit_rate == pytest.approx(hits / 24)
    assert replayed(trace, slots=2, changes={"cache": "mru", "spared": "1"}).hit_rate == 0
    assert hits_of(trace, "mru", 2, 4, {"spared": 1}).decode.counts.hits == 0


def _after(held: list[int], key: int) -> list[int]:
    """What two slots hold after a use of `key`, the newest last."""
    if key in held:
        return [*(other for other in held if other != key), key]
    return [*held[:1], key]


# a predictor


def test_a_predictor_in_the_engine(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PREDICTIONS, "same-again", SameAgain)
    monkeypatch.setitem(PREDICTIONS, "likeliest", LikeliestExpert)
    expected, _, _ = answered(qwen, preset="lru")
    for name in ("same-again", "likeliest"):

        def read_ahead(name: str = name) -> bool:
            found, counts, _ = answered(qwen, preset="lru", set={"prefetch": name, "ahead": "1"})
            assert found == expected
            return counts.speculative_loads > 0

        until(read_ahead)  # on a busy machine a prediction may be taken back before any lane has begun with it


def test_a_predictor_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's expert is read (a tenth of a second) while the one before it computes, though the cache holds two of
    the three."""
    monkeypatch.setitem(PREDICTIONS, "same-again", SameAgain)
    fast = {"slots": 2, "bandwidth": 1000.0}
    alone, ahead = (replayed(circle(6), changes=changes, **fast) for changes in ({}, {"prefetch": "same-again"}))
    assert alone.hit_rate == 0
    assert replayed(circle(6), changes={"prefetch": "same-again", "least": "2"}, **fast).hit_rate == 0
    assert ahead.hit_rate == pytest.approx(5 / 6)  # all but the first round
    assert ahead.decode_tok_s > alone.decode_tok_s


def test_a_predictor_that_asks_routers_needs_a_trace_that_holds_what_they_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PREDICTIONS, "likeliest", LikeliestExpert)
    same = layer([0], forecasts={1: [(0, 1.0)]})
    trace = trace_of([decode(same, same, same) for _ in range(3)], top_k=1)
    alone, asking = (replayed(trace, slots=2, changes={"prefetch": name}) for name in ("none", "likeliest"))
    assert (alone.counts.speculative_loads, alone.hit_rate) == (0, 0)
    assert asking.counts.speculative_loads > 0
    with pytest.raises(TraceError, match="no forecasts"):
        replayed(trace_of(trace.passes, top_k=1, holds=EVERYTHING - {"forecasts"}), changes={"prefetch": "likeliest"})


# a precision rule


def test_a_precision_rule_in_the_engine(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECISIONS, "first-high", FirstHigh)
    exact, _, _ = answered(qwen, preset="lru", bits=8)
    rule = {"precision": "first-high"}
    same, _, _ = answered(qwen, preset="lru", bits=8, set=rule | {"low_bits": "8"})
    assert same == exact
    _, counts, stats = answered(qwen, preset="lru", bits=8, set=rule | {"low_bits": "2"})
    assert counts.low_loads > 0
    assert stats["lossy"] == "precision=first-high"


def test_a_precision_rule_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer reads one expert of 100 bytes and one of 50 in its only round."""
    monkeypatch.setitem(PRECISIONS, "first-high", FirstHigh)
    result = replayed(circle(1, experts=2), slots=6, changes={"precision": "first-high", "low_bits": "2"})
    assert result.bytes_read == 3 * (100 + 50)
    both = replayed(circle(1, experts=2), slots=6, changes={"precision": "first-high", "first": "2"})
    assert both.bytes_read == 3 * (100 + 100)


def test_a_setting_of_an_addition_is_known_everywhere(tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PREDICTIONS, "same-again", SameAgain)
    with pytest.raises(ConfigError, match="least must be from 1 to 1024, got 0"):
        compose("lru", {"prefetch": "same-again", "least": "0"})
    with pytest.raises(ConfigError, match="least does nothing with prefetch=none; it is read by prefetch=same-again"):
        compose("lru", {"least": "2"})
    monkeypatch.setitem(PRESETS, "again", Composition("again", "", prefetch="same-again", own={"least": 2}))
    assert re.search(r"^least +2", tiermoe_("presets", "again").out, re.MULTILINE)
    assert re.search(r"^least +1", tiermoe_("presets", "lru").out, re.MULTILINE)


# a model family


def test_a_family_with_another_activation_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = Mine.model_type
    AutoConfig.register(name, MineConfig, exist_ok=True)
    AutoModelForCausalLM.register(MineConfig, MineForCausalLM, exist_ok=True)
    monkeypatch.setitem(FAMILIES, name, Mine())
    monkeypatch.setitem(tiny.CONFIGS, name, {**tiny.CONFIGS["qwen3_moe"], "hidden_act": "relu"})
    directory = tiny.write(tmp_path, name, torch.float32)
    plain = oracle(directory, name, torch.float32)
    ids = tokens(2, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    assert isinstance(ours.tiermoe.decoder, Decoder)
    assert close(logits(ours, name, ids), logits(plain, name, ids))
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))
    ours.tiermoe.close()


# a gate


def test_a_gate_that_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the table: outlines name the gate, and messages what it costs. Without one it is the module's."""
    plain = oracle(tiny.write(tmp_path, "qwen3_moe", torch.float32, hidden_act="relu"), "qwen3_moe", torch.float32)
    ids, found = tokens(2, 9), []
    for entry in (None, RELU):
        if entry:
            monkeypatch.setitem(GATES, "relu", entry)
        engine = engine_of(tmp_path, preset="lru")
        gate = engine.gates[0].activation
        found.append((gate.stored, slow_gate(gate)))
        engine.close()
        ours, _ = tiermoe.load(tmp_path, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
        assert close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
        ours.tiermoe.close()
    slow = "no kernel computes the gate of {}: torch computes the experts, about three times slower"
    with_transformers = ", and transformers is imported at every start"
    assert found == [
        (None, slow.format("Qwen3MoeExperts") + with_transformers), (("relu",), slow.format("relu")),
    ]  # fmt: skip
    assert slow_gate(gate_named("silu")) is None


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_a_gate_without_a_kernel_is_named_at_loading(tmp_path: Path) -> None:
    tiny.write(tmp_path, "qwen3_moe", torch.bfloat16, hidden_act="relu")
    engine = engine_of(tmp_path, preset="lru")
    slow = "no kernel computes the gate of this model's experts: torch computes the experts, about three times slower"
    assert [warning for warning in engine.plan.warnings if warning.startswith(slow)]
    engine.close()


# a weight format


@pytest.fixture
def five_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(config.BITS, 5, "additions.encoding:Int5")


@pytest.mark.usefixtures("five_bits")
def test_a_matrix_in_a_weight_format() -> None:
    """Every weight within half a step of what it was, computed weight by weight from the packed bits."""
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    encoding = encoding_for(5, 6, 8, torch.float32)
    assert encoding_named(encoding.name) == encoding
    fields = encoding.encode(weight, QUANTIZERS["hqq"], torch.float32)
    assert sum(field.nbytes for field in encoding.stored_fields(6, 8, torch.float32)) == 6 * (8 * 5 // 8 + 4)
    bits = "".join(f"{byte:08b}"[::-1] for byte in fields["codes"].flatten().tolist())
    codes = torch.tensor([int(bits[at : at + 5][::-1], 2) for at in range(0, len(bits), 5)]).view(6, 8)
    expected = (codes - 16) * fields["scale"][:, None]
    assert torch.equal(encoding.decode(fields, 6, 8, torch.float32), expected)
    assert bool(((expected - weight).abs() <= fields["scale"][:, None] * 0.5001).all())
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear_for("int5", "cpu", torch.float32)(x, fields, 6, 8), x @ expected.t())


@pytest.mark.usefixtures("five_bits")
def test_a_weight_format_in_the_engine(tmp_path: Path) -> None:
    """Packed, read into slots and computed, against the plain model with the weights that 5 bits stand for."""
    directory = tiny.write(tmp_path, "qwen3_moe", torch.float32)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=5, dense_bits=16, cache="40%", lanes=1)
    plain = oracle(directory, "qwen3_moe", torch.float32)
    ids = tokens(2, 9)
    assert not close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
    put_decoded_experts(ours.tiermoe, plain)
    assert close(logits(ours, "qwen3_moe", ids), logits(plain, "qwen3_moe", ids))
    ours.tiermoe.close()


def test_bits_without_a_format_are_refused() -> None:
    with pytest.raises(ConfigError, match="bits must be one of"):
        config.settings(bits=5)


# speculation and a batch policy


@pytest.fixture(scope="module", params=["float32", "packed"])
def engine(request: pytest.FixtureRequest, tiny_model: Model) -> Iterator[Any]:
    """In float32, and one whose every product is native where this machine has native kernels."""
    if request.param == "float32":
        made = engine_of(tiny_model("qwen3_moe", torch.float32))
    else:
        made = engine_of(tiny_model("qwen3_moe", torch.bfloat16, **NATIVE), bits=4, dense_bits=4)
    yield made
    made.close()


def test_speculation_by_looking_up_the_prompt(engine: Any) -> None:
    """A repetitive prompt takes fewer steps than tokens; the tokens are those of plain greedy decoding."""
    ids = tokens(1, 5)[0].tolist() * 4
    counted = Counted(engine)
    assert speculate(counted, ids, 40) == greedy(engine, ids, 40)
    assert counted.steps < 40


def test_a_batch_policy(engine: Any) -> None:
    """Three requests of different lengths, two at a time: each gets the tokens that it gets alone. In bfloat16 that
    takes kernels whose rounding does not depend on how many tokens there are."""
    if engine.settings.bits == 4 and not engine.decoder.batch_invariant:
        pytest.skip("this machine has no native kernels")
    requests = [tokens(1, length, seed=length)[0].tolist() for length in (4, 11, 7)]
    counted = Counted(engine)
    assert serve(counted, requests, 10, together=2) == [greedy(engine, ids, 10) for ids in requests]
    assert counted.steps == 20


# what the native kernels take

ROOT = Path(__file__).parent.parent
TREE = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}


def changed_tree(root: Path, changes: Changes) -> Path:
    """A copy of the sources with these changes."""
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in TREE:
        shutil.copy(ROOT / name, root)
    change(root, changes)
    return root


OTHERS = """
#include "kernels.h"
static int nowhere(void) { return 0; }
const Kernels kernels_avx512bf16 = {.runs = nowhere}, kernels_avx2 = {.runs = nowhere},
              kernels_avxvnni = {.runs = nowhere};
const Kernels kernels_neondot = {.runs = nowhere}, kernels_neon = {.runs = nowhere};
"""  # in place of the sets that take a minute to compile


def row_of(what: str) -> str:
    """The files that the guide's table says an addition takes."""
    (row,) = re.findall(rf"^\| {what} \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return str(row)


@pytest.mark.long
def test_a_cpu_instruction_set(tmp_path: Path) -> None:
    """Found by its name, it computes what every set does."""
    root = changed_tree(tmp_path / "tree", INSTRUCTION_SET)
    native, additions = root / "src" / "tiermoe" / "native", Path(__file__).parent / "additions"
    shutil.copy(additions / "vectors.c", native / "isa")
    shutil.copytree(additions / "vectors", native / "isa" / "vectors")
    assert COUNTS[len(INSTRUCTION_SET)] in row_of("a CPU instruction set")
    build, program, others = [compiler("cc"), *STRICT, "-O1", f"-I{native}"], str(tmp_path / "check"), tmp_path / "o.c"
    others.write_text(OTHERS)
    sources = ("isa/vectors.c", "isa/generic.c", "gguf_grids.c", "kernels.c", "matrix.c", "team.c")
    files = [others, *(native / name for name in sources)]
    built([*build, str(Path(__file__).parent / "kernels_check.c"), *map(str, files), *LIBRARIES, "-o", program])
    assert ran([program]) == ["vectors", "generic"]


GATED = """
from dataclasses import replace

import torch
from additions.gate import RELU
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_named
from tiermoe.kernels.experts import FusedExperts, UnfusedExperts, expert_kernel
from tiermoe.kernels.gates import GATES, gate_named, slow_gate
from tiermoe.types import MoeLayer, Part

GATES["relu"] = replace(RELU, native="RELU")
gate = gate_named("relu")
assert slow_gate(gate) is None
draw = torch.Generator().manual_seed(0)
parts = (Part("gate_up", (128, 64)), Part("down", (64, 64)))
encodings = dict.fromkeys(("gate_up", "down"), encoding_named("int8"))
form = ExpertFormat(MoeLayer("experts", 1, 1, parts), 8, torch.bfloat16, encodings)
slot = torch.empty(form.slot.nbytes, dtype=torch.uint8)
form.encode({part.name: torch.randn(part.shape, generator=draw) for part in parts}, QUANTIZERS["linear"], slot)
x, views = torch.randn(5, 64, generator=draw).bfloat16(), form.slot.views(slot)
kernel = expert_kernel(form, gate, "cpu")
assert isinstance(kernel, FusedExperts)
assert torch.equal(kernel(x, views), UnfusedExperts(form, gate, "cpu")(x, views))
print("right")
"""

SCALED = """
import torch
from tiermoe.model.routers import Router, RouterRule

draw = torch.Generator().manual_seed(0)
weight, x = (torch.randn(rows, 64, generator=draw).bfloat16() for rows in (8, 5))
scale = torch.rand(8, generator=draw).bfloat16()
plain, scaled = Router(weight, RouterRule(3)), Router(weight, RouterRule(3), expert_scale=scale)
assert scaled.native is not None
weights, experts = plain.route(x)
found, same = scaled.route(x)
assert torch.equal(experts, same)
assert torch.equal(found, weights * scale[experts])
assert not torch.equal(found, weights)
print("right")
"""


@pytest.mark.long
def test_a_gate_in_c_and_a_field_that_a_kernel_takes(tmp_path: Path) -> None:
    compiler("cc")
    root = changed_tree(tmp_path, {**ROUTER_FIELD, **GATE})
    setup = root / "setup.py"
    setup.write_text(setup.read_text().replace('"-O3"', '"-O0"'))
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=root, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for script in (SCALED, GATED):
        paths = os.pathsep.join(map(str, (root / "src", Path(__file__).parent)))
        assert ran([sys.executable, "-c", script], PYTHONPATH=paths) == ["right"]
    assert COUNTS[len(ROUTER_FIELD)] in row_of("a field that a kernel takes")


# a sampling field


def test_a_sampling_field_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of .5, .3, .15 and .05: above a tenth three are drawn, above nine tenths the likeliest alone."""
    logits = torch.log(torch.tensor([0.15, 0.5, 0.05, 0.3]))
    with pytest.raises(ConfigError, match="unknown sampling field 'epsilon_cutoff'"):
        Sampling(own={"epsilon_cutoff": 0.1})
    monkeypatch.setitem(TRUNCATIONS, "epsilon_cutoff", EpsilonCutoff())
    for cutoff, drawn in ((0.0, {0, 1, 2, 3}), (0.1, {0, 1, 3}), (0.9, {1})):
        sampler = Sampler(Sampling(temperature=1.0, seed=1, own={"epsilon_cutoff": cutoff}))
        assert {sampler.choose(logits) for _ in range(200)} == drawn
    with pytest.raises(ConfigError, match="epsilon-cutoff must be from 0 to 1, got 2"):
        Sampling(own={"epsilon_cutoff": 2})


def test_a_sampling_field_of_a_request(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**fields: Any) -> Any:
        asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, **fields}
        return http.post("/v1/completions", json=asked)

    def message(cutoff: Any) -> str:
        refused = answer(temperature=1.0, epsilon_cutoff=cutoff)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "epsilon_cutoff")
        return str(refused.json()["error"]["message"])

    assert message(0.9) == "epsilon_cutoff is not supported by this server; leave it out"
    monkeypatch.setitem(TRUNCATIONS, "epsilon_cutoff", EpsilonCutoff())
    assert message(1.5) == "epsilon_cutoff must be from 0 to 1, got 1.5"
    assert message("much") == "epsilon_cutoff must be from 0 to 1, got 'much'"
    likeliest, cut, free = (
        answer(**fields).json()["choices"][0]["text"]
        for fields in ({"temperature": 0}, {"temperature": 1.5, "seed": 3, "epsilon_cutoff": 1},
                       {"temperature": 1.5, "seed": 3, "epsilon_cutoff": 0})
    )  # fmt: skip
    assert likeliest == cut != free


# the guide


def test_the_guide_links_every_example() -> None:
    root = Path(__file__).parent
    linked = re.findall(r"\[Example\]\(tests/(additions/\w+\.py)\)", (root.parent / "CONTRIBUTING.md").read_text())
    files = {str(file.relative_to(root)) for file in (root / "additions").glob("*.py")}
    assert sorted(linked) == sorted(files - {"additions/__init__.py", "additions/native.py"})
