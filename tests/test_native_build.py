"""The native kernels' C: no warnings, for other systems and processors too; its threads under a sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src" / "tiermoe" / "native"
FILES = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.c"))
BINDINGS = {"module.c", "attention_binding.c"}  # these include Python's headers, which are this machine's
ELSEWHERE = ["-U__linux__", "-Ulinux"]  # a system of POSIX alone
CALLS = """
#include <unistd.h>
#include "team.h"
static atomic_size_t sum;
static void add(void *data, size_t thread, size_t task) {
    (void)data, (void)thread;
    atomic_fetch_add(&sum, task);
}
int main(void) {
    const Phase phases[] = {{NULL, add, 100}, {NULL, add, 50}};
    for (int call = 0; call < 400; call++) {
        team_run(phases, 2, NULL, 3, OWN);
        if (call % 100 == 99) usleep(20000); /* the others fall asleep */
    }
    return atomic_load(&sum) != 400 * (4950 + 1225);
}
"""


def compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("options", [[], ELSEWHERE], ids=["here", "another system"])
def test_no_file_has_a_warning(options: list[str]) -> None:
    strict = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-isystem"]
    files = [str(SOURCES / name) for name in FILES]
    check([compiler("cc"), *strict, sysconfig.get_path("include"), *options, *files])


def test_no_file_has_a_warning_on_arm() -> None:
    files = [str(SOURCES / name) for name in FILES if name not in BINDINGS]
    strict = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    check([compiler("aarch64-linux-gnu-gcc"), *strict, *files])


@pytest.mark.parametrize("options", [[], ELSEWHERE], ids=["here", "another system"])
def test_threads_wait_for_each_other_without_a_race(options: list[str], tmp_path: Path) -> None:
    program = tmp_path / "calls.c"
    program.write_text("#include <stdatomic.h>\n" + CALLS)
    build = [compiler("cc"), "-std=gnu11", "-g", "-O1", "-fsanitize=thread", *options, f"-I{SOURCES}", str(program)]
    built = subprocess.run(
        [*build, str(SOURCES / "team.c"), "-lpthread", "-ldl", "-o", str(tmp_path / "calls")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if "cannot find" in built.stderr:
        pytest.skip("needs the thread sanitizer's library")
    assert built.returncode == 0, built.stderr[-2000:]
    check([str(tmp_path / "calls")])
