"""The model under measurement: its text in tokens, its store packed, its options checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiermoe.bench.cases import Condition
from tiermoe.bench.stretches import random_ids, rows, token_ids
from tiermoe.config import settings as make_settings
from tiermoe.engine.load import resolve_for
from tiermoe.errors import ModelError
from tiermoe.generation.sequence import end_tokens
from tiermoe.kernels import machine_layout
from tiermoe.model.blueprint import inspect_model
from tiermoe.model.hub import load_tokenizer, resolve_model
from tiermoe.model.prepare_store import ensure_packed, open_or_create, store_root
from tiermoe.store.store import precision_key


class Subject:
    """A checkpoint that every engine runs. model: a directory or a hub id; text: what is fed, None for random token
    ids. Raises ModelError for a model that cannot be used so."""

    def __init__(self, model: str, text: str | None) -> None:
        self.directory = resolve_model(model)
        self._blueprint = inspect_model(self.directory, model)
        self._blueprint.require_text()
        if self._blueprint.family.encoder_decoder:
            raise ModelError(
                f"{self._blueprint.family.name} models read a prompt through an encoder, which the peers' runs do not; "
                f"bench measures decoder-only models"
            )
        if text is None:
            self.ids = random_ids(self._blueprint.config.vocab_size)
        else:
            self.ids = token_ids(load_tokenizer(self.directory), text)
        self.context = self._blueprint.max_context()
        self.ends = end_tokens(self._blueprint.generation_settings())
        self.name = self._blueprint.name
        self.fingerprint = self._blueprint.checkpoint.fingerprint()
        self.store_root = store_root(self._blueprint, None)

    def ids_file(self, folder: Path) -> Callable[[Condition], Path]:
        """Condition → a .npy file in `folder` of the token ids that it feeds, made where it is not there."""

        def file(condition: Condition) -> Path:
            path = folder / f"ids-{condition.batch}-{condition.prompt}-{condition.output}.npy"
            if not path.exists():
                np.save(path, np.asarray(rows(self.ids, condition), dtype=np.int64))
            return path

        return file

    def ensure(self, preset: str, options: dict[str, Any]) -> Callable[[Any], tuple[Path, ...]]:
        """What packs the precisions of a preset, given a progress callback, and returns the files that a run reads."""

        def pack(progress: Any) -> tuple[Path, ...]:
            settings = make_settings(preset=preset, **options)
            resolved = resolve_for(self._blueprint, settings)
            settings = resolved.settings
            store = open_or_create(self._blueprint, store_root(self._blueprint, settings.store))
            unit = resolved.composition.unit
            for bits in resolved.precisions:
                ensure_packed(
                    store,
                    self._blueprint,
                    bits,
                    settings.quantizer_used,
                    settings.dense_bits_used,
                    progress,
                    "cpu",
                    unit,
                )
            keys = [
                precision_key(bits, settings.quantizer_used, machine_layout("cpu"), unit)
                for bits in resolved.precisions
            ]
            extents = (extent for key in keys for layer in store.precisions[key].layers for extent in layer.extents)
            experts = {Path(segment.file) for extent in extents for segment in extent.segments}
            dense = {store.root / entry["file"] for entry in store.dense.values()}
            return tuple(sorted(experts | dense | set(self.directory.glob("*.safetensors"))))

        return pack
