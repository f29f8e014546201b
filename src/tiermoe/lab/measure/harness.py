"""Tasks of lm-eval on a preset, in this process: definitions and documents lie on this machine, nothing is downloaded.
Needs the extra `eval`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiermoe.config import settings as make_settings
from tiermoe.engine.load import load
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.evaluate import settings_of
from tiermoe.metrics import PhaseMetrics, named
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.prepare_store import Progress

FOLDER = Path(__file__).parent / "lm_tasks"
"""Definitions of tasks for lm-eval, each called NAME_local."""

FILES: dict[str, tuple[str, ...]] = {
    "gsm8k": ("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
    "mmlu": ("mmlu/dev/*_dev.csv", "mmlu/test/*_test.csv"),
    "piqa": ("piqa/valid.jsonl", "piqa/valid-labels.lst"),
    "truthfulqa": ("truthfulqa/TruthfulQA.csv",),
    "wikitext": ("wikitext2/wiki.test.raw",),
    "winogrande": ("winogrande/winogrande.jsonl",),
}
"""Task → its files in the folder of the data, as they are published."""

LONGEST = 4096
"""Tokens of a prompt and its answer at most; a longer prompt loses its beginning."""


def tasks_asked(text: str, data: Path | None) -> list[str]:
    """The tasks of 'piqa,gsm8k', each once. ConfigError for one that is not known, and for one whose files are not in
    the folder `data`."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"no task is named; --tasks takes {', '.join(FILES)}")
    for name in names:
        if name == "humaneval":
            raise ConfigError("humaneval runs what a model writes as code on this machine, which tiermoe does not do")
        if name not in FILES:
            raise ConfigError(f"the task '{name}' is not known; --tasks takes {', '.join(FILES)}")
        if data is None:
            raise ConfigError("name the folder of the tasks' files with --data")
        missing = [file for file in FILES[name] if not any(data.glob(file))]
        if missing:
            raise ConfigError(
                f"the data of {name} are not in {data}: {missing[0]} is missing; download the published files of "
                f"{name} into {data / FILES[name][0].split('/')[0]}"
            )
    return names


def results_of(model: Any, tasks: Sequence[str], data: str, limit: int | None) -> dict[str, dict[str, float]]:
    """Task → figure → its value and NAME_stderr, of what lm-eval finds with a model of its own class."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={"data": data})
    names = [f"{task}_local" for task in tasks]
    # 1 asks for the errors of means; no metric here is resampled
    found = simple_evaluate(model, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=1)
    results = {task: found["results"][f"{task}_local"] for task in tasks}
    return {  # without the names of filters
        task: {name.split(",")[0]: float(v) for name, v in values.items() if "," in name and isinstance(v, int | float)}
        for task, values in results.items()
    }


def evaluate_tasks(
    model: str, tasks: Sequence[str], data: Path, limit: int | None, options: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """What lm-eval finds with a preset, and what it cost, by the names that `tiermoe eval --json` prints. tasks: as
    `tasks_asked` gives them. limit: documents of each task; None: all."""
    from lm_eval.models.huggingface import HFLM

    asked = make_settings(**options)
    longest = inspect_model(resolve_model(model), model, asked.store).max_context()
    length = LONGEST if longest is None else min(LONGEST, longest)
    with load(model, progress=progress, **{**options, "context": length}) as (loaded, tokenizer):
        scorer = HFLM(
            pretrained=loaded,
            tokenizer=tokenizer,
            backend="seq2seq" if loaded.config.is_encoder_decoder else "causal",
            batch_size=1,  # several are padded: other shapes, other roundings
            max_length=length,
            add_bos_token=bool(tokenizer("").input_ids),  # lm-eval begins texts as the tokenizer does if it is told to
            softmax_dtype="float64",  # of sums too; else that of the logits, which may have 8 bits of mantissa
        )
        engine = loaded.tiermoe
        used, begun = PhaseMetrics(), time.perf_counter()
        with used.measured(engine.snapshot, 0):
            found = results_of(scorer, tasks, str(data), limit)
        return {
            **settings_of(engine),
            "tasks": found,
            "limit": limit,
            "seconds": time.perf_counter() - begun,
            **named(used, "hit_rate", "bytes_read", "wait_s"),
            "memory_budget_bytes": engine.plan.budget,
        }
