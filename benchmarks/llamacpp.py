"""GGUF files of checkpoints for llama.cpp, by its own converter and quantiser.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    python -m benchmarks.llamacpp MODEL --converter llama_cpp_python-*/vendor/llama.cpp --type q4_k_m --out FILE.gguf

The converter runs in this interpreter, which has torch and transformers. llama.cpp quantises in the one that
--peer-python names, which needs llama-cpp-python and numpy. Prints one JSON object.

llama.cpp rounds the bounds between which YaRN blends its frequencies; gpt-oss is published with bounds that are not
rounded, so its logits differ by that from transformers'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.rounds import parser_of
from tiermoe.errors import TiermoeError
from tiermoe.lab.bench.child import CaseFailed, last_object

ROOT = Path(__file__).resolve().parents[1]
CONVERTED = ("f32", "bf16")  # types that the converter writes
QUANTISED = {"q4_0": "MOSTLY_Q4_0", "q4_k_m": "MOSTLY_Q4_K_M", "mxfp4": "MOSTLY_MXFP4_MOE"}
"""Types of files → llama.cpp's names. `mxfp4` keeps experts that are published so and puts the rest in 8 bits, as the
files do that people download."""


@dataclass(frozen=True)
class Peer:
    """llama.cpp in an interpreter of its own (`benchmarks.peer`)."""

    python: str  # the interpreter, which has llama-cpp-python and numpy
    threads: int

    def run(self, *words: object) -> dict[str, Any]:
        """The JSON object that one command of `benchmarks.peer` prints. CaseFailed where it fails."""
        command = [self.python, "-m", "benchmarks.peer", *map(str, words), "--threads", str(self.threads)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        if done.returncode:
            raise CaseFailed(f"{self.python} ended with code {done.returncode}; see above")
        return last_object(done.stdout)

    def quantise(self, gguf: Path, ftype: str, out: Path, pure: bool = False) -> None:
        """Writes a file in another type. ftype: llama.cpp's name, as MOSTLY_Q4_0; pure: every matrix in that type, as
        far as llama.cpp has it so."""
        self.run("quantise", gguf.resolve(), "--ftype", ftype, "--out", out.resolve(), *(["--pure"] if pure else []))

    def surprisals(
        self, gguf: Path, ids: npt.NDArray[np.int64], context: int, attention: str
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Of each window of `benchmarks.surprisals`: the sum of its surprisals in nats, and how many they are."""
        with tempfile.TemporaryDirectory() as folder:
            file, out = Path(folder) / "ids.npy", Path(folder) / "out.npz"
            np.save(file, ids)
            words = ("surprisals", gguf.resolve(), "--ids", file, "--out", out, "--context", context)
            self.run(*words, "--attention", attention)
            with np.load(out) as found:
                return found["sums"], found["counts"]


def convert(model: Path, converter: Path, kind: str, out: Path, peer: Peer) -> None:
    """Writes a checkpoint as a GGUF file of a type: of `CONVERTED` or `QUANTISED`. CaseFailed where llama.cpp's
    programs fail or are not there."""
    if not (converter / "convert_hf_to_gguf.py").is_file():
        raise CaseFailed(f"{converter} has no convert_hf_to_gguf.py; --help says where llama.cpp's converter is")
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        whole = Path(folder) / "whole.gguf"
        first = kind if kind in CONVERTED else "bf16"
        words = [str(converter.resolve()), str(model.resolve()), "--outtype", first, "--outfile", str(whole.resolve())]
        command = [sys.executable, "-m", "benchmarks.run_converter", *words]
        done = subprocess.run(command, stdout=sys.stderr, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if done.returncode:
            raise CaseFailed(f"llama.cpp's converter ended with code {done.returncode}; see above")
        if kind in QUANTISED:
            quantised = Path(folder) / "quantised.gguf"
            peer.quantise(whole, QUANTISED[kind], quantised)
            whole = quantised
        whole.rename(out)


def main() -> None:
    parser = parser_of(__doc__, measures=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--converter", type=Path, required=True, help="folder of convert_hf_to_gguf.py")
    parser.add_argument("--type", choices=[*CONVERTED, *QUANTISED], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    try:
        convert(args.model, args.converter, args.type, args.out, Peer(args.peer_python, args.threads))
    except TiermoeError as error:
        sys.exit(f"llamacpp: {error}")
    print(json.dumps({"out": str(args.out), "bytes": args.out.stat().st_size}))


if __name__ == "__main__":
    main()
