"""llama.cpp under measurement, through llama-cpp-python in an interpreter of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tiermoe.bench.cases import LLAMA, Condition
from tiermoe.bench.child import Bounds, CaseFailed, run_child
from tiermoe.bench.engines import Common, files_to_drop, warm_tokens
from tiermoe.bench.llama.checkpoint import is_mxfp4
from tiermoe.errors import ConfigError
from tiermoe.store.gguf.file import is_gguf

_SCRIPT = Path(__file__).parent / "llama" / "run_in_peer.py"
_K_BLOCK = 256  # weights of a k-quant's block, which must divide a matrix's rows
_STARTING = 120.0  # seconds that the interpreter may take to say what it has
_CONVERTING = 6 * 3600.0


class LlamaCpp:
    """llama.cpp on 4-bit weights: under a bound it maps its file and does not repack, without one it holds everything,
    repacked.

    gguf: a file of the same model; None takes the model's own where it is one, else makes one in `kept`, once. python:
    the interpreter that has llama-cpp-python (and gguf, to make one)."""

    name, preset = LLAMA, None

    def __init__(self, common: Common, gguf: Path | None, kept: Path, python: str) -> None:
        self._common = common
        self._python = python
        given = gguf or (common.directory if is_gguf(common.directory) else None)
        self._given = given is not None
        self._kind = "" if given else quantisation(common.directory)
        self.gguf = given or kept / f"{self._kind}.gguf"

    def missing(self) -> str | None:
        if shutil.which(self._python) is None:
            return f"{self._python} is no interpreter; name one that has llama-cpp-python with --peer-python"
        modules = ["llama_cpp", "numpy", *([] if self._given or self.gguf.exists() else ["gguf"])]
        program = f"import {', '.join(modules)}"
        done = subprocess.run(
            [self._python, "-c", program], capture_output=True, text=True, timeout=_STARTING, check=False
        )
        if done.returncode == 0:
            return None
        said = done.stderr.strip().splitlines()
        return (
            f"{said[-1] if said else 'import failed'} in {self._python}; pip install llama-cpp-python gguf, or name an "
            f"interpreter that has them with --peer-python"
        )

    def takes(self, condition: Condition) -> bool:
        return True

    def prepare(self, progress: Any) -> None:
        if self.gguf.exists():
            return
        what = f"making {self.gguf} (once)"
        progress(what, 0, 1)
        self.gguf.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.gguf.with_suffix(f".{os.getpid()}.tmp")
        job = {"task": "convert", "model": str(self._common.directory), "out": str(unfinished), "type": self._kind,
               "threads": self._common.threads}  # fmt: skip
        try:
            run_child([self._python, str(_SCRIPT), json.dumps(job)], Bounds(None, _CONVERTING))
            unfinished.rename(self.gguf)
        except CaseFailed as error:
            raise ConfigError(f"no GGUF could be made ({error}); give one with --gguf") from error
        finally:
            unfinished.unlink(missing_ok=True)
        progress(what, 1, 1)

    def run(self, condition: Condition, ids: Path) -> dict[str, Any]:
        resident = condition.memory is None
        job = {
            "task": "run",
            "gguf": str(self.gguf),
            "ids": str(ids),
            "prompt": condition.prompt,
            "warm": warm_tokens(condition),
            "threads": self._common.threads,
            "mmap": not resident,
            "repack": resident,
        }
        bounds = Bounds(condition.memory, self._common.timeout, files_to_drop(condition, (self.gguf,)))
        return {**run_child([self._python, str(_SCRIPT), json.dumps(job)], bounds), "gguf": self.gguf.name}

    def answer(self, ids: Path, tokens: int) -> dict[str, Any]:
        """A fresh process that answers the prompt in a .npy file of (1, prompt) token ids with so many tokens, greedily
        (`tiermoe.bench.llama.measure.answer`). CaseFailed where it does not."""
        job = {"task": "answer", "gguf": str(self.gguf), "ids": str(ids), "tokens": tokens,
               "threads": self._common.threads}  # fmt: skip
        return run_child([self._python, str(_SCRIPT), json.dumps(job)], Bounds(None, self._common.timeout))


def quantisation(directory: Path) -> str:
    """What people download: 'mxfp4' where the experts are published so, else 'q4_k_m', or 'q4_0' where the k-quants'
    blocks do not divide the hidden size: llama.cpp would then take other types for most matrices."""
    if is_mxfp4(directory):
        return "mxfp4"
    config = json.loads((directory / "config.json").read_text())
    return "q4_0" if config.get("hidden_size", _K_BLOCK) % _K_BLOCK else "q4_k_m"
