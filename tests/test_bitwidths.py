"""Bitwidths: EdgeMoE's search beside trying every K, and real checkpoints by the paper's formula."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from channel_wise import round_experts
from commands import Command
from tiermoe.config import settings as make_settings
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.lab.measure.bitwidths import BitsMeter, Journal, ModelSource, by_ray, check_room, find_bitwidths, places_of
from tiermoe.lab.measure.pairs import read_pairs
from tiermoe.lab.measure.tasks import Perplexity, Rouge2, rouge2, rouge2_loss
from tiermoe.lab.measure.texts import WindowShape
from tiermoe.lab.papers.edgemoe import RelativeLoss, accept, lowered, search
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.tokenizer import load_tokenizer
from tiny import oracle, write

PLACES = [(layer, expert) for layer in range(3) for expert in range(4)]


unhurried = settings(max_examples=60)


COSTS = {2: 1.0, 4: 0.1, 8: 0.01, 16: 0.0}


class Additive:
    """Each expert costs its weight, times what its bitwidth costs; remembers what was measured."""

    def __init__(self, weights: Mapping[tuple[int, int], float], noise: float = 0.0) -> None:
        self.weights = weights
        self.measured: list[dict[tuple[int, int], int]] = []
        self._noise = random.Random(1)
        self._spread = noise

    def exact(self, table: Mapping[tuple[int, int], int]) -> float:
        return sum(self.weights[place] * COSTS[bits] for place, bits in table.items())

    def __call__(self, table: Mapping[tuple[int, int], int]) -> float:
        self.measured.append(dict(table))
        return self.exact(table) + self._noise.uniform(-self._spread, self._spread)


def test_worked_example() -> None:
    """Twelve experts of weight 1/100 (even ones) or 2/100, P = 5 %. All at 2 bits: 18 %, at 4: 1.8 %. Each even one
    moved adds 0.9 %: 1.8 + 3 * 0.9 = 4.5 % is within, a fourth gives 5.4 %."""
    loss = Additive({(layer, expert): 0.02 if expert % 2 else 0.01 for layer, expert in PLACES})
    found = search(loss, loss.weights, 0.05)
    assert (found.lower, found.upper, found.k) == (2, 4, 3)
    assert found.loss == pytest.approx(0.045)
    assert [place for place in PLACES if found.table[place] == 2] == [(0, 0), (0, 2), (1, 0)]
    assert set(found.table) == set(PLACES)
    assert found.uniform == pytest.approx({2: 0.18, 4: 0.018, 8: 0.0018, 16: 0.0})
    assert found.mixed[4] == pytest.approx(0.054)


def test_equally_important_experts_go_in_their_order() -> None:
    loss = Additive(dict.fromkeys(PLACES, 0.01))
    found = search(loss, dict.fromkeys(reversed(PLACES), 0.01), 0.05)
    assert [place for place in PLACES if found.table[place] == 2] == PLACES[: found.k]


def test_a_loss_that_cannot_be_met_gives_the_best_found() -> None:
    dear, cheap = (Additive(dict.fromkeys(PLACES, weight)) for weight in (0.1, 0.01))
    with pytest.raises(ConfigError, match=r"within 0.500%: the best found is 1.200%, all experts at 8 bits"):
        search(dear, dear.weights, 0.005, precisions=(2, 4, 8))
    found = search(cheap, cheap.weights, 0.05, precisions=(2, 4, 8))
    with pytest.raises(
        ConfigError, match=r"not seen within 5.000%: the best found is 12.000% ± 1.000%, all experts at 8"
    ):
        accept(
            lambda table: RelativeLoss(100 * cheap.exact(table), 0.01), found, cheap.weights, 0.05, precisions=(2, 4, 8)
        )


@unhurried
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=40), st.floats(0.01, 20), st.floats(0.1, 10), st.floats(0, 1))
def test_the_fewest_bytes_that_hold_on_both(weights: list[float], tolerated: float, times: float, share: float) -> None:
    """Of every table; and of those from there upwards, on other text, where each expert costs `times` as much, give or
    take a share of the tolerated loss."""
    error = share * tolerated
    by_place = {(0, expert): weight for expert, weight in enumerate(weights)}
    loss = Additive(by_place)
    order = sorted(by_place, key=lambda place: (by_place[place], place))
    tables = [lowered(order, k, *pair) for pair in ((2, 4), (4, 8), (8, 16)) for k in range(len(order), 0, -1)]
    tables.append(lowered(order, 0, 8, 16))
    found = search(loss, by_place, tolerated)
    assert found.table == next(table for table in tables if loss.exact(table) <= tolerated)
    assert len(loss.measured) <= 4 + len(order).bit_length()
    upwards = tables[tables.index(found.table) :]
    accepted = accept(lambda table: RelativeLoss(times * loss.exact(table), error), found, by_place, tolerated)
    assert accepted.table == next(table for table in upwards if times * loss.exact(table) + error <= tolerated)
    assert accepted.loss == pytest.approx((times * loss.exact(accepted.table), error))


@unhurried
@given(st.integers(0, 10_000))
def test_noise_never_gives_a_table_that_was_not_measured_within(seed: int) -> None:
    chance = random.Random(seed)
    by_place = {(0, expert): chance.uniform(0.001, 0.01) for expert in range(30)}
    loss = Additive(by_place, noise=0.01)
    found = search(loss, by_place, 0.05)
    assert found.loss <= 0.05
    assert found.table in loss.measured
    if found.k and found.lower != found.upper:
        assert found.mixed[found.k + 1] > 0.05


FAMILY, LAYERS, EXPERTS = "olmoe", 2, 4


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


class Case:
    """A tiny checkpoint, and sequences that its own 16-bit model says."""

    def __init__(self, folder: Path) -> None:
        self.store, self.journal = folder / "store", folder / "journal"
        changes = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": 2}
        self.directory = write(folder / "model", FAMILY, torch.float32, **changes)
        self.blueprint = inspect_model(self.directory, "tiny")
        self._plain = oracle(self.directory, FAMILY, torch.float32)
        torch.manual_seed(0)
        self.ids = self._plain.generate(torch.tensor([[1]] * 16), max_new_tokens=31, do_sample=True, eos_token_id=[])

    def find(
        self, tolerated: float, journal: Path | None = None, progress: Any = quiet, processes: int = 1,
        ray: bool = False,
    ) -> Any:  # fmt: skip
        options = {"memory": "4GiB", "dense_bits": 16, "device": "cpu", "quantizer": "linear", "threads": 1, "lanes": 2}
        settings = make_settings(store=self.store, **options)
        task = Perplexity(self.ids)
        return find_bitwidths(self.blueprint, settings, task, tolerated, progress, processes, journal, ray)

    def nll(self, table: Mapping[tuple[int, int], int], half: int = 0) -> float:
        """Of the even sequences (half 0) or the odd ones, as `nlls`."""
        return float(self.nlls(table, half).mean())

    def nlls(self, table: Mapping[tuple[int, int], int], half: int) -> torch.Tensor:
        """Of each sequence, by a plain model with rounded weights and torch's own cross-entropy."""
        plain, ids = copy.deepcopy(self._plain), self.ids[half::2]
        round_experts(plain, self.blueprint.layers, table)
        with torch.no_grad():
            logits = plain(input_ids=ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.mT.double(), ids[:, 1:], reduction="none")
        return losses.mean(1)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("bitwidths"))


@pytest.fixture(scope="module")
def tolerated(case: Case) -> float:
    """Half way between what 4 and 2 bits for all experts cost."""
    places = places_of(case.blueprint)
    found = []
    for half in (0, 1):
        base, *lower = (case.nll(dict.fromkeys(places, bits), half) for bits in (16, 4, 2))
        four, two = (math.expm1(nll - base) for nll in lower)
        assert 0 < four < two
        found.append((four + two) / 2)
    return max(found)


@pytest.fixture(scope="module")
def found(case: Case, tolerated: float) -> Any:
    return case.find(tolerated, case.journal)


def test_importance_is_what_each_expert_costs_alone_at_two_bits(case: Case, found: Any) -> None:
    places = places_of(case.blueprint)
    four = case.nll(dict.fromkeys(places, 4))
    for layer, expert in places:
        alone = case.nll({**dict.fromkeys(places, 4), (layer, expert): 2})
        assert found["importance"][layer][expert] == pytest.approx(math.expm1(alone - four), abs=2e-4)
    assert len({round(value, 5) for row in found["importance"] for value in row}) > 4, "not all the same"


def test_the_table_costs_what_is_said_and_no_more_than_is_tolerated(case: Case, found: Any, tolerated: float) -> None:
    places = places_of(case.blueprint)
    table = {place: found["table"][place[0]][place[1]] for place in places}
    differences = case.nlls(table, 1) - case.nlls(dict.fromkeys(places, 16), 1)  # of sequences the search has not seen
    assert found["loss"] == pytest.approx(math.expm1(float(differences.mean())), abs=5e-4)
    error = math.exp(float(differences.mean())) * float(differences.std()) / math.sqrt(len(differences))
    assert found["loss_error"] == pytest.approx(error, abs=5e-4)
    assert found["loss"] + found["loss_error"] <= tolerated
    assert found["judged"][-1][3] + found["judged"][-1][4] <= tolerated or len(found["judged"]) > 1
    base = case.nll(dict.fromkeys(places, 16))
    searched = found["searched"]
    assert searched["loss"] <= tolerated
    assert (searched["lower"], searched["upper"]) == (2, 4)
    least = sorted(places, key=lambda place: found["importance"][place[0]][place[1]])[: found["k"]]
    assert {place for place in places if table[place] == found["lower"]} == set(least)
    for bits, loss in found["losses"]["uniform"].items():
        expected = math.expm1(case.nll(dict.fromkeys(places, bits)) - base)
        assert loss == pytest.approx(expected, abs=5e-4)
    assert json.loads(json.dumps(found))["metric"] == "perplexity"


def lines_of(journal: Path) -> list[str]:
    return journal.read_text().splitlines(keepends=True)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[dict[Any, int]]:
    """The tables that are measured in this process from now on."""
    tables: list[dict[Any, int]] = []
    values = BitsMeter.values

    def noting(self: BitsMeter, table: Mapping[Any, int], task: Any) -> list[float]:
        tables.append(dict(table))
        return values(self, table, task)

    monkeypatch.setattr(BitsMeter, "values", noting)
    return tables


def test_a_killed_run_goes_on_where_it_stopped(
    case: Case, found: Any, tolerated: float, tmp_path: Path, measurements: list[dict[Any, int]]
) -> None:
    """Stopped after three experts, the last line torn: each is measured once in all, but for the torn one."""
    journal = tmp_path / "journal"
    journal.write_text("".join(line for line in lines_of(case.journal) if "alone" not in line))

    def stopping(what: str, done: int, total: int) -> None:
        if what == "measuring each expert alone" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.find(tolerated, journal, stopping)
    assert len(measurements) == 3
    journal.write_bytes(journal.read_bytes()[:-9])
    torn = measurements.pop()
    again = case.find(tolerated, journal)
    assert measurements.count(torn) == 1
    assert len(measurements) == LAYERS * EXPERTS
    assert {**again, "seconds_per_expert": None} == {**found, "seconds_per_expert": None}
    measurements.clear()
    assert case.find(tolerated, journal)["seconds_per_expert"] is None
    assert measurements == []


def test_several_processes_find_the_same(case: Case, found: Any, tolerated: float, tmp_path: Path) -> None:
    """The second layer's experts are left to measure."""
    journal = tmp_path / "journal"
    kept = [line for line in lines_of(case.journal) if "alone 1" not in line]
    assert len(lines_of(case.journal)) - len(kept) == EXPERTS
    journal.write_text("".join(kept))
    again = case.find(tolerated, journal, processes=2)
    assert again["table"] == found["table"]
    assert again["importance"] == found["importance"]
    assert again["seconds_per_expert"] > 0


@pytest.mark.long
def test_ray_s_processes_find_the_same(
    case: Case, found: Any, tolerated: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a task raises comes back as it was raised."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it leaves a token in the user's folder
    journal = tmp_path / "journal"
    journal.write_text("".join(line for line in lines_of(case.journal) if "alone" not in line))
    again = case.find(tolerated, journal, processes=2, ray=True)
    assert sorted(lines_of(journal)) == sorted(lines_of(case.journal))
    assert {**again, "seconds_per_expert": None} == {**found, "seconds_per_expert": None}
    settings = make_settings(memory="1MiB", threads=1, dense_bits=16, device="cpu", store=case.store)
    task = Perplexity(case.ids)
    places = places_of(case.blueprint)
    with pytest.raises(BudgetError, match="too little"):
        list(by_ray(ModelSource.of(case.blueprint, settings, task), task, places[:1], places, 1))


def test_a_cluster_without_room_is_told_of_before_anything_waits_for_it() -> None:
    has = {"CPU": 4.0, "memory": float(3 << 30)}
    check_room(has, processes=3, threads=1, memory=1 << 30)
    with pytest.raises(ConfigError, match=r"3 processes of 2 threads and 1 GiB each .* 4 processors and 3 GiB"):
        check_room(has, processes=3, threads=2, memory=1 << 30)
    with pytest.raises(ConfigError, match="fewer --processes"):
        check_room(has, processes=4, threads=1, memory=1 << 30)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for", "fate,hobbit", "--processes", "2"], "--processes measures edgemoe's experts, and --for names other"),
        (["--for", "fate", "--processes", "2", "--ray"], "--ray measures edgemoe's experts, and --for names other"),
        (["--ray"], "say how many with --processes"),
        (["--processes", "2", "--ray"], r"--ray needs ray\S*: pip install 'tiermoe\[ray\]'"),
    ],
)
def test_processes_that_would_do_nothing_are_refused(
    words: list[str], said: str, tiermoe_: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (text := tmp_path / "text").write_text("Once")
    assert re.search(said, tiermoe_("calibrate", "nowhere", "--text", text, *words).cause)


def test_what_was_measured_of_something_else_is_kept_and_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, "one text").add("all 4", [1.5])
    other = Journal(path, "another text")
    assert other.get("all 4") is None
    other.add("all 4", [2.5, 2.0])
    assert Journal(path, "one text").get("all 4") == [1.5]
    assert Journal(path, "another text").get("all 4") == [2.5, 2.0]


def test_perplexity_of_an_encoder_decoder_model_is_that_of_its_answers(tmp_path: Path) -> None:
    plain = oracle(write(tmp_path, "switch_transformers", torch.float32), "switch_transformers", torch.float32)
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = [plain(input_ids=row[None, :6], labels=row[None, 6:]).loss for row in ids]
    assert Perplexity(ids).values(plain) == pytest.approx([float(loss) for loss in losses], rel=1e-5)


def test_rouge2_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """'the cat ran' has two bigrams, 'the cat sat' too, one is the same: precision, recall and F are 1/2."""
    pytest.importorskip("rouge_score")
    assert rouge2("the cat sat", "the cat ran") == pytest.approx(0.5)
    assert rouge2("on the mat", "on the mat") == 1
    assert rouge2_loss([0.4, 0.8], [0.5, 1.0]) == pytest.approx((0.2, 0.0))
    # .8 are kept: .5 - .4 and .7 - .8 lie .1 from their mean, which errs by half of their distance
    assert rouge2_loss([0.5, 0.7], [0.5, 1.0]) == pytest.approx((0.2, 0.5 * (0.1 + 0.1) / 0.75))
    with pytest.raises(ConfigError, match="ROUGE-2 of 0"):
        rouge2_loss([0.0], [0.0])
    for name in ("rouge_score", "rouge_score.rouge_scorer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'tiermoe\[rouge\]'"):
        Rouge2([("a document", "a summary")], None, WindowShape())


def test_the_rouge2_of_a_task_is_that_of_transformers_greedy_summaries(case: Case) -> None:
    """Of the model that measures bitwidths, all experts at 16 bits; the references are its summaries and more words."""
    pytest.importorskip("rouge_score")
    tokenizer, shape = load_tokenizer(case.directory), WindowShape(12, 8, 8)
    plain, pairs, expected = oracle(case.directory, FAMILY, torch.float32), [], []
    for document in ("a dog and a cat", "rain fell on the hills"):
        ids = torch.tensor([tokenizer.encode(document)[: shape.prompt]])
        made = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=shape.window, do_sample=False)
        said = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        pairs.append((document, f"one two {said} three"))
        expected.append(rouge2(pairs[-1][1], said))
    task = Rouge2(pairs, tokenizer, shape)
    settings = make_settings(store=case.store, memory="4GiB", dense_bits=16, device="cpu", quantizer="linear")
    with BitsMeter(ModelSource.of(case.blueprint, settings, task)) as meter:
        assert meter.values(dict.fromkeys(places_of(case.blueprint), 16), task) == pytest.approx(expected)


def test_halves_share_no_sequence() -> None:
    even, odd = Perplexity(torch.arange(10).view(5, 2)).halves()
    assert (even.ids[:, 0].tolist(), odd.ids[:, 0].tolist()) == ([0, 4, 8], [2, 6])
    with pytest.raises(ConfigError, match="4 are needed, there are 3 sequences; raise --tokens"):
        Perplexity(torch.zeros(3, 2)).halves()


def test_pairs_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"document": "long", "summary": "short"}\n\n{"document": "a", "summary": "b"}\n')
    assert read_pairs(path) == [("long", "short"), ("a", "b")]
    path.write_text('{"document": "long", "summary": "short"}\n{"document": "a"}\n')
    with pytest.raises(ConfigError, match="line 2 of"):
        read_pairs(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pairs(tmp_path / "none")
