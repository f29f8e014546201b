"""`tiermoe eval`: quality of a preset beside the 16-bit weights, and its speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import BOUND, note, progress_bar, starting
from tiermoe.cli.terminal import Terminal
from tiermoe.config import format_size
from tiermoe.errors import ConfigError
from tiermoe.lab.cli import options as lab
from tiermoe.platform.machine import require_extra


@opt.engine_options(without=["context"])
def evaluate(
    model: opt.Model,
    options: dict[str, Any],
    text: lab.ScoredText = None,
    pairs: lab.ScoredPairs = None,
    metric: lab.ScoredMetric = "perplexity",
    tokens: lab.ScoredTokens = 2048,
    window: lab.Window = 256,
    prompt: lab.WindowPrompt = None,
    reference: lab.Reference = "16bit",
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-eval instead, with commas: gsm8k, mmlu, piqa, truthfulqa, wikitext, winogrande.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the tasks' published files.", show_default=False)] = None,
    limit: Annotated[
        int | None, typer.Option(help="Documents of each task. Default: all.", show_default=False, min=1)
    ] = None,
    save_reference: Annotated[
        Path | None,
        typer.Option(
            help="Score the checkpoint's own weights alone and save the reference to a file.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of one JSON object.")] = False,
) -> None:
    """Score a text, or summaries: perplexity, KL divergence and same top-1 against the 16-bit weights, or ROUGE-2 and
    its loss, with standard errors; and the speed."""
    if tasks is not None:
        _evaluate_tasks(model, tasks, data, limit, options, as_json, text or pairs or save_reference)
        return
    if data is not None or limit is not None:
        raise ConfigError("--data and --limit are of --tasks; name the tasks, or leave them out")
    material = lab.read_material(text, pairs, prompt)
    with starting():
        from tiermoe.lab.measure.evaluate import prepare
        from tiermoe.lab.measure.texts import WindowShape

        shape = WindowShape(material.prompt, window, tokens)
        evaluation = prepare(model, material.pairs or material.text, shape, options, metric)
    with progress_bar() as progress:
        if save_reference is not None:
            result = evaluation.save_reference(save_reference, progress)
        else:
            result = evaluation.run(reference, progress)
    if as_json:
        print(json.dumps([result]))
        return
    Terminal().print(_table(result))
    note(conditions(result))


def _evaluate_tasks(
    model: str,
    tasks: str,
    data: Path | None,
    limit: int | None,
    options: dict[str, Any],
    as_json: bool,
    more: Path | None,
) -> None:
    if more is not None:
        raise ConfigError(f"--tasks brings texts of its own; leave out {more}")
    with starting():
        from tiermoe.lab.measure.harness import evaluate_tasks, tasks_asked

        names = tasks_asked(tasks, data)
        require_extra("--tasks", "eval", "lm_eval")
    assert data is not None
    with progress_bar() as progress:
        result = evaluate_tasks(model, names, data, limit, options, progress)
    if as_json:
        print(json.dumps([result]))
        return
    table = Table(title=_title(result), title_justify="left")
    for column in ("task", "metric", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for task, values in result["tasks"].items():
        for name, value in values.items():
            if not name.endswith("_stderr"):
                table.add_row(task, name, with_error(value, values.get(f"{name}_stderr"), ".4f"))
    Terminal().print(table)
    what = "all documents" if limit is None else f"{limit} documents of each task"
    note(
        f"[{what}; experts at {result['bits']} bits, other layers at {result['dense_bits']}; hit rate "
        f"{result['hit_rate']:.1%}; {format_size(result['bytes_read'])} read; {result['seconds']:.0f} s]"
    )


def conditions(result: dict[str, Any]) -> str:
    """The conditions of a result, in a line."""
    parts = [scored(result)]
    if "preset" in result:
        parts += [
            f"experts at {result['bits']} bits, other layers at {result['dense_bits']}",
            f"{result['cache_fraction']:.0%} of the experts cached",
            f"kernels {result['kernels']}",
            f"compute threads: {result['threads']}",
            f"peak memory {format_size(result['peak_memory_bytes'])} of {format_size(result['memory_budget_bytes'])}",
        ]
    over = "documents" if "documents" in result else "windows"
    return "[" + "; ".join(parts) + f"; ± is the standard error over {over}]"


def scored(result: dict[str, Any]) -> str:
    """The scored text, in words."""
    if "documents" in result:
        return (
            f"{result['tokens']} tokens of {result['documents']} summaries, at most {result['window']} each, of "
            f"documents of at most {result['prompt']}"
        )
    return (
        f"{result['tokens']} tokens in {result['windows']} windows of {result['prompt']} + {result['window']}, "
        f"each token decoded on its own"
    )


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=_title(result), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, text in [*_scores(result), *_speed(result)]:
        table.add_row(label, text)
    return table


def _title(result: dict[str, Any]) -> str:
    if "preset" not in result:
        return "the checkpoint's own weights"
    changed = "".join(f" {name}={value}" for name, value in result["set"].items())
    return f"{result['preset']}{changed} ({', '.join(result['lossy']) or 'exact'})"


def _scores(result: dict[str, Any]) -> list[tuple[str, str]]:
    labels = {
        "perplexity": ("perplexity", ".4g"),
        "perplexity_16bit": ("perplexity at 16 bits", ".4g"),
        "perplexity_loss": ("loss", ".2%"),
        "kl": ("KL to 16 bits, nats", ".3g"),
        "same_top1": ("same top-1", ".1%"),
        "rouge2": ("ROUGE-2", ".4f"),
        "rouge2_16bit": ("ROUGE-2 at 16 bits", ".4f"),
        "rouge2_loss": ("loss", ".2%"),
    }
    return [
        (label, with_error(result[name], result[f"{name}_se"], form))
        for name, (label, form) in labels.items()
        if name in result
    ]


def with_error(value: float, error: float | None, form: str) -> str:
    """'9.87 ± 0.31', or the value alone where there is no error."""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{'.2%' if form.endswith('%') else '.2g'}}")


def _speed(result: dict[str, Any]) -> list[tuple[str, str]]:
    if "preset" not in result:
        return []
    bound = result["bound_tok_s"]
    share = f" ({result['decode_tok_s'] / bound:.0%} of {BOUND.format(bound)})" if bound else ""
    rows = [
        ("decode", f"{result['decode_tok_s']:.1f} tok/s{share}"),
        ("prefill", f"{result['prefill_tok_s']:.1f} tok/s"),
        ("hit rate", f"{result['hit_rate']:.1%} (decode {result['decode_hit_rate']:.1%})"),
        ("read a token", format_size(result["bytes_per_token"])),
        ("waited", f"{result['wait_s']:.2f} s"),
    ]
    return rows + [(name, f"{share(result):.1%}") for name, share in COUNTERS.items() if share(result)]


def _share_of(part: str, *whole: str) -> Callable[[dict[str, Any]], float]:
    """A counter as a share of the sum of others; 0 where these are 0. With no others: the figure itself."""

    def share(result: dict[str, Any]) -> float:
        value: float = result.get(part, 0)
        return value / max(sum(result[name] for name in whole), 1) if value and whole else value

    return share


COUNTERS: dict[str, Callable[[dict[str, Any]], float]] = {
    "prefetched, of hits": _share_of("prefetched_hits", "expert_hits"),
    "low, of loads": _share_of("low_loads", "loads", "speculative_loads"),
    "skipped, of choices": _share_of("expert_skips", "expert_hits", "expert_misses", "expert_skips"),
    "on the CPU, of misses": _share_of("experts_on_cpu", "expert_misses"),
    "fallbacks, of tokens": _share_of("fallback_ratio"),
    "neurons spared": _share_of("neurons_spared"),
    "stood in for others": _share_of("displaced_share"),
    "gate weight moved": _share_of("moved_weight_share"),
}
"""What parts of a preset did: name → its share, from a result."""
