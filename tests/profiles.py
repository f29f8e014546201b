"""What a calibration leaves in a store."""

from __future__ import annotations

from pathlib import Path

from tiermoe.offload.profiles import Profile, profile_path, to_json


def write_profile(store: Path, profile: Profile) -> None:
    path = profile_path(store, profile.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_json(profile))
