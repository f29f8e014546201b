"""Calibration profiles: what was measured offline for one checkpoint, kept beside its store, each with what it was made
from. JSON, written atomically by `calibrate`, read by the engine and the simulator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.errors import ProfileError
from tiermoe.process.json_files import read_json

FORMAT = "tiermoe-profile"
VERSION = 1
FOLDER = "profiles"


@dataclass(frozen=True, slots=True)
class Profile:
    """`name`: the preset it serves (hobbit, edgemoe, mobile, fate, corm). `fingerprint`: of the checkpoint.
    `made_from`: text, tokens, bits, command, for people. `settings`: values for the composition's open settings
    (t1, t2, weights, gamma, window, …). `data`: tables (bits per expert, paths, frequencies)."""

    name: str
    fingerprint: str
    made_from: dict[str, Any]
    settings: dict[str, Any]
    data: dict[str, Any]


def profile_path(store: Path, name: str) -> Path:
    """Where the profile of preset `name` lies in a store's folder."""
    return store / FOLDER / f"{name}.json"


def to_json(profile: Profile) -> bytes:
    """The bytes of a profile's file."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "name": profile.name,
            "fingerprint": profile.fingerprint,
            "made_from": profile.made_from,
            "settings": profile.settings,
            "data": profile.data,
        },
        separators=(",", ":"),
    ).encode()


def read_profile(path: Path, fingerprint: str | None, command: str) -> Profile:
    """The profile at `path`. ProfileError, naming the `command` that makes it, where it is missing, damaged, of another
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
        fields = ("name", "fingerprint", "made_from", "settings", "data")
        profile = Profile(*(document[field] for field in fields))
    except KeyError as error:
        raise ProfileError(f"{path} lacks {error}; make it again with: {command}") from None
    if fingerprint is not None and profile.fingerprint != fingerprint:
        raise ProfileError(f"{path} was made for another checkpoint; make it again with: {command}")
    return profile
