"""The steps of `benchmarks.gpu`. Each is a generator of rows, {what: text, figure: number or text}, and runs in a
process of its own: `python -m benchmarks.gpu_steps STEP DEVICE FOLDER [quick]` prints a row a line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tiermoe
from benchmarks.kernels import SHAPES, Shape, Turns, filled
from benchmarks.random_model import ALL, SMALL, config_of, write
from benchmarks.rounds import at_least_one
from tiermoe.batch import Batch, decode, prompt
from tiermoe.config import settings
from tiermoe.engine.load import start
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
from tiermoe.offload.cuda import CudaCopier
from tiermoe.platform.machine import installed_version
from tiermoe.types import MoeLayer, Part

Row = dict[str, Any]

OLMOE = Shape(2048, 1024, 8, 16, 16, 128, 50304)
TOLERANCE = {torch.float32: 2**-20, torch.float16: 1.01 * 2**-10, torch.bfloat16: 1.01 * 2**-7}
"""Most error of an element, in units of |x| @ |w|: results are rounded to the dtype, weights by the tiled kernel."""

PAPERS: Mapping[str, dict[str, Any]] = {
    "load-on-demand": {},
    "lru": {},
    "mixtral-offload": {},
    "hobbit": {"t1": 0.6, "t2": 0.9, "weights": "0.25,0.25,0.25,0.25"},
    "mobile": {"gamma": 0.5},
    "default": {},
}
"""Preset → the settings that a calibration would find; of random weights there is nothing to find. EdgeMoE and Fate
read tables of a calibration, CORM's neurons are computed on CPUs."""

MODELS = (
    ("qwen3-30b-a3b", 8, "33%"),
    ("mixtral-8x7b", 3, "25%"),
    ("phi-3.5-moe", 3, "25%"),
    ("olmoe-1b-7b", 16, "50%"),
    ("qwen1.5-moe-a2.7b", 12, "50%"),
    ("deepseek-v2-lite", 12, "50%"),
)
"""Shape, layers of it, and the share of the experts that the GPU holds: 8 GiB hold a third of Qwen3-30B-A3B's."""


@dataclass(frozen=True)
class Run:
    """Where a step runs. quick: on tiny shapes, to see that it does. folder: for checkpoints and their stores."""

    device: str
    quick: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def kind(self) -> str:
        """The device's type."""
        return self.device.partition(":")[0]

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """Of one call, the median of the rounds after one that does not count; on a GPU by its own clock. A round calls
        as often as 5 ms need."""
        call()
        first = self._seconds(call, 1)
        often = 1 if self.quick else max(1, min(1000, int(5e-3 / max(first, 1e-9))))
        return median(self._seconds(call, often) / often for _ in range(1 if self.quick else rounds))

    def _seconds(self, call: Callable[[], object], often: int) -> float:
        if not self.on_gpu:
            began = time.perf_counter()
            for _ in range(often):
                call()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(often):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def checkpoint(self, kind: str, layers: int, small: bool) -> Path:
        """A checkpoint of random weights, written once."""
        out = self.folder / f"{kind}-{layers}{'-small' * small}"
        if not out.exists():
            write(kind, out, config_of(kind, layers, **(SMALL[kind] if small else {})))
        return out

    def store(self, model: Path) -> Path:
        """Where a checkpoint is packed."""
        return self.folder / f"store-{model.name}"


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
    """Tokens of small random checkpoints beside the CPU's, with all experts resident and with some."""
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


def copies(run: Run) -> Iterator[Row]:
    """GB/s between main memory and the GPU by size, and what an urgent copy waits behind a speculative one."""
    sizes = [1 << 16] if run.quick else [1 << shift for shift in (16, 18, 20, 22, 24, 26)]
    for nbytes in sizes:
        there = torch.empty(nbytes, dtype=torch.uint8, device=run.device)
        for pinned in (True, False) if run.on_gpu else (False,):
            here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            for way, source, target in (("to the GPU", here, there), ("back", there, here)):
                seconds = run.seconds(lambda source=source, target=target: target.copy_(source, non_blocking=True))
                what = f"{nbytes >> 10} KiB {way}, {'pinned' if pinned else 'not pinned'}"
                yield {"what": what, "gb_s": nbytes / seconds / 1e9}
    if not run.on_gpu:
        return
    large, small = 64 << 20, 4 << 20
    here = torch.empty(large + small, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(large + small, dtype=torch.uint8, device=run.device)
    copier = CudaCopier(run.device)
    for beside in (False, True):
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            mark = copier.mark()
            if beside:
                copier.copy(here[small:], there[small:], mark, urgent=False)
            began = time.perf_counter()
            copier.wait(copier.copy(here[:small], there[:small], mark, urgent=True))
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
            "share_of_memory": nbytes / seconds / read,
            "tflop_s": 6 * tokens * shape.hidden * shape.inner / seconds / 1e12,
            "torch_bfloat16_us": 1e6 * _plain_seconds(shape, tokens, run),
        }  # fmt: skip


def layers(run: Run) -> Iterator[Row]:
    """Python's and launches' time a layer: decoding with every expert resident, of matrices that take no time. One
    thread, and the quickest token: what others do on the machine is no part of it."""
    depth, tokens = (2, 2) if run.quick else (24, 64)
    model = run.checkpoint("qwen3-30b-a3b", depth, small=True)
    for decoder in ("auto", "generic"):
        for preset in ("lru", "default"):
            engine = _engine(model, run, preset=preset, decoder=decoder, cache="100%", threads=1)
            fed = _Fed(engine)
            fed.decode(4)
            least = min(fed.decode(1).seconds for _ in range(tokens))
            row: Row = {"what": f"decoder {type(engine.decoder).__name__}, preset {preset}",
                        "ms_a_layer": 1e3 * least / depth}  # fmt: skip
            if run.on_gpu:
                row["synchronisations_a_layer"] = _synchronisations(lambda fed=fed: fed.decode(4)) / 4 / depth
            engine.close()
            yield row


def papers(run: Run) -> Iterator[Row]:
    """Presets on shapes that fit: tokens a second, bytes moved a token, hits. Main memory holds all experts."""
    for kind, depth, cache in MODELS if not run.quick else (("qwen3-30b-a3b", 2, "50%"),):
        model = run.checkpoint(kind, depth, small=run.quick)
        for preset, changes in PAPERS.items():
            row: Row = {"what": f"{kind}, {depth} layers, {cache} on the GPU, {preset}"}
            try:
                own = {} if preset == "load-on-demand" else {"cache": cache}
                engine = _engine(model, run, preset=preset, set=changes, **own)
                fed = _Fed(engine)
                fed.decode(2 if run.quick else 16)
                used = fed.decode(2 if run.quick else 48)
                row |= {
                    "tok_s": used.tok_s, "bound_tok_s": used.bound_tok_s(engine.service.bandwidth),
                    "hits": used.hit_rate, "copied_mb_a_token": used.bytes_copied / used.tokens / 1e6,
                    "read_mb_a_token": used.bytes_per_token / 1e6, "waited_ms_a_token": 1e3 * used.wait_s / used.tokens,
                    "slots": engine.plan.slots, "of": engine.plan.all_slots,
                }  # fmt: skip
                engine.close()
            except (TiermoeError, RuntimeError) as error:
                row["error"] = reason(error)
            yield row
        for folder in (model, run.store(model)):  # the next one needs the room
            shutil.rmtree(folder, ignore_errors=True)


class _Fed:
    """A sequence of random tokens over an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._cache = engine, engine.new_cache(1)
        self._ids = iter(torch.randint(0, 4096, (512,), generator=torch.Generator().manual_seed(0)).tolist())
        self._row = prompt(self._cache.open(), [next(self._ids) for _ in range(16)])
        engine.step(Batch((self._row,)), self._cache)

    def decode(self, tokens: int) -> Any:
        """The metrics of so many tokens, one after the other."""
        before = self._engine.snapshot()
        for _ in range(tokens):
            self._row = decode(self._row.slab, self._row.end, next(self._ids))
            self._engine.step(Batch((self._row,)), self._cache)
        used = self._engine.snapshot().since(before)
        used.tokens = tokens
        return used


def _engine(model: Path, run: Run, **options: Any) -> Any:
    """An engine without a record of earlier runs, whose main memory is filled by now."""
    for record in run.store(model).glob("runs-*.json"):
        record.unlink()
    asked = settings(device=run.device, bits=4, dense_bits=16, context=512, store=run.store(model), **options)
    engine = start(inspect_model(model, str(model), asked.store), asked)
    held, until = -1, time.monotonic() + 60
    while run.on_gpu and time.monotonic() < until and (now := engine.stats()["host_experts"]) > held:
        held = now
        time.sleep(1)
    return engine


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
    "machine": (machine, 60),
    "kernels": (kernels, 180),
    "families": (families, 240),
    "copies": (copies, 60),
    "products": (products, 180),
    "layers": (layers, 120),
    "papers": (papers, 900),
}
"""Name → (what measures, seconds at most), in order of worth."""


def main(words: Sequence[str]) -> None:
    name, device, folder, *quick = words
    for row in STEPS[name][0](Run(device, bool(quick), Path(folder))):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
