"""The native kernels' C: no warnings, for other systems and processors too; its threads under a sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tiermoe import native

SOURCES = Path(__file__).parent.parent / "src" / "tiermoe" / "native"
FILES = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.c"))
BINDINGS = {"module.c", "attention_binding.c"}  # these include Python's headers, which are this machine's
ELSEWHERE = ["-U__linux__", "-Ulinux"]  # a system of POSIX alone
CHECK = [str(Path(__file__).parent / "kernels_check.c"), str(SOURCES / "matrix.c"), f"-I{SOURCES}"]
GENERIC = [str(Path(__file__).parent / "generic_alone.c"), str(SOURCES / "isa" / "generic.c")]
EVERY = [str(SOURCES / name) for name in FILES if name.startswith("isa") or name == "kernels.c"]
AVX512 = str(SOURCES / "isa" / "avx512bf16.c")
SIMDE = Path("/usr/include/simde")
STRICT = ["-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra"]
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


def test_a_source_distribution_has_every_file() -> None:
    project = tomllib.loads((SOURCES.parents[2] / "pyproject.toml").read_text())
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    listed = {Path(name) for name in extension["sources"] + extension["depends"]}
    assert listed == {path.relative_to(SOURCES.parents[2]) for path in SOURCES.rglob("*.[ch]")}


def compiler(*names: str) -> str:
    """The first of these programs that is here."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"needs {' or '.join(names)}")
    return found


def built(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "cannot find -l" in done.stderr or "cannot find /usr" in done.stderr:
        pytest.skip("needs the sanitizers' libraries")
    assert done.returncode == 0, done.stderr[-2000:]


def ran(command: list[str]) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout.split()


@pytest.mark.parametrize("options", [[], ELSEWHERE], ids=["here", "another system"])
def test_no_file_has_a_warning(options: list[str]) -> None:
    files = [str(SOURCES / name) for name in FILES]
    python = ["-isystem", sysconfig.get_path("include")]
    built([compiler("cc"), *STRICT, "-O1", "-Werror", "-fsyntax-only", *python, *options, *files])


def test_no_file_has_a_warning_on_arm() -> None:
    files = [str(SOURCES / name) for name in FILES if name not in BINDINGS]
    built([compiler("aarch64-linux-gnu-gcc"), *STRICT, "-O1", "-Werror", "-fsyntax-only", *files])


@pytest.mark.parametrize("options", [[], ELSEWHERE], ids=["here", "another system"])
def test_threads_wait_for_each_other_without_a_race(options: list[str], tmp_path: Path) -> None:
    program = tmp_path / "calls.c"
    program.write_text("#include <stdatomic.h>\n" + CALLS)
    build = [compiler("cc"), "-std=gnu11", "-g", "-O1", "-fsanitize=thread", *options, f"-I{SOURCES}", str(program)]
    built([*build, str(SOURCES / "team.c"), "-lpthread", "-ldl", "-o", str(tmp_path / "calls")])
    ran([str(tmp_path / "calls")])


def test_generic_kernels_are_right_under_sanitizers(tmp_path: Path) -> None:
    program = str(tmp_path / "check")
    build = [compiler("cc"), *STRICT, "-Og", "-g1", "-fsanitize=address,undefined"]
    built([*build, *CHECK, *GENERIC, "-lm", "-o", program])
    assert ran([program]) == ["generic"]


@pytest.mark.long
def test_every_instruction_set_is_right_under_sanitizers(tmp_path: Path) -> None:
    program = str(tmp_path / "check")
    build = [compiler("cc"), *STRICT, "-O1", "-g1", "-fsanitize=address,undefined"]
    built([*build, *CHECK, *EVERY, "-lm", "-o", program])
    assert ran([program])[-1] == "generic"


@pytest.mark.long
def test_neon_is_right_in_an_emulator(tmp_path: Path) -> None:
    program, emulator = str(tmp_path / "check"), compiler("qemu-aarch64", "qemu-aarch64-static")
    build = [compiler("aarch64-linux-gnu-gcc"), *STRICT, "-O2", "-static"]
    built([*build, *CHECK, *EVERY, "-lm", "-o", program])
    assert ran([emulator, program]) == ["neon", "generic"]


@pytest.mark.long
def test_avx512_is_right_in_c(tmp_path: Path) -> None:
    """Whether the machine has AVX-512 or not: emulated/immintrin.h stands for its instructions."""
    if not SIMDE.is_dir():
        pytest.skip("needs SIMDe's headers (libsimde-dev)")
    if "avx2" not in native.instruction_sets():
        pytest.skip("needs AVX2, on which AVX-512 is emulated")
    program, unit = str(tmp_path / "check"), str(tmp_path / "avx512bf16.o")
    build = [compiler("gcc"), *STRICT, "-O1"]
    headers = ["-isystem", str(Path(__file__).parent / "emulated"), f"-I{SOURCES}"]
    quiet = ["-Wno-unknown-pragmas", "-Wno-psabi"]  # Clang's pragmas; 64 bytes between functions
    built([*build, "-mavx2", "-mfma", "-mf16c", *headers, *quiet, "-c", AVX512, "-o", unit])
    others = [name for name in EVERY if name != AVX512]
    built([*build, *CHECK, *others, unit, "-lm", "-o", program])
    assert ran([program]) == ["avx512bf16", "avx2", "generic"]
