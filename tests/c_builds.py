"""Programs of the native kernels' C, built and run by tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from patience import PATIENCE_S

SOURCES = Path(__file__).parent.parent / "src" / "tiermoe" / "native"
LIBRARIES = ["-lm", "-lpthread", "-ldl"]
STRICT = ["-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra"]


def compiler(*names: str) -> str:
    """The first of these programs that is here."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"needs {' or '.join(names)}")
    return found


def built(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if "cannot find -l" in done.stderr or "cannot find /usr" in done.stderr:
        pytest.skip("needs the sanitizers' libraries")
    assert done.returncode == 0, done.stderr[-2000:]


def ran(command: list[str], **environment: str) -> list[str]:
    variables = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout.split()
