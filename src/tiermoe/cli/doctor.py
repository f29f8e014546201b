"""`tiermoe doctor`: what this machine has, what is missing, and what would make tiermoe faster; whether a model has the
same bits on it in every way."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import xxhash
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import progress_bar, spinner, starting
from tiermoe.cli.terminal import WIDE, Terminal
from tiermoe.config import CacheSize, format_size, settings
from tiermoe.errors import ConfigError
from tiermoe.offload.computers import LINKS
from tiermoe.platform.machine import (
    available_memory,
    installed_version,
    most_memory,
    processor_name,
    processors,
    total_memory,
)
from tiermoe.version import VERSION

if TYPE_CHECKING:
    from tiermoe.engine.engine import Engine

_SLOW_DRIVE = LINKS["nvme"].bandwidth / 2
_GIVEN, _AFTER = 96, 8  # tokens of the prompt that --exact runs, and of what comes after them one by one


@opt.engine_options(only=["memory", "bits", "dense_bits", "quantizer", "store"])
def doctor(
    options: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(help="With --exact: a model, named as for run. Default: the shipped one.", show_default=False),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Run a prompt of MODEL in many ways (in chunks, after a prefix, beside others, on other threads and "
            "instruction sets, in less memory) and compare the logits bit for bit. Exit status 1 if some differ.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Show what this machine has, what is missing, and what would make tiermoe faster. An issue report needs the same.
    The rates of drive, memory and processor are measured where plan has not measured them in the last 30 days.
    MODEL and the options of memory, precision and store are of --exact."""
    if exact:
        _exact(model or "stories-7m", options, as_json)
        return
    if model is not None or options:
        named = ", ".join([*filter(None, [model]), *(f"--{name.replace('_', '-')}" for name in options)])
        raise ConfigError(f"{named}: doctor takes these with --exact alone; add it, or leave them out")
    with starting("measuring this machine"):
        found = examine()
    if as_json:
        print(json.dumps(found))
        return
    lines = Table.grid(padding=(0, 2, 0, 0))
    for label, text in _lines(found):
        lines.add_row(label, text)
    Terminal(piped=WIDE).print(lines)


# --- bits ---


def _exact(model: str, options: dict[str, Any], as_json: bool) -> None:
    """Runs a prompt in every way and prints a line for each as it ends. Exits with 1 if some logits differ."""
    with starting():
        import torch

        from tiermoe import native
        from tiermoe.engine.expert_inputs import shipped_text
        from tiermoe.engine.load import start
        from tiermoe.engine.ways import Way, Ways
        from tiermoe.model.hf.blueprint import inspect_model
        from tiermoe.model.hf.hub import resolve_model
        from tiermoe.model.tokenizer import load_tokenizer
        from tiermoe.types import Use

        directory, tokens = resolve_model(model), _GIVEN + _AFTER
        asked = settings(device="cpu", batch=3, context=tokens, warm=False, **options)
        if inspect_model(directory, model, asked.store).family.encoder_decoder:
            raise ConfigError(f"--exact compares steps of a decoder, and {model} encodes its prompt; leave it out")
        ids = load_tokenizer(directory).encode(shipped_text()[: 40 * tokens])[:tokens]

    def load(cache: CacheSize | None, progress: Callable[[str, int, int], None] | None = None) -> Engine:
        blueprint = inspect_model(directory, model, asked.store)
        return start(blueprint, replace(asked, cache=cache), progress, Use(scored=2 * tokens))

    def with_fewer_experts() -> torch.Tensor:
        engine.close()  # two engines would be more than the budget
        other = load(CacheSize(nbytes=fewer * plan.slot_bytes))
        whole = Ways(other, ids, _GIVEN).whole()
        other.close()
        return whole

    with progress_bar() as progress:
        engine = load(None, progress)
    ways, plan = Ways(engine, ids, _GIVEN), engine.plan
    fewer = max(plan.slots // 4, plan.layer_slots)
    fewest = "" if fewer < plan.slots else f"{plan.slots} are in memory, the fewest that run"
    each = [*ways.all(), Way(f"with {fewer} of {plan.all_slots} experts", with_fewer_experts, left_out=fewest)]
    width = max(len(way.name) for way in each)
    if not as_json:
        kernels = f"{native.instruction_set() or 'torch'}, {torch.get_num_threads()} threads"
        print(f"{model}: {plan.precision}; {kernels}; {_GIVEN} tokens in one piece, {_AFTER} one by one, and the same")
    with spinner("in one piece"):
        whole = ways.whole()
    found: dict[str, list[int]] = {}
    for number, way in enumerate(each, 1):
        line = f"left out: {way.left_out}"
        if not way.left_out:
            with spinner(f"{way.name}: {number} of {len(each)}"):
                differ = found[way.name] = way.differing(whole)
            line = f"{len(differ)} of {tokens} tokens differ, first token {differ[0] + 1}" if differ else "equal"
        if not as_json:
            print(f"  {way.name:<{width}}  {line}", flush=True)
    engine.close()
    others = sum(map(bool, found.values()))
    if as_json:
        left_out = {way.name: way.left_out for way in each if way.left_out}
        print(json.dumps({"model": model, "tokens": tokens, "differing": found, "left_out": left_out}))
    elif others:
        print(f"{others} of {len(found)} have other bits; an issue needs these lines and those of 'tiermoe doctor'")
    else:
        checksum = xxhash.xxh3_64_hexdigest(whole.view(torch.uint8).numpy().tobytes())
        print(f"all {len(found)} have the same bits; the logits' checksum, to compare machines: {checksum}")
    if others:
        raise typer.Exit(1)


# --- facts ---


def examine() -> dict[str, Any]:
    """Facts of this machine and this installation, by name. Bytes, and bytes or float operations a second. No path but
    that of the cache folder. Imports torch."""
    import torch

    free, source = available_memory()
    found = {
        "versions": {
            "tiermoe": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": installed_version("transformers"),
        },
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "cores_allowed": processors(),
        "threads": torch.get_num_threads(),
        "kernels": _kernels(),
        "memory": {"total": total_memory(), "most": most_memory(), "free": free, "free_source": source},
        **_drive(),
        "gpu": _gpu(),
        "missing_extras": _missing_extras(),
    }
    return found | {"advice": list(_advice(found))}


def _kernels() -> dict[str, Any]:
    """used: instruction set of the kernels that compute; None if there are none, and `problem` says why. `problem`
    also says why they are not faster ones."""
    import torch

    from tiermoe import native
    from tiermoe.cli.describe import missing_kernels, why_not_faster

    has = native.instruction_sets()
    try:
        used, problem = native.instruction_set(), missing_kernels(torch.bfloat16)
    except ConfigError as error:  # of TIERMOE_ISA: no model loads
        return {"used": None, "compiled": has, "problem": str(error)}
    return {"used": used, "compiled": has, "problem": why_not_faster(used) if used else problem}


def _drive() -> dict[str, Any]:
    """The cache folder, and what was measured with its drive: None if it could not be, and `problem` says why."""
    from tiermoe.engine.machine_rates import machine_rates
    from tiermoe.formats.store_files import cache_folder

    try:
        folder = cache_folder()
    except ConfigError as error:
        return {"cache_folder": {"path": None, "free": None, "problem": str(error)}, "rates": None}
    rates, problem = None, ""
    try:
        rates = machine_rates(folder)
    except OSError as error:
        problem = f"its drive cannot be measured ({error.strerror}); make room, or set TIERMOE_CACHE to another folder"
    there = next((each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir()), Path.cwd())
    if there != folder.absolute() or not os.access(there, os.W_OK):
        problem = "it cannot be written, so no model can be packed; set TIERMOE_CACHE to a folder that can be written"
    elif rates is not None and not rates.drive:
        rates, problem = None, "nothing can be read from its drive; check the drive"
    return {
        "cache_folder": {"path": str(folder), "free": shutil.disk_usage(there).free, "problem": problem},
        "rates": rates and {name: getattr(rates, name) for name in ("drive", "memory", "arithmetic", "source")},
    }


def _gpu() -> dict[str, Any]:
    """name None: no GPU, and `problem` says why."""
    import torch

    from tiermoe.offload.cuda import free_memory, why_no_gpu

    if not torch.cuda.is_available():
        return {"name": None, "problem": why_no_gpu()}
    about = torch.cuda.get_device_properties(0)
    lacking = "" if installed_version("triton") else "its kernels need triton: pip install 'tiermoe[cuda]'"
    return {"name": about.name, "memory": about.total_memory, "free": free_memory("cuda:0"), "problem": lacking}


def _missing_extras() -> dict[str, list[str]]:
    """Optional extra → its packages that are not installed, by the metadata of the installation."""
    from importlib.metadata import PackageNotFoundError, metadata

    from packaging.requirements import Requirement

    try:
        about = metadata("tiermoe")
    except PackageNotFoundError:
        return {}
    needs = [Requirement(text) for text in about.get_all("Requires-Dist") or []]
    missing: dict[str, list[str]] = {}
    for extra in about.get_all("Provides-Extra") or []:
        for need in needs:
            wanted = need.marker is not None and need.marker.evaluate({"extra": extra})
            wanted = wanted and not need.marker.evaluate({"extra": ""})  # type: ignore[union-attr]
            if extra not in ("arm", "dev", "docs") and wanted and installed_version(need.name) is None:
                missing.setdefault(extra, []).append(need.name)
    return missing


def _advice(found: dict[str, Any]) -> Iterator[str]:
    """What would make tiermoe faster on this machine."""
    kernels, memory, rates = found["kernels"], found["memory"], found["rates"]
    if kernels["used"] and kernels["used"] != kernels["compiled"][0]:
        yield f"{kernels['used']} kernels are asked for, {kernels['compiled'][0]} are faster; unset TIERMOE_ISA"
    if found["threads"] < found["cores_allowed"]:
        yield (
            f"{found['threads']} of {found['cores_allowed']} cores compute; unset OMP_NUM_THREADS, or give --threads"
        )
    if found["cores_allowed"] < found["cores"]:
        yield f"this process may run on {found['cores_allowed']} of {found['cores']} cores; let it run on more"
    if memory["most"] < memory["total"]:
        yield (
            f"a control group allows {format_size(memory['most'])} of the machine's {format_size(memory['total'])}; "
            f"with a higher limit more experts stay in memory"
        )
    if rates and rates["drive"] < _SLOW_DRIVE:
        yield (
            f"the cache folder's drive reads {_gigabytes(rates['drive'])}, an NVMe drive about "
            f"{_gigabytes(LINKS['nvme'].bandwidth)}; TIERMOE_CACHE names a folder on another drive, --also one with a "
            f"copy"
        )


# --- lines ---


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    versions, kernels, memory, rates = (found[name] for name in ("versions", "kernels", "memory", "rates"))
    folder, gpu = found["cache_folder"], found["gpu"]
    yield "versions:", ", ".join(f"{name} {version or 'is missing'}" for name, version in versions.items())
    yield "system:", found["system"]
    yield (
        "processor:",
        _joined(
            found["processor"],
            f"{found['cores']} cores",
            found["cores_allowed"] < found["cores"] and f"{found['cores_allowed']} of them for this process",
            rates and f"products {rates['arithmetic'] / 1e9:.3g} GFLOP/s",
        ),
    )
    others = [name for name in kernels["compiled"] if name != kernels["used"]]
    yield "CPU kernels:", _joined(kernels["used"], kernels["problem"], others and f"compiled too: {', '.join(others)}")
    yield (
        "memory:",
        _joined(
            format_size(memory["total"]),
            memory["most"] < memory["total"] and f"a limit of {format_size(memory['most'])}",
            f"{format_size(memory['free'])} {memory['free_source']}",
            rates and _gigabytes(rates["memory"]),
        ),
    )
    yield (
        "cache folder:",
        _joined(
            folder["path"],
            folder["free"] is not None and f"{format_size(folder['free'])} free",
            rates and f"its drive reads {_gigabytes(rates['drive'])}",
            folder["problem"],
        ),
    )
    if rates:
        yield "rates:", rates["source"]
    sizes = gpu["name"] and f"{format_size(gpu['memory'])}, {format_size(gpu['free'])} free"
    yield "GPU:", _joined(gpu["name"] or "none", sizes, gpu["problem"])
    extras = found["missing_extras"]
    missing = "; ".join(f"{extra} ({', '.join(names)})" for extra, names in extras.items())
    yield "extras:", f"{missing} missing: pip install 'tiermoe[{','.join(extras)}]'" if extras else "none missing"
    for index, text in enumerate(found["advice"]):
        yield ("" if index else "would be faster:"), text


def _joined(*parts: Any) -> str:
    """The parts that are there."""
    return "; ".join(filter(None, parts))


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2g} GB/s"
