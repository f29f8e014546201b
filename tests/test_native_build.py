"""The native kernels' C: no warnings, for other systems and processors too; its threads under a sanitizer."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from c_builds import LIBRARIES, SOURCES, STRICT, built, compiler, ran
from tiermoe import native
from tiermoe.native import structs

FILES = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.c"))
HEADERS = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.h"))
PYTHON = ["-isystem", sysconfig.get_path("include"), "-DPy_LIMITED_API=0x030b0000"]
ELSEWHERE = ["-U__linux__", "-Ulinux"]  # a system of POSIX alone
CHECK = [
    str(Path(__file__).parent / "kernels_check.c"),
    str(SOURCES / "gguf_grids.c"),
    str(SOURCES / "matrix.c"),
    str(SOURCES / "team.c"),
    f"-I{SOURCES}",
]
GENERIC = [str(Path(__file__).parent / "generic_alone.c"), str(SOURCES / "isa" / "generic.c")]
EVERY = [str(SOURCES / name) for name in FILES if name.startswith("isa") or name == "kernels.c"]
AVX512 = str(SOURCES / "isa" / "avx512.c")
SIMDE = Path("/usr/include/simde")
OTHERS = """
#include "kernels.h"
static int nowhere(void) { return 0; }
const Kernels kernels_avx512bf16 = {.runs = nowhere}, kernels_avx2 = {.runs = nowhere};
"""  # in place of the sets that this test is not about
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


@pytest.mark.parametrize("options", [[], ELSEWHERE], ids=["here", "another system"])
def test_no_file_has_a_warning(options: list[str]) -> None:
    files = [str(SOURCES / name) for name in FILES]
    built([compiler("cc"), *STRICT, "-O1", "-Werror", "-fsyntax-only", *PYTHON, *options, *files])


X86 = ["-mavx2", "-mfma", "-mf16c"]
SETS = {  # what a set's own headers are compiled with
    "avx2": ["-DSIMD_AVX2", *X86],
    "avx512": ["-DSIMD_AVX512", *X86, *(f"-mavx512{each}" for each in ("f", "bw", "dq", "vl", "vbmi", "bf16"))],
    "neon": ["-DSIMD_NEON"],
    "neondot": ["-DSIMD_NEON", "-DSIMD_NEON_DOT", "-march=armv8.2-a+dotprod"],
    "generic": [],
}


def sets_of(header: str) -> list[str]:
    """The instruction sets whose vocabulary a header is written in, the native one first."""
    folder, own = Path(header).parts[0], Path(header).parent.name
    if folder != "isa":
        return ["generic"]
    arm = ["neon", "neondot"]
    if own in SETS:
        return arm if own == "neon" else [own]
    x86, words = ["avx2", "avx512"], ["avx2", *arm]
    needs = {"x86.h": x86, "x86_strips.h": x86, "lane_groups.h": x86, "nibbles.h": words, "rows.h": words}
    return needs.get(Path(header).name, [*SETS])


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(header: str) -> None:
    """With a guard of its own, and for every instruction set that it may be included by."""
    text = (SOURCES / header).read_text()
    assert re.search(r"^#ifndef (TIERMOE_\w+_H)\n#define \1$", text, re.MULTILINE)
    assert text.endswith("#endif\n")
    for each in sets_of(header):
        cc = shutil.which("aarch64-linux-gnu-gcc") if "neon" in each else compiler("cc")
        if cc and ("neon" in each or each == "generic" or platform.machine() == "x86_64"):
            quiet = ["-Wno-unused-function"]  # who includes it calls them
            flags = [*STRICT, "-O1", "-Werror", *quiet, "-fsyntax-only", *PYTHON, *SETS[each]]
            built([cc, *flags, "-include", str(SOURCES / header), "-x", "c", "/dev/null"])


def test_python_describes_structs_as_c_does(tmp_path: Path) -> None:
    program = tmp_path / "structs.c"
    headers = sorted({each.__doc__.split(";")[0].split()[0] for each in structs.STRUCTS})
    lines = [f'#include "{name}"' for name in headers]
    for each in structs.STRUCTS:
        name = each.__name__
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(each)}, "{name}");')
        for field, kind in each._fields_:
            place, size = getattr(each, field).offset, ctypes.sizeof(kind)
            same = f"offsetof({name}, {field}) == {place} && sizeof((({name} *)0)->{field}) == {size}"
            lines.append(f'_Static_assert({same}, "{name}.{field}");')
    program.write_text("\n".join(lines) + "\n")
    built([compiler("cc"), "-std=gnu11", "-fsyntax-only", f"-I{SOURCES}", str(program)])


def test_no_file_has_a_warning_on_arm() -> None:
    paths = [SOURCES / name for name in FILES]
    files = [
        str(path) for path in paths if not re.search(r'Python\.h|"(binding|io)\.h"', path.read_text())
    ]  # this machine's
    built([compiler("aarch64-linux-gnu-gcc"), *STRICT, "-O1", "-Werror", "-fsyntax-only", *files])


@pytest.mark.parametrize("options", [[], ELSEWHERE], ids=["here", "another system"])
def test_threads_wait_for_each_other_without_a_race(options: list[str], tmp_path: Path) -> None:
    program = tmp_path / "calls.c"
    program.write_text("#include <stdatomic.h>\n" + CALLS)
    build = [compiler("cc"), "-std=gnu11", "-g", "-O1", "-fsanitize=thread", *options, f"-I{SOURCES}", str(program)]
    built([*build, str(SOURCES / "team.c"), "-lpthread", "-ldl", "-o", str(tmp_path / "calls")])
    ran([str(tmp_path / "calls")])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD")
@pytest.mark.parametrize("sanitizers", [("thread",), ("address", "undefined")], ids="-".join)
def test_io_threads_do_no_wrong_under_sanitizers(sanitizers: tuple[str, ...], tmp_path: Path) -> None:
    """Without a leak, which is asked of the requests that loads keep: the interpreter leaks too."""
    cc, tests = compiler("gcc"), Path(__file__).parent
    build = [cc, *STRICT, "-g1", "-O1", f"-fsanitize={','.join(sanitizers)}", "-fPIC", "-shared", *PYTHON]
    sources = [str(tests / "io_check.c"), str(SOURCES / "io.c"), str(SOURCES / "xxh3.c")]
    built([*build, f"-I{SOURCES}", *sources, "-lpthread", "-o", str(tmp_path / "io_check.so")])
    names = [f"lib{'ub' if each == 'undefined' else each[0]}san.so" for each in sanitizers]
    libraries = [ran([cc, f"-print-file-name={name}"])[0] for name in names]
    ran(
        [sys.executable, str(tests / "io_check.py"), str(tmp_path)],
        LD_PRELOAD=" ".join(libraries),
        PYTHONMALLOC="malloc",  # each object by itself, so that one that is used after its end is found
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="halt_on_error=1",
    )


def test_generic_kernels_are_right_under_sanitizers(tmp_path: Path) -> None:
    program = str(tmp_path / "check")
    build = [compiler("cc"), *STRICT, "-Og", "-g1", "-fsanitize=address,undefined"]
    built([*build, *CHECK, *GENERIC, *LIBRARIES, "-o", program])
    assert ran([program]) == ["generic"]


@pytest.mark.long
def test_every_instruction_set_is_right_under_sanitizers(tmp_path: Path) -> None:
    program = str(tmp_path / "check")
    build = [compiler("cc"), *STRICT, "-O1", "-g1", "-fsanitize=address,undefined"]
    built([*build, *CHECK, *EVERY, *LIBRARIES, "-o", program])
    assert ran([program])[-1] == "generic"


@pytest.mark.long
def test_avxvnni_is_right_by_the_encoding_of_avx512(tmp_path: Path) -> None:
    """The same instruction, on a processor that has AVX-512 and may lack AVX-VNNI: bits as in plain C."""
    if "avx512bf16" not in native.instruction_sets():
        pytest.skip("needs AVX-512 with VNNI")
    program, others = str(tmp_path / "check"), tmp_path / "others.c"
    others.write_text(OTHERS)
    sources = [str(SOURCES / name) for name in ("isa/avxvnni.c", "isa/generic.c", "kernels.c")]
    built([compiler("cc"), *STRICT, "-O1", "-DEVEX", *CHECK, *sources, str(others), *LIBRARIES, "-o", program])
    assert ran([program]) == ["avxvnni", "generic"]


@pytest.mark.long
def test_neon_is_right_in_an_emulator(tmp_path: Path) -> None:
    """With what `pip install tiermoe[arm]` brings, or Debian's cross compiler and QEMU."""
    program = str(tmp_path / "check")
    if all(map(importlib.util.find_spec, ("ziglang", "unicorn", "elftools"))):
        build = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
        emulator = [sys.executable, str(Path(__file__).parent / "arm_machine.py")]
    else:
        emulator, build = [compiler("qemu-aarch64", "qemu-aarch64-static")], [compiler("aarch64-linux-gnu-gcc")]
    built([*build, *STRICT, "-O2", "-static", *CHECK, *EVERY, *LIBRARIES, "-o", program])
    assert ran([*emulator, program]) == ["neondot", "neon", "generic"]


@pytest.mark.long
def test_avx512_is_right_in_c(tmp_path: Path) -> None:
    """Whether the machine has AVX-512 or not: emulated/immintrin.h stands for its instructions."""
    if not SIMDE.is_dir():
        pytest.skip("needs SIMDe's headers (libsimde-dev)")
    if "avx2" not in native.instruction_sets():
        pytest.skip("needs AVX2, on which AVX-512 is emulated")
    program, unit = str(tmp_path / "check"), str(tmp_path / "avx512.o")
    build = [compiler("gcc"), *STRICT, "-O1"]
    headers = ["-isystem", str(Path(__file__).parent / "emulated"), f"-I{SOURCES}"]
    quiet = ["-Wno-unknown-pragmas", "-Wno-psabi"]  # Clang's pragmas; 64 bytes between functions
    built([*build, "-mavx2", "-mfma", "-mf16c", *headers, *quiet, "-c", AVX512, "-o", unit])
    others = [name for name in EVERY if name != AVX512]
    built([*build, *CHECK, *others, unit, *LIBRARIES, "-o", program])
    assert ran([program]) == ["avx512bf16", *(name for name in native.instruction_sets() if name != "avx512bf16")]


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_a_struct_with_values_that_no_kernel_takes_is_refused() -> None:
    pack = native._native.pack
    with pytest.raises(AttributeError, match="rowz"):
        structs.Matrix(rowz=64)
    for struct, told in (
        (structs.Matrix(coding=99, scale_rows=1, scale_columns=1, factor_rows=1), "99 is not a coding"),
        (
            structs.Matrix(coding=0, scale_kind=6, scale_rows=1, scale_columns=1, factor_rows=1),
            "6 is no kind of scales",
        ),
        (structs.Matrix(coding=0), "a scale of no weights"),
        (structs.Expert(gate=6), "6 is not a gate"),
        (structs.Router(experts=8, columns=64, k=9, groups=1, kept=1, judges=1), "no router: 9 of 8 experts"),
        (structs.Delta(heads=3, key_heads=2, key_columns=16, value_columns=16), "no linear attention: 2 of 3 heads"),
        (structs.Neurons(bits=3, group=16, width=64), "no neurons of 64 weights of 3 bits"),
        (structs.Codes(coding=native.CODINGS["NL4"]), "coding 5 is not packed here"),
        (structs.Uneven(coding=native.CODINGS["INT4"]), "coding 0 has no uneven levels"),
        (structs.Hqq(group=512), "hqq takes groups of 256"),
    ):
        with pytest.raises(ValueError, match=told):
            pack(struct)
    with pytest.raises(ValueError, match="bytes of a packed struct"):
        native._native.product(pack(structs.Norm()), 0, 1, 0, 0, 1, False)
    with pytest.raises(TypeError, match="no struct is called Other"):
        pack(type("Other", (structs.Struct,), {"_fields_": ()})())


def test_every_quant_is_named_in_each_sets_table() -> None:
    """By one list, quants.h: a product of its own, and the same sizes for Python."""
    text = (SOURCES / "quants.h").read_text()
    named = re.findall(r"^    X\((\w+), (\w+), (\d+), (\d+), (\d+), \d\)", text, re.MULTILINE)
    assert all(coding.lower() == name for coding, name, *_ in named)
    if native.available():
        assert [coding for coding, *_ in named] == list(native.CODINGS)
        sizes = {coding: (int(columns), int(bytes_), int(group)) for coding, _, columns, bytes_, group in named}
        assert {name: tuple(rest) for name, *rest in native._native.quants()} == sizes


def test_the_grids_are_those_of_the_gguf_package() -> None:
    script = [sys.executable, str(Path(__file__).parents[1] / "tools" / "gguf_grids.py")]
    written = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert written == (SOURCES / "gguf_grids.c").read_text()
