"""Memory of this process: bytes that are resident, that allocator and libraries may keep, that go back to the system.

`import_libraries` before anything imports torch, `import_modelling_code` where transformers' model classes are needed,
`settle` after imports and after loading, `keep_activations` once there is a plan.
notebook/2026-11-21-process-memory.md has the measurements of each. Apart from `anonymous_memory` and
the readings, systems other than Linux with glibc are left as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import re
import resource
import sys
from collections.abc import Iterator
from types import ModuleType

_MADV_DONTNEED = 4
_FREE_ADVICE = 5 if sys.platform == "darwin" else _MADV_DONTNEED
"""Advice that frees a range of anonymous memory: MADV_DONTNEED, on macOS MADV_FREE."""
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = 128 << 10  # glibc's own initial value, also of what it gives back at once
# While packing: smaller blocks stay in the process when they are freed, as fresh pages cost more than the arithmetic.
_PACKING_THRESHOLD = 4 << 20
PACKING_HEAP = 64 << 20
"""Bytes of freed heap that packing may keep: 60 MiB measured for gpt-oss, 20 for Qwen3."""
_ACTIVATIONS_THRESHOLD = 32 << 20  # the most that glibc takes
ACTIVATIONS_HEAP = 96 << 20
"""Bytes that may lie idle between activations: 78 MiB measured with glibc's own thresholds."""
# Loaded together with torch._C and never unloaded, as Python's extension modules are.
_TORCH_LIBRARIES = (
    "libtorch_cpu.so",
    "libtorch_python.so",
    "libc10.so",
    "libtorch_cuda.so",
    "libc10_cuda.so",
)
# oneDNN and its wrapper in torch keep what they compile for each shape of a product: 0.7 MiB for each number of tokens
# that an expert ever had, up to 1024 of them, more than a budget can hold. Read at a process's first product.
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_PRODUCT_SHAPES = 32
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s+(\S.*)")


# --- readings ---


def resident_bytes() -> int:
    """Resident set of the process now, in bytes (its peak where the system tells no more)."""
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


# --- imports ---


def import_libraries(own_process: bool = False) -> None:
    """Imports torch. Pages that only its start needs are given back, so the peak of what comes after, transformers for
    one, stays near that of torch alone. Does nothing where torch is imported already.

    own_process: the process belongs to tiermoe alone. Objects of the libraries then stay for good and no later garbage
    collection looks at them, which would take 0.1 s each time."""
    _fix_mmap_threshold()
    for variable in _PRODUCT_CACHES:
        os.environ.setdefault(variable, str(_PRODUCT_SHAPES))
    if "torch" in sys.modules:
        return
    _import("torch")
    if own_process:
        gc.freeze()  # without a search: what importing leaves behind is not worth 0.1 s either


def import_transformers() -> None:
    """Imports transformers, without its modelling code. Its objects stay for good where torch's do
    (`import_libraries`)."""
    if "transformers" not in sys.modules:
        _import("transformers")
        if gc.get_freeze_count():
            gc.freeze()


def import_modelling_code() -> None:
    """Imports what every model class of transformers imports (with torch._dynamo, sympy and torch.distributed), and
    gives back what only their start needs. A start from a packed store on a decoder of our own needs none of it.

    triton, where it is installed, comes first and alone: its start touches 66 MiB of library pages, which would add to
    the peak (notebook/2026-11-21-process-memory.md)."""
    if "transformers.modeling_utils" not in sys.modules:
        with contextlib.suppress(ImportError):
            _import("triton")
        _import("transformers.modeling_utils")


def _import(name: str) -> None:
    """Imports a module without garbage collection: imports make many objects that stay and hardly any garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        if collecting:
            gc.enable()
    _give_back()


# --- the allocator ---


def _fix_mmap_threshold() -> None:
    """Keeps glibc from raising the size from which an allocation has a mapping of its own. It would rise to that of
    the largest activation freed. A prefill's activations would then come from a heap that fragments and keeps up to
    60 MiB, a different number in every run: no plan could bound that (notebook/2026-11-21-process-memory.md)."""
    _set_thresholds(_MMAP_THRESHOLD, _MMAP_THRESHOLD)


def _set_thresholds(mapped: int, kept: int) -> None:
    """Allocations of `mapped` bytes and more have a mapping of their own; up to `kept` free bytes at the heap's end
    stay in the process."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, mapped)
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, kept)


@contextlib.contextmanager
def heap_for_packing() -> Iterator[None]:
    """Around packing: its temporaries, a few MiB each and thousands of them, use the same memory again, at most
    `PACKING_HEAP` more than they need; afterwards all is given back. Packing is two to three times as fast."""
    _set_thresholds(_PACKING_THRESHOLD, PACKING_HEAP)
    try:
        yield
    finally:
        _fix_mmap_threshold()
        _give_heap_back()


def keep_activations(planned: int, idle: int) -> None:
    """Sets whether memory of activations stays in the process for the next pass. planned: bytes of activations in the
    plan. idle: bytes that the plan has for what may lie idle between them, `ACTIVATIONS_HEAP`; 0: each activation's
    memory goes back with it.

    Fresh pages are a fifth of the time of a prompt: 130,000 of them for 512 tokens of Qwen3's shape in six layers
    (notebook/2026-11-21-process-memory.md)."""
    if idle:
        _set_thresholds(_ACTIVATIONS_THRESHOLD, planned + idle)
    else:
        _fix_mmap_threshold()
        _give_heap_back()


# --- giving memory back ---


def settle() -> int:
    """Collects garbage, gives free heap back and drops pages of libraries that were only used to start. Returns the
    bytes given back.

    Called after imports and after loading, before memory is handed to the expert cache. The dropped pages are clean
    pages of mapped files: the system may take them at any moment itself, and the ones that are still used come back
    from its page cache."""
    before = resident_bytes()
    gc.collect()
    _give_back()
    return max(0, before - resident_bytes())


def _give_back() -> None:
    """Gives back free heap, and pages of libraries that were only used to start."""
    _give_heap_back()
    if sys.platform == "linux":
        for start, end in clean_library_pages():
            _advise(start, end - start, _MADV_DONTNEED)


def _give_heap_back() -> None:
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _advise(address: int, nbytes: int, advice: int) -> None:
    """madvise; locked pages stay."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(address, nbytes, advice)


def clean_library_pages() -> list[tuple[int, int]]:
    """Address ranges (begin, end) of libraries that are private, not writable and hold no page of the process's own.

    MADV_DONTNEED on a page that the process has changed would undo the change, so a range with a single
    anonymous or swapped page is left out (relocated data that is made read-only afterwards has the same
    permissions as code). Only libraries that are completely loaded and never unloaded are looked at: another
    thread's dlopen maps its library read-only first and its data over that, and what it unmaps may be mapped
    anew.
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
    """Whether a line of smaps begins a mapping (some have no file)."""
    return line[:1] in "0123456789abcdef" and "-" in line.split(" ", 1)[0]


def _loaded_libraries() -> set[str]:
    """Real paths of extension modules whose import has finished, and of torch's own libraries."""
    # From the dict itself: asking a lazy module for an attribute may load it.
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    files = [object.__getattribute__(module, "__dict__").get("__file__") for module in modules]
    paths = {os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".so")}
    core = sys.modules.get("torch._C")
    if core is not None and isinstance(core.__file__, str):
        folder = os.path.join(os.path.dirname(os.path.realpath(core.__file__)), "lib")
        paths |= {os.path.join(folder, library) for library in _TORCH_LIBRARIES}
    return paths


# --- memory outside malloc ---


def anonymous_memory(nbytes: int, huge: bool = True) -> mmap.mmap:
    """Fresh zeroed memory that begins at a page, outside malloc; a page becomes resident when it is first written.
    huge: huge pages where the system has them; False: never, and there may be more addresses than the system has
    memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes, flags=flags if huge else flags | _MAP_NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            with contextlib.suppress(OSError):  # a system without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def free_pages(address: int, nbytes: int) -> None:
    """Gives the whole pages of a range of `anonymous_memory` back: their content is lost, and they become resident
    again when they are written."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        _advise(begin, end - begin, _FREE_ADVICE)
