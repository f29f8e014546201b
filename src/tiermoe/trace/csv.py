"""The `route_trace v1` CSV of BigMoeOnEdge, read as a trace of ours.

Its prompt has one row per token, layer and rank; the last layer runs for the prompt's last token alone.
"""

from __future__ import annotations

import csv
import re

from tiermoe.errors import TraceError
from tiermoe.trace.schema import Header, LayerTrace, Pass, Trace

SIGNATURE = "# route_trace"
_VERSION = "v1"
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight")
_BITS = 4  # of files of about 4 bits a weight ("Q4_K_M"), where the name says nothing

_Rows = dict[tuple[int, int], dict[int, list[tuple[int, float]]]]
"""(turn, step of a decode pass or -1) → layer → (expert, weight) in the file's order, K per token."""


def parse(text: str, name: str) -> Trace:
    """The whole CSV; `name` is used in messages. Weights are held, times are not; each turn is a sequence. TraceError
    where it is of another version, damaged or cut short."""
    lines = text.splitlines()
    remarks = [line for line in lines if line.startswith("#")]
    if remarks[0].split()[2:] != [_VERSION]:
        raise TraceError(f"{name} is {remarks[0].lstrip('# ')!r}; this tiermoe reads route_trace {_VERSION}")
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
            expert_bytes={_bits(fields["model"]): [int(size["expert_bytes"]) for size in sizes]},
            times=None,
            holds=frozenset({"weights"}),
            dense_bytes=sum(int(size["dense_bytes"]) for size in sizes),
            made_from={"source": "route_trace v1"},
        )
        rows = _rows([line for line in lines if not line.startswith("#")], header)
    except (KeyError, ValueError, IndexError) as error:
        raise TraceError(f"{name} is damaged or cut short ({error!r}); fetch it again") from error
    return Trace(header, [_pass(key, by_layer, header, name) for key, by_layer in sorted(rows.items())])


def _rows(lines: list[str], header: Header) -> _Rows:
    reader = csv.reader(lines)
    titles = next(reader, [])
    turn, phase, step, layer, slot, expert, weight = (titles.index(column) for column in _COLUMNS)
    rows: _Rows = {}
    for row in reader:
        if int(row[expert]) >= header.experts[int(row[layer])]:
            raise ValueError(f"expert {row[expert]} of layer {row[layer]}")
        key = (int(row[turn]), int(row[step]) if int(row[phase]) else -1)
        chosen = rows.setdefault(key, {}).setdefault(int(row[layer]), [])
        if int(row[slot]) != len(chosen) % header.top_k[0]:
            raise ValueError(f"rank {row[slot]} of layer {row[layer]}, step {row[step]} stands out of order")
        chosen.append((int(row[expert]), float(row[weight])))
    return rows


def _pass(
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


def _bits(model: str) -> int:
    match = re.search(r"(?:^|[^A-Za-z])I?Q(\d)", model)
    return {2: 2, 8: 8}.get(int(match[1]), _BITS) if match else _BITS
