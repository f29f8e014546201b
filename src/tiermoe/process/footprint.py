"""What the process itself holds besides the model: measured, kept small, and given back.

`prepare` before torch and transformers are imported, `before_modelling_code` where transformers' is needed,
`without_meta_references` around the construction of a model, `settle` after imports and after loading. The numbers
behind each are in docs/notebook/process-memory.md. On systems other than Linux with glibc, `before_modelling_code`
postpones imports and the rest does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tiermoe.process import windows

_MADV_DONTNEED = 4
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = 128 << 10  # glibc's own initial value, also of what it gives back at once
# While packing: what is smaller stays in the process when it is freed, as fresh pages cost more than the arithmetic.
_PACKING_THRESHOLD = 4 << 20
PACKING_HEAP = 64 << 20  # what may stay so beside what is in use: 60 MiB measured for gpt-oss, 20 for Qwen3
_ACTIVATIONS_THRESHOLD = 32 << 20  # the most that glibc takes
ACTIVATIONS_HEAP = 96 << 20  # what may lie idle between activations: 78 MiB measured with glibc's own thresholds
# Loaded together with torch._C and never unloaded, as Python's extension modules are.
_TORCH_LIBRARIES = (
    "libtorch_cpu.so",
    "libtorch_python.so",
    "libc10.so",
    "libtorch_cuda.so",
    "libc10_cuda.so",
)
# oneDNN and its wrapper in torch keep what they compile for each shape of a product, 0.7 MiB for each number of tokens
# that an expert ever had, up to 1024 of them: more than a budget can hold. Read at a process's first product.
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_PRODUCT_SHAPES = 32
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s+(\S.*)")


def prepare() -> None:
    """Bounds what the allocator and torch's products keep. Call it before torch is imported. Idempotent."""
    _fix_mmap_threshold()
    for variable in _PRODUCT_CACHES:
        os.environ.setdefault(variable, str(_PRODUCT_SHAPES))


def before_modelling_code() -> None:
    """Postpones the imports of transformers' modelling code that inference does not use (see `deferred_imports`); later
    it changes nothing that is imported already. A start over our own decoder alone needs none of it. Idempotent."""
    from tiermoe.process import deferred_imports  # late: see above

    deferred_imports.install()


def import_libraries(own_process: bool = False) -> None:
    """`prepare`, then torch and transformers: the pages that only torch's start needs are given back before
    transformers comes, and the peak stays near that of torch alone. Does nothing where they are imported already.

    own_process: nobody else's objects are here. What the libraries made stays for good then, and no later search for
    garbage looks at it, which takes 0.1 s each time."""
    prepare()
    missing = [library for library in ("torch", "transformers") if library not in sys.modules]
    for library in missing:
        with _without_collecting():
            importlib.import_module(library)
        _give_back()
    if own_process and missing:
        gc.freeze()  # without a search: what importing leaves behind is not worth 0.1 s either


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Around imports: they make many objects that stay and hardly any garbage, for which Python would look again and
    again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _fix_mmap_threshold() -> None:
    """Keeps glibc from raising the size from which an allocation has a mapping of its own. It would rise to that of
    the largest activation freed, and then a prefill's activations come from a heap that fragments and keeps up to
    60 MiB, a different number in every run: no plan could bound that (docs/notebook/process-memory.md)."""
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
    """Whether memory of activations stays in the process for the next pass. idle: bytes that the plan has for what may
    lie idle between them, `ACTIVATIONS_HEAP`; 0: each gives its memory back when it goes. planned: bytes of activations
    in the plan.

    Fresh pages are a fifth of the time of a prompt: 130,000 of them for 512 tokens of Qwen3's shape in six layers
    (docs/notebook/process-memory.md)."""
    if idle:
        _set_thresholds(_ACTIVATIONS_THRESHOLD, planned + idle)
    else:
        _fix_mmap_threshold()
        _give_heap_back()


@contextlib.contextmanager
def without_meta_references() -> Iterator[None]:
    """Around transformers' from_pretrained: keeps torch from importing sympy for the meta device (35 MiB).

    For a tensor on the meta device torch runs ``normal_``, ``uniform_`` and ``arange`` (and what follows
    from it in a rotary embedding) through references in Python. Here the first two do nothing, as there is
    no data to fill, and ``arange`` stays on the CPU, as does what is joined to it: from_pretrained puts a
    tensor of the same shape and dtype in the place of every parameter and buffer, wherever it lay, and then
    loads or initialises it.
    Tensors with data are not touched. For the calling thread.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    random = {aten.normal_.default, aten.uniform_.default}
    ranges = {aten.arange.default, aten.arange.start, aten.arange.start_step}

    class WithoutMetaReferences(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in random and args[0].is_meta:
                return args[0]
            if func in ranges and kwargs.get("device") == torch.device("meta"):
                return func(*args, **{**kwargs, "device": "cpu"})
            if func is aten.cat.default and len({each.is_meta for each in args[0]}) == 2:
                joined = [torch.zeros_like(each, device="cpu") if each.is_meta else each for each in args[0]]
                return func(joined, *args[1:], **kwargs)
            return func(*args, **kwargs)

    with WithoutMetaReferences():  # type: ignore[no-untyped-call]
        yield


def settle() -> int:
    """Collects garbage, gives free heap back and drops pages of libraries that were only used to start.

    Call it after imports and after loading, before memory is handed to the expert cache. Returns the bytes
    given back. The dropped pages are clean pages of mapped files: the system may take them at any moment
    itself, and the ones that are still used come back from its page cache.
    """
    before = resident_bytes()
    gc.collect()
    _give_back()
    return max(0, before - resident_bytes())


def _give_back() -> None:
    """Free heap, and pages of libraries that were only used to start."""
    _give_heap_back()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in _clean_library_pages():
            libc.madvise(start, end - start, _MADV_DONTNEED)


def _give_heap_back() -> None:
    """Returns free heap to the system."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _clean_library_pages() -> list[tuple[int, int]]:
    """Address ranges of libraries that are private, not writable and hold no page of the process's own.

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


def resident_bytes() -> int:
    """Resident set of the process now, in bytes (its peak where the system tells no more)."""
    if sys.platform == "win32":
        return windows.process_memory(windows.kernel32())[0]
    return _status("VmRSS") or _peak_from_rusage()


def peak_resident_bytes() -> int:
    """Largest resident set that the process has had, in bytes (VmHWM)."""
    if sys.platform == "win32":
        return windows.process_memory(windows.kernel32())[1]
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
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak if sys.platform == "darwin" else peak * 1024
