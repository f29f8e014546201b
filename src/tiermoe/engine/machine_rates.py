"""Rates of this machine, measured in a few seconds and kept beside the stores: of the drive, memory and arithmetic."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from tiermoe.config import MIB
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.plain import Plain
from tiermoe.kernels.linear import linear_for, multiplies_bfloat16
from tiermoe.offload.computers import Rates
from tiermoe.offload.probe import drive_rate
from tiermoe.platform import bandwidth
from tiermoe.platform.json_files import read_json, replace_unlocked
from tiermoe.platform.threads import torch_threads
from tiermoe.types import Extent, Segment

NAME = "machine.json"
_READ = 4 * MIB  # about an expert
_LEAST_FILE, _SCRATCH = 64 * MIB, 128 * MIB
_DAYS = 30
_PRODUCT = (512, 2048)  # tokens, columns of a square weight
_SECONDS = 0.2  # of products, of either kind
ALONE_SHARE = 0.9  # share of the threads' time that a product has where no other program computes; at .8 a sixth slower


def machine_rates(folder: Path, threads: int | None = None) -> Rates:
    """Rates of this machine with the drive of `folder`: measured in the last 30 days by as many threads, or now, which
    takes a few seconds. Rates measured while other programs compute are too low: they are not kept, and their source
    says so. threads: that compute; None: torch's number."""
    threads = threads or torch.get_num_threads()
    folder.mkdir(parents=True, exist_ok=True)
    case = f"{os.stat(folder).st_dev}:{threads}"
    kept = _read(folder / NAME)
    if case not in kept or (date.today() - kept[case][1]).days > _DAYS:
        rates, share = _measure(folder, threads)
        kept[case] = rates, date.today()
        if share < ALONE_SHARE:
            busy = f"while other programs took {1 - share:.0%} of their time"
            source = f"measured on {date.today()} with {threads} threads, {busy}: the figures are too low, and not kept"
            return replace(rates, source=source)
        document = {
            name: {"memory": each.memory, "drive": each.drive, "arithmetic": each.arithmetic, "day": day.isoformat()}
            for name, (each, day) in kept.items()
        }
        replace_unlocked(folder / NAME, json.dumps(document).encode())
    rates, day = kept[case]
    return replace(rates, source=f"measured on {day} with {threads} threads, kept in {folder / NAME}")


def with_second_drive(rates: Rates, folder: Path) -> Rates:
    """The same machine where `folder` has a copy of all experts: its drive, which is measured now, shares the reads."""
    drive = _drive_rate(folder, "*")
    source = f"{rates.source}; {drive / 1e9:.2g} GB/s of the drive's are those of {folder}"
    return replace(rates, drive=rates.drive + drive, source=source)


def torch_seconds(form: ExpertFormat) -> tuple[float, float]:
    """Seconds that torch's products of one token with an expert take, a byte of the slot, at best and on average, for
    torch's number of threads. Of small matrices they are the seconds of a call, which waits for every thread."""
    products = []
    for part in form.layer.parts:
        if part.is_matrix:
            out, in_ = part.out_in
            encoding = form.encodings.get(part.name) or Plain()
            fields = {
                each.name: torch.zeros(each.shape, dtype=each.dtype)
                for each in encoding.slot_fields(out, in_, form.dtype)
            }
            kernel = linear_for(encoding.name, "cpu", form.dtype)
            products.append(partial(kernel, torch.ones(1, in_, dtype=form.dtype), fields, out, in_))

    def token() -> float:
        began = time.perf_counter()
        for _ in range(form.layer.top_k):
            for product in products:
                product()
        return (time.perf_counter() - began) / (form.layer.top_k * form.slot.nbytes)

    token()  # threads are made, pages are touched
    seconds, started = [token()], time.perf_counter()
    while time.perf_counter() < started + _SECONDS:
        seconds.append(token())
    return min(seconds), fmean(seconds)


def _read(path: Path) -> dict[str, tuple[Rates, date]]:
    """The rates that are kept, and when they were measured; none if the file is missing or torn."""
    try:
        return {case: _checked(entry) for case, entry in read_json(path).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _checked(entry: dict[str, str | float]) -> tuple[Rates, date]:
    memory, drive, arithmetic = (float(entry[name]) for name in ("memory", "drive", "arithmetic"))
    if not min(memory, drive, arithmetic) > 0:
        raise ValueError("not a machine's rates")
    return Rates(memory, drive, arithmetic, ""), date.fromisoformat(str(entry["day"]))


def _measure(folder: Path, threads: int) -> tuple[Rates, float]:
    """Measured rates, and the share of the threads' time in which they had a processor."""
    drive = _drive_rate(folder, "*/*")
    with torch_threads(threads):
        memory = float(bandwidth.measure(threads)["bandwidth"])
        arithmetic, share = product_rate()
    return Rates(memory, drive, arithmetic, ""), share


def _drive_rate(folder: Path, pattern: str) -> float:
    """Bytes a second of the drive of `folder`, read from one of the files of `pattern` there."""
    with _sample(folder, pattern) as file:
        size = file.stat().st_size // _READ
        extents = [Extent((Segment(str(file), index * _READ, _READ, 0),), "") for index in range(size)]
        return drive_rate(extents)


@contextlib.contextmanager
def _sample(folder: Path, pattern: str) -> Iterator[Path]:
    """A large file on the drive of `folder`: the largest of a pattern, or one that is written for the purpose."""
    files = [file for file in folder.glob(pattern) if file.is_file() and file.stat().st_dev == folder.stat().st_dev]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    if largest is not None and largest.stat().st_size >= _LEAST_FILE:
        yield largest
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as scratch:
        block = os.urandom(_READ)
        for _ in range(_SCRATCH // _READ):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        yield Path(scratch.name)


def product_rate() -> tuple[float, float]:
    """Float operations a second of the fastest matrix product in the processor's dtype, and the share of the threads'
    time in which they computed: less where other programs do."""
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    tokens, columns = _PRODUCT
    x, weight = torch.ones(tokens, columns, dtype=dtype), torch.ones(columns, columns, dtype=dtype)
    torch.nn.functional.linear(x, weight)  # threads are made, pages are touched
    fastest, started, used = float("inf"), time.perf_counter(), time.process_time()
    while (began := time.perf_counter()) < started + _SECONDS or fastest == float("inf"):
        torch.nn.functional.linear(x, weight)
        fastest = min(fastest, time.perf_counter() - began)
    share = (time.process_time() - used) / (time.perf_counter() - started) / torch.get_num_threads()
    return 2 * tokens * columns * columns / fastest, min(share, 1.0)
