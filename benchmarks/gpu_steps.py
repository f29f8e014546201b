"""The steps of `benchmarks.gpu`. Each is a generator of rows and runs in a process of its own:
`python -m benchmarks.gpu_steps STEP RUN` prints a row a line. RUN: the fields of `Run` as a JSON object."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tiermoe
from benchmarks.free_graphs import FreeGraphs, free_graphs
from benchmarks.gpu_models import LATER, PRESETS, llama_cpp, presets_on
from benchmarks.gpu_run import Fed, Row, Run, engine_of, random_tokens
from benchmarks.kernels import SHAPES, Shape, Turns, filled
from benchmarks.random_model import ALL
from benchmarks.rounds import at_least_one
from tiermoe import native
from tiermoe.config import settings
from tiermoe.errors import TiermoeError, reason
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for
from tiermoe.kernels.experts import SlotViews, UnfusedExperts, expert_kernel
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import linear_for
from tiermoe.lab.bench.summary import describe_machine
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.offload.composition import NO_CACHE
from tiermoe.offload.cuda import CudaCopier, Mark, Ticket
from tiermoe.offload.presets import compose
from tiermoe.platform.machine import installed_version
from tiermoe.types import MoeLayer, Part

OLMOE = Shape(2048, 1024, 8, 16, 16, 128, 50304)
EXPERT_BYTES = 2_654_208  # of Qwen3-30B-A3B's at 4 bits
TOLERANCE = {torch.float32: 2**-20, torch.float16: 1.01 * 2**-10, torch.bfloat16: 1.01 * 2**-7}
"""Most error of an element, in units of |x| @ |w|: results are rounded to the dtype, weights by the tiled kernel."""


_BY_GRAPHS, _FREE = ", by graphs", ", graphs and kernels that launch nothing"
"""Ways of `layers`; others are without graphs."""


def machine(run: Run) -> Iterator[Row]:
    """GPU, driver, versions, bus."""
    yield {"what": "machine", **describe_machine(), "triton": installed_version("triton")}
    if not run.on_gpu:
        return
    about = torch.cuda.get_device_properties(run.device)
    yield {
        "what": "GPU", "name": about.name, "memory_bytes": about.total_memory, "cuda": torch.version.cuda,
        "processors": about.multi_processor_count, "capability": f"{about.major}.{about.minor}",
    }  # fmt: skip
    fields = "driver_version,pcie.link.gen.current,pcie.link.width.current,clocks.max.memory"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[0]
    yield {"what": "driver and bus", **dict(zip(fields.split(","), found.split(", "), strict=True))}


def kernels(run: Run) -> Iterator[Row]:
    """Each linear kernel beside the decoded weights, and a token's experts beside one launch for each."""
    shapes = [(128, 256)] if run.quick else [(7, 320), (1536, 2048), (4096, 14336)]
    dtypes = [torch.float32] if run.quick else [*TOLERANCE]  # in bfloat16 a CPU rounds inputs too
    for bits in (8, 6, 4, 3, 2):
        for dtype in dtypes:
            for out, in_ in shapes:
                generator = torch.Generator().manual_seed(bits)
                encoding = encoding_for(bits, out, in_, dtype)
                weight = torch.randn(out, in_, generator=generator) * 0.05 + 0.02
                stored = encoding.encode(weight, QUANTIZERS["linear"], dtype)
                slot = {name: field.to(run.device) for name, field in stored.items()}
                whole = encoding.decode(stored, out, in_, torch.float32).double()
                kernel, worst = linear_for(encoding.name, run.kind, dtype), 0.0
                for tokens in (1, 3, 40, 512):
                    x = torch.randn(tokens, in_, generator=generator).to(dtype)
                    y = kernel(x.to(run.device), slot, out, in_).cpu().double()
                    scale = x.double().abs() @ whole.abs().T
                    worst = max(worst, float(((y - x.double() @ whole.T).abs() / scale).max()))
                what = f"{encoding.name}, {str(dtype).removeprefix('torch.')}, ({out}, {in_})"
                yield {"what": what, "error": worst, "tolerance": TOLERANCE[dtype], "right": worst <= TOLERANCE[dtype]}
    form, views = _experts(Shape(256, 128, 3, 4, 2, 32, 320), run, 3)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(run.device)
    together = expert_kernel(form, gate_named("silu"), run.kind).forward_one(x, views)
    separate = UnfusedExperts(form, gate_named("silu"), run.kind).forward_one(x, views)
    yield {"what": "a token's experts together", "right": torch.equal(together, separate)}


def families(run: Run) -> Iterator[Row]:
    """Tokens of small random checkpoints beside the CPU's; of each exact preset with all experts on the GPU, half of
    them, and 30 %."""
    ids = torch.randint(0, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    for kind in ALL if not run.quick else ("qwen3-30b-a3b",):
        model = run.checkpoint(kind, 2, small=True)
        answers: list[torch.Tensor] = []
        row: Row = {"what": kind}
        try:
            for device, cache in (("cpu", "100%"), (run.device, "100%"), (run.device, "50%")):
                options = {"memory": "8GiB", "bits": 4, "dense_bits": 16, "store": run.store(model)}
                with tiermoe.load(model, device=device, cache=cache, warm=False, **options) as (loaded, _):
                    mine = ids.to(loaded.device)
                    answer = loaded.generate(mine, max_new_tokens=16, do_sample=False)
                    answers.append(answer[0, ids.shape[1] :].cpu())
            row["equal_tokens"] = int((answers[1] == answers[0]).cumprod(0).sum())  # until the first that differs
            row["of"] = len(answers[0])
            row["right"] = torch.equal(answers[2], answers[1])  # whatever is cached
        except (TiermoeError, RuntimeError) as error:
            row["error"] = reason(error)
        yield row
    yield from _budgets(run)


def _budgets(run: Run) -> Iterator[Row]:
    """Tokens of each exact preset: no cache's size may change one."""
    model = run.checkpoint("qwen3-30b-a3b", 2, small=True)
    first: list[int] | None = None
    for preset, changes in {**PRESETS, **LATER}.items():
        composition = compose(preset, changes)
        if composition.lossy:
            continue
        budgets = [{}] if composition.cache in NO_CACHE else [{"cache": share} for share in ("100%", "50%", "30%")]
        row: Row = {"what": f"tokens of {preset}" + ", 100, 50 and 30 % on the GPU" * (len(budgets) > 1)}
        try:
            answers = []
            for budget in budgets:
                with _engine(model, run, preset=preset, set=changes, **budget) as engine:
                    answers.append(Fed(engine, random_tokens(24), ()).answer(16))
            first = first or answers[0]
            row["right"] = all(answer == first for answer in answers)
        except (TiermoeError, RuntimeError) as error:
            row["error"] = reason(error)
        yield row


def copies(run: Run) -> Iterator[Row]:
    """GB/s between main memory and the GPU by size; the engine's copies of an expert beside the largest pinned copy,
    which is taken for the bus's rate; what an urgent copy waits behind a speculative one."""
    sizes = [1 << 16] if run.quick else [1 << shift for shift in (16, 18, 20, 22, 24, 26)]
    bus = 0.0
    for nbytes in sizes:
        there = torch.empty(nbytes, dtype=torch.uint8, device=run.device)
        for pinned in (True, False) if run.on_gpu else (False,):
            here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            for way, source, target in (("to the GPU", here, there), ("back", there, here)):
                seconds = run.seconds(lambda source=source, target=target: target.copy_(source, non_blocking=True))
                what = f"{nbytes >> 10} KiB {way}, {'pinned' if pinned else 'not pinned'}"
                yield {"what": what, "gb_s": nbytes / seconds / 1e9}
                bus = max(bus, nbytes / seconds) if pinned and target is there else bus
    if not run.on_gpu:
        return
    large, small = 64 << 20, 4 << 20
    here = torch.empty(large + small, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(large + small, dtype=torch.uint8, device=run.device)
    copier, places = CudaCopier(run.device), range(0, large - EXPERT_BYTES, EXPERT_BYTES)

    def copied(part: slice, mark: Mark, urgent: bool) -> Ticket:
        return copier.launch(lambda: there[part].copy_(here[part], non_blocking=True), mark, urgent)

    def copy_experts() -> float:
        torch.cuda.synchronize()
        mark, began = copier.mark(), time.perf_counter()
        for at in places:
            last = copied(slice(at, at + EXPERT_BYTES), mark, urgent=True)
        copier.wait(last)
        return len(places) * EXPERT_BYTES / (time.perf_counter() - began)

    rate = median([copy_experts() for _ in range(6)][1:])
    what = f"{len(places)} experts of {EXPERT_BYTES / 1e6:.1f} MB, as the engine copies them"
    yield {"what": what, "gb_s": rate / 1e9, "share_of_bus": rate / bus}
    for beside in (False, True):
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            mark = copier.mark()
            if beside:
                copied(slice(small, None), mark, urgent=False)
            began = time.perf_counter()
            copier.wait(copied(slice(small), mark, urgent=True))
            found.append(time.perf_counter() - began)
        after = " after a speculative one of 64 MiB has begun" if beside else " alone"
        yield {"what": f"an urgent copy of 4 MiB{after}", "ms": 1e3 * median(found)}


def products(run: Run) -> Iterator[Row]:
    """Products of packed experts beside the rate of the memory and torch's product in bfloat16."""
    memory = 1 << 20 if run.quick else 512 << 20
    source, target = (torch.empty(memory, dtype=torch.uint8, device=run.device) for _ in range(2))
    read = 2 * memory / run.seconds(lambda: target.copy_(source))
    yield {"what": "a copy within the memory", "gb_s": read / 1e9}
    shapes = {"mixtral-8x7b": SHAPES["mixtral-8x7b"], "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"], "olmoe-1b-7b": OLMOE}
    if run.quick:
        shapes = {"small": Shape(128, 64, 2, 4, 2, 32, 320)}
    for name, shape in shapes.items():
        yield from _products(name, shape, run, memory, read)


def _products(name: str, shape: Shape, run: Run, memory: int, read: float) -> Iterator[Row]:
    """memory: bytes of experts that take turns. read: of the memory, bytes per second."""
    nbytes, top_k = _format(shape, run).slot.nbytes, shape.top_k
    form, views = _experts(shape, run, max(2 * top_k, memory // nbytes))
    kernel, turns = expert_kernel(form, gate_named("silu"), run.kind), Turns(views)
    one = torch.randn(1, shape.hidden).bfloat16().to(run.device)
    rate = top_k * nbytes / run.seconds(lambda: kernel.forward_one(one, list(turns.take(top_k))))
    yield {"what": f"{name}, a token's {top_k} experts", "gb_s": rate / 1e9, "share_of_memory": rate / read}
    for tokens in (1, 16, 64, 512):
        x = torch.randn(tokens, shape.hidden).bfloat16().to(run.device)
        seconds = run.seconds(lambda x=x: kernel(x, next(turns.take(1))))
        yield {
            "what": f"{name}, an expert, {tokens} tokens", "us": 1e6 * seconds, "gb_s": nbytes / seconds / 1e9,
            "tflop_s": 6 * tokens * shape.hidden * shape.inner / seconds / 1e12,
            "torch_bfloat16_us": 1e6 * _plain_seconds(shape, tokens, run),
        }  # fmt: skip


def layers(run: Run) -> Iterator[Row]:
    """Python's and launches' time a layer, by graphs and without: decoding with every expert resident, of matrices that
    take no time. One thread, and the quickest token: what others do on the machine is no part of it. On a CPU graphs
    cost nothing (`free_graphs`), beside torch's operators alone."""
    depth, measured = (2, 2) if run.quick else (24, 64)
    model = run.checkpoint("qwen3-30b-a3b", depth, small=True)
    free = [] if run.on_gpu or native.available() else [("auto", _FREE)]
    ways = (
        [("auto", _BY_GRAPHS), ("auto", ""), ("generic", "")] if run.on_gpu else [("auto", ""), ("generic", ""), *free]
    )
    usual: dict[str, dict[str, Any]] = {each: {"preset": each, "cache": "100%"} for each in ("lru", "default")}
    predicts = {"preset": "default", "cache": "50%", "set": {"speculate": "always"}}  # what it chooses is soon there
    for decoder, how in ways:
        for preset, asked in (usual | ({"default, which predicts": predicts} if how == _FREE else {})).items():
            with contextlib.ExitStack() as stack:
                if how == _FREE:
                    stack.enter_context(free_graphs())
                engine = stack.enter_context(_engine(model, run, decoder=decoder, threads=1, **asked))
                tokens = random_tokens(16 + 4 + measured + 4)
                fed = Fed(engine, tokens[:16], tokens[16:])
                if how == _FREE:
                    engine.decoder._graphs, fed._cache.by_place = FreeGraphs(), True
                elif run.on_gpu and decoder == "auto" and not how:
                    engine.decoder.watch(lambda part: part)
                before = torch.cuda.mem_get_info(run.device)[0] if run.on_gpu else 0
                fed.decode(4)
                row: Row = {"what": f"decoder {type(engine.decoder).__name__}, preset {preset}{how}"}
                if how == _BY_GRAPHS:
                    row["graph_bytes_a_layer"] = (before - torch.cuda.mem_get_info(run.device)[0]) / depth
                row["ms_a_layer"] = 1e3 * min(fed.decode(1).seconds for _ in range(measured)) / depth
                if run.on_gpu:
                    row["synchronisations_a_layer"] = _synchronisations(lambda fed=fed: fed.decode(4)) / 4 / depth
            yield row


def _engine(model: Path, run: Run, **options: Any) -> Any:
    """`engine_of` a checkpoint that is packed at 4 bits."""
    asked = settings(device=run.device, bits=4, dense_bits=16, context=512, store=run.store(model), **options)
    return engine_of(inspect_model(model, str(model), asked.store), asked)


def _synchronisations(work: Callable[[], object]) -> int:
    """How often torch blocks for the GPU within `work`."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchron" in str(each.message) for each in found)


def _format(shape: Shape, run: Run) -> ExpertFormat:
    """Experts of a shape at 4 bits."""
    parts = (Part("gate_up", (2 * shape.inner, shape.hidden)), Part("down", (shape.hidden, shape.inner)))
    encodings: dict[str, Encoding] = {part.name: encoding_for(4, *part.out_in, torch.bfloat16) for part in parts}
    return ExpertFormat(MoeLayer("experts", shape.top_k, shape.top_k, parts), 4, torch.bfloat16, encodings)


def _experts(shape: Shape, run: Run, count: int) -> tuple[ExpertFormat, list[SlotViews]]:
    """`count` experts of a shape with random codes, in slots."""
    form = _format(shape, run)
    made = []
    for _ in range(at_least_one(str(count))):
        views = form.slot.views(torch.empty(form.slot.nbytes, dtype=torch.uint8, device=run.device))
        for part in form.layer.parts:
            for name, field in filled(form.encodings[part.name], *part.out_in).items():
                views[part.name][name].copy_(field)
        made.append(SlotViews(views))
    return form, made


def _plain_seconds(shape: Shape, tokens: int, run: Run) -> float:
    """torch's products in bfloat16 of an expert's matrices."""
    up = torch.randn(2 * shape.inner, shape.hidden, device=run.device).bfloat16()
    down = torch.randn(shape.hidden, shape.inner, device=run.device).bfloat16()
    x, y = (torch.randn(tokens, size, device=run.device).bfloat16() for size in (shape.hidden, shape.inner))
    return run.seconds(lambda: (torch.nn.functional.linear(x, up), torch.nn.functional.linear(y, down)))


STEPS: Mapping[str, tuple[Callable[[Run], Iterator[Row]], float]] = {
    "machine": (machine, 30),
    "kernels": (kernels, 130),
    "families": (families, 140),
    "copies": (copies, 45),
    "products": (products, 90),
    "layers": (layers, 75),
    "qwen3-30b-a3b": (functools.partial(presets_on, "qwen3-30b-a3b"), 400),
    "llama.cpp": (llama_cpp, 150),
    "mixtral-8x7b": (functools.partial(presets_on, "mixtral-8x7b"), 100),
    "olmoe-1b-7b": (functools.partial(presets_on, "olmoe-1b-7b"), 110),
    "qwen1.5-moe-a2.7b": (functools.partial(presets_on, "qwen1.5-moe-a2.7b"), 80),
    "deepseek-v2-lite": (functools.partial(presets_on, "deepseek-v2-lite"), 80),
    "phi-3.5-moe": (functools.partial(presets_on, "phi-3.5-moe"), 70),
}
"""Name → (what measures, seconds at most), in order of worth; 25 minutes in all."""


def main(words: Sequence[str]) -> None:
    name, fields = words
    given = json.loads(fields)
    given |= {path: Path(given[path]) for path in ("folder", "routing") if given.get(path) is not None}
    try:
        for row in STEPS[name][0](Run(**given)):
            print(json.dumps(row), flush=True)
    except TiermoeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
