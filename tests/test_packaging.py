"""Packaging: one version, a whole source distribution, and a build that says when it has no compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from patience import PATIENCE_S
from tiermoe.model.hf.local_models import SHIPPED
from tiermoe.version import VERSION

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tiermoe"
NO_COMPILER = {"CC": "no-such-compiler"}


def setup(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py with a command; its variables TIERMOE_NATIVE and CC are those that are given."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TIERMOE_NATIVE", "CC", "LDSHARED")}
    command = [sys.executable, "setup.py", "-q", *words]
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    done = setup("egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder))
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / f"tiermoe-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"tiermoe-{VERSION}"


def test_a_source_distribution_has_every_file(source: Path) -> None:
    wanted = {"*.py", "*.pyi", "*.c", "*.h", "web/**/*.*", "*.txt", "*.yaml", "py.typed"}
    files = {path.relative_to(ROOT) for pattern in wanted for path in PACKAGE.rglob(pattern)}
    files |= {Path("src/tiermoe") / SHIPPED.name / path.name for path in SHIPPED.iterdir()}
    assert len(files) > 300
    assert {str(path) for path in files if not (source / path).is_file()} == set()
    assert (source / "setup.py").is_file()


def test_the_version_is_one_number(source: Path) -> None:
    assert f"\nVersion: {VERSION}\n" in (source / "PKG-INFO").read_text()
    others = [ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "README.md", PACKAGE / "__init__.py"]
    number = re.compile(rf"(?<![\d.]){re.escape(VERSION)}(?![\d.])")
    assert [path.name for path in others if number.search(path.read_text())] == []


def test_a_build_without_a_compiler_says_what_to_do(tmp_path: Path) -> None:
    to = ("build_ext", "--build-temp", str(tmp_path / "objects"), "--build-lib", str(tmp_path / "built"))
    failed = setup(*to, **NO_COMPILER)
    assert failed.returncode == 1
    assert "no-such-compiler" in failed.stderr
    assert "Install a C compiler" in failed.stderr
    assert "TIERMOE_NATIVE=0" in failed.stderr
    assert "Traceback" not in failed.stderr
    without = setup(*to, **NO_COMPILER, TIERMOE_NATIVE="0")
    assert without.returncode == 0, without.stderr
    assert not list(tmp_path.rglob("_native*"))
