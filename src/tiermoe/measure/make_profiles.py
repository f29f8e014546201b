"""`tiermoe calibrate`: the profiles of the presets that need one, beside the store.

The recording and each profile are kept as soon as they are whole, with what they were made from, so an interrupted
calibration goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.decide.profiles import FOLDER, Profile, profile_path, read_profile, to_json
from tiermoe.errors import ProfileError, TiermoeError
from tiermoe.measure.calibration import TRACE, Calibration
from tiermoe.measure.calibrators import CALIBRATORS, READS
from tiermoe.model.prepare_store import Progress
from tiermoe.store.files import write_atomically
from tiermoe.store.lock import exclusive


@dataclass(frozen=True, slots=True)
class Found:
    """A calibrated profile: `facts` are what was found, for people. kept: it was there already, made from the same."""

    name: str
    profile: Profile
    facts: dict[str, str]
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A profile that could not be made."""

    name: str
    error: TiermoeError


def make_profiles(
    calibration: Calibration, names: Sequence[str], progress: Progress, force: bool = False
) -> list[Found | Failed]:
    """The profiles `names`, in order. force: make all anew, the recording too. What cannot be made of one profile does
    not keep the others from being made."""
    results: list[Found | Failed] = []
    with exclusive(calibration.store / FOLDER, progress):
        if force:
            (calibration.store / FOLDER / TRACE).unlink(missing_ok=True)
        for name in names:
            kept = None if force else _kept(calibration, name)
            try:
                results.append(kept or _make(calibration, name, progress))
            except TiermoeError as error:
                results.append(Failed(name, error))
    return results


def _kept(calibration: Calibration, name: str) -> Found | None:
    try:
        profile = read_profile(profile_path(calibration.store, name), calibration.fingerprint, "")
    except ProfileError:
        return None
    if profile.made_from != _made_from(calibration, name):
        return None
    return Found(name, profile, profile.data.get("found", {}), kept=True)


def _make(calibration: Calibration, name: str, progress: Progress) -> Found:
    settings, data, facts = CALIBRATORS[name](calibration, progress)
    made_from = _made_from(calibration, name)
    profile = Profile(name, calibration.fingerprint, made_from, settings, {**data, "found": facts})
    write_atomically(profile_path(calibration.store, name), to_json(profile))
    return Found(name, profile, facts)


def _made_from(calibration: Calibration, name: str) -> dict[str, Any]:
    """The recording, and what of `Asked` the profile depends on."""
    return {**calibration.made_from, **{field: getattr(calibration.asked, field) for field in READS.get(name, ())}}
