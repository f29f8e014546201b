"""Choices moved towards experts that are here: the rule by hand and by formula, in a model; what a strength costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import tiermoe
from commands import Command
from fake_link import Said, scheduler_with
from profiles import write_profile
from tiermoe.config import settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.engine.rerouting import PredictedRouting, routes
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.lab.measure import searches as prior
from tiermoe.lab.measure.searches import STRENGTHS, Trials, cost, find_prior
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.routers import Router, RouterRule
from tiermoe.offload.composition import Composition, changed
from tiermoe.offload.policies.routing import CachePrior
from tiermoe.offload.presets import resolve
from tiermoe.offload.profiles import Profile
from tiermoe.types import Routed


# the rule
def test_by_hand() -> None:
    """Scores 5, 4, 3, 2, 1, spread 4: a quarter of it lifts what is here by 1, which is more than nothing and not more
    than 1."""
    scores, weights = [5.0, 4.0, 3.0, 2.5, 1.0], [0.4, 0.3, 0.15, 0.1, 0.05]

    def chosen(strength: float, always: int, *here: int, **more: Any) -> tuple[list[int], float]:
        return CachePrior(strength, always, **more).choose(0, [0, 1, 2], scores, weights, here.__contains__)

    assert chosen(0.25, 1, 0, 1, 2) == ([0, 1, 2], 0.0)  # all are here
    assert chosen(0.25, 1, 3) == ([0, 1, 3], pytest.approx(0.05 / 0.85))
    assert chosen(0.25, 3, 3) == ([0, 1, 2], 0.0)  # none may leave
    assert chosen(0.125, 1, 3) == ([0, 1, 2], 0.0)  # lifted to 3, as much as the other one
    assert chosen(0.25, 1, 4) == ([0, 1, 2], 0.0)  # lifted to 2
    assert chosen(1.0, 1, 3, 4) == ([0, 4, 3], pytest.approx((0.05 + 0.25) / 0.85))
    assert chosen(1.0, 1, 3, 4, most_moved=0.2) == ([0, 1, 3], pytest.approx(0.05 / 0.85))
    assert chosen(1.0, 1, 3, 4, untouched=1) == ([0, 1, 2], 0.0)  # this is layer 0
    assert chosen(1.0, 1, 1, 3, 4) == ([0, 1, 3], pytest.approx(0.05 / 0.85))  # who is here stays


def test_the_spread_is_the_mean_of_the_layers_tokens() -> None:
    prior, here = CachePrior(0.5, 0), {2}.__contains__
    assert prior.choose(0, [0], [4.0, 2.0, 1.0], [0.5, 0.3, 0.2], here)[0] == [0]  # spread 3: 1 + 1.5 < 4
    assert prior.choose(0, [0], [9.0, 2.0, 0.0], [0.5, 0.3, 0.2], here)[0] == [0]  # 6: 0 + 3 < 9
    assert prior.choose(0, [0], [3.5, 2.0, 0.5], [0.5, 0.3, 0.2], here)[0] == [0]  # 5, in the mean: 0.5 + 2.5 < 3.5
    assert prior.choose(0, [0], [2.5, 2.0, 0.5], [0.5, 0.3, 0.2], here)[0] == [2]  # 4.25: 0.5 + 2.125 > 2.5
    assert prior.choose(1, [0], [2.5, 2.0, 0.5], [0.5, 0.3, 0.2], here)[0] == [0]  # another layer: 2


@given(st.data())
def test_it_is_the_papers_formula(data: st.DataObject) -> None:
    """The top J by score, and of the others the K - J of the largest score plus bonus."""
    experts = data.draw(st.integers(2, 12))
    k = data.draw(st.integers(1, experts))
    always = data.draw(st.integers(0, k))
    strength = data.draw(st.floats(0, 2))
    scores = data.draw(
        st.lists(st.integers(-1000, 1000).map(lambda n: n / 97), min_size=experts, max_size=experts, unique=True)
    )
    here = data.draw(st.sets(st.integers(0, experts - 1)))
    weights = [math.exp(score) for score in scores]
    order = sorted(range(experts), key=lambda expert: -scores[expert])
    taken, moved = CachePrior(strength, always).choose(0, order[:k], scores, weights, here.__contains__)
    bonus = strength * (max(scores) - min(scores))
    lifted = sorted(order[always:], key=lambda expert: -(scores[expert] + bonus * (expert in here)))
    expected = {*order[:always], *lifted[: k - always]}
    values = sorted((scores[e] + bonus * (e in here) for e in order[always:]), reverse=True)
    if k - always < len(values) and k > always and math.isclose(values[k - always - 1], values[k - always]):
        return  # a tie, or one but for rounding
    assert set(taken) == expected
    total = sum(weights[expert] for expert in order[:k])
    assert moved == pytest.approx(1 - sum(weights[expert] for expert in taken) / total, abs=1e-9)


def test_what_cannot_be_chosen_stays_out() -> None:
    scores = [3.0, -math.inf, 1.0, -math.inf]
    prior = CachePrior(4.0, 0)
    assert prior.choose(0, [0], scores, [0.5, 0.3, 0.2, 0.1], {1, 3}.__contains__) == ([0], 0.0)


# routers
RULES = {
    "softmax": RouterRule(3), "softmax, normalised": RouterRule(3, normalise=True, wide=True),
    "chosen": RouterRule(3, "chosen"), "sigmoid": RouterRule(3, "sigmoid", normalise=True, scale=2.5),
    "groups": RouterRule(3, "sigmoid", groups=4, kept_groups=2, normalise=True, wide=True),
    "best of group": RouterRule(3, groups=4, kept_groups=2, best_of_group=True, scale=16.0),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("corrected", [False, True])
def test_scores_rank_and_weigh_as_the_router_does(name: str, dtype: torch.dtype, corrected: bool) -> None:
    torch.manual_seed(0)
    rule = RULES[name]
    if corrected and rule.scores != "sigmoid":
        pytest.skip("no such router")
    correction = torch.rand(16) / 4 if corrected else None
    router = Router(torch.randn(16, 64, dtype=dtype), rule, correction=correction)
    hidden = torch.randn(7, 64, dtype=dtype)
    weights, experts = router.route(hidden)
    scores, shares = router.scores(hidden)
    best = scores.gather(1, experts)
    assert torch.equal(best.sort(descending=True).values, scores.topk(3).values)  # equal ones: any
    found = router.weights_of(shares, experts)
    assert found.float() == pytest.approx(weights.float(), rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    if rule.groups > 1:
        assert int(scores.isneginf().sum()) == 7 * 8


def test_predicted_experts_have_the_router_s_weights_of_them() -> None:
    """CORM's second reading, against a softmax over the predicted experts alone; prompts and layers that nothing was
    predicted for keep their router's."""
    torch.manual_seed(0)
    scheduler, _ = scheduler_with("lru", slots=9, prefetch="next-gate", on_mispredict="predicted")
    router = Router(torch.randn(4, 64), RouterRule(2, normalise=True, wide=True))
    hidden = torch.randn(1, 64)
    logits = (router.weight @ hidden[0]).tolist()
    worst = sorted(range(4), key=lambda expert: logits[expert])[:2]
    context: Any = SimpleNamespace(scheduler=scheduler, phase="decode")
    routing = PredictedRouting(1, context)
    scheduler.begin_pass(1, Said(), "decode")
    assert routing(router, [hidden])[0][1].tolist() == router.route(hidden)[1].tolist()
    said = Said({1: [(expert, 0.5) for expert in worst]})
    for _ in scheduler.run_layer(Routed(0, "decode", [[0, 1]], [[0.5, 0.5]]), said):
        pass
    ((weights, experts),) = routing(router, [hidden])
    assert sorted(experts[0].tolist()) == sorted(worst)
    expected = torch.softmax(torch.tensor([logits[expert] for expert in experts[0].tolist()]), 0)
    assert weights[0].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert scheduler.loader.counts.displaced == 2
    context.phase = "prefill"
    assert routing(router, [hidden])[0][1].tolist() == router.route(hidden)[1].tolist()


# a composition
def _moved(changes: dict[str, Any], tokens: int = 40) -> tuple[int, int]:
    """(choices displaced, misses) of random scores under a composition, four experts of a layer, two a token."""
    chance = random.Random(3)
    scheduler, _ = scheduler_with("lru", **changes)
    prior, counts = scheduler.prior, scheduler.loader.counts
    for _ in range(tokens):
        scheduler.begin_pass(1, Said(), "decode")
        for layer in range(3):
            scores = [chance.gauss(0, 1) for _ in range(4)]
            taken = sorted(range(4), key=lambda expert: -scores[expert])[:2]
            weights = [math.exp(score) for score in scores]
            if prior is not None:
                own, here = taken, scheduler.is_resident(layer)
                taken, _ = prior.choose(layer, own, scores, weights, here)
                counts.displaced += sum(a != b for a, b in zip(own, taken, strict=True))
            gates = [weights[expert] for expert in taken]
            for _ in scheduler.run_layer(Routed(layer, "decode", [taken], [gates]), Said()):
                pass
    return counts.displaced, counts.misses


OTHERS = [
    *({"cache": name} for name in ("random", "fifo", "lfu", "lhu", "fld", "distance", "arc")),
    {"cache": "weighted"}, {"cache": "all"}, {"cache": "none"},
    {"allotment": "even"}, {"allotment": "shallow", "boundary": 1}, {"precision": "gate-score", "t1": 0.8, "t2": 0.8},
    {"start": "together"}, {"prefetch": "layer"}, {"records": "sequence", "cache": "lfu"},
]  # fmt: skip


@pytest.mark.parametrize("beside", OTHERS, ids=str)
def test_it_does_something_beside_what_it_is_accepted_with(beside: dict[str, Any]) -> None:
    changes = {"weights": (0.25, 0.25, 0.25, 0.25), **beside} if beside.get("cache") == "weighted" else beside
    cached = {"routing": "cached", "prior": 0.4, "always": 1}
    if beside.get("cache") == "none":
        with pytest.raises(ConfigError, match="routing=cached does nothing with cache=none"):
            _moved({**changes, **cached})
        return
    displaced, misses = _moved({**changes, **cached})
    if beside == {"cache": "all"}:  # until all have come
        assert displaced >= 0
        return
    assert displaced > 0
    assert misses < _moved(changes)[1]
    assert _moved({**changes, **cached, "prior": 0.0}) == (0, _moved(changes)[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prior": 0.1}, "prior does nothing with routing=all; it is read by routing=cached"),
        ({"always": 2}, "always does nothing with routing=all"),
        ({"most_moved": 0.1, "routing": "half"}, "most_moved does nothing with routing=half"),
        ({"routing": "cached", "prior": 5}, "prior must be from 0 to 4, got 5"),
    ],
)
def test_what_does_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(Composition("any", ""), given)


# a model
@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_moe", torch.bfloat16)


MOVED = {"prior": 0.3, "always": 1, "untouched": 0}


IDS = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(2))


def answer(directory: Path, preset: str, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """(tokens, logits of each step, statistics)."""
    options = {"memory": "4GiB", "device": "cpu", "bits": 4, "cache": "50%", "warm": False, **options}
    model, _ = tiermoe.load(directory, preset=preset, set=changes or {}, **options)
    done = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=12, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    stats = model.tiermoe.stats()
    model.tiermoe.close()
    return done.sequences, torch.stack(done.logits), stats


def test_a_prior_of_no_strength_gives_the_exact_presets_bits(checkpoint: Path) -> None:
    tokens, logits, stats = answer(checkpoint, "default")
    assert stats["displaced_choices"] == 0
    found = answer(checkpoint, "nimble", {"prior": 0})
    assert torch.equal(found[0], tokens)
    assert torch.equal(found[1], logits)
    assert (found[2]["displaced_choices"], found[2]["moved_weight"], found[2]["lossy"]) == (0, 0.0, "routing=cached")


def test_nimble_3bit_is_nimble_on_experts_at_three_bits(checkpoint: Path) -> None:
    exact = answer(checkpoint, "default", bits=3, quantizer="nonlinear")
    found = answer(checkpoint, "nimble-3bit", {"quantizer": "nonlinear", "prior": 0}, bits=None)
    assert torch.equal(found[1], exact[1])


def test_its_counters_move_and_misses_are_fewer(checkpoint: Path) -> None:
    plain = answer(checkpoint, "nimble", {"routing": "all"})[2]
    _, logits, stats = answer(checkpoint, "nimble", MOVED)
    assert torch.isfinite(logits).all()
    assert stats["displaced_choices"] > 0
    assert stats["moved_weight"] > 0
    assert stats["expert_misses"] < plain["expert_misses"]
    assert (plain["displaced_choices"], plain["lossy"]) == (0, "")
    capped = answer(checkpoint, "nimble", {**MOVED, "most_moved": 0.05})[2]
    assert 0 < capped["displaced_choices"] < stats["displaced_choices"]


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_other_routers(family: str, tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model(family, torch.bfloat16)
    exact = answer(directory, "default")
    found = answer(directory, "nimble", {"prior": 0})
    assert torch.equal(found[1], exact[1])
    assert answer(directory, "nimble", {**MOVED, "prior": 0.5})[2]["displaced_choices"] > 0


def test_a_choice_that_is_moved_is_weighed_by_the_routers_own_scores(checkpoint: Path) -> None:
    """What runs, beside transformers' rule for this model: the softmax of all logits, of the experts that run."""
    model, _ = tiermoe.load(
        checkpoint, preset="nimble", set=MOVED, memory="4GiB", device="cpu", bits=16, cache="50%", warm=False
    )
    engine = model.tiermoe
    block, seen = engine.decoder.layers[0].feed_forward, []
    experts = block.experts

    def route(router: Router, *parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found: list[tuple[torch.Tensor, torch.Tensor]] = experts.route(router, *parts)
        seen.extend((router, hidden, *both) for hidden, both in zip(parts, found, strict=True))
        return found

    block.experts = _Watched(experts, route)
    model.generate(
        IDS[:1], attention_mask=torch.ones_like(IDS[:1]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    engine.close()
    others = 0
    for router, hidden, weights, index in seen:
        if len(hidden) > 1:
            continue
        shares = torch.softmax(torch.nn.functional.linear(hidden.float(), router.weight.float()), -1)[0]
        assert weights[0].float() == pytest.approx(shares[index[0]], rel=2e-2)
        others += set(index[0].tolist()) != set(shares.topk(3).indices.tolist())
    assert others > 2


class _Watched:
    """Experts of which `route` is another."""

    def __init__(self, experts: Any, route: Any) -> None:
        self.route = route
        self.batch_invariant = experts.batch_invariant
        self.block, self.forward_ragged = experts.block, experts.forward_ragged


def test_what_transformers_code_decodes_is_refused(checkpoint: Path) -> None:
    model, _ = tiermoe.load(checkpoint, preset="nimble", memory="4GiB", device="cpu", bits=4, warm=False)
    cache = DynamicCache(config=model.config)
    model(IDS[:1], past_key_values=cache)  # a prompt is the router's
    with pytest.raises(ConfigError, match="routing=cached decodes with tiermoe's own decoder"):
        model(IDS[:1, :1], past_key_values=cache)
    model.tiermoe.close()


@pytest.mark.parametrize(("family", "more"), [("phimoe", {}), ("qwen3_moe", {"decoder": "generic"})])
def test_models_whose_scores_are_not_known_are_refused(
    family: str, more: dict[str, Any], tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match="routing=cached needs the scores of all experts"):
        answer(tiny_model(family, torch.bfloat16), "nimble", **more)


def test_layers_whose_experts_follow_from_the_token_choose_by_their_table(tiny_model: Callable[..., Path]) -> None:
    directory = tiny_model("deepseek_v4", torch.bfloat16)
    loaded, _ = tiermoe.load(directory, preset="nimble", memory="4GiB", device="cpu", bits=16, warm=False)
    engine = loaded.tiermoe
    found = routes(engine.context, engine.decoder, len(engine.layers))
    assert [layer for layer, each in enumerate(found) if each is None] == [*engine.decoder.tables]
    assert 0 < len(engine.decoder.tables) < len(found)
    engine.close()


TEXT_IDS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(7))


def test_cost_by_hand() -> None:
    """Sequences that lose .1 and .3 nats a token: .2 ± .1."""
    base = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])]
    moved = [torch.tensor([1.1, 2.1]), torch.tensor([3.4, 3.2])]
    found = cost(0.1, (moved, 3.0), (base, 4.0))
    assert found.loss == pytest.approx(math.exp(0.2) - 1)
    assert found.error == pytest.approx(0.1 * math.exp(0.2))
    assert (found.strength, found.misses) == (0.1, 0.75)
    assert cost(0.1, (moved[:1], 3.0), (base[:1], 4.0)).error is None


@pytest.fixture
def engine(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def make(**options: Any) -> Engine:
        directory = tiny_model("qwen3_moe", torch.bfloat16)
        options = {"memory": "4GiB", "device": "cpu", "bits": 4, "cache": "50%", "warm": False, **options}
        options = {"preset": "nimble", "context": 32, **options}
        options["set"] = {"always": 1, "untouched": 0, **options.get("set", {})}
        started.append(start(inspect_model(directory, str(directory)), settings(**options)))
        return started[-1]

    yield make
    for each in started:
        each.close()


def test_the_exact_run_displaces_nothing_and_skips_nothing(engine: Callable[..., Engine]) -> None:
    running = engine(set={"precision": "gate-score", "t1": 0.3, "t2": 0.3})
    counts = running.loader.counts
    losses, misses = Trials(running, TEXT_IDS, 6).exact()
    assert [len(each) for each in losses] == [18] * 4
    assert (counts.displaced, counts.skipped) == (0, 0)
    moved, fewer = Trials(running, TEXT_IDS, 6).moved(0.4)
    assert counts.displaced > 0
    assert counts.skipped > 0
    assert fewer < misses
    assert any(not torch.equal(a, b) for a, b in zip(losses, moved, strict=True))


def test_the_strongest_that_costs_little_is_found(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([0.001, 0.004, 0.02, 0.003])
    real = prior.cost

    def said(*arguments: Any) -> prior.Cost:
        found = real(*arguments)
        return prior.Cost(found.strength, next(losses), found.error, found.misses)

    monkeypatch.setattr(prior, "cost", said)
    running = engine()
    steps: list[tuple[int, int]] = []
    found = find_prior(running, TEXT_IDS, 6, lambda done, total: steps.append((done, total)))
    assert [each.strength for each in found.tried] == list(STRENGTHS[:3])
    assert (found.strength, found.judged.loss) == (STRENGTHS[1], 0.003)
    assert steps[-1] == (len(STRENGTHS) + 1, len(STRENGTHS) + 1)
    assert running.scheduler.prior is not None
    assert running.scheduler.prior.strength == running.composition.prior  # as it was


def test_without_misses_or_patience_there_is_none(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="every expert fits this memory"):
        find_prior(engine(cache="100%"), TEXT_IDS, 6, lambda *_: None)
    monkeypatch.setattr(prior, "TOLERATED", -1.0)
    with pytest.raises(ConfigError, match="even the weakest prior"):
        find_prior(engine(), TEXT_IDS, 6, lambda *_: None)


def test_a_calibration_takes_the_presets_place_and_what_is_asked_for_stays(tmp_path: Path) -> None:
    def strength(**options: Any) -> float | None:
        return resolve(settings(preset="nimble", **options), tmp_path, "abc", "m", 8).composition.prior

    preset = strength()
    write_profile(tmp_path, Profile("nimble", "abc", {}, {"prior": 0.375}, {}))
    assert preset != 0.375
    assert strength() == 0.375
    assert strength(set={"prior": 0.05}) == 0.05
    assert strength(set={"routing": "all"}) == preset  # which nothing reads
    write_profile(tmp_path, Profile("nimble", "another", {}, {"prior": 0.375}, {}))
    with pytest.raises(ProfileError, match="made for another checkpoint"):
        strength()


def test_it_is_among_what_calibrate_takes(tiermoe_: Command, tiny_model: Callable[..., Path]) -> None:
    failed = tiermoe_("calibrate", tiny_model("qwen3_moe", torch.bfloat16), "--text", __file__, "--for", "frugal")
    assert "'frugal' needs no calibration of its own; --for takes" in failed.err
    assert "hobbit, edgemoe, fate, corm, mobile, nimble" in failed.err
