"""`python -m benchmarks.evaluation`: lm-eval in this process and over HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation import beside, main, same_chunk, tasks_of


def test_figures_are_compared_as_they_are_shown() -> None:
    rows = beside({"piqa": {"acc": 0.25, "acc_norm": 0.5}}, {"piqa": {"acc": 0.250049, "acc_norm": 0.50006}})
    assert rows == [("piqa", "acc", "0.2500", "0.2500", True), ("piqa", "acc_norm", "0.5000", "0.5001", False)]
    assert tasks_of("piqa,wikitext") == ["piqa", "wikitext"]
    with pytest.raises(ValueError, match="other"):
        tasks_of("piqa,other")


def test_a_chunk_is_what_a_server_scores_at_once(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_chunk(str(shipped)) == 512
    monkeypatch.setattr("tiermoe.engine.request_loop.SCORED_LOGITS_BYTES", 100 * 4 * 4096)
    assert same_chunk(str(shipped)) == 100


def data(folder: Path) -> Path:
    """Few documents, as the published files have them: among them prompts around 64 tokens, and a page of several
    windows."""
    for name in ("piqa", "winogrande", "wikitext2"):
        (folder / name).mkdir()
    goals = [{"goal": "to see" + " a king" * n, "sol1": "look.", "sol2": "close the eyes."} for n in range(20, 32)]
    (folder / "piqa/valid.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in goals))
    (folder / "piqa/valid-labels.lst").write_text("0\n1\n" * 6)
    contexts = [f"The king{' was old and' * n} had a" for n in (3, 12)]
    row = {"context_options": contexts, "continuation": "crown.", "gold": 1}
    (folder / "winogrande/winogrande.jsonl").write_text(json.dumps(row))
    page = " = A king = \n The king had a house . \n = = His house = = \n" + " It was old , and he was glad . \n" * 40
    (folder / "wikitext2/wiki.test.raw").write_text(page + page.replace("king", "queen"))
    return folder


@pytest.mark.long
def test_both_ways_give_the_same_figures(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    words = ["--data", data(tmp_path), "--length", 100, "--memory", "1GiB", "--threads", 1]
    monkeypatch.setattr(sys, "argv", ["evaluation", str(shipped), *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (ended.value.code, told["equal"]) == (0, True)
    for task, figures in told["in_process"].items():  # but for the order in which logarithms are summed
        assert told["over_http"][task] == pytest.approx(figures, rel=1e-13)
    assert list(told["in_process"]) == ["piqa", "winogrande", "wikitext"]
    assert told["in_process"]["wikitext"]["word_perplexity"] > 1
