"""Triton kernels: their cases in the interpreter, on a GPU where there is one, and what they compile to."""

import builtins
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiermoe.errors import ConfigError
from tiermoe.kernels.linear import linear_for

HERE = Path(__file__).parent
CASES = [str(HERE / f"triton_{of}cases.py") for of in ("", "grouped_", "neuron_", "attention_")]
DEVICES = ("interpreter", "gpu") if torch.cuda.is_available() else ("interpreter",)
CODINGS = ("INT8", "INT6", "INT4", "INT2", "TCQ2", "NL4", "NL3", "NL2")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: it exists for Linux alone (pip install triton)",
)


def run_python(*arguments: str, tmp_path: Path, **variables: str) -> str:
    """Runs in a process of its own: Triton reads its environment variables when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment = {**kept, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=HERE.parent,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_cases(device: str, marked: str, tmp_path: Path) -> None:
    variables = {"TRITON_INTERPRET": "1"} if device == "interpreter" else {}
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *CASES)
    output = run_python(*command, tmp_path=tmp_path, **variables)
    assert re.search(r"\d+ passed", output)
    assert "skipped" not in output


@needs_triton
@pytest.mark.parametrize("device", DEVICES)
def test_cases(device: str, tmp_path: Path) -> None:
    run_cases(device, "not long", tmp_path)


@needs_triton
@pytest.mark.long
def test_long_cases(tmp_path: Path) -> None:
    run_cases("interpreter", "long", tmp_path)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "codings", "kernels"),
    [
        ("90", ("INT4", "NL3"), 15 + 12),
        *(pytest.param(each, CODINGS, 57 + 12, marks=pytest.mark.long) for each in ("75", "89", "90")),
        pytest.param("80", CODINGS, 114 + 23, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_kernels_compile_for_gpus_without_atomics_and_spills(
    capability: str, codings: tuple[str, ...], kernels: int, tmp_path: Path
) -> None:
    command = (str(HERE / "triton_compiled.py"), capability, *codings)
    output = run_python(*command, tmp_path=tmp_path, TRITON_DUMP_PTXAS_LOG="1")
    assert output.count("compiled") == kernels
    told = re.findall(r"(\d+) bytes spill stores.*?^compiled \w+ \d+ (\w+) \S+ (\d+)", output, re.DOTALL | re.MULTILINE)
    assert len(told) == kernels
    for nbytes, dtype, tokens in told:
        without_tensor_cores = tokens != "1" and (capability == "75" or dtype == "fp32")
        assert int(nbytes) <= 16 or without_tensor_cores


@pytest.mark.parametrize("encoding", ["int8", "int4/cpu-avx512/g64", "nl3/cpu-avx512/g64"])
def test_missing_triton_is_named(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_triton(name, *rest):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return real_import(name, *rest)

    monkeypatch.delitem(sys.modules, "tiermoe.kernels.triton_kernels", raising=False)
    monkeypatch.delattr("tiermoe.kernels.triton_kernels", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_triton)
    with pytest.raises(ConfigError, match=re.escape("pip install tiermoe[cuda]")):
        linear_for(encoding, "cuda", torch.bfloat16)
