"""Breaks a copy of the tree in one place at a time and tells whether the tests find it.

    python tools/breakages                 every breakage, against the tests that are expected to find it
    python tools/breakages --all           against the whole suite
    python tools/breakages --only slot     those with this in their name
    python tools/breakages --tests parts   those with this in a name of their tests

Ends with 0 where every breakage was found. The copy has the files that git knows or would add, and the kernels that
were built in place; the tree itself is never touched. Each run of the tests is a fork of this process, which has
imported what is slow to import and not of the tree.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch  # noqa: F401  for forks
import transformers.generation  # noqa: F401  for forks
from breakage import Breakage
from table import BREAKAGES

ROOT = Path(__file__).parents[2]
BUILT = "src/tiermoe/native/*.so"
BUILD = ("setup.py", "build_ext", "--inplace")
LINKED = "models"
"""A folder that no breakage touches, and large."""
ALL = ("tests", "--ignore=tests/test_breakages.py")
"""That file compares the table with the code: it fails whatever is broken."""
PATIENCE_S = 600
WAITED_S = 60
"""Patience of a test that waits (`tests/patience.py`): what it waits for in a broken tree may never come."""


def copy_tree(to: Path) -> None:
    """The working tree at `to`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    files += [path.relative_to(ROOT) for path in ROOT.glob(BUILT)]
    for file in files:
        if file.parts[0] != LINKED and ((ROOT / file).is_file() or (ROOT / file).is_symlink()):
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to / file, follow_symlinks=False)  # the shipped model is a link
    (to / LINKED).symlink_to(ROOT / LINKED, target_is_directory=True)


def run_tests(root: Path, tests: Sequence[str], log: Path | None = None) -> int | None:
    """pytest's exit code over `tests` in the copy at `root`, None where it hangs. log: gets what pytest prints; nothing
    is compiled to files then, as the tree is broken. ValueError where pytest would test another tree."""
    run = multiprocessing.get_context("fork").Process(target=_pytest, args=(root, tests, log))
    run.start()
    run.join(PATIENCE_S)
    if hangs := run.is_alive():
        run.kill()
        run.join()
    return None if hangs else run.exitcode


def _pytest(root: Path, tests: Sequence[str], log: Path | None) -> None:
    os.chdir(root)
    os.environ.update(PYTHONPATH=str(root / "src"), TMPDIR=str(root.parent), TIERMOE_TEST_PATIENCE_S=str(WAITED_S))
    sys.path[0] = str(root / "src")
    if log:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    import tiermoe

    if not Path(tiermoe.__file__).is_relative_to(root):
        raise ValueError(f"the tests would run {tiermoe.__file__}, which is not the copy in {root}")
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--disable-warnings", *tests]))


def verdict(breakage: Breakage, root: Path, tests: Sequence[str]) -> str:
    """'found' and the test that did, 'missed', or why neither can be said. A breakage that ends the tests' process by a
    signal (memory that is not there) is found. The copy at `root` is as before afterwards."""
    path, text = breakage.broken(root)
    changed = [path] if path.suffix == ".py" else [path, *root.glob(BUILT)]
    for file in changed:
        shutil.copy2(file, file.with_suffix(".whole"))
    log = root / "log"
    try:
        path.write_text(text)
        if path.suffix != ".py":
            subprocess.run([sys.executable, *BUILD], cwd=root, capture_output=True, check=True)
        code = run_tests(root, tests, log)
    finally:
        for file in changed:
            file.with_suffix(".whole").replace(file)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", log.read_text(errors="replace"), re.MULTILINE)
    found = f"found by {failed[1]}" if failed else "found"
    if code is not None and code < 0:
        return f"found ({signal.Signals(-code).name} ends the tests)"
    return {0: "missed", 1: found, None: "found (hangs)"}.get(code, f"pytest ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run the whole suite against each breakage")
    parser.add_argument("--only", default="", metavar="TEXT", help="breakages with this in their name")
    parser.add_argument("--tests", default="", metavar="TEXT", help="breakages with this in a name of their tests")
    asked = parser.parse_args()
    chosen = [breakage for breakage in BREAKAGES if asked.only in breakage.name and asked.tests in str(breakage.tests)]
    if not chosen:
        parser.error("no breakage is named so")
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()  # for forks
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "tree"
        copy_tree(root)
        named = sorted({test for breakage in chosen for test in breakage.node_ids(root)})
        if (code := run_tests(root, ALL if asked.all else named)) != 0:
            print(f"the tests do not pass on the unbroken tree (pytest ended with {code}): nothing can be said")
            return 2
        missed = 0
        for breakage in chosen:
            began = time.monotonic()
            said = verdict(breakage, root, ALL if asked.all else breakage.node_ids(root))
            missed += not said.startswith("found")
            print(f"{breakage.name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
