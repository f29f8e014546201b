"""Routing traces: what each router chose, pass by pass, with what predictors said of it; and their files: gzip'd JSON
lines (a header, one line per pass, a footer), or a `route_trace` CSV of BigMoeOnEdge. docs/formats.md describes
them."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tiermoe.config import MIB, format_size
from tiermoe.errors import TraceError
from tiermoe.platform.json_files import parse_json

VERSION = 1
HOLDS = ("weights", "forecasts", "counts", "little", "neurons", "tokens")
"""What a trace can hold beside the experts that were chosen."""

FORMAT = "tiermoe-trace"
_COMMAND = "tiermoe trace MODEL --text FILE --out TRACE"
_AGAIN = f"make it again with {_COMMAND}"
_GZIP = b"\x1f\x8b"
_RATIO, _PLAIN = 32, 16 * MIB
"""A trace may unpack to so many times its packed size, and so many bytes more: recorded ones have four times."""

_NEURONS = ("neurons", "named")  # fields of a layer
_RANKED = ("forecasts", "counts")  # likewise
_LATER = ("slot_bytes", "copied_bytes", "neuron_slot_bytes")  # files of earlier versions of tiermoe lack them
_NOT_PLAIN = (*_LATER, "quantized_bytes", "hash_layers", "costs")  # older files lack these too
_LATER_TIMES = ("layers", "prefill_layers", "prefill_pass")

_CSV = "# route_trace"  # a CSV's first characters
_CSV_VERSION = "v1"
_CSV_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
_CSV_BITS = 4  # of files of about 4 bits a weight ("Q4_K_M"), where the name says nothing


@dataclass(slots=True)
class LayerTrace:
    """One MoE layer in one pass."""

    experts: list[list[int]]  # [t]: the K experts of token t, in the router's order; none where the layer did not run
    weights: list[list[float]]  # [t]: their gate weights
    forecasts: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Distance d → (expert, softmax weight) of the router of layer l + d on this layer's input, likeliest first, summed
    over the pass's tokens."""
    neurons: dict[int, int] = field(default_factory=dict)  # expert → active neurons, a bit set: neuron j is bit j
    named: dict[int, int] = field(default_factory=dict)  # expert → neurons active on the input of the layer before
    counts: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Of a prompt's pass: distance d → (expert, number of tokens for which that router chooses it), most first."""


@dataclass(slots=True)
class Little:
    """The little pass at the same position (MoBiLE)."""

    confidence: float  # probability of its likeliest next token
    layers: list[LayerTrace]  # all K that the router named, by falling weight


@dataclass(slots=True)
class Pass:
    """One forward pass."""

    phase: str  # 'prefill' or 'decode'
    sequence: int  # counted from 0
    tokens: list[int]  # their ids; empty where unknown
    layers: list[LayerTrace]  # one per MoE layer of the model
    little: Little | None = None

    @property
    def size(self) -> int:
        """How many tokens ran."""
        return max([len(self.tokens), *(len(layer.experts) for layer in self.layers)])


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of computing, measured where the trace was made."""

    dense: float  # everything but experts, in one decode pass
    expert: dict[int, float]  # bits → one expert on one token
    prefill_token: float  # everything but experts, per prompt token
    prefill_expert: dict[int, float]  # bits → one expert per prompt token beyond its first
    layers: float = 0.0  # of `dense`, what layers take from the router's choice to their first expert
    prefill_layers: float = 0.0  # likewise of `prefill_token`
    prefill_pass: float = 0.0  # of a prompt's pass, however many tokens; 0 where `prefill_token` has it


DECIDING = ("unit", "precision", "prefetch", "routing", "cache")
"""Parts of a composition that what a layer's decisions take follows from, the dearest first."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """What the engine spent on deciding under one composition, beside kernels, loads and waiting."""

    parts: dict[str, str]  # `DECIDING` → value
    decode: float  # seconds of a layer of a decoded token's pass
    prefill: float  # seconds of a layer of a prompt's pass


@dataclass(frozen=True, slots=True)
class Costs:
    """What the engine spends that is no computing, measured where the trace was made."""

    bandwidth: float  # of the link, bytes per second
    latency: float  # seconds before a transfer's first byte
    lanes: int  # reads at once
    load: float  # seconds of asking for an expert and of placing it, beside its transfer
    presets: dict[str, Deciding]
    memory: float = 0.0  # bytes per second of a copy within main memory, for `store=memory`; 0 if unknown


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace was made from and holds."""

    model: str
    fingerprint: str  # of the checkpoint
    experts: Sequence[int]  # per MoE layer
    top_k: Sequence[int]  # per MoE layer
    expert_bytes: dict[int, list[int]]  # bits → bytes of one expert per layer as stored, and read from a drive
    times: Times | None  # None where none were measured
    holds: frozenset[str]  # of `HOLDS`
    forecast_distances: Sequence[int] = ()  # layers ahead
    head_bytes: int = 0  # of W1; 0 where unknown, likewise below
    neuron_bytes: int = 0  # of one neuron's rows
    neurons: int = 0  # of an expert
    dense_bytes: int = 0  # of all that is no expert
    encoder_layers: int = 0  # how many of the MoE layers are an encoder's, the first ones
    made_from: dict[str, str | int | float] = field(default_factory=dict)  # for people
    slot_bytes: dict[int, list[int]] = field(default_factory=dict)  # bits → bytes in memory; none: as stored
    copied_bytes: dict[int, list[int]] = field(default_factory=dict)  # bits → bytes of a copy to a GPU; none: as stored
    neuron_slot_bytes: dict[int, int] = field(default_factory=dict)
    """Bits → bytes of a slot of the neuron unit; none: as of whole experts."""
    quantized_bytes: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """Quantiser that a preset names → `expert_bytes` under it, and as many in a slot; of others they are as above."""
    hash_layers: Sequence[int] = ()  # MoE layers whose experts follow from the token alone
    costs: Costs | None = None  # None where none were measured


@dataclass(slots=True)
class Trace:
    """A whole trace in memory."""

    header: Header
    passes: list[Pass]


def frequencies(trace: Trace) -> list[list[int]]:
    """Number of tokens that each expert served, a row per MoE layer."""
    counts = [[0] * experts for experts in trace.header.experts]
    for passed in trace.passes:
        for row, layer in zip(counts, passed.layers, strict=True):
            for chosen in layer.experts:
                for expert in chosen:
                    row[expert] += 1
    return counts


class TraceWriter:
    """Writes a trace pass by pass; `path` appears whole when the context ends well, and not at all otherwise."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._header = header
        self._passes = 0

    def __enter__(self) -> TraceWriter:
        try:
            self._file = gzip.open(self._partial, "wt", encoding="utf-8", compresslevel=6)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be written ({error}); choose another --out") from error
        self._write(_header_to_json(self._header))
        return self

    def add(self, passed: Pass) -> None:
        """Appends a pass. ValueError where it has not one entry per MoE layer."""
        if len(passed.layers) != len(self._header.experts):
            raise ValueError(f"a pass of {len(passed.layers)} layers in a trace of {len(self._header.experts)}")
        self._write(_pass_to_json(passed))
        self._passes += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write({"passes": self._passes})
            self._file.close()
            if kind is None:
                os.replace(self._partial, self._path)
        finally:
            self._partial.unlink(missing_ok=True)

    def _write(self, document: dict[str, Any]) -> None:
        self._file.write(json.dumps(document, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> Trace:
    """The trace at `path`, in our format or as a `route_trace` CSV; the content says which. TraceError where the file
    is missing, no trace, of another version, or cut short."""
    try:
        with open(path, "rb") as file:
            start = file.read(64)
        if start.startswith(_CSV.encode()):
            return _read_csv(path.read_text(encoding="utf-8"), str(path))
        if not start.startswith(_GZIP):
            raise TraceError(f"{path} is not a trace: neither gzip nor a CSV that begins with {_CSV!r}")
        with gzip.open(path) as file:
            return _parse(_lines(file, _PLAIN + _RATIO * os.path.getsize(path), path), path)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path} is cut short or damaged ({error}); {_AGAIN}") from error
    except FileNotFoundError:
        raise TraceError(f"there is no trace at {path}; make it with {_COMMAND}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read ({error}); {_AGAIN}") from error


def _lines(file: gzip.GzipFile, most: int, path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked one by one. TraceError where there are more than `most` bytes of them."""
    left = most
    while line := file.readline(left + 1):
        left -= len(line)
        if left < 0:
            raise TraceError(
                f"{path} unpacks to more than {format_size(most)}, {_RATIO} times its size: no trace does; {_AGAIN}"
            )
        yield line


def _parse(lines: Iterator[bytes], path: Path) -> Trace:
    header = _document(next(lines, b""), 1, path)
    if header.get("format") != FORMAT:
        raise TraceError(f"{path} is not a trace: its first line does not say {FORMAT!r}")
    if header.get("version") != VERSION:
        raise TraceError(
            f"{path} has version {header.get('version')} of the trace format, this tiermoe reads {VERSION}; {_AGAIN}"
        )
    number, passes = 1, list[Pass]()
    last: dict[str, Any] | None = None
    try:
        parsed = _header_from_json(header)
        for number, line in enumerate(lines, 2):
            if last is not None:
                passes.append(_pass_from_json(last, parsed))
            last = _document(line, number, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}, line {number - (last is not None)} is damaged ({error!r}); {_AGAIN}") from error
    if last is None or last.get("passes") != len(passes):
        raise TraceError(f"{path} is cut short: {number - 1} passes and no footer that counts them; {_AGAIN}")
    return Trace(parsed, passes)


def _document(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        document = parse_json(line)
    except ValueError as error:
        raise TraceError(f"{path}, line {number} is no JSON: cut short or damaged; {_AGAIN}") from error
    if not isinstance(document, dict):
        raise TraceError(f"{path}, line {number} is no JSON object: cut short or damaged; {_AGAIN}")
    return document


def _header_to_json(header: Header) -> dict[str, Any]:
    fields = {name: getattr(header, name) for name in Header.__slots__}
    times = header.times and {name: getattr(header.times, name) for name in Times.__slots__}
    costs = header.costs and asdict(header.costs)
    more = {"times": times, "costs": costs, "holds": sorted(header.holds)}
    return {"format": FORMAT, "version": VERSION, **fields, **more}


def _header_from_json(document: dict[str, Any]) -> Header:
    values = {name: document[name] for name in Header.__slots__ if name not in _NOT_PLAIN}
    values |= {name: _by_number(document.get(name, {})) for name in _LATER}
    quantized = document.get("quantized_bytes", {}).items()
    values["quantized_bytes"] = {quantizer: _by_number(sizes) for quantizer, sizes in quantized}
    values["hash_layers"] = tuple(map(int, document.get("hash_layers", [])))
    if len(values["experts"]) != len(values["top_k"]):
        raise ValueError(f"{len(values['experts'])} layers of experts and {len(values['top_k'])} of top_k")
    if set(values["hash_layers"]) - set(range(len(values["experts"]))):
        raise ValueError(f"hash-routed layers {values['hash_layers']} of {len(values['experts'])}")
    unknown = set(values["holds"]) - set(HOLDS)
    if unknown:
        raise ValueError(f"holds {', '.join(sorted(unknown))}, which this version does not know")
    times = values["times"]
    if times is not None:
        times = Times(
            times["dense"], _by_number(times["expert"]), times["prefill_token"], _by_number(times["prefill_expert"]),
            **{name: times.get(name, 0.0) for name in _LATER_TIMES},
        )  # fmt: skip
    if (costs := document.get("costs")) is not None:
        presets = {name: Deciding(**deciding) for name, deciding in costs["presets"].items()}
        values["costs"] = Costs(**costs | {"presets": presets})
    return Header(
        **values | {"expert_bytes": _by_number(values["expert_bytes"]), "holds": frozenset(values["holds"])}
        | {"times": times}
    )  # fmt: skip


def _pass_to_json(passed: Pass) -> dict[str, Any]:
    document: dict[str, Any] = {
        "phase": passed.phase,
        "sequence": passed.sequence,
        "tokens": passed.tokens,
        "layers": [_layer_to_json(layer) for layer in passed.layers],
    }
    if passed.little is not None:
        layers = [_layer_to_json(layer) for layer in passed.little.layers]
        document["little"] = {"confidence": passed.little.confidence, "layers": layers}
    return document


def _pass_from_json(document: dict[str, Any], header: Header) -> Pass:
    if document["phase"] not in ("prefill", "decode"):
        raise ValueError(f"phase {document['phase']!r}")
    little = document.get("little")
    return Pass(
        document["phase"],
        document["sequence"],
        document["tokens"],
        _layers_from_json(document["layers"], header),
        little and Little(little["confidence"], _layers_from_json(little["layers"], header)),
    )


def _layer_to_json(layer: LayerTrace) -> dict[str, Any]:
    document: dict[str, Any] = {"experts": layer.experts, "weights": layer.weights}
    for name in _RANKED:
        if found := getattr(layer, name):
            document[name] = found
    for name in _NEURONS:
        if found := getattr(layer, name):
            document[name] = {expert: f"{neurons:x}" for expert, neurons in found.items()}
    return document


def _layers_from_json(documents: list[dict[str, Any]], header: Header) -> list[LayerTrace]:
    if len(documents) != len(header.experts):
        raise ValueError(f"{len(documents)} layers where the model has {len(header.experts)}")
    return [_layer_from_json(document, count) for document, count in zip(documents, header.experts, strict=True)]


def _layer_from_json(document: dict[str, Any], count: int) -> LayerTrace:
    experts, weights = document["experts"], document["weights"]
    if [len(row) for row in experts] != [len(row) for row in weights]:
        raise ValueError("as many weights as experts belong to each token")
    if any(not 0 <= expert < count for row in experts for expert in row):
        raise ValueError(f"an expert that is none of the layer's {count}")
    ranked = {
        name: {
            int(distance): [(int(expert), float(value)) for expert, value in pairs]
            for distance, pairs in document.get(name, {}).items()
        }
        for name in _RANKED
    }
    neurons, named = (
        {int(expert): int(neurons, 16) for expert, neurons in document.get(name, {}).items()} for name in _NEURONS
    )
    return LayerTrace(experts, weights, ranked["forecasts"], neurons, named, ranked["counts"])


def _by_number(document: dict[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in document.items()}


_CsvRows = dict[tuple[int, int], dict[int, list[tuple[int, float]]]]
"""(turn, step of a decode pass or -1) → layer → (expert, weight) in the file's order, K per token."""


def _read_csv(text: str, name: str) -> Trace:
    """A trace of a `route_trace v1` CSV; `name` is used in messages. It holds weights and no times; each turn is a
    sequence. The prompt has one row per token, layer and rank; the last layer runs for its last token alone. TraceError
    where the file is of another version, damaged or cut short."""
    lines = text.splitlines()
    remarks = [line for line in lines if line.startswith("#")]
    if remarks[0].split()[2:] != [_CSV_VERSION]:
        raise TraceError(f"{name} is {remarks[0].lstrip('# ')!r}; this tiermoe reads route_trace {_CSV_VERSION}")
    fields = dict(re.findall(r"(\w+)=(\S+)", remarks[1] if len(remarks) > 1 else ""))
    sizes = [dict(re.findall(r"(\w+)=(\d+)", line)) for line in remarks[2:]]
    try:
        layers, experts, top_k = (int(fields[key]) for key in ("n_layer", "n_expert", "n_expert_used"))
        if len(sizes) != layers:
            raise TraceError(f"{name} is cut short: sizes of {len(sizes)} layers of {layers}")
        header = Header(
            model=fields["model"],
            fingerprint="",
            experts=[experts] * layers,
            top_k=[top_k] * layers,
            expert_bytes={_csv_bits(fields["model"]): [int(size["expert_bytes"]) for size in sizes]},
            times=None,
            holds=frozenset({"weights"}),
            dense_bytes=sum(int(size["dense_bytes"]) for size in sizes),
            made_from={"source": "route_trace v1"},
        )
        rows = _csv_rows([line for line in lines if not line.startswith("#")], header)
    except (KeyError, ValueError, IndexError) as error:
        raise TraceError(f"{name} is damaged or cut short ({error!r}); fetch it again") from error
    return Trace(header, [_csv_pass(key, by_layer, header, name) for key, by_layer in sorted(rows.items())])


def _csv_rows(lines: list[str], header: Header) -> _CsvRows:
    reader = csv.reader(lines)
    titles = next(reader, [])
    turn, phase, step, layer, slot, expert, weight = (titles.index(column) for column in _CSV_COLUMNS)
    rows: _CsvRows = {}
    for row in reader:
        if int(row[expert]) >= header.experts[int(row[layer])]:
            raise ValueError(f"expert {row[expert]} of layer {row[layer]}")
        key = (int(row[turn]), int(row[step]) if int(row[phase]) else -1)
        chosen = rows.setdefault(key, {}).setdefault(int(row[layer]), [])
        if int(row[slot]) != len(chosen) % header.top_k[0]:
            raise ValueError(f"rank {row[slot]} of layer {row[layer]}, step {row[step]} stands out of order")
        chosen.append((int(row[expert]), float(row[weight])))
    return rows


def _csv_pass(
    key: tuple[int, int], by_layer: dict[int, list[tuple[int, float]]], header: Header, name: str
) -> Pass:  # fmt: skip
    turn, step = key
    top_k = header.top_k[0]
    layers = []
    for layer in range(len(header.experts)):
        chosen = by_layer.get(layer, [])
        if not chosen or len(chosen) % top_k:
            where = "the prompt" if step < 0 else f"step {step}"
            raise TraceError(
                f"{name} is cut short: turn {turn}, {where}, layer {layer} has {len(chosen)} rows, {top_k} a token"
            )
        tokens = [chosen[start : start + top_k] for start in range(0, len(chosen), top_k)]
        experts = [[expert for expert, _ in token] for token in tokens]
        layers.append(LayerTrace(experts, [[weight for _, weight in token] for token in tokens]))
    return Pass("prefill" if step < 0 else "decode", turn, [], layers)


def _csv_bits(model: str) -> int:
    match = re.search(r"(?:^|[^A-Za-z])I?Q(\d)", model)
    return {2: 2, 8: 8}.get(int(match[1]), _CSV_BITS) if match else _CSV_BITS
