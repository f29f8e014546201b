"""Packing experts, beside reading the same bytes of the checkpoint from end to end.

    python -m benchmarks.packing MODEL [--layers 1] [--bits 4] [--quantizer hqq] [--dense-bits 4] [--out FOLDER]

Experts of the first layers are packed into a folder of their own under `--out`, and removed again; `--dense-bits` packs
the dense layers as well, all of them. `plain read` is one thread that reads the tensors that are packed in blocks of
4 MiB and looks at nothing. Both find the checkpoint in the page cache, as far as it fits. `memory`: the peak while
packing less what the process held before, its interpreter and libraries. Prints one JSON object, and a table on
standard error.
"""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.rounds import about, at_least_one, parser_of, print_table, rates, ratios, shown, timed
from tiermoe.errors import TiermoeError
from tiermoe.formats.pack import pack_experts
from tiermoe.formats.store import Source, Store
from tiermoe.kernels.linear import machine_layout
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.packing import pack_dense, packable
from tiermoe.offload.reader import aligned_memory
from tiermoe.platform.process_memory import heap_for_packing, peak_resident_bytes, resident_bytes, settle
from tiermoe.types import MoeLayer

BLOCK = 4 << 20


class Work:
    """What is packed: the experts of the first layers, and all dense layers where `dense_bits` is below 16."""

    def __init__(self, blueprint: Blueprint, layers: int, bits: int, quantizer: str, dense_bits: int) -> None:
        self._blueprint, self._bits, self._quantizer, self._dense_bits = blueprint, bits, quantizer, dense_bits
        self.layers = blueprint.layers[:layers]
        self.experts = sum(map(_weights_of, self.layers))
        tensors = blueprint.checkpoint.tensors
        self.dense = [key for keys in packable(blueprint).values() for key in keys] if dense_bits < 16 else []
        self.dense_weights = sum(math.prod(tensors[key].shape) for key in self.dense)

    def pack(self, root: Path, workers: int) -> None:
        """Packs into `root` and removes it."""
        blueprint, layout = self._blueprint, machine_layout("cpu")
        root.mkdir()
        dtype = str(blueprint.dtype).removeprefix("torch.")
        try:
            source = Source(blueprint.name, blueprint.checkpoint.fingerprint(), blueprint.family.model_type, dtype)
            store = Store(root, source, self.layers)
            store.save()
            with heap_for_packing():
                pack_experts(store, blueprint.experts, self._bits, self._quantizer, layout, workers=workers)
                if self.dense:
                    pack_dense(store, blueprint, self._dense_bits, layout, workers=workers)
        finally:
            shutil.rmtree(root)

    def places(self) -> list[tuple[Path, int, int]]:
        """(file, offset, bytes) of what is read: as large a share of the experts' tensors as the layers are of all."""
        tensors, experts = self._blueprint.checkpoint.tensors, self._blueprint.experts.expert_keys
        entries = sorted((tensors[key].file, tensors[key].offset, tensors[key].nbytes) for key in experts)
        share = self.experts / sum(map(_weights_of, self._blueprint.layers))
        found = entries[: round(share * len(entries))]
        found += [(tensors[key].file, tensors[key].offset, tensors[key].nbytes) for key in self.dense]
        return found


def _weights_of(layer: MoeLayer) -> int:
    return layer.experts * sum(math.prod(part.shape) for part in layer.parts)


def plain_read(places: Sequence[tuple[Path, int, int]]) -> None:
    """Reads every byte once, in blocks."""
    memory = aligned_memory(BLOCK)
    for file, offset, nbytes in places:
        with open(file, "rb", buffering=0) as handle:
            handle.seek(offset)
            left = nbytes
            while left > 0:
                count = handle.readinto(memory[: min(left, BLOCK)])
                assert count
                left -= count


@contextlib.contextmanager
def peak_above(found: list[int]) -> Iterator[None]:
    """Appends the bytes by which the process grew at the most."""
    settle()
    before = resident_bytes()
    _forget_peak()
    yield
    found.append(max(0, peak_resident_bytes() - before))


def _forget_peak() -> None:
    """Linux counts the peak anew; elsewhere an earlier one stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure(work: Work, root: Path, workers: int, rounds: int) -> dict[str, Any]:
    """Speeds, ratios and memory."""
    places, grown = work.places(), list[int]()

    def pack() -> None:
        with peak_above(grown):
            work.pack(root, workers)

    calls: dict[str, Callable[[], object]] = {"packing": pack, "plain read": lambda: plain_read(places)}
    seconds = timed(calls, rounds)
    nbytes, weights = sum(nbytes for _, _, nbytes in places), work.experts + work.dense_weights
    return {
        "weights": weights, "dense_weights": work.dense_weights, "bytes": nbytes, "workers": workers,
        "weights_per_s": rates(seconds["packing"], weights),
        "gb_s": {name: rates(took, nbytes / 1e9) for name, took in seconds.items()},
        "ratios": ratios(seconds, "packing"),
        "peak_bytes_above": max(grown),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("--layers", type=at_least_one, default=1, help="how many of the MoE layers (default 1)")
    parser.add_argument("--bits", type=int, default=4, choices=(8, 4, 2))
    parser.add_argument("--quantizer", default="hqq", choices=("hqq", "linear"))
    parser.add_argument("--dense-bits", type=int, default=16, choices=(16, 8, 4), help="default 16: not packed")
    parser.add_argument("--workers", type=at_least_one, default=torch.get_num_threads() + 1)
    parser.add_argument("--out", type=Path, help="folder on the drive to write to (default: the system's for such)")
    args = parser.parse_args()
    try:
        blueprint = inspect_model(resolve_model(args.model), args.model)
        work = Work(blueprint, args.layers, args.bits, args.quantizer, args.dense_bits)
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            found = measure(work, Path(folder) / "store", args.workers, args.rounds)
    except TiermoeError as error:
        parser.error(str(error))
    print(json.dumps({**about(args.rounds), "bits": args.bits, "quantizer": args.quantizer, **found}))
    speed = {name: found["weights_per_s"][name] / 1e6 for name in ("median", "low", "high")}
    rows = [
        ["packing", f"{shown(speed)} million weights/s", shown(found["gb_s"]["packing"])],
        ["plain read", "", shown(found["gb_s"]["plain read"])],
        ["packing / plain read", "", shown(found["ratios"]["plain read"])],
        ["memory above the process's own", f"{found['peak_bytes_above'] / (1 << 20):.0f} MiB", ""],
    ]
    print_table(["", "", "GB/s of the checkpoint"], rows)


if __name__ == "__main__":
    main()
