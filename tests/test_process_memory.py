"""Memory of the process: dropping pages changes what the process holds, never what it computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiermoe.platform import process_memory

clean_library_pages = process_memory.clean_library_pages  # before conftest.py replaces it
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = r"""
import json, sys
from pathlib import Path
from tiermoe.platform import process_memory
trimmed, folder = sys.argv[1] == "trimmed", Path(sys.argv[2])
given_back = []
if trimmed:
    for _ in range(2):
        process_memory.import_libraries()
        process_memory.import_modelling_code()
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
if not (folder / "model").exists():
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", vocab_size=64, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
        bos_token_id=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
model = AutoModelForCausalLM.from_pretrained(folder / "model", experts_implementation="eager")
if trimmed:
    given_back.append(process_memory.settle())
ids = torch.arange(2, 14).view(1, -1)
greedy = model.generate(ids, max_new_tokens=6, do_sample=False)
torch.manual_seed(1)
sampled = model.generate(ids, max_new_tokens=6, do_sample=True, top_p=0.9)
tokens = [greedy.tolist(), sampled.tolist(), model(ids).logits.double().sum().item()]
print(json.dumps({"tokens": tokens, "given_back": given_back, "resident": process_memory.resident_bytes(),
                  "peak": process_memory.peak_resident_bytes()}))
"""
"""Builds a tiny model, or loads it, and answers with what it generates."""


def run(mode: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, mode, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@linux
def test_a_trimmed_process_is_smaller_and_generates_the_same(tmp_path: Path) -> None:
    plain, trimmed = run("plain", tmp_path), run("trimmed", tmp_path)
    assert trimmed["tokens"] == plain["tokens"]
    assert max(trimmed["given_back"]) > 1 << 20
    assert trimmed["resident"] <= trimmed["peak"]
    assert plain["resident"] - trimmed["resident"] > 30 << 20


@linux
def test_dropped_ranges_hold_no_page_of_the_process() -> None:
    import torch  # noqa: F401

    ranges = clean_library_pages()
    assert ranges
    permissions = {}
    anonymous = {}
    for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
        fields = line.split()
        if len(fields) > 4 and "-" in fields[0]:
            start, end = (int(part, 16) for part in fields[0].split("-"))
            permissions[start, end] = fields[1]
        elif fields[0] == "Anonymous:":
            anonymous[start, end] = int(fields[1])
    for chosen in ranges:
        assert permissions[chosen] in ("r--p", "r-xp")
        assert anonymous[chosen] == 0
    assert "r--p" in {permissions[key] for key in anonymous if anonymous[key]}  # relocated data: left alone


@linux
def test_readings_follow_the_process() -> None:
    before = process_memory.resident_bytes()
    block = bytearray(b"x" * (64 << 20))
    assert process_memory.resident_bytes() - before > 48 << 20
    assert process_memory.peak_resident_bytes() >= process_memory.resident_bytes()
    del block


def test_readings_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    def without_proc(file: Any, *rest: Any, **options: Any) -> Any:
        if str(file).startswith("/proc"):
            raise FileNotFoundError(file)
        return real(file, *rest, **options)

    monkeypatch.setattr("builtins.open", without_proc)
    assert process_memory.peak_resident_bytes() > 1 << 20
    assert process_memory.resident_bytes() == process_memory.peak_resident_bytes()


def test_pages_are_freed_and_come_back_empty() -> None:
    import torch

    memory = process_memory.anonymous_memory(1 << 20, huge=False)
    memory[:] = b"x" * (1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    process_memory.free_pages(address + 1, (512 << 10) - 1)  # whole pages alone: not the first one
    assert memory[4096 : 512 << 10] == bytes((512 << 10) - 4096)
    assert memory[:4096] == b"x" * 4096
    assert memory[512 << 10 :] == b"x" * (512 << 10)
