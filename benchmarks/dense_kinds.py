"""What packing each kind of dense layer costs: perplexity and KL divergence to the checkpoint's own weights.

python -m benchmarks.dense_kinds models/stories-7m [--kinds v_proj,o_proj --tokens 24576 --experts 16]

Each kind of linear layer (`q_proj`, `lm_head`, ...) is packed alone, at 4, 6 and 8 bits, then mixtures are; the experts
stay at 16 bits, or are at 4 in every row (`--experts 4`). A weight is replaced by what its packed form decodes to, and
transformers' eager model computes in float32, so that a row differs from the next by the weights alone. An output layer
tied to the embedding is measured as if it had weights of its own. Prints one JSON object, and a table on standard error
(loss in perplexity as a share, KL divergence in nats, each with the standard error of the mean over windows).
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.perplexity import load_eager, token_ids
from benchmarks.rounds import parser_of
from tiermoe.formats.int4 import CPU_LAYOUT
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.packing import kind_of, packable

OUTPUT = "lm_head"
Recipe = dict[str, int]
"""Kind → bits; a kind that is not named stays at 16."""


def packed(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The float32 values that a matrix (out, in) has at `bits`."""
    encoding = encoding_for(bits, *weight.shape, torch.bfloat16, CPU_LAYOUT)
    fields = encoding.encode(weight, QUANTIZERS["hqq"], torch.bfloat16)
    return encoding.decode(fields, *weight.shape, torch.bfloat16).float()


class Model:
    """A checkpoint whose dense layers take other precisions in turn."""

    def __init__(self, directory: Path) -> None:
        self._blueprint = blueprint = inspect_model(directory, directory.name)
        self._eager = load_eager(directory, torch.float32)
        names = [*packable(blueprint), OUTPUT]
        self._own = {name: self._eager.get_submodule(name).weight.detach().clone() for name in dict.fromkeys(names)}
        self.kinds = list(dict.fromkeys(map(kind_of, self._own)))
        self._made: dict[tuple[str, int], torch.Tensor] = {}

    def pack_experts(self, bits: int) -> None:
        """For good."""
        for layer in self._blueprint.layers:
            for tensor in self._eager.get_submodule(layer.name).parameters():
                tensor.data = torch.stack([packed(matrix, bits) for matrix in tensor.data])

    def weights(self, kind: str) -> int:
        """How many weights the kind has."""
        return sum(weight.numel() for name, weight in self._own.items() if kind_of(name) == kind)

    def set(self, recipe: Recipe) -> None:
        for name in self._own:
            weight = self._at(name, recipe.get(kind_of(name), 16))
            self._eager.get_submodule(name).weight = torch.nn.Parameter(weight, requires_grad=False)

    def _at(self, name: str, bits: int) -> torch.Tensor:
        if bits == 16:
            return self._own[name]
        if (name, bits) not in self._made:
            self._made[name, bits] = packed(self._own[name], bits)
        return self._made[name, bits]

    @torch.inference_mode()
    def log_probabilities(self, windows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Window by window (n, T): (T - 1, vocabulary)."""
        for window in windows:
            logits = self._eager(window[None], use_cache=False).logits[0, :-1]
            yield torch.log_softmax(logits, -1)


def recipes(kinds: list[str]) -> dict[str, Recipe]:
    """Each kind alone, then together, then with kinds above the others."""
    found: dict[str, Recipe] = {"all at 16": {}}
    found |= {f"{kind} at {bits}": {kind: bits} for kind in kinds for bits in (4, 6, 8)}
    layers = [kind for kind in kinds if kind != OUTPUT]
    four = dict.fromkeys(kinds, 4)
    found |= {"all at 8": dict.fromkeys(kinds, 8), "all at 4": four}
    found |= {f"4, {OUTPUT} {bits}": four | {OUTPUT: bits} for bits in (6, 8)}
    found |= {f"4, {OUTPUT} and {kind} 8": four | {OUTPUT: 8, kind: 8} for kind in layers}
    attention = {kind: 8 for kind in layers if kind in ("v_proj", "o_proj")}
    return found | {f"4, {OUTPUT}, {' and '.join(attention)} 8": four | {OUTPUT: 8} | attention}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every recipe's scores beside the checkpoint's own weights."""
    model = Model(args.model)
    ids = torch.from_numpy(token_ids(args.model, args.text))
    windows = ids[: len(ids) // args.window * args.window].view(-1, args.window)
    windows = windows[:: max(1, len(windows) * args.window // args.tokens)]
    model.set({})
    reference = list(model.log_probabilities(windows))
    if args.experts < 16:
        model.pack_experts(args.experts)
    rows = []
    for label, recipe in recipes(args.kinds.split(",") if args.kinds else model.kinds).items():
        model.set(recipe)
        losses, divergences = [], []
        for window, ours, theirs in zip(windows, model.log_probabilities(windows), reference, strict=True):
            targets = window[1:, None]
            losses.append((theirs.gather(1, targets) - ours.gather(1, targets)).mean())
            divergences.append((theirs.exp() * (theirs - ours)).sum(-1).mean())
        rows.append({"recipe": label, "perplexity_loss": _score(losses), "kl": _score(divergences)})
        figures = [*rows[-1]["perplexity_loss"], *rows[-1]["kl"]]
        print(f"{label:32}", *(f"{value:10.5f}" for value in figures), file=sys.stderr)
    nll = [-own.gather(1, window[1:, None]).mean() for window, own in zip(windows, reference, strict=True)]
    return {
        "model": str(args.model), "experts": args.experts, "tokens": windows.numel() - len(windows),
        "perplexity_16bit": float(torch.stack(nll).mean().exp()),
        "weights": {kind: model.weights(kind) for kind in model.kinds}, "rows": rows,
    }  # fmt: skip


def _score(values: list[torch.Tensor]) -> tuple[float, float]:
    """(mean, standard error): of differences in nats, which are shares of the perplexity while they are small."""
    found = torch.stack(values).double()
    return float(found.mean()), float(found.std() / len(found) ** 0.5)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=Path("data/heldout.txt"))
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--kinds")
    parser.add_argument("--experts", type=int, default=16)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
