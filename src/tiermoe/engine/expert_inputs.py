"""Inputs of experts on a text, for quantisers that are calibrated on them (gptq): recorded once from a running engine,
kept in files, and summed up expert by expert while packing."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from tiermoe.batch import Batch, prompt
from tiermoe.config import CALIBRATED, Settings, format_size
from tiermoe.config import settings as make_settings
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import start
from tiermoe.engine.observer import Observer
from tiermoe.errors import ConfigError, PackError
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.store import Store, precision_key
from tiermoe.formats.store_files import exclusive, write_atomically
from tiermoe.kernels.experts import UnfusedExperts
from tiermoe.kernels.gates import Gate
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.moe import named_gates
from tiermoe.model.prepare_store import Progress
from tiermoe.model.tokenizer import Tokenizer, load_tokenizer
from tiermoe.platform.json_files import read_json
from tiermoe.types import MoeLayer, Routed

TEXT = "calibration.txt"
"""The text that ships with the package: passages of books in the public domain."""

TOKENS = 32_768
LEAST_TOKENS = 4096
WINDOW = 256
TOGETHER = 16
"""Windows that run at once, so that an expert is read once for all of them."""

SEEN = 256
"""Tokens of an expert at least: one that was routed fewer takes others of the layer too."""

FOLDER = "inputs"
_TABLE = "inputs.json"
_FIELDS = ("hidden", "index", "weights")
_ROWS = 4096  # tokens whose products are formed at a time: bounds the temporaries


class Text(NamedTuple):
    """A text to calibrate on."""

    name: str
    ids: torch.Tensor  # (windows, window) int64

    @property
    def made_from(self) -> str:
        """Identifies the text, whatever its file is called."""
        return f"{self.ids.numel()} tokens, {xxhash.xxh3_64_hexdigest(self.ids.numpy().tobytes())}"


def shipped_text() -> str:
    return resources.files("tiermoe.engine").joinpath(TEXT).read_text(encoding="utf-8")


def calibration_text(blueprint: Blueprint, name: str, content: str) -> Text:
    """Windows of a text, of at most `TOKENS` tokens in all, spread over it. ConfigError if the text has fewer than
    `LEAST_TOKENS`, or the model cannot be calibrated."""
    if blueprint.family.encodes:
        raise ConfigError("a model with an encoder cannot be calibrated for gptq; pack it with --quantizer hqq")
    if blueprint.outline.gate is None:
        raise ConfigError(
            f"gptq does not know what {blueprint.family.model_type}'s experts compute between their matrices; pack it "
            f"with --quantizer hqq"
        )
    tokenizer, window = load_tokenizer(blueprint.directory), min(WINDOW, blueprint.max_context() or WINDOW)
    start = beginning(tokenizer)
    ids = tokenizer.encode(content, add_special_tokens=False, verbose=False)
    have = len(ids) // (window - len(start)) * window
    if have < LEAST_TOKENS:
        raise ConfigError(
            f"{name} has {have:,} tokens in whole windows of {window:,}; calibrating takes at least {LEAST_TOKENS:,}: "
            f"give a longer --calibration-text"
        )
    return Text(name, torch.tensor(spread(start, ids, window - len(start), min(TOKENS, have) // window)))


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The beginning-of-sequence token where the tokenizer sets one before a text: some models are lost without it."""
    first = list(tokenizer.encode("")[:1])
    return first if first and first[0] == tokenizer.bos_token_id else []


def spread(start: list[int], ids: list[int], length: int, count: int) -> list[list[int]]:
    """`count` pieces of `length` tokens, evenly spread over `ids`, each after `start`."""
    begins = [index * (len(ids) - length) // max(count - 1, 1) for index in range(count)]
    return [[*start, *ids[begin : begin + length]] for begin in begins]


def recorded_inputs(blueprint: Blueprint, store: Store, text: Text, progress: Progress) -> ExpertInputs:
    """The inputs of a checkpoint's experts on a text, in the folder of the store: what is there of the same checkpoint
    and text is kept, the rest is recorded. Waits for another process that records there. PackError if the disk has
    no room or the folder cannot be written."""
    folder = store.root / FOLDER
    with exclusive(folder, progress):
        recording = _Recording(folder, blueprint, text)
        if recording.windows < len(text.ids):
            _record(recording, blueprint, store, text, progress)
            store.refresh()  # what was run with may have been packed for it
    gates = [gate.activation for gate in named_gates(blueprint.outline)]
    return ExpertInputs(folder, text.made_from, blueprint.layers, gates, blueprint.dtype)


def forget_inputs(store: Path) -> None:
    """Removes the recording from a store's folder."""
    shutil.rmtree(store / FOLDER, ignore_errors=True)


class PackInputs:
    """Experts' inputs for the precisions that `tiermoe pack` packs. asked: settings of each. keys: bits → key in the
    store. name, content: the text that the user named, None for the one that ships with the package. force: the store's
    precisions are packed anew. ConfigError for a named text that nothing is calibrated on, and where the store holds a
    precision that another text calibrated."""

    def __init__(
        self,
        blueprint: Blueprint,
        store: Store,
        asked: Sequence[Settings],
        keys: Mapping[int, str],
        name: str | None,
        content: str | None,
        force: bool = False,
    ) -> None:
        self._blueprint, self._store = blueprint, store
        self._inputs: ExpertInputs | None = None
        taking = [keys[each.bits_used] for each in asked if _takes_inputs(each)]
        if content is not None and not taking:
            raise ConfigError(
                f"--calibration-text is for --quantizer {' or '.join(CALIBRATED)} at 4, 3 or 2 bits; leave it out"
            )
        self._missing = [key for key in taking if force or key not in store.precisions]
        if not taking or (content is None and not self._missing):
            return
        self._text = calibration_text(blueprint, name or TEXT, shipped_text() if content is None else content)
        for key in taking:
            packed = store.precisions.get(key)
            if not force and packed is not None and packed.made_from != self._text.made_from:
                raise ConfigError(
                    f"the store in {store.root} holds {key} as calibrated on {packed.made_from}; --force packs it anew"
                )

    def inputs(self, settings: Settings, progress: Progress) -> ExpertInputs | None:
        """Inputs for packing with these settings, recorded once for all; None if the quantiser takes none."""
        if not _takes_inputs(settings) or not self._missing:
            return None
        if self._inputs is None:
            self._inputs = recorded_inputs(self._blueprint, self._store, self._text, progress)
        return self._inputs

    def forget(self) -> None:
        """Removes the recording after packing."""
        if self._missing:
            forget_inputs(self._store.root)


def _takes_inputs(settings: Settings) -> bool:
    return settings.quantizer_used in CALIBRATED and settings.bits_used in (4, 3, 2)


class ExpertInputs:
    """Recorded inputs of a model's experts, in the files of `folder`; implements `encode_experts.Inputs`.

    Of each layer: `hidden` (T, H) in the model's dtype, what its experts got, `index` int32 (T, K), -1 for none, and
    `weights` float32 (T, K)."""

    def __init__(
        self,
        folder: Path,
        made_from: str,
        layers: Sequence[MoeLayer],
        gates: Sequence[Gate],
        dtype: torch.dtype,
    ) -> None:
        self.made_from = made_from
        self._folder, self._layers, self._dtype = folder, layers, dtype
        formats = [expert_format(layer, 16, dtype, "") for layer in layers]
        self._steps = [UnfusedExperts(form, gate, "cpu") for form, gate in zip(formats, gates, strict=True)]
        self._gates = gates
        self._lock = threading.Lock()
        self._held: tuple[int, tuple[torch.Tensor, ...]] = -1, ()

    @torch.no_grad()
    def moments(self, layer: int, expert: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Second moments (in, in) float32 of each matrix's inputs. A token counts by the square of its gate weight, as
        its error does."""
        hidden, index, weights = self._of(layer)
        tokens, ranks = (index == expert).nonzero(as_tuple=True)
        counts = weights[tokens, ranks]
        if len(tokens) < SEEN:
            others = torch.linspace(0, len(hidden) - 1, min(SEEN, len(hidden)) - len(tokens)).long()
            usual = float(counts.mean()) if len(counts) else 1.0
            tokens, counts = torch.cat([tokens, others]), torch.cat([counts, torch.full(others.shape, usual)])
        first, second = (part for part in self._layers[layer].parts if part.is_matrix)
        found = {part.name: torch.zeros(part.out_in[1], part.out_in[1]) for part in (first, second)}
        views = {name: {"weight": values} for name, values in tensors.items()}
        for some, some_counts in zip(torch.split(tokens, _ROWS), torch.split(counts, _ROWS), strict=True):
            x = hidden[some]
            inner = self._gates[layer](self._steps[layer].features(x, views))
            _add_moments(found[first.name], x, some_counts)
            _add_moments(found[second.name], inner, some_counts)
        return found

    def _of(self, layer: int) -> tuple[torch.Tensor, ...]:
        with self._lock:
            if self._held[0] != layer:
                dtypes = (self._dtype, torch.int32, torch.float32)
                found = [self._read(layer, name, dtype) for name, dtype in zip(_FIELDS, dtypes, strict=True)]
                tokens = len(found[1]) // self._layers[layer].top_k
                self._held = layer, tuple(values.view(tokens, -1) for values in found)
            return self._held[1]

    def _read(self, layer: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        path = _file(self._folder, layer, name)
        size = path.stat().st_size // dtype.itemsize
        return torch.from_file(str(path), shared=False, size=size, dtype=dtype)


def _add_moments(moments: torch.Tensor, x: torch.Tensor, counts: torch.Tensor) -> None:
    weighted = x.float() * counts[:, None]
    moments.addmm_(weighted.t(), weighted)


class _Recording(Observer):
    """Recording of experts' inputs in files, with which a later process carries on. `windows`: how many of the text are
    in the files."""

    weights = True

    def __init__(self, folder: Path, blueprint: Blueprint, text: Text) -> None:
        self._folder, self._layers = folder, blueprint.layers
        self._stamp = {"fingerprint": blueprint.checkpoint.fingerprint(), "made_from": text.made_from}
        self._window = text.ids.shape[1]
        self._hidden = int(blueprint.config.hidden_size) * blueprint.dtype.itemsize
        self.windows = self._kept()

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        chosen = self._layers[routed.layer].top_k
        index = torch.tensor(_filled(routed.experts, chosen, -1), dtype=torch.int32)
        weights = torch.tensor(_filled(routed.weights, chosen, 0), dtype=torch.float32)
        for name, values in zip(_FIELDS, (hidden.cpu(), index, weights), strict=True):
            with _file(self._folder, routed.layer, name).open("ab") as file:
                file.write(values.contiguous().view(torch.uint8).numpy().tobytes())
                file.flush()
                os.fsync(file.fileno())  # before the table speaks of it

    def nbytes(self, windows: int) -> int:
        """Bytes of so many windows."""
        return sum(sum(self._row_bytes(layer)) for layer in self._layers) * windows * self._window

    def finished(self, windows: int) -> None:
        """Records that so many windows are in the files, with all layers."""
        self.windows = windows
        write_atomically(self._folder / _TABLE, json.dumps({**self._stamp, "windows": windows}).encode())

    def _kept(self) -> int:
        """How many windows of this text the files have; other contents are removed."""
        table = _table_of(self._folder)
        windows = int(table.get("windows", 0)) if self._stamp.items() <= table.items() else 0
        places = [
            (_file(self._folder, number, name), nbytes * windows * self._window)
            for number, layer in enumerate(self._layers)
            for name, nbytes in zip(_FIELDS, self._row_bytes(layer), strict=True)
        ]
        if windows and all(path.exists() and path.stat().st_size >= nbytes for path, nbytes in places):
            for path, nbytes in places:
                os.truncate(path, nbytes)
            return windows
        for path in (self._folder / _TABLE, *(path for path, _ in places)):
            path.unlink(missing_ok=True)
        return 0

    def _row_bytes(self, layer: MoeLayer) -> tuple[int, int, int]:
        """Bytes of a token in each file."""
        return self._hidden, 4 * layer.top_k, 4 * layer.top_k


def _filled(rows: Sequence[Sequence[float]], length: int, rest: int) -> list[list[float]]:
    return [[*row, *[rest] * (length - len(row))] for row in rows]


def _record(recording: _Recording, blueprint: Blueprint, store: Store, text: Text, progress: Progress) -> None:
    windows, window = text.ids.shape
    # at 8 bits where 16 would be a copy of the experts
    bits = 16 if blueprint.comes_quantized or blueprint.experts.in_place(0, 0) else 8
    _check_room(store, bits, recording.nbytes(windows - recording.windows))
    options: dict[str, Any] = {
        "bits": bits, "dense_bits": 16, "device": "cpu", "store": store.root, "preset": "lru", "warm": False,
        "chunk": TOGETHER * window, "context": window, "batch": min(TOGETHER, windows),
    }  # fmt: skip
    engine = start(
        blueprint,
        make_settings(**options),
        lambda what, done, total: progress(f"to calibrate: {what}", done, total),
    )
    try:
        engine.observe(recording)
        for first in range(recording.windows, windows, TOGETHER):
            some = text.ids[first : first + TOGETHER]
            _run(engine, some.tolist())
            recording.finished(first + len(some))
            progress("running the calibration text", first + len(some), windows)
    finally:
        engine.close()


@torch.inference_mode()
def _run(engine: Engine, windows: list[list[int]]) -> None:
    cache = engine.new_cache(len(windows), len(windows[0]))
    engine.step(Batch(tuple(prompt(cache.open(), ids) for ids in windows)), cache)


def _check_room(store: Store, bits: int, recording: int) -> None:
    """PackError if the disk lacks room for the recording, or for the experts that must be packed to run the text."""
    packed = 0
    if bits == 8 and precision_key(8, "") not in store.precisions:
        formats = [expert_format(layer, 8, store.dtype, "") for layer in store.layers]
        packed = sum(form.stored.nbytes * form.layer.experts for form in formats)
    free = shutil.disk_usage(store.root).free
    if recording + packed > free:
        experts = f", and {format_size(packed)} of experts at 8 bits to run the text" if packed else ""
        raise PackError(
            f"calibrating keeps {format_size(recording)} of the experts' inputs in {store.root} until packing is "
            f"done{experts}; {format_size(free)} are free; free some space or choose another folder with --out"
        )


def _file(folder: Path, layer: int, name: str) -> Path:
    return folder / f"layer{layer:03}.{name}"


def _table_of(folder: Path) -> dict[str, Any]:
    """Empty if it cannot be read."""
    try:
        table = read_json(folder / _TABLE)
    except (FileNotFoundError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}
