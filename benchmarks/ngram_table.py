"""A model with an n-gram table that is larger than memory: what stays resident, and the rows that a token reads.

    python -m benchmarks.ngram_table --gb 40 --memory 4GiB

Writes a Qwen3.8 model whose other parts are tiny and random, once with a small table and once with one of `--gb`
gigabytes in a sparse file, which takes no room on the drive. Each decodes in a process of its own. A hole is read
without the drive: the times are those of the reads' calls alone."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

_ROWS = 20_000_000  # of a head's range, as the model has them
_HEADS, _PARTS = 16, 512
_PROMPT, _DECODED = 64, 64
_DTYPES = {torch.bfloat16: "BF16", torch.int64: "I64", torch.float32: "F32"}


def _config(rows: int, columns: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen4_exp_text", vocab_size=1024, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, hc_count=4, hc_lowrank=32, ple_layer_ids=[2], ple_embed_dim=_HEADS * columns,
        ngram_vocab_size_base=rows, heads_per_ngram=_HEADS // 2, split_ngram_parts=_PARTS, indexer_n_heads=4,
        indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=2048, indexer_compress_ratio=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def write(directory: Path, gigabytes: float | None) -> int:
    """Writes the model, with a table of so many bytes, or a small one; returns the table's bytes."""
    from transformers import AutoModelForCausalLM

    rows = 1024 if gigabytes is None else _ROWS
    columns = 64 if gigabytes is None else max(1, int(gigabytes * 1e9 / (2 * _HEADS * rows)))
    config = _config(rows, columns)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")
    config.save_pretrained(directory)
    torch.manual_seed(0)
    parts: list[tuple[str, torch.dtype, tuple[int, ...], torch.Tensor | None]] = []
    for name, tensor in model.state_dict().items():
        if name.endswith("ngram_embedding.weight"):
            each = -(-tensor.shape[0] // _PARTS)
            sizes = [min(each, tensor.shape[0] - begin) for begin in range(0, tensor.shape[0], each)]
            stem = name.removesuffix("weight")
            parts += [(f"{stem}shard_{at}.weight", tensor.dtype, (n, columns), None) for at, n in enumerate(sizes)]
            table = tensor.nbytes
        else:
            parts.append((name, tensor.dtype, tuple(tensor.shape), _values(model, name, tensor)))
    _write_sparsely(directory / "model.safetensors", sorted(parts, key=lambda part: part[3] is None))
    return int(table)


def _values(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Random weights; of the buffers of n-grams' hashes what the config says."""
    if tensor.dtype != torch.int64:
        return torch.randn(tensor.shape).mul_(0.05).to(tensor.dtype)
    from transformers.models.qwen4_exp import modeling_qwen4_exp as code

    owner = model.get_submodule(name.rpartition(".")[0])
    if name.endswith("layer_multipliers"):
        return code._build_layer_multipliers(
            owner.unigram_vocab_size, owner.ngram_size, owner.ple_layer_index, owner.seed
        ).cpu()
    return torch.tensor(owner.head_offsets if name.endswith("offsets") else owner.head_vocab_sizes)


def _write_sparsely(file: Path, parts: list[tuple[str, torch.dtype, tuple[int, ...], torch.Tensor | None]]) -> None:
    """A safetensors file; parts without values, which come last, are holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, _ in parts:
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for *_, values in parts:
            if values is not None:
                handle.write(values.contiguous().view(torch.uint8).numpy().tobytes())
        handle.truncate(8 + len(text) + end)


def measure(directory: Path, memory: str) -> dict[str, Any]:
    """Decodes in this process: the plan, the peak, and the rows that a token reads of the table."""
    from tiermoe.batch import Batch, decode, prompt
    from tiermoe.config import settings
    from tiermoe.engine.load import load_blueprint, resolve_for, start, starts_lean
    from tiermoe.model.hf.blueprint import inspect_model
    from tiermoe.model.prepare_store import found_store

    chosen = settings(memory=memory, device="cpu", context=256, chunk=64, warm=False, store=directory / "store")
    blueprint = inspect_model(directory, "table", chosen.store)
    lean = starts_lean(blueprint, resolve_for(blueprint, chosen), found_store(blueprint, chosen.store))
    engine = start(blueprint, chosen) if lean else load_blueprint(blueprint, chosen).tiermoe
    tables = {key for keys in blueprint.outline.tables.values() for key in keys}
    read, whole = 0, blueprint.checkpoint.read

    def counted(name: str, row: int | None = None) -> torch.Tensor:
        nonlocal read
        read += name in tables
        return whole(name, row)

    blueprint.checkpoint.read = counted  # type: ignore[method-assign]
    ids = torch.randint(3, 1024, (_PROMPT + _DECODED,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = engine.new_cache(1)
    slab = cache.open()
    engine.step(Batch((prompt(slab, ids[:_PROMPT]),)), cache)
    of_prompt, read, began = read, 0, time.perf_counter()
    for at in range(_PROMPT, len(ids)):
        engine.step(Batch((decode(slab, at, ids[at]),)), cache)
    seconds = time.perf_counter() - began
    found = {
        "start": "own decoder alone" if lean else "transformers model in front",
        "decoder": type(engine.decoder).__name__,
        "plan_mib": engine.plan.total >> 20,
        "dense_mib": engine.plan.dense >> 20,
        "peak_mib": _peak() >> 10,
        "rows_a_token": read / _DECODED,
        "rows_a_prompt_token": of_prompt / _PROMPT,
        "ms_a_token": round(1000 * seconds / _DECODED, 2),
    }
    engine.close()
    return found


def _peak() -> int:
    """KiB of this process at the most; `getrusage` counts what its parent held, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=40)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--child", type=Path)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.memory)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, gigabytes in (("small", None), ("large", args.gb)):
            directory = Path(folder) / name
            directory.mkdir()
            table = write(directory, gigabytes)
            for run in ("first", "again"):
                command = [sys.executable, "-m", "benchmarks.ngram_table", "--memory", args.memory, "--child"]
                done = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                found[f"{name}, {run}"] = {"table_gb": table / 1e9, **json.loads(done.stdout.splitlines()[-1])}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
