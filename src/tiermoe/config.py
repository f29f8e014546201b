"""Settings of an engine, and sizes as people write them. Unknown names and malformed values are refused."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from tiermoe.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*")

NATIVE_SWITCH = "TIERMOE_NATIVE"
"""Environment variable: 0 keeps the native kernels out, so that they can be compared with torch's."""

BY_SHAPE = "by shape"
BITS: dict[int, str] = {
    16: "tiermoe.formats.plain:Plain", 8: "tiermoe.formats.int8:Int8", 4: BY_SHAPE, 3: BY_SHAPE, 2: BY_SHAPE,
}  # fmt: skip
"""Bits of experts → the class of the encoding that matrices of every shape have; `BY_SHAPE`: `formats.registry` has the
choice. A weight format is a line here."""
DENSE_BITS = (16, 8, 4)
KV_BITS = (16, 8, 4)
DEFAULT_BITS = 4
QUANTIZERS = ("nonlinear", "hqq", "hqq-double", "linear", "gptq", "gptq-nonlinear")
DEFAULT_QUANTIZER = "hqq"
CALIBRATED = ("gptq", "gptq-nonlinear")
"""Quantizers that need to know the inputs of the matrices (`formats.gptq`), below 8 bits."""


def parse_size(text: str | int, what: str = "size") -> int:
    """Bytes of '6GiB', '700M', '1.5 GB' or a plain number of bytes (K, M, G, T are powers of 1024, KB, MB, GB, TB of
    1000). ConfigError, naming `what`, for anything else."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{what} {str(text)!r} is not a size; write it like 6GiB, 700MiB or 1.5GB")
    size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"{what} must be at least one byte, got {str(text)!r}; write it like 6GiB, 700MiB or 1.5GB")
    return size


def format_size(nbytes: float) -> str:
    """Bytes with a binary unit: '3.54 MiB', '700 MiB', '6 GiB'."""
    value = float(nbytes)
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(value) >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    text = f"{value:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + f" {unit}"


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of an expert cache; exactly one of the two is set."""

    fraction: float | None = None  # of the bytes of all experts in their slots
    nbytes: int | None = None


def parse_cache(text: str | int) -> CacheSize:
    """The cache size of '25%' of the experts' bytes in their slots, or of a size such as '3MiB'. ConfigError for
    anything else."""
    stripped = str(text).strip()
    if stripped.endswith("%"):
        try:
            percent = float(stripped[:-1])
        except ValueError:
            raise ConfigError(f"cache {str(text)!r} is not a share; write it like 25% or 3MiB") from None
        if not 0 < percent <= 100:
            raise ConfigError(f"cache {str(text)!r} must be above 0% and at most 100%")
        return CacheSize(fraction=percent / 100)
    return CacheSize(nbytes=parse_size(stripped, "cache"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an engine, with the defaults of `tiermoe.load` and of every command.

    A preset may have bits, dense_bits and a quantizer of its own; they take the place of None here."""

    memory: int | None = None
    """Bound on the whole process in bytes; None: 80% of what the machine has free."""
    bits: int | None = None
    """Precision of the experts, one of `BITS`; 16 is the checkpoint's own. None: 4, for a checkpoint that is quantised
    already its own."""
    dense_bits: int | None = None
    """Precision of the other linear layers, one of `DENSE_BITS`; some layers are kept at more (`model.packing`).
    None: that of the experts, but at least 4; layers that come quantised stay as the checkpoint has them."""
    quantizer: str | None = None
    """One of `QUANTIZERS`, for 4 and 2 bits; None: hqq. 3 bits are 'nonlinear', or 'gptq-nonlinear' where one of the
    two 'gptq' is named. Both 'gptq' need a calibration (`tiermoe pack`). 'hqq-double' is hqq but in the neuron unit."""
    cache: CacheSize | None = None
    """Size of the expert cache alone, for experiments; None: what `memory` leaves."""
    chunk: int = 512
    """Tokens of a prompt that run in one step."""
    context: int | None = None
    """Tokens (prompt and answer) to reserve KV cache for; None: the smaller of 4096 and the model's own."""
    kv_bits: int = 16
    """Precision of the KV cache: 16 is the checkpoint's own; 8 and 4 take less memory and can change tokens."""
    batch: int = 1
    """Sequences that run at once."""
    lanes: int | None = None
    """Reads of experts at once, from each drive; None: learned while they are read."""
    threads: int | None = None
    """Compute threads; None: torch's setting."""
    device: str = "auto"
    """'cpu', 'cuda', 'cuda:N' or 'auto': a GPU if there is one."""
    gpu_memory: int | None = None
    """Bound on allocations on a GPU in bytes; None: what is free, less a reserve."""
    also: Path | None = None
    """Folder on another drive with a copy of the files of experts, or of some of them, which are read from both drives;
    None: from one."""
    store: Path | None = None
    """Folder of the expert store; None: in the user's cache folder."""
    decoder: str = "auto"
    """'auto': tiermoe's own decoder if the family has one; 'generic': transformers' modelling code."""
    preset: str = "default"
    """Name of a composition of policies (`tiermoe.offload.presets`)."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Parts and settings of the preset to replace, as {'prefetch': 'none'}."""
    warm: bool = True
    """Experts are read in the background from loading on, in the order of earlier runs' uses, and this run's uses are
    recorded for later ones. False, for measurements: an empty cache, and nothing is recorded."""

    def __post_init__(self) -> None:
        for name, (kind, written) in _KINDS.items():
            value = getattr(self, name)
            optional = type(self).__dataclass_fields__[name].default is None
            # True is an int to Python, but no number to a user
            fits = isinstance(value, kind) and not isinstance(value, bool)
            _require(fits or (optional and value is None), f"{name} must be {written}, got {value!r}")
        _require(isinstance(self.warm, bool), f"warm must be True or False, got {self.warm!r}")
        _require(self.bits is None or self.bits in BITS, f"bits must be one of {tuple(BITS)}, got {self.bits}")
        _require(
            self.dense_bits is None or self.dense_bits in DENSE_BITS,
            f"dense_bits must be one of {DENSE_BITS}, got {self.dense_bits}",
        )
        _require(self.kv_bits in KV_BITS, f"kv_bits must be one of {KV_BITS}, got {self.kv_bits}")
        _require(
            self.quantizer is None or self.quantizer in QUANTIZERS,
            f"quantizer must be one of {', '.join(QUANTIZERS)}, got '{self.quantizer}'",
        )
        _require(
            self.bits != 3 or self.quantizer != "linear",
            "linear makes no codes of 3 bits; leave --quantizer out, or choose 4 or 2 bits",
        )
        _require(self.decoder in ("auto", "generic"), f"decoder must be auto or generic, got '{self.decoder}'")
        _require(self.chunk >= 1, f"chunk must be at least 1 token, got {self.chunk}")
        _require(self.batch >= 1, f"batch must be at least 1, got {self.batch}")
        _require(
            self.context is None or self.context >= 2,
            f"context must be at least 2 tokens, got {self.context}",
        )
        _require(self.lanes is None or 1 <= self.lanes <= 64, f"lanes must be 1 to 64, got {self.lanes}")
        _require(self.threads is None or 1 <= self.threads <= 1024, f"threads must be 1 to 1024, got {self.threads}")
        _require(
            self.device in ("auto", "cpu", "cuda") or self.device.startswith("cuda:"),
            f"device must be auto, cpu or cuda, got '{self.device}'",
        )

    @property
    def bits_used(self) -> int:
        """`bits`, or the default."""
        return self.bits or DEFAULT_BITS

    @property
    def dense_bits_used(self) -> int:
        """`dense_bits`, or the default: `bits_used`, but at least 4."""
        return self.dense_bits or max(self.bits_used, min(DENSE_BITS))

    @property
    def quantizer_used(self) -> str:
        """`quantizer`, or the default."""
        return self.quantizer or DEFAULT_QUANTIZER


_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("memory", "bits", "dense_bits", "kv_bits", "chunk", "context", "batch", "lanes", "threads", "gpu_memory"),
        (int, "a whole number"),
    ),
    "quantizer": (str, f"one of {', '.join(QUANTIZERS)}"),
    "device": (str, "auto, cpu or cuda"),
    "decoder": (str, "auto or generic"),
    "store": (Path, "the path of a folder"),
    "also": (Path, "the path of a folder"),
    "preset": (str, "the name of a preset"),
    "set": (Mapping, "parts and settings by name"),
    "cache": (CacheSize, "a share like 25% or a size like 3MiB"),
}
"""Setting → (type of its value, the type in words)."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def settings(**options: Any) -> Settings:
    """`Settings` from values as people write them: sizes as text, paths as text. ConfigError for an unknown name, with
    the nearest known one, and for a value out of range."""
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option '{name}'{hint}")
    for name in ("memory", "gpu_memory"):
        if options.get(name) is not None:
            options[name] = parse_size(options[name], name)
    if options.get("cache") is not None and not isinstance(options["cache"], CacheSize):
        options["cache"] = parse_cache(options["cache"])
    for name in ("store", "also"):
        if isinstance(options.get(name), str | os.PathLike):
            options[name] = Path(options[name])
    return Settings(**options)
