"""Calibration profiles: what was measured offline for one checkpoint, kept beside its store. JSON, written by
`calibrate`, read by the engine and the simulator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tiermoe.errors import ProfileError
from tiermoe.offload.policies.prediction import Paths, paths_from_json
from tiermoe.platform.json_files import read_json

FORMAT = "tiermoe-profile"
VERSION = 1
FOLDER = "profiles"
_LATER = ("model", "experts", "top_k")  # fields that files of earlier versions of tiermoe lack


@dataclass(frozen=True, slots=True)
class Profile:
    """What a calibration has found for one preset."""

    name: str  # of the preset: hobbit, edgemoe, mobile, fate, corm
    fingerprint: str  # of the checkpoint
    made_from: dict[str, Any]  # text, tokens, bits, command, for people
    settings: dict[str, Any]  # values for the composition's open settings: t1, t2, weights, gamma, window, …
    data: dict[str, Any]  # tables: bits per expert, frequencies, paths
    model: str = ""  # of the checkpoint; empty in older files, as are these:
    experts: Sequence[int] = ()  # per MoE layer; in older files of their tables, if they have any
    top_k: Sequence[int] = ()  # per MoE layer


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a profile."""

    bits: Mapping[tuple[int, int], int] = field(default_factory=dict)  # of (layer, expert)
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)  # share or number of tokens
    paths: Paths = field(default_factory=dict)


def tables(profile: Profile | None) -> Tables:
    """The tables in a profile's data: 'table' and 'frequencies' hold a row of experts per layer (or layer → row),
    'paths' is `paths_to_json`'s. Without a profile all are empty."""
    data = profile.data if profile else {}
    return Tables(
        _by_expert(data.get("table")), _by_expert(data.get("frequencies")), paths_from_json(data.get("paths", {}))
    )


def profile_path(store: Path, name: str) -> Path:
    """The file of preset `name` in a store's folder."""
    return store / FOLDER / f"{name}.json"


def to_json(profile: Profile) -> bytes:
    """The bytes of a profile's file."""
    document = {each.name: getattr(profile, each.name) for each in fields(profile)}
    return json.dumps({"format": FORMAT, "version": VERSION, **document}, separators=(",", ":")).encode()


def read_profile(path: Path, fingerprint: str | None, command: str) -> Profile:
    """The profile at `path`. ProfileError, naming the `command` that makes it, if it is missing, damaged, of another
    version, or made for another checkpoint than `fingerprint` (None: any)."""
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ProfileError(f"no calibration in {path}; make it with: {command}") from None
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read ({error}); make it again with: {command}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ProfileError(f"{path} is not a calibration profile of version {VERSION}; make it again with: {command}")
    try:
        values = {each.name: document[each.name] for each in fields(Profile) if each.name not in _LATER}
        values |= {name: document[name] for name in _LATER if name in document}
        profile = Profile(**values)
    except KeyError as error:
        raise ProfileError(f"{path} lacks {error}; make it again with: {command}") from None
    if fingerprint is not None and profile.fingerprint != fingerprint:
        raise ProfileError(f"{path} was made for another checkpoint; make it again with: {command}")
    return profile


def _by_expert(rows: Any) -> dict[tuple[int, int], Any]:
    layers = rows.items() if isinstance(rows, Mapping) else enumerate(rows or ())
    return {(int(layer), expert): value for layer, row in layers for expert, value in enumerate(row)}
