"""What the process itself holds besides the model: measured, kept small, and given back.

`prepare` before torch and transformers are imported, `without_meta_init` around the construction of a model,
`settle` after imports and after loading. The numbers behind each are in docs/performance.md. On systems other than
Linux with glibc, `prepare` postpones imports and the rest does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

from tiermoe.runtime import deferred_imports

_MADV_DONTNEED = 4
# Loaded together with torch._C and never unloaded, as Python's extension modules are.
_TORCH_LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libtorch_cuda.so", "libc10_cuda.so")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s+(\S.*)")


def prepare() -> None:
    """Postpones the imports of transformers that inference does not use (see `deferred_imports`).

    Call it before transformers is imported; later it changes nothing that is imported already. Idempotent.
    """
    deferred_imports.install()


@contextlib.contextmanager
def without_meta_init() -> Iterator[None]:
    """Skips random initialisation of tensors on the meta device, which hold no data.

    torch runs ``normal_`` on a meta tensor through its Python references, which import sympy (60 MiB with its
    company). Everything else, and every tensor that holds data, is initialised as ever. For the calling thread.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    random = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}

    class WithoutMetaInit(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in random and args[0].is_meta:
                return args[0]
            return func(*args, **(kwargs or {}))

    with WithoutMetaInit():
        yield


def settle() -> int:
    """Collects garbage, returns free heap to the system and drops pages of libraries that were only used to start.

    Call it after imports and after loading, before memory is handed to the expert cache. Returns the bytes given
    back. The dropped pages are clean pages of mapped files: the system may take them at any moment itself, and the
    ones that are still used come back from its page cache.
    """
    before = resident_bytes()
    gc.collect()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in _clean_library_pages():
            libc.madvise(start, end - start, _MADV_DONTNEED)
    return max(0, before - resident_bytes())


def _clean_library_pages() -> list[tuple[int, int]]:
    """Address ranges of loaded libraries that are private, not writable and hold no page of the process's own.

    MADV_DONTNEED on a page that the process has changed would undo the change, so a range with a single anonymous
    or swapped page is left out (relocated data that is made read-only afterwards has the same permissions as code).
    Only libraries that are completely loaded and never unloaded are looked at: another thread's dlopen maps its
    library read-only first and its data over that, and what it unmaps may be mapped anew.
    """
    libraries = _loaded_libraries()
    ranges: list[tuple[int, int]] = []
    candidate: tuple[int, int] | None = None
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as smaps:
        for line in smaps:
            mapping = _MAPPING.match(line)
            if mapping is not None or _is_header(line):
                candidate = None
                if mapping is not None and mapping[3] in ("r--p", "r-xp") and mapping[5] in libraries:
                    candidate = int(mapping[1], 16), int(mapping[2], 16)
                    ranges.append(candidate)
            elif candidate is not None and line.startswith(("Anonymous:", "Swap:")) and int(line.split()[1]):
                ranges.remove(candidate)
                candidate = None
    return ranges


def _is_header(line: str) -> bool:
    return line[:1] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]


def _loaded_libraries() -> set[str]:
    """Real paths of extension modules whose import has finished, and of torch's own libraries."""
    modules = list(sys.modules.items())
    files = [getattr(module, "__file__", None) for name, module in modules]
    paths = {os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".so")}
    core = sys.modules.get("torch._C")
    if core is not None and isinstance(core.__file__, str):
        folder = os.path.join(os.path.dirname(os.path.realpath(core.__file__)), "lib")
        paths |= {os.path.join(folder, library) for library in _TORCH_LIBRARIES}
    return paths


def resident_bytes() -> int:
    """Resident set of the process now, in bytes (elsewhere than on Linux: its peak)."""
    return _status("VmRSS") or _peak_from_rusage()


def peak_resident_bytes() -> int:
    """Largest resident set that the process has had, in bytes (VmHWM)."""
    return _status("VmHWM") or _peak_from_rusage()


def _status(field: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _peak_from_rusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak if sys.platform == "darwin" else peak * 1024
