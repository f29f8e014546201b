"""What experts at 2 to 3 bits lose: each candidate on `models/stories-7m`, transformers' eager model on held-out text.

    python -m benchmarks.two_bits [--windows 48] [CANDIDATE …]

Every expert by itself by GPTQ (`formats.gptq`), from the second moments of what it gets on 32,768 tokens of the text
that ships; dense layers keep their precision. Prints a row a candidate: bits a weight, relative error of the weights
(gate and up, down), loss of perplexity with its standard error over windows of 256 tokens, KL divergence in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.perplexity import TEXT, load_eager, token_ids
from benchmarks.rounds import at_least_one, parser_of
from tiermoe.engine.expert_inputs import SEEN, TOKENS, WINDOW
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.gptq import levels_of, solve
from tiermoe.formats.int4 import CPU_LAYOUT
from tiermoe.formats.nonuniform import NonUniform
from tiermoe.formats.trellis import Trellis

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "stories-7m"
CALIBRATION = ROOT / "src" / "tiermoe" / "engine" / "calibration.txt"
TOGETHER = 8  # windows

Solver = Callable[[Tensor, Tensor], Tensor]
"""A weight (N, K) and its inputs' second moments (K, K) → what stands in its place."""


def solved(encoding: Encoding) -> Solver:
    levels = levels_of(encoding, torch.bfloat16)
    assert levels is not None
    return lambda weight, moments: solve(weight, moments, levels).values


def rounded(encoding: Encoding) -> Solver:
    """As without calibration: all inputs count alike."""
    within = solved(encoding)
    return lambda weight, moments: within(weight, torch.eye(len(moments)))


def rotated(encoding: Encoding) -> Solver:
    """Columns mixed by a Hadamard matrix with random signs, as QTIP and QuIP# do."""
    within = solved(encoding)

    def solve_mixed(weight: Tensor, moments: Tensor) -> Tensor:
        mix = hadamard(len(moments))
        return within(weight @ mix, mix.t() @ moments @ mix) @ mix.t()

    return solve_mixed


def hadamard(size: int) -> Tensor:
    mix = torch.ones(1, 1)
    while len(mix) < size:
        mix = torch.cat((torch.cat((mix, mix), 1), torch.cat((mix, -mix), 1)))
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs * mix / math.sqrt(size)


def nonuniform(bits: int) -> Encoding:
    return NonUniform(bits, CPU_LAYOUT, 64)


def trellis(columns: int) -> Encoding:
    return Trellis(CPU_LAYOUT, columns)


# name → bits a weight, gate and up, down (64 columns); a scale takes 16 bits
CANDIDATES: dict[str, tuple[float, Solver, Solver]] = {
    "nl3": (3.25, solved(nonuniform(3)), solved(nonuniform(3))),
    "nl2": (2.25, solved(nonuniform(2)), solved(nonuniform(2))),
    "nl2, down nl3": (2.583, solved(nonuniform(2)), solved(nonuniform(3))),
    "tcq2": (2.167, solved(trellis(128)), solved(trellis(64))),
    "tcq2, uncalibrated": (2.167, rounded(trellis(128)), rounded(trellis(64))),
    "tcq2, down nl3": (2.5, solved(trellis(128)), solved(nonuniform(3))),
    "tcq2 rotated, down nl3": (2.5, rotated(trellis(128)), solved(nonuniform(3))),
}


class Lab:
    """The model, its experts' weights and inputs, and what it makes of the held-out text."""

    def __init__(self, windows: int) -> None:
        self._model = load_eager(MODEL, torch.float32)
        self._layers = [layer.mlp for layer in self._model.model.layers]
        self._weights = [self._matrices(mlp) for mlp in self._layers]
        self._moments = self._record(spread(CALIBRATION, TOKENS // WINDOW))
        self._text = spread(TEXT, windows)
        self._base = [self._read(some).half() for some in self._text.split(TOGETHER)]

    def run(self, first: Solver, second: Solver) -> tuple[list[float], Tensor, Tensor]:
        """Relative errors of both kinds of matrices; of each window the loss and the divergence, in nats a token."""
        error, size = [0.0, 0.0], [0.0, 0.0]
        for mlp, weights, moments in zip(self._layers, self._weights, self._moments, strict=True):
            for kind, solver in enumerate((first, second)):
                for expert, weight in enumerate(weights[kind]):
                    found = solver(weight, moments[expert][kind])
                    self._matrices(mlp, copied=False)[kind][expert] = found
                    error[kind] += float((found - weight).square().sum())
                    size[kind] += float(weight.square().sum())
        losses, divergences = [], []
        for some, before in zip(self._text.split(TOGETHER), self._base, strict=True):
            usual, now = before.float(), self._read(some)
            lost = (usual - now)[:, :-1].gather(2, some[:, 1:, None])
            losses.append(lost.mean((1, 2)))
            divergences.append((usual.exp() * (usual - now)).sum(-1).mean(1))
        return [math.sqrt(e / s) for e, s in zip(error, size, strict=True)], torch.cat(losses), torch.cat(divergences)

    @staticmethod
    def _matrices(mlp: Any, copied: bool = True) -> tuple[Tensor, Tensor]:
        found = mlp.experts.gate_up_proj.data, mlp.experts.down_proj.data
        return (found[0].clone(), found[1].clone()) if copied else found

    def _read(self, windows: Tensor) -> Tensor:
        """Log-probabilities after each token."""
        logits: Tensor = self._model(windows, use_cache=False).logits
        return logits.log_softmax(-1)

    def _record(self, windows: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """Second moments of each expert's inputs and inner values, as `engine.expert_inputs` weighs them."""
        hidden: list[list[Tensor]] = [[] for _ in self._layers]
        hooks = [
            mlp.register_forward_pre_hook(lambda _, args, at=at: at.append(args[0].flatten(0, 1)))
            for mlp, at in zip(self._layers, hidden, strict=True)
        ]
        for some in windows.split(TOGETHER):
            self._model.model(some, use_cache=False)
        for hook in hooks:
            hook.remove()
        return [self._moments_of(mlp, torch.cat(x)) for mlp, x in zip(self._layers, hidden, strict=True)]

    @staticmethod
    def _moments_of(mlp: Any, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        _, gates, chosen = mlp.gate(x)
        found = []
        for expert, weight in enumerate(mlp.experts.gate_up_proj):
            tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
            counts = gates[tokens, ranks]
            if len(tokens) < SEEN:
                others = torch.linspace(0, len(x) - 1, SEEN - len(tokens)).long()
                usual = float(counts.mean()) if len(counts) else 1.0
                tokens, counts = torch.cat((tokens, others)), torch.cat((counts, torch.full(others.shape, usual)))
            gate, up = (x[tokens] @ weight.t()).chunk(2, -1)
            both = (each * counts[:, None] for each in (x[tokens], torch.nn.functional.silu(gate) * up))
            first, second = (each.t() @ each for each in both)
            found.append((first, second))
        return found


def spread(text: Path, windows: int) -> Tensor:
    """So many windows (windows, WINDOW), spread over a text."""
    ids = torch.from_numpy(token_ids(MODEL, text))
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[torch.from_numpy(np.linspace(0, len(whole) - 1, windows).astype(np.int64))]


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("candidates", nargs="*", default=list(CANDIDATES), metavar="CANDIDATE")
    parser.add_argument("--windows", type=at_least_one, default=48)
    args = parser.parse_args()
    unknown = set(args.candidates) - set(CANDIDATES)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no candidate; there are {'; '.join(CANDIDATES)}")
    torch.set_num_threads(1)  # matrices are small
    lab = Lab(args.windows)
    for name in args.candidates:
        bits, first, second = CANDIDATES[name]
        errors, loss, divergence = lab.run(first, second)
        root = math.sqrt(len(loss))
        print(
            f"{name:24} {bits:.3f} bits  error {errors[0]:.4f} {errors[1]:.4f}  "
            f"perplexity {100 * math.expm1(loss.mean()):+.2f} ± {100 * float(loss.std()) / root:.2f} %  "
            f"KL {divergence.mean():.5f} ± {float(divergence.std()) / root:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
