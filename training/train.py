"""Train a small Qwen3-MoE from a folder of text and save it in Hugging Face format.

    python -m training.train TEXT --out MODEL [--held-out FILE] [settings]

An interrupted run (Ctrl-C too) goes on where it stopped when the same command is given again.
"""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from benchmarks.rounds import parser_of
from benchmarks.surprisals import surprisals
from training.checkpoint import OtherSettings, load_state, save_state
from training.data import Tokens, batch, documents, encode
from training.export import export
from training.model import build_model, losses
from training.settings import RECIPES, Settings
from training.tokenizer import load_tokenizer, train_tokenizer

HELD_OUT_SHARE = 0.01


@dataclass(frozen=True)
class Step:
    """What one training step reports: how many are ``done``, the losses as floats, and tokens per second."""

    done: int
    loss: float
    balance: float
    dropped: float
    speed: float

    def __str__(self) -> str:
        losses = f"loss {self.loss:.3f}  balance {self.balance:.3f}  dropped {self.dropped:.1%}"
        return f"{losses}  {self.speed:,.0f} tok/s"


def make_optimizer(model: Qwen3MoeForCausalLM, settings: Settings) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then linear decay to ``final_rate`` of the peak."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    left = 1 - step / settings.steps
    return settings.learning_rate * warm * (settings.final_rate + (1 - settings.final_rate) * left)


def train(
    model: Qwen3MoeForCausalLM,
    tokens: Tokens,
    settings: Settings,
    state: Path,
    report: Callable[[Step], None] = lambda step: None,
    save_every: int = 500,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train from the state in ``state``, if there is one, and return how many steps are done then.

    The state is written every ``save_every`` steps, at the end, and when ``stop``, asked after each step,
    says so: always between two steps, so that a resumed run computes what an uninterrupted one does.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, settings)
    done = first = load_state(state, settings, model, optimizer)
    began = time.perf_counter()
    model.train()
    for step in range(first, settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        inputs, targets = batch(tokens, step, settings.seed, settings.batch, settings.sequence)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found = losses(model, inputs.to(device), targets.to(device), settings.capacity_factor)
        torch.autograd.backward(found.language + settings.balance * found.balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        speed = (done - first) * inputs.numel() / (time.perf_counter() - began)
        report(Step(done, found.language.item(), found.balance.item(), found.dropped.item(), speed))
        leave = stop()
        if leave or done % save_every == 0 or done == settings.steps:
            save_state(state, settings, done, model, optimizer)
        if leave:
            break
    return done


def prepare(args: argparse.Namespace, settings: Settings) -> tuple[Tokens, Tokens]:
    """Tokenizer, training tokens and held-out tokens, made once and then kept in ``args.work``."""
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "tokenizer.json").exists():
        tokenizer = train_tokenizer(documents(args.text), settings.vocab, settings.max_length, settings.chats)
        tokenizer.save_pretrained(args.work)
    tokenizer = load_tokenizer(args.work)
    tokens = encode(tokenizer, documents(args.text), args.work / "train.tokens")
    if args.held_out:
        return tokens, encode(tokenizer, documents(args.held_out), args.work / "held-out.tokens")
    cut = len(tokens) - max(2, int(len(tokens) * HELD_OUT_SHARE))
    return tokens[:cut], tokens[cut:]


def parser() -> argparse.ArgumentParser:
    top = parser_of(__doc__)
    top.add_argument("text", type=Path, help="folder of .txt and .txt.xz files, or one such file")
    top.add_argument("--out", type=Path, required=True, help="directory of the trained model")
    top.add_argument("--recipe", choices=RECIPES, default="stories-7m", help="the settings not given (%(default)s)")
    top.add_argument("--held-out", type=Path, help="text for the perplexity (default: the last 1 %% of TEXT)")
    top.add_argument("--work", type=Path, help="directory of tokens and training state (default: OUT.work)")
    top.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    top.add_argument("--threads", type=int, default=torch.get_num_threads())
    top.add_argument("--save-every", type=int, default=500, help="steps between saves of the training state")
    top.add_argument("--log-every", type=int, default=20, help="steps between lines of progress")
    for field in fields(Settings):
        name = "--" + field.name.replace("_", "-")
        values = ", ".join(str(getattr(settings, field.name)) for settings in RECIPES.values())
        told: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{field.metadata['help']} ({values})"}
        if isinstance(field.default, bool):
            top.add_argument(name, action=argparse.BooleanOptionalAction, **told)
        else:
            top.add_argument(name, type=type(field.default), **told)
    return top


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C or SIGTERM end the training after the current step; a second one ends it at once."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    given = {field.name: getattr(args, field.name) for field in fields(Settings) if hasattr(args, field.name)}
    settings = replace(RECIPES[args.recipe], **given)
    console = Console(stderr=True)
    tokens, held_out = prepare(args, settings)
    model = build_model(settings).to(args.device)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{size / 1e6:.2f} M parameters, {len(tokens) / 1e6:.2f} M tokens of text, {args.device}")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=settings.steps)

        def report(step: Step) -> None:
            progress.update(task, completed=step.done, description=str(step))
            if step.done % args.log_every == 0:
                console.print(f"step {step.done}/{settings.steps}  {step}", highlight=False)

        state = args.work / "state.pt"
        with stop_on_signal() as stop:
            done = train(model, tokens, settings, state, report, args.save_every, stop)
    if done < settings.steps:
        sys.exit(f"training: stopped after step {done}; the same command goes on from there")
    export(model, load_tokenizer(args.work), args.out)
    exported = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32, experts_implementation="eager")

    @torch.inference_mode()
    def logits(ids: Any) -> Any:
        return exported(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()

    found = np.concatenate(list(surprisals(logits, held_out.astype(np.int64), settings.sequence)))
    print(f"held-out perplexity {np.exp(found.mean()):.2f} over {len(found)} tokens; model in {args.out}")


def main() -> None:
    args = parser().parse_args()
    args.work = args.work or args.out.with_name(args.out.name + ".work")
    try:
        run(args)
    except (ValueError, OtherSettings) as error:
        sys.exit(f"training: {error}")


if __name__ == "__main__":
    main()
