"""What `tiermoe pack` calibrates: precisions whose quantiser has to know what experts get as inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiermoe.config import Settings
from tiermoe.errors import ConfigError
from tiermoe.measure.expert_inputs import (
    TEXT,
    ExpertInputs,
    calibration_text,
    forget_inputs,
    recorded_inputs,
    shipped_text,
)
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.prepare_store import Progress
from tiermoe.quant.quantizers import CALIBRATED
from tiermoe.store.store import Store


class Calibrated:
    """Inputs for the precisions that are asked for. keys: bits → key in the store. name, content: the text that the
    user named, None for the one that ships with the package. force: what the store holds will be packed anew.
    ConfigError where a text was named that changes nothing,
    or with which the store cannot be what was asked for."""

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
        """What packing with these settings needs: recorded once for all. None where it needs nothing."""
        if not _takes_inputs(settings) or not self._missing:
            return None
        if self._inputs is None:
            self._inputs = recorded_inputs(self._blueprint, self._store, self._text, progress)
        return self._inputs

    def forget(self) -> None:
        """Removes the recording, which nothing needs any more."""
        if self._missing:
            forget_inputs(self._store.root)


def _takes_inputs(settings: Settings) -> bool:
    return settings.quantizer_used in CALIBRATED and settings.bits_used in (4, 3, 2)
