"""Breaks a copy of the tree in one place at a time and tells whether the tests find it.

    python tools/breakages                 every breakage, against the tests that are expected to find it
    python tools/breakages --all           against the whole suite
    python tools/breakages --only slot     those with this in their name

Ends with 0 where every breakage was found. The copy has the files that git knows or would add, and the kernels that
were built in place; the tree itself is never touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from breakage import Breakage
from table import BREAKAGES

ROOT = Path(__file__).parents[2]
BUILT = "src/tiermoe/native/*.so"
BUILD = ("-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace")
LINKED = "models"
"""A folder that no breakage touches, and large."""
PATIENCE_S = 600


def copy_tree(to: Path) -> None:
    """The working tree at `to`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    files += [path.relative_to(ROOT) for path in ROOT.glob(BUILT)]
    for file in files:
        if file.parts[0] != LINKED and (ROOT / file).exists():
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to / file)
    (to / LINKED).symlink_to(ROOT / LINKED, target_is_directory=True)


def run_tests(root: Path, tests: Sequence[str], quiet: bool = True) -> int | None:
    """pytest's exit code over `tests` in the copy at `root`, None where it hangs. quiet: what it prints is not shown.
    SystemExit where it would test another tree."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    where = subprocess.run(
        [sys.executable, "-c", "import tiermoe; print(tiermoe.__file__)"],
        env=environment, cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if not where.startswith(str(root)):
        raise SystemExit(f"the tests would run {where.strip()}, which is not the copy in {root}")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, env=environment, cwd=root, capture_output=quiet, timeout=PATIENCE_S).returncode
    except subprocess.TimeoutExpired:
        return None


def verdict(breakage: Breakage, root: Path, tests: Sequence[str]) -> str:
    """'found', 'missed', or why neither can be said. The copy at `root` is as before afterwards."""
    path, text = breakage.broken(root)
    changed = [path] if path.suffix == ".py" else [path, *root.glob(BUILT)]
    before = [(file, file.read_bytes()) for file in changed]
    try:
        path.write_text(text)
        if path.suffix != ".py":
            subprocess.run([sys.executable, *BUILD], cwd=root, capture_output=True, check=True)
        code = run_tests(root, tests)
    finally:
        for file, content in before:
            file.write_bytes(content)
    return {0: "missed", 1: "found", None: "found (hangs)"}.get(code, f"pytest ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run the whole suite against each breakage")
    parser.add_argument("--only", default="", metavar="TEXT", help="breakages with this in their name")
    asked = parser.parse_args()
    chosen = [breakage for breakage in BREAKAGES if asked.only in breakage.name]
    if not chosen:
        parser.error(f"no breakage has {asked.only!r} in its name")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        copy_tree(root)
        named = sorted({test for breakage in chosen for test in breakage.node_ids(root)})
        if (code := run_tests(root, [] if asked.all else named, quiet=False)) != 0:
            print(f"the tests do not pass on the unbroken tree (pytest ended with {code}): nothing can be said")
            return 2
        missed = 0
        for breakage in chosen:
            began = time.monotonic()
            said = verdict(breakage, root, [] if asked.all else breakage.node_ids(root))
            missed += not said.startswith("found")
            print(f"{said:14} {breakage.name}  ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
