"""The native kernels' build; pyproject.toml has everything else.

One module serves every Python from 3.11 on (the stable ABI), and has the kernels of every instruction set. A build that
finds no compiler fails and says what to do: pip shows what a build prints only where it fails.
"""

import os
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

NO_KERNELS = "TIERMOE_NATIVE"  # 0 means the same where tiermoe runs
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")  # a free-threaded Python has none yet


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            sys.exit(
                f"tiermoe: the native kernels were not compiled: {error}\n"
                f"Install a C compiler (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc) and try "
                f"again, or set {NO_KERNELS}=0 to install without kernels: torch's operators compute then, several "
                f"times slower."
            )


kernels = Extension(
    "tiermoe.native._native",
    sorted(glob("src/tiermoe/native/**/*.c", recursive=True)),
    depends=sorted(glob("src/tiermoe/native/**/*.h", recursive=True)),
    extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],  # a sum is fused where it says so, on every machine
    define_macros=[("Py_LIMITED_API", "0x030b0000")] if STABLE_ABI else [],
    py_limited_api=STABLE_ABI,
)
if sys.platform == "win32":
    sys.exit("tiermoe needs a POSIX system (Linux, macOS); on Windows install it in WSL")
wanted = os.environ.get(NO_KERNELS) != "0"

setup(
    ext_modules=[kernels] if wanted else [],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if wanted and STABLE_ABI else {},
)
