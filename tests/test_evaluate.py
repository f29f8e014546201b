"""`tiermoe eval`: scores against brute force and plain transformers, windows, the reference's file, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import Command
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.lab.measure.evaluate import Evaluation, prepare
from tiermoe.lab.measure.scoring import TokenScores, mean_over_windows, score_tokens, summarise
from tiermoe.lab.measure.texts import WindowShape, cut_windows
from tiermoe.metrics import ExpertCounts, PhaseMetrics
from tiermoe.model.tokenizer import load_tokenizer
from tiny import oracle

SHAPE = WindowShape(prompt=8, window=12, tokens=36)
OPTIONS = {"memory": "4GiB", "lanes": 1, "cache": "40%"}
TEXT = "Once upon a time there was a small model that spoke in single letters, and it was glad to. " * 4


def nothing(*_: Any) -> None:
    """Shows no progress."""


# ---- scores

ROWS = st.integers(2, 6).flatmap(
    lambda words: st.lists(
        st.tuples(
            *(st.lists(st.floats(-6, 6), min_size=words, max_size=words) for _ in range(2)),
            st.integers(0, words - 1),
        ),
        min_size=1,
        max_size=9,
    )
)


def softmax(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


@given(ROWS)
def test_scores_are_those_of_the_formulas(rows: list[tuple[list[float], list[float], int]]) -> None:
    ours = [softmax(logits) for logits, _, _ in rows]
    theirs = [softmax(logits) for _, logits, _ in rows]
    targets = [target for _, _, target in rows]
    scores = score_tokens(
        torch.tensor([logits for logits, _, _ in rows], dtype=torch.float64),
        torch.tensor(targets),
        torch.tensor(theirs, dtype=torch.float64).log(),
    )
    assert scores.kl is not None
    assert scores.same_top1 is not None
    assert scores.reference_nll is not None
    assert scores.nll.tolist() == pytest.approx([-math.log(q[t]) for q, t in zip(ours, targets, strict=True)])
    assert scores.reference_nll.tolist() == pytest.approx(
        [-math.log(p[t]) for p, t in zip(theirs, targets, strict=True)]
    )
    divergence = [
        math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) for p, q in zip(theirs, ours, strict=True)
    ]
    assert scores.kl.tolist() == pytest.approx(divergence, abs=1e-9)
    for same, (q, p, _) in zip(scores.same_top1.tolist(), rows, strict=True):
        best_q, best_p = softmax(q), softmax(p)
        if len(set(best_q)) == len(best_q) and len(set(best_p)) == len(best_p):
            assert same == (best_q.index(max(best_q)) == best_p.index(max(best_p)))


def test_a_token_that_neither_model_can_say_adds_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    reference = torch.log_softmax(torch.tensor([[math.log(3.0), 0.0, -math.inf]]), -1)
    scores = score_tokens(logits, torch.tensor([0]), reference)
    assert scores.kl is not None
    assert scores.kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_standard_errors_are_of_the_windows_means() -> None:
    windows = [torch.tensor(values, dtype=torch.float64) for values in ([0.0, 2.0], [2.0, 2.0], [1.0, 5.0])]
    score = mean_over_windows(windows)  # the means are 1, 2, 3: their standard deviation is 1
    assert score.value == pytest.approx(2)
    assert score.error == pytest.approx(1 / math.sqrt(3))
    assert mean_over_windows(windows[:1]).error is None


def test_the_loss_is_paired_window_by_window() -> None:
    """Windows that differ much in perplexity, and little in what the model loses: the loss's error is small."""
    log = math.log
    reference = [[log(10.0)], [log(90.0)]]
    nll = [[log(11.0)], [log(99.0)]]
    one = torch.ones(1, dtype=torch.float64)
    windows = [
        TokenScores(*(torch.tensor(values, dtype=torch.float64) for values in pair), one, one)
        for pair in zip(nll, reference, strict=True)
    ]
    result = summarise(windows)
    assert result["perplexity"] == pytest.approx(33)
    assert result["perplexity_16bit"] == pytest.approx(30)
    assert result["perplexity_16bit_se"] == pytest.approx(30 * log(9) / 2)
    assert result["perplexity_loss"] == pytest.approx(0.1)
    assert result["perplexity_loss_se"] == pytest.approx(0, abs=1e-12)


def test_the_bound_is_the_slower_of_computing_and_reading() -> None:
    phase = PhaseMetrics(4.0, 1.0, 3.0, bytes_read=600, tokens=10, counts=ExpertCounts(hits=3, misses=1))
    assert phase.bound_tok_s(bandwidth=300.0) == pytest.approx(5)  # 2 s of reading, 1 s of computing
    assert phase.bound_tok_s(bandwidth=6000.0) == pytest.approx(10)
    assert (phase.tok_s, phase.hit_rate, phase.bytes_per_token) == (2.5, 0.75, 60)


def test_a_gpu_is_bound_by_its_bus_too() -> None:
    phase = PhaseMetrics(8.0, 1.0, 7.0, bytes_read=600, tokens=10, read_s=3.0, bytes_copied=6000, copy_s=5.0)
    assert phase.bound_tok_s(bandwidth=1500.0) == pytest.approx(10 / 4)
    assert phase.bound_tok_s(bandwidth=3000.0) == pytest.approx(10 / 3)  # the drive's work
    assert phase.bound_tok_s(bandwidth=1000.0) == pytest.approx(10 / 5)  # the bus did no more work than that
    twice = PhaseMetrics(8.0, 1.0, 7.0, tokens=10, bytes_copied=6000, copy_s=9.0)  # two at once count each
    assert twice.bound_tok_s(bandwidth=100.0) == pytest.approx(10 / 8)


def test_nothing_that_ran_is_above_its_bound() -> None:
    """Reading that is faster than the drive was found to be, and bytes that came as the phase began."""
    phase = PhaseMetrics(4.0, 1.0, 3.0, bytes_read=600, tokens=10, read_s=3.5)
    assert phase.bound_tok_s(bandwidth=100.0) == pytest.approx(10 / 3.5)
    assert phase.bound_tok_s(bandwidth=300.0) == pytest.approx(5)  # a drive that was slow here is not a slow drive
    began = PhaseMetrics(100.0, 50.0, 50.0, 1000, 0, read_s=40.0)
    ended = PhaseMetrics(104.0, 51.0, 53.0, 1600, 0, read_s=43.5)
    used = PhaseMetrics(tokens=3)
    used.add(ended.since(began), 7)
    assert used.bound_tok_s(bandwidth=100.0) == pytest.approx(10 / 3.5)
    used.add(ended.since(began), 10)
    assert used.bound_tok_s(bandwidth=100.0) == pytest.approx(20 / 7)


# ---- windows


class Letters:
    """A tokenizer of one token a letter, which begins a text with token 7."""

    bos_token_id = 7

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        return [7] * add_special_tokens + [1000 + index for index in range(len(text))]


@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 200))
def test_windows_do_not_overlap_and_reach_over_the_text(prompt: int, window: int, count: int, more: int) -> None:
    shape = WindowShape(prompt, window, window * count)
    length = (count + 1) * (shape.length - 1) + more
    windows = cut_windows(Letters(), "x" * length, shape)
    rows = torch.stack([window.ids for window in (windows.warming, *windows.scored)])
    assert rows.shape == (count + 1, shape.length)
    assert (rows[:, 0] == 7).all()
    flat = rows[:, 1:].reshape(-1).tolist()
    assert flat == sorted(set(flat))
    assert (flat[0], flat[-1]) == (1000, 1000 + length - 1)
    with pytest.raises(ConfigError, match="the text has"):
        cut_windows(Letters(), "x" * (length - more - 1), shape)


def test_a_text_that_is_too_short_says_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"has 57 tokens; scoring 36 .* takes 76: .* or use --tokens 24$"):
        cut_windows(Letters(), "x" * 57, WindowShape(8, 12, 36))


def test_shapes_that_score_nothing_are_refused() -> None:
    cases = {(0, 8, 8): "prompt must be", (8, 0, 8): "window must be", (8, 9, 8): r"tokens \(8\) is less than one"}
    for values, cause in cases.items():
        with pytest.raises(ConfigError, match=cause):
            WindowShape(*values)


# ---- a model


@pytest.fixture(scope="module")
def sixteen(tiny: Path) -> Evaluation:
    return prepare(str(tiny), TEXT, SHAPE, {**OPTIONS, "bits": 16})


@pytest.fixture(scope="module")
def against_itself(sixteen: Evaluation) -> dict[str, Any]:
    return sixteen.run("16bit", nothing)


def test_perplexity_is_plain_transformers(tiny: Path, against_itself: dict[str, Any]) -> None:
    windows = cut_windows(load_tokenizer(tiny), TEXT, SHAPE)
    model = oracle(tiny, "qwen3_moe", torch.float32)
    scored = torch.stack([window.ids for window in windows.scored])
    with torch.no_grad():
        logits = model(scored).logits[:, SHAPE.prompt - 1 : -1]
    log_probs = logits.double().log_softmax(-1)
    expected = -log_probs.gather(-1, scored[:, SHAPE.prompt :, None]).mean()
    assert against_itself["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)
    assert against_itself["perplexity_16bit"] == pytest.approx(expected.exp().item(), rel=1e-5)


def test_sixteen_bits_do_not_differ_from_themselves(against_itself: dict[str, Any]) -> None:
    assert against_itself["kl"] == pytest.approx(0, abs=1e-6)
    assert against_itself["same_top1"] == 1
    assert against_itself["lossy"] == []
    assert 0.3 < against_itself["cache_fraction"] <= 0.4
    assert against_itself["bytes_read"] > 3 * 11 * against_itself["bytes_per_token"] > 0


def test_prefill_runs_in_the_engines_chunks(tiny: Path, against_itself: dict[str, Any]) -> None:
    evaluation = prepare(str(tiny), TEXT, SHAPE, {**OPTIONS, "bits": 16, "chunk": 3})
    assert evaluation.run("none", nothing)["perplexity"] == pytest.approx(against_itself["perplexity"], rel=1e-5)


@pytest.fixture(scope="module")
def saved(sixteen: Evaluation, against_itself: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "reference"
    result = sixteen.save_reference(file, nothing)
    assert result["perplexity_16bit"] == pytest.approx(against_itself["perplexity_16bit"])
    assert [path.name for path in file.parent.iterdir()] == ["reference"]
    return file


def test_a_saved_reference_gives_the_same_scores(
    sixteen: Evaluation, against_itself: dict[str, Any], saved: Path
) -> None:
    result = sixteen.run(str(saved), nothing)
    for name in ("perplexity", "kl", "same_top1", "perplexity_loss_se"):
        assert result[name] == pytest.approx(against_itself[name])


def test_a_reference_that_does_not_fit_is_refused(sixteen: Evaluation, tiny: Path, saved: Path, tmp_path: Path) -> None:
    other_text = prepare(str(tiny), TEXT[5:], SHAPE, {**OPTIONS, "bits": 16})
    with pytest.raises(ConfigError, match="was made with another text"):
        other_text.run(str(saved), nothing)
    file = tmp_path / "reference"
    file.write_bytes(saved.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="was cut short"):
        sixteen.run(str(file), nothing)
    file.write_text("a poem")
    with pytest.raises(ConfigError, match="holds no log-probabilities"):
        sixteen.run(str(file), nothing)
    with pytest.raises(ConfigError, match=r"cannot be read: .*--save-reference"):
        sixteen.run(str(tmp_path / "nowhere"), nothing)


def test_nothing_is_left_where_scoring_ends_early(
    sixteen: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiermoe.lab.measure.evaluate.start", interrupt)
    before = set(sixteen.store.iterdir())
    with pytest.raises(KeyboardInterrupt):
        sixteen.run("16bit", nothing)
    with pytest.raises(KeyboardInterrupt):
        sixteen.save_reference(tmp_path / "reference", nothing)
    assert set(sixteen.store.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_anything_is_scored(sixteen: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(ConfigError, match=r"of 36 tokens take 22 KiB, .* has 10 B free; lower --tokens"):
        sixteen.run("16bit", nothing)


def test_a_budget_that_the_sixteen_bit_model_exceeds_names_the_way_out(
    sixteen: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BudgetError("too little")

    monkeypatch.setattr("tiermoe.lab.measure.evaluate.start", refuse)
    with pytest.raises(BudgetError, match=r"16-bit model .* too little .* for the logits .*--reference none"):
        sixteen.run("16bit", nothing)


def test_a_window_longer_than_the_context_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"window of 8 \+ 249 tokens is longer than the model's context of 256"):
        prepare(str(tiny), TEXT, WindowShape(8, 249, 249), OPTIONS)


# ---- the command

HELD_OUT = Path(__file__).parent.parent / "data" / "heldout.txt"
WORDS = ("--tokens", 16, "--window", 8, "--prompt", 8, "--bits", 8, "--memory", "4GiB", "--lanes", 1)
SMALL = ("--text", HELD_OUT, *WORDS)


def test_eval_prints_a_list_of_one_object(tiermoe_: Command, shipped: Path) -> None:
    ended = tiermoe_("eval", shipped, *SMALL, "--cache", "45%", "--json")
    assert ended.code == 0, ended.err
    (result,) = json.loads(ended.out)
    assert {
        "preset", "cache_fraction", "hit_rate", "decode_tok_s", "prefill_tok_s", "bound_tok_s", "bytes_read",
        "bytes_per_token", "wait_s", "perplexity", "perplexity_16bit", "kl", "same_top1", "kl_se",
    } <= set(result)  # fmt: skip
    assert result["preset"] == "default"
    assert result["kl"] > 0
    asked = result["expert_hits"] + result["expert_misses"]
    assert result["hit_rate"] == result["expert_hits"] / asked
    assert (result["expert_skips"], result["low_loads"], result["discarded_misses"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("preset", "settings", "shown"),
    [
        ("hobbit", ["t1=0.3", "t2=0.6", "weights=1,0,0,0"], {"low, of loads": "low_loads", "skipped": "expert_skips"}),
        ("corm", ["theta=0.25", "precision=fixed"], {"neurons spared": "neurons_spared"}),
    ],
)
def test_eval_says_what_parts_did(
    preset: str, settings: list[str], shown: dict[str, str], tiermoe_: Command, shipped: Path
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    start = ("eval", shipped, *SMALL, "--bits", 4, "--reference", "none", "--cache", "45%", "--preset", preset, *words)
    (result,) = json.loads(tiermoe_(*start, "--json").out)
    ended = tiermoe_(*start)
    table = ended.out
    assert f"{preset} {settings[0]}" in table
    assert "perplexity" in table
    assert "16 bits" not in table
    assert "16 tokens in 2 windows of 8 + 8" in ended.err
    for label, name in shown.items():
        assert result[name] > 0
        assert label in table
    assert ("neurons spared" in table) == (preset == "corm")


def test_eval_refuses_in_one_line(tiermoe_: Command, shipped: Path, tmp_path: Path) -> None:
    assert "did you mean hobbit" in tiermoe_("eval", shipped, *SMALL, "--preset", "hobit").cause
    assert "tiermoe calibrate" in tiermoe_("eval", shipped, *SMALL, "--preset", "hobbit").cause
    (tmp_path / "short.txt").write_text("Once upon a time")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert "the text has 5 tokens" in tiermoe_("eval", shipped, "--text", tmp_path / "short.txt").cause
    assert "is not UTF-8" in tiermoe_("eval", shipped, "--text", tmp_path / "latin.txt").cause
    assert "cannot be read" in tiermoe_("eval", shipped, "--text", tmp_path / "none.txt").cause
    assert "too little" in tiermoe_("eval", shipped, *SMALL, "--memory", "20MiB").cause
