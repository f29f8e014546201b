"""How long the ways through the engine are: calls of its own Python functions for a decoded token, frames from the
engine's step to the experts' kernel and to a forecast, and the objects between a router and the read of an expert.

    python -m benchmarks.calls MODEL [--cache 45%] [--tokens N]

Counted by `sys.setprofile`, greedily decoded, without a record of earlier runs: with every expert in memory, and with a
cache of the size given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tiermoe
from benchmarks.rounds import parser_of
from tiermoe.batch import Batch, decode, prompt

OWN = str(Path(tiermoe.__file__).parent)
PROMPT = "Once upon a time there was"
KERNELS = {"block", "block_experts"}


class Decoding:
    """A model that decodes greedily after `PROMPT`; options: of `tiermoe.load`."""

    def __init__(self, model: str, **options: Any) -> None:
        loaded, tokenizer = tiermoe.load(model, context=1024, warm=False, device="cpu", **options)
        self.engine = loaded.tiermoe
        self.cache = self.engine.new_cache(1, 1024)
        self.row = prompt(self.cache.open(), tokenizer(PROMPT).input_ids)

    def run(self, tokens: int) -> None:
        for _ in range(tokens):
            token = int(self.engine.step(Batch((self.row,)), self.cache)[0].argmax())
            self.row = decode(self.row.slab, self.row.end, token)


class Ways:
    """A profiler. `calls`: of the package's own functions. `kernel`, `forecast`: the most frames, from the engine's
    step on, to a call of an experts' kernel and of a forecast. `objects`: the most that a missing expert passes from
    its MoE layer to the read, both included."""

    def __init__(self) -> None:
        self.calls = self.kernel = self.forecast = self.objects = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            self.calls += 1
            if frame.f_code.co_qualname == "Forecaster.ranked":
                self.forecast = max(self.forecast, len(list(up_to(frame, "Engine.step"))))
        elif event == "c_call" and argument.__name__ in KERNELS:
            self.kernel = max(self.kernel, len(list(up_to(frame, "Engine.step"))))
        elif event == "c_call" and argument.__name__ == "submit":
            frames = up_to(frame, "MoELayer.block")
            owners = {id(owner) for each in frames if (owner := each.f_locals.get("self")) is not None}
            self.objects = max(self.objects, len(owners) + 1)  # and the native threads


def up_to(frame: FrameType | None, name: str) -> Iterator[FrameType]:
    """The package's own frames from the innermost to the first that is called `name`, this one included."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OWN):
            yield frame
            if frame.f_code.co_qualname == name:
                return
        frame = frame.f_back


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache", default="45%", help="the partial cache (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=100, help="decoded tokens that are counted (default: %(default)s)"
    )
    given = parser.parse_args()
    cases: dict[str, dict[str, Any]] = {
        "all in memory": {"cache": "100%"},
        f"{given.cache}, without prefetching": {"cache": given.cache, "set": {"prefetch": "none"}},
        f"{given.cache}, prefetching": {"cache": given.cache, "set": {"speculate": "always"}},
    }
    print("| cache | calls a token | frames to the kernel | to a forecast | objects to the read |")
    print("|---|--:|--:|--:|--:|")
    for name, options in cases.items():
        decoding, ways = Decoding(given.model, **options), Ways()
        decoding.run(given.tokens)
        sys.setprofile(ways)
        decoding.run(given.tokens)
        sys.setprofile(None)
        calls = ways.calls / given.tokens
        print(f"| {name} | {calls:.0f} | {ways.kernel} | {ways.forecast or '-'} | {ways.objects or '-'} |")
        decoding.engine.close()


if __name__ == "__main__":
    main()
