"""Write docs/which-model.md: what `tiermoe plan` says of models that people run, on machines that people have.

    python -m benchmarks.which_model

A plan reads a config and headers, so a checkpoint here is a config of the published shape and a file that has a header
and no weights (sparse: a few KiB on the drive). Nothing runs and nothing is measured. The interpreter is taken at its
usual size, so that the document does not depend on the process that writes it.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.random_model import TOKENIZER, config_of, specs
from benchmarks.rounds import parser_of
from benchmarks.widen import TOKENIZER_FILES
from tiermoe.cli.preview import Preview, preview_of
from tiermoe.config import GIB, MIB, settings
from tiermoe.engine.memory_plan import GpuMemoryPlan
from tiermoe.errors import BudgetError
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.offload.computers import COMPUTERS, Rates

FILE = Path(__file__).resolve().parents[1] / "docs" / "which-model.md"
INTERPRETER = 300 * MIB


@dataclass(frozen=True)
class Model:
    """A model on the hub, by a shape of `benchmarks.random_model`."""

    name: str
    kind: str
    sizes: Mapping[str, int] = field(default_factory=dict)  # in place of the shape's own


MODELS = (
    Model("allenai/OLMoE-1B-7B-0924-Instruct", "olmoe-1b-7b"),
    Model("Qwen/Qwen1.5-MoE-A2.7B-Chat", "qwen1.5-moe-a2.7b"),
    Model("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
    Model("openai/gpt-oss-20b", "gpt-oss-20b"),
    Model("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    Model("microsoft/Phi-3.5-MoE-instruct", "phi-3.5-moe"),
    Model("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
    Model("zai-org/GLM-4.5-Air", "glm-4.5-air"),
    Model("openai/gpt-oss-120b", "gpt-oss-120b"),
    Model(
        "Qwen/Qwen3-235B-A22B",
        "qwen3-30b-a3b",
        {
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
        },
    ),
)
"""The smallest first. Sizes are those of the published config.json."""


@dataclass(frozen=True)
class Column:
    """A machine of the table."""

    title: str
    options: dict[str, Any]  # of the plan
    machine: str = ""  # of `plan --machine`; none: a GPU's rates are not known

    @property
    def rates(self) -> Rates:
        return COMPUTERS[self.machine].rates()

    @property
    def source(self) -> str:
        if not self.machine:
            return "main memory caches the experts that the GPU lacks"
        rates = self.rates
        return f"{rates.source}; taken at {rates.memory / 1e9:.3g} and {rates.drive / 1e9:.2g} GB/s"

    @property
    def flags(self) -> str:
        named = {"machine": self.machine, **self.options} if self.machine else self.options
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in named.items())

    @contextmanager
    def as_here(self) -> Iterator[None]:
        """As if this machine had the column's GPU, or none."""
        asked = self.options.get("device") == "cuda"
        memory = (8 * GIB, 8 * GIB)  # free, in all
        with (
            mock.patch("torch.cuda.is_available", return_value=asked),
            mock.patch("torch.cuda.mem_get_info", return_value=memory),
        ):
            yield


COLUMNS = (
    Column("laptop, 8 GB", {"memory": "5GiB"}, "laptop-ddr4"),
    Column("laptop, 16 GB", {"memory": "12GiB"}, "laptop-ddr5"),
    Column("laptop, 32 GB", {"memory": "26GiB"}, "laptop-ddr5"),
    Column("16 GB and a GPU of 8 GB", {"memory": "12GiB", "device": "cuda", "gpu_memory": "7GiB", "bits": 4}),
)

_HEAD = """# Which model fits my machine

Written by `python -m benchmarks.which_model` from what `tiermoe plan` says, and checked by
`tests/test_which_model.py`. Every figure is an **estimate before anything has run**: arithmetic over bytes, a machine's
nominal rates lowered to what programs get of them, and hit rates of recorded routing. None is measured.
[Results](results.md) has what was measured.
"""
_TAIL = """
A cell of a laptop has tokens a second while decoding, from the worst to the best case that the plan knows, and the
share of the experts that the cache holds. Where the share is below 100 %, tokens wait for the drive, and a slower drive
slows them by as much at most. *No* means that the plan refuses: the layers that stay resident and one token's experts
of one layer do not fit. The context is that of the default, 4,096 tokens.

The column with a GPU says what share of the experts has a slot on the GPU, and in main memory. The plan expects no
speed there, since a GPU's rates are not known. The GPU tier was tested without a GPU.

*On the drive* is what stays there: weights that tiermoe packed to 4 bits, or the checkpoint where its experts run where
they lie (gpt-oss, MXFP4). The download of the others has 16 bits a weight. A GGUF file of about 4 bits a weight runs
where it lies, and needs no other download: `tiermoe plan ORG/MODEL:FILE` plans it from its header.

## Your machine
`tiermoe plan MODEL` measures this machine's memory, drive and products, and says what to expect here. Of a model on the
hub it reads the config and the headers alone. `--memory` bounds what tiermoe takes, so it leaves out what the system
and other programs need: above, 3 GiB of 8, 4 of 16 and 6 of 32. A cell of the table is
`tiermoe plan MODEL --machine laptop-ddr5 --memory 12GiB`; an unknown name lists the machines.

After a run, `tiermoe plan MODEL` says what that run measured, and what more memory would bring.
"""


def document() -> str:
    """The text of docs/which-model.md."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.dict("os.environ", TIERMOE_CACHE=str(folder)))
        stack.enter_context(mock.patch("tiermoe.engine.budget.resident_bytes", return_value=INTERPRETER))
        rows = [row(write_headers(model, folder / str(number)), model) for number, model in enumerate(MODELS)]
    columns = ["model", "on the drive", *(column.title for column in COLUMNS)]
    table = [f"| {' | '.join(columns)} |", "|---|" + "--:|" * (len(columns) - 1), *rows]
    machines = [f"| {column.title} | `{column.flags}` | {column.source} |" for column in COLUMNS]
    return "\n".join([_HEAD, *table, "", "| machine | options | what it is |", "|---|---|---|", *machines, _TAIL])


def write_headers(model: Model, out: Path) -> Path:
    """A checkpoint of a config, a tokenizer and a header, without weights; its folder, which is not there yet."""
    config, table, end = config_of(model.kind, **model.sizes), {}, 0
    for name, spec in specs(model.kind, config):
        dtype = "U8" if spec.kind in ("codes", "exponents") else "BF16"
        table[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": (end, end + spec.nbytes)}
        end += spec.nbytes
    header = json.dumps(table).encode()
    out.mkdir()
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + end)
    (out / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        if (TOKENIZER / name).exists() and name != "generation_config.json":
            shutil.copyfile(TOKENIZER / name, out / name)
    return out


def row(checkpoint: Path, model: Model) -> str:
    """The row of a model."""
    blueprint = inspect_model(checkpoint, model.name)
    found = [planned(blueprint, column) for column in COLUMNS]
    packing = next(each.packing for each in found if each is not None and each.expectation is not None)
    size = packing.experts + packing.dense if packing else (checkpoint / "model.safetensors").stat().st_size
    return f"| `{model.name}` | {size / 1e9:.3g} GB | {' | '.join(map(_cell, found))} |"


def planned(blueprint: Blueprint, column: Column) -> Preview | None:
    """What `tiermoe plan` says; None where it refuses because memory is too small."""
    options = settings(**column.options)
    try:
        with column.as_here():
            return preview_of(blueprint, None, options, lambda by_torch: column.rates, here=False, learns=False)
    except BudgetError:
        return None


def _cell(found: Preview | None) -> str:
    if found is None:
        return "no"
    plan, speed = found.plan, found.expectation
    share = f"{plan.slots / plan.all_slots:.0%}"
    if isinstance(plan, GpuMemoryPlan):
        beside = f", {plan.host_slots / plan.all_slots:.0%} in memory" if plan.slots < plan.all_slots else ""
        return f"{share} on the GPU{beside}"
    assert speed is not None, found.unknown
    return f"{_number(speed.decode_tok_s.low)} to {_number(speed.decode_tok_s.high)} tok/s; {share}"


def _number(value: float) -> str:
    """Two digits: an estimate has no more."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.parse_args()
    FILE.write_text(document())


if __name__ == "__main__":
    main()
