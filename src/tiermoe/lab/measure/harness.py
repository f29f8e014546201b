"""Tasks of lm-eval on a preset, in this process: definitions and documents lie on this machine, nothing is downloaded.
Needs the extra `eval`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
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


def need_harness() -> None:
    """ConfigError where lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--tasks needs {error.name}: pip install 'tiermoe[eval]'") from error


@contextlib.contextmanager
def hosted(model: str, length: int, options: Mapping[str, Any], progress: Progress | None = None) -> Iterator[Any]:
    """lm-eval's transformers class on the model that `tiermoe.load` returns. length: of windows, in tokens."""
    from lm_eval.models.huggingface import HFLM

    with load(model, progress=progress, **options) as (loaded, tokenizer):
        yield HFLM(
            pretrained=loaded,
            tokenizer=tokenizer,
            backend="seq2seq" if loaded.config.is_encoder_decoder else "causal",
            batch_size=1,  # several are padded: other shapes, other roundings
            max_length=length,
            add_bos_token=begins(tokenizer),
            softmax_dtype="float64",  # of sums too; else that of the logits, which may have 8 bits of mantissa
        )


def begins(tokenizer: Any) -> bool:
    """Whether a model's texts begin with a token of their own: lm-eval adds it only where it is told to."""
    return bool(tokenizer("").input_ids)


def results_of(model: Any, tasks: Sequence[str], data: str, limit: int | None, errors: bool = False) -> dict[str, Any]:
    """Task → metric → value of what lm-eval finds with a model of its own class; with `errors` NAME_stderr too."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={"data": data})
    names = [f"{task}_local" for task in tasks]
    # 1 asks for the errors of means; no metric here is resampled
    found = simple_evaluate(model, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=int(errors))
    return {task: _metrics(found["results"][f"{task}_local"], errors) for task in tasks}


def _metrics(results: Mapping[str, Any], errors: bool) -> dict[str, float]:
    """lm-eval's figures by name, without the names of filters."""
    values = {name.split(",")[0]: value for name, value in results.items() if "," in name}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and (errors or not name.endswith("_stderr"))
    }


def evaluate_tasks(
    model: str, tasks: Sequence[str], data: Path, limit: int | None, options: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """What lm-eval finds with a preset, and what it cost, by the names that `tiermoe eval --json` prints. tasks: as
    `tasks_asked` gives them. limit: documents of each task; None: all."""
    need_harness()
    asked = make_settings(**options)
    longest = inspect_model(resolve_model(model), model, asked.store).max_context()
    length = LONGEST if longest is None else min(LONGEST, longest)
    with hosted(model, length, {**options, "context": length}, progress) as scorer:
        engine = scorer.model.tiermoe
        used, begun = PhaseMetrics(), time.perf_counter()
        with used.measured(engine.snapshot, 0):
            found = results_of(scorer, tasks, str(data), limit, errors=True)
        return {
            **settings_of(engine),
            "tasks": found,
            "limit": limit,
            "seconds": time.perf_counter() - begun,
            **named(used, "hit_rate", "bytes_read", "wait_s"),
            "memory_budget_bytes": engine.plan.budget,
        }
