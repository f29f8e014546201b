"""Trimming a process changes what it holds, never what it computes or what can be imported later."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import sysconfig
import threading
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiermoe.process import deferred_imports, footprint

clean_library_pages = footprint._clean_library_pages  # before conftest.py replaces it
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Builds a tiny model of each family, or loads it, and answers with what it generates.
SCRIPT = r"""
import contextlib, json, sys
from pathlib import Path
from tiermoe.process import footprint
trimmed, folder = sys.argv[1] == "trimmed", Path(sys.argv[2])
if trimmed:
    for _ in range(2):
        footprint.prepare()
        footprint.before_modelling_code()
import torch
torch.set_num_threads(1)
given_back = [footprint.settle()] if trimmed else []
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, eos_token_id=None, pad_token_id=0, bos_token_id=1)
latent = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
              q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
              n_group=1, topk_group=1, num_key_value_heads=4)
families = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": latent, "deepseek_v3": latent,
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    "switch_transformers": dict(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4,
                                num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
                                decoder_start_token_id=0),
}
answer = {"tokens": {}}
around = footprint.without_meta_references if trimmed else contextlib.nullcontext
for family, options in families.items():
    kind = AutoModelForSeq2SeqLM if family == "switch_transformers" else AutoModelForCausalLM
    if not (folder / family).exists():
        torch.manual_seed(0)
        kind.from_config(AutoConfig.for_model(family, **(small | options))).save_pretrained(folder / family)
    with around():
        model = kind.from_pretrained(folder / family, experts_implementation="eager")
    if trimmed:
        given_back.append(footprint.settle())
    ids = torch.arange(2, 14).view(1, -1)
    greedy = model.generate(ids, max_new_tokens=6, do_sample=False)
    torch.manual_seed(1)
    sampled = model.generate(ids, max_new_tokens=6, do_sample=True, top_p=0.9)
    logits = model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})).logits
    answer["tokens"][family] = [greedy.tolist(), sampled.tolist(), logits.double().sum().item()]
from tiermoe.process import deferred_imports, postponed
answer["postponed"] = sorted(deferred_imports._states)
answer["sympy"] = "sympy" in sys.modules
answer["resident"], answer["peak"], answer["given_back"] = (
    footprint.resident_bytes(), footprint.peak_resident_bytes(), given_back)
exec(sys.argv[3] if len(sys.argv) > 3 else "")
print(json.dumps(answer))
"""

# Afterwards, in the trimmed process: everything that was postponed, used for real.
LATER = r"""
import gc, importlib, threading
from transformers import masking_utils
from transformers.distributed import sharding_utils, tensor_parallel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.integrations import eager_paged
stand_in = sharding_utils.DTensor
assert type(stand_in) is deferred_imports.StandIn and not isinstance(torch.zeros(1), stand_in)
import torch.distributed.tensor._dtensor_spec  # its package runs first, and imports it: not loaded twice
assert torch.distributed.tensor._dtensor_spec.DTensorSpec is torch.distributed.tensor._api.DTensorSpec
assert type(torch.distributed.tensor._dtensor_spec.__spec__.loader).__module__ == "_frozen_importlib_external"
assert sharding_utils.DTensor is torch.distributed.tensor.DTensor
compiled = []
def work():
    function = torch.compile(lambda x: torch.sin(x) + 1, backend="eager", fullgraph=True)
    compiled.append(function(torch.zeros(2)).tolist())
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert compiled == [[1.0, 1.0]] * 2, compiled
from torch.distributed.tensor import DTensor, Replicate, Shard, _dtensor_spec
import torch.distributed.checkpoint.hf_storage as storage
import torch.distributed.fsdp
from torch.distributed._composable.fsdp import fully_shard
from transformers.distributed import fsdp
assert fsdp.fully_shard is fully_shard
assert storage.HuggingFaceStorageReader and torch.distributed.fsdp.FullyShardedDataParallel
assert sharding_utils.DTensor is DTensor and tensor_parallel.Shard is Shard
assert _dtensor_spec.Shard is Shard
assert type(ALL_PARALLEL_STYLES["colwise"].output_layouts) is Shard
assert all(type(style) is not deferred_imports.StandInCall for style in gc.get_objects())
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert masking_utils.TransformGetItemToIndex is TransformGetItemToIndex
assert deferred_imports._states == {}, deferred_imports._states
for name in postponed.POSTPONED:
    module = importlib.import_module(name)
    assert type(module) is not deferred_imports.PostponedModule and module.__spec__.name == name
function = eager_paged.eager_paged_attention_forward
assert function._torchdynamo_disable
try:
    torch.compile(lambda x: function(x), backend="eager", fullgraph=True)(torch.zeros(1))
except torch._dynamo.exc.Unsupported as error:
    answer["disabled"] = "disable" in str(error)
exported = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
answer["exported"] = len(exported.graph.nodes) > 0
whole = torch.compile(model, backend="eager")
answer["compiled"] = torch.equal(whole(ids, decoder_input_ids=ids).logits, logits)
"""


def run(mode: str, folder: Path, later: str = "") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(folder), later], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def plain_and_trimmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    return run("plain", folder), run("trimmed", folder)


def test_every_family_generates_the_same(
    plain_and_trimmed: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    plain, trimmed = plain_and_trimmed
    assert len(plain["tokens"]) == 6
    assert trimmed["tokens"] == plain["tokens"]


def test_loading_and_generating_need_nothing_postponed(
    plain_and_trimmed: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    plain, trimmed = plain_and_trimmed
    assert plain["sympy"]
    assert not trimmed["sympy"]
    assert {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"} <= set(trimmed["postponed"])


@linux
def test_trimmed_process_is_smaller(plain_and_trimmed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, trimmed = plain_and_trimmed
    assert trimmed["given_back"][0] > 10 << 20  # torch's own start-up
    assert trimmed["resident"] <= trimmed["peak"]
    assert plain["peak"] - trimmed["peak"] > 60 << 20


@pytest.mark.long
def test_postponed_modules_work_later(tmp_path: Path) -> None:
    run("plain", tmp_path)  # writes the models
    trimmed = run("trimmed", tmp_path, LATER)  # whose own assertions have passed in there
    assert trimmed["disabled"]
    assert trimmed["exported"]
    assert trimmed["compiled"]


class ReadsSysconfig(Loader):
    """Runs a module as triton does: it reads a name of sysconfig's table."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["EXE"] = sysconfig.get_config_var("EXE")


def test_two_threads_never_see_sysconfig_half_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two postponed modules run at once while sysconfig's table is empty, as it is in a fresh process."""
    table: dict[str, str] = {}
    began, other_done = threading.Event(), threading.Event()

    def get_config_vars() -> dict[str, str]:
        """As Python 3.11's, for a first caller that is interrupted in the middle."""
        if not table:
            table["prefix"] = "/usr"
            began.set()
            other_done.wait(0.3)
            table["EXE"] = ""
        return table

    monkeypatch.setattr(sysconfig, "get_config_vars", get_config_vars)
    names = ("tiermoe_first", "tiermoe_second")
    for name in names:
        spec = importlib.machinery.ModuleSpec(name, deferred_imports._PostponingLoader(ReadsSysconfig()))
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
        assert spec.loader is not None
        spec.loader.exec_module(sys.modules[name])
    first = threading.Thread(target=deferred_imports.run, args=names[:1])
    first.start()
    assert began.wait(10)
    deferred_imports.run(names[1])
    other_done.set()
    first.join()
    assert [vars(sys.modules[name])["EXE"] for name in names] == ["", ""]


def test_tensors_with_data_are_filled_as_ever() -> None:
    import torch

    def fill() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.empty(4).normal_(), torch.empty(4).uniform_(), torch.arange(0, 4, 2)]

    expected = fill()
    with footprint.without_meta_references():
        for tensor, other in zip(fill(), expected, strict=True):
            assert torch.equal(tensor, other)
        with torch.device("meta"):
            weight = torch.nn.Embedding(3, 4).weight
    assert weight.is_meta
    assert weight.shape == (3, 4)


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
    before = footprint.resident_bytes()
    block = bytearray(b"x" * (64 << 20))
    assert footprint.resident_bytes() - before > 48 << 20
    assert footprint.peak_resident_bytes() >= footprint.resident_bytes()
    del block


def test_readings_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_status", lambda field: None)
    assert footprint.peak_resident_bytes() > 1 << 20
    assert footprint.resident_bytes() == footprint.peak_resident_bytes()
