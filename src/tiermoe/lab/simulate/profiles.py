"""The profile of a preset for a trace, from a folder of calibrations: the traced checkpoint's own, or another's of the
same shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiermoe.errors import ProfileError
from tiermoe.lab.trace import Header
from tiermoe.offload.profiles import Profile, read_profile


def profile_of(folder: Path, name: str, header: Header) -> Profile:
    """The profile `name` of a folder, for a trace of the same checkpoint, or of one whose MoE layers have as many
    experts and use as many (a widened model's). ProfileError as `read_profile`, and for another shape. Older profiles
    say of a shape what their tables do."""
    command = f"tiermoe calibrate {header.model} --text FILE --for {name}"
    path = folder / f"{name}.json"
    profile = read_profile(path, None, command)
    try:
        experts, top_k = list(profile.experts) or _rows(profile), list(profile.top_k)
    except TypeError as error:
        raise ProfileError(f"{path} is damaged ({error}); make it again with: {command}") from None
    for known, traced in ((experts, header.experts), (top_k, header.top_k)):
        if profile.fingerprint != header.fingerprint and known and known != list(traced):
            raise ProfileError(
                f"a trace of another model than the profile's: {path} is of {_model(profile)} "
                f"({_told(experts, top_k)}), the trace of {header.model} "
                f"({_told(header.experts, header.top_k)}); make it with: {command}, or use --profiles from-trace"
            )
    return profile


def borrowed(profile: Profile, header: Header) -> str:
    """What to say of a profile that was made for another checkpoint than the traced one; empty if it was not."""
    if profile.fingerprint == header.fingerprint:
        return ""
    return f"{profile.name}: calibrated on {_model(profile)}, replayed on a trace of {header.model}"


def _rows(profile: Profile) -> list[int]:
    rows = profile.data.get("frequencies") or profile.data.get("table") or []
    return list(map(len, rows.values() if isinstance(rows, dict) else rows))


def _model(profile: Profile) -> str:
    return profile.model or f"checkpoint {profile.fingerprint[:8]}"


def _told(experts: Sequence[int], top_k: Sequence[int]) -> str:
    """A shape, for people: '48 layers of 128 experts, 6 a token'."""
    each = str(experts[0]) if len(set(experts)) == 1 else "different numbers of"
    used = f", {top_k[0]} a token" if len(set(top_k)) == 1 else ""
    return f"{len(experts)} layers of {each} experts{used}"
