"""Trace files: gzip'd JSON lines, a header, one line per pass, a footer. docs/trace-format.md is their description."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tiermoe.config import MIB, format_size
from tiermoe.errors import TraceError
from tiermoe.process.json_files import parse_json
from tiermoe.trace import csv
from tiermoe.trace.schema import HOLDS, VERSION, Header, LayerTrace, Little, Pass, Times, Trace

FORMAT = "tiermoe-trace"
_COMMAND = "tiermoe trace MODEL --text FILE --out TRACE"
_AGAIN = f"make it again with {_COMMAND}"
_GZIP = b"\x1f\x8b"
_RATIO, _PLAIN = 32, 16 * MIB
"""Times its packed size and bytes beside that a trace may unpack to: recorded ones have four times."""
_NEURONS = ("neurons", "named")  # fields of a layer
_RANKED = ("forecasts", "counts")  # likewise

_LATER = ("slot_bytes", "copied_bytes", "neuron_slot_bytes")  # files of earlier versions of tiermoe lack them


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
    """The trace at `path`: one of ours, or a `route_trace` CSV (told by content). TraceError where it is missing, no
    trace, of another version, or cut short."""
    try:
        with open(path, "rb") as file:
            start = file.read(64)
        if start.startswith(csv.SIGNATURE.encode()):
            return csv.parse(path.read_text(encoding="utf-8"), str(path))
        if not start.startswith(_GZIP):
            raise TraceError(f"{path} is not a trace: neither gzip nor a CSV that begins with {csv.SIGNATURE!r}")
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
    times = header.times
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": header.model,
        "fingerprint": header.fingerprint,
        "experts": list(header.experts),
        "top_k": list(header.top_k),
        "expert_bytes": header.expert_bytes,
        "times": times and {name: getattr(times, name) for name in Times.__slots__},
        "holds": sorted(header.holds),
        "forecast_distances": list(header.forecast_distances),
        "head_bytes": header.head_bytes,
        "neuron_bytes": header.neuron_bytes,
        "neurons": header.neurons,
        "dense_bytes": header.dense_bytes,
        "encoder_layers": header.encoder_layers,
        "made_from": header.made_from,
        **{name: getattr(header, name) for name in _LATER},
    }


def _header_from_json(document: dict[str, Any]) -> Header:
    values = {name: document[name] for name in Header.__slots__ if name not in _LATER}
    values |= {name: _by_number(document.get(name, {})) for name in _LATER}
    if len(values["experts"]) != len(values["top_k"]):
        raise ValueError(f"{len(values['experts'])} layers of experts and {len(values['top_k'])} of top_k")
    unknown = set(values["holds"]) - set(HOLDS)
    if unknown:
        raise ValueError(f"holds {', '.join(sorted(unknown))}, which this version does not know")
    times = values["times"]
    if times is not None:
        times = Times(
            times["dense"], _by_number(times["expert"]), times["prefill_token"], _by_number(times["prefill_expert"])
        )
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
