"""The commands that work: what goes where, and what it says."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import tiermoe
from commands import Command
from patience import PATIENCE_S
from tiermoe import native
from tiermoe.cli.main import COMMANDS, app
from tiermoe.config import Settings
from tiermoe.engine import load
from tiermoe.formats.store import open_store
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.platform.machine import processors
from tiny import TEMPLATE, oracle, write

FAST = ("--memory", "4GiB", "--lanes", "1")
KEYS = {
    "text": str,
    "token_ids": list,
    "prompt_tokens": int,
    "completion_tokens": int,
    "load_s": float,
    "ttft_s": float,
    "prefill_tok_s": float,
    "decode_tok_s": float,
    "hit_rate": float,
    "expert_hits": int,
    "expert_misses": int,
    "bytes_read": int,
    "bytes_read_also": int,
    "also_warning": str,
    "wait_s": float,
    "peak_memory_bytes": int,
    "memory_budget_bytes": int,
    "preset": str,
    "bits": int,
    "dense_bits": int,
    "kernels": str,
    "bound_tok_s": float,
    "prefetching": str,
    "displaced_share": float,
    "moved_weight_share": float,
    "guessed_tokens": int,
    "right_guesses": int,
    "other_budgets": list,
}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(tiny)


# --- run ---


def test_run_prints_the_answer_and_nothing_else(tiermoe_: Command, tiny: Path, tokenizer: Any) -> None:
    ids = tokenizer("once upon", return_tensors="pt").input_ids
    told = oracle(tiny, "qwen3_moe", torch.float32).generate(ids, max_new_tokens=8, do_sample=False)
    wanted = tokenizer.decode(told[0, ids.shape[1] :], skip_special_tokens=True)
    outcome = tiermoe_("run", tiny, "once upon", *FAST, "--bits", "16", "--max-tokens", "8")
    assert (outcome.code, outcome.out) == (0, wanted + "\n")
    summary = (
        r"\[8 tokens, [\d.]+ tok/s, {}first token after [\d.]+ s, hit rate \d+%, .* read, kernels torch, "
        r"peak memory .* of 4 GiB\]"  # for experts in float32
    )
    assert re.fullmatch(summary.format("(.* allow, )?"), outcome.err.splitlines()[-1])
    words = ("run", tiny, "once upon", *FAST, "--bits", "16", "--max-tokens", "8", "--set", "prefetch=none")
    missing = tiermoe_(*words, "--cache", "40%").err.splitlines()[-1]
    assert re.fullmatch(summary.format(r"\d+% of the [\d.]+ that drive and computing allow, "), missing)
    assert re.fullmatch(
        summary.format(""), tiermoe_(*words).err.splitlines()[-1]
    )  # nothing is read: no drive bounds it
    piped = tiermoe_("run", tiny, "-", *FAST, "--bits", "16", "--max-tokens", "8", stdin="once upon")
    assert piped.out == wanted + "\n"


def test_the_first_run_packs_and_says_so(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    words = ("run", tiny, "hi", *FAST, "--max-tokens", "2", "--store", tmp_path / "store")
    first, second = tiermoe_(*words), tiermoe_(*words)
    packing, *_, took, loss, _ = first.err.splitlines()
    assert packing == "packing experts (once): 24 to do"
    assert re.fullmatch(
        r"packed [\d.]+ [KM]iB in \d+ s, once; later runs read it from " + re.escape(str(tmp_path / "store")), took
    )
    assert re.fullmatch(
        r"experts at 4 bits, other layers at 4 bits, lm_head at 6 bits; experts at so many bits cost "
        r"the shipped model 0\.6% of perplexity, as llama\.cpp's Q4_0 does \(docs/results\.md\); 'tiermoe eval "
        r"MODEL --text FILE' measures the loss in quality here",
        loss,
    )
    assert "pack" not in second.err
    assert first.out == second.out


def test_json_holds_what_the_run_did(tiermoe_: Command, tiny: Path, tokenizer: Any) -> None:
    outcome = tiermoe_("run", tiny, "once upon", *FAST, "--max-tokens", "8", "--cache", "50%", "--json")
    assert outcome.code == 0
    report = json.loads(outcome.out)
    assert {name: type(value) for name, value in report.items()} == KEYS
    assert report["text"] == tokenizer.decode(report["token_ids"], skip_special_tokens=True)
    assert (report["prompt_tokens"], report["completion_tokens"], len(report["token_ids"])) == (9, 8, 8)
    hits, misses = report["expert_hits"], report["expert_misses"]
    decoded = 7 * 3 * 3  # seven tokens, three layers, three experts: each is asked for once
    assert decoded + 9 <= hits + misses <= decoded + 24  # and the prompt asks for each expert of a layer at most once
    assert report["hit_rate"] == pytest.approx(hits / (hits + misses))
    assert report["bytes_read"] >= misses * 4096
    assert report["memory_budget_bytes"] == 4 << 30
    assert report["peak_memory_bytes"] > 0
    assert (report["bits"], report["dense_bits"], report["preset"]) == (4, 4, "default")
    assert all(report[name] > 0 for name in ("load_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "bound_tok_s"))


def test_one_token_has_no_decoding_rate(tiermoe_: Command, tiny: Path) -> None:
    report = json.loads(tiermoe_("run", tiny, "a", *FAST, "--max-tokens", "1", "--json").out)
    assert (report["completion_tokens"], report["decode_tok_s"], report["bound_tok_s"]) == (1, 0.0, 0.0)


def test_memory_is_reserved_for_the_prompt_and_the_answer_which_ends_there(
    tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    start = load.start

    def started(*arguments: Any) -> Any:
        engine = start(*arguments)
        reserved.append(engine.plan.context)
        return engine

    monkeypatch.setattr(load, "start", started)
    for words, context in (
        (("x" * 20, "--max-tokens", "5"), 25),
        (("x" * 250, "--max-tokens", "500"), 256),
        (("x" * 20, "--max-tokens", "50", "--context", "24"), 24),
    ):
        report = json.loads(tiermoe_("run", tiny, *words, *FAST, "--json").out)
        assert reserved.pop() == context
        assert report["prompt_tokens"] + report["completion_tokens"] <= context


def test_a_seed_repeats_an_answer(tiermoe_: Command, tiny: Path) -> None:
    words = ("run", tiny, "hi", *FAST, "--max-tokens", "12", "--temperature", "1.5", "--json", "--seed")
    one, again, other = (json.loads(tiermoe_(*words, seed).out)["token_ids"] for seed in (1, 1, 2))
    assert one == again != other


def test_a_long_prompt_runs_in_chunks(tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    monkeypatch.setattr("tiermoe.cli.run.prompt_progress", lambda: lambda done, total: read.append((done, total)))
    assert tiermoe_("run", tiny, "x" * 40, *FAST, "--chunk", "16", "--max-tokens", "3").code == 0
    assert read == [(16, 40), (32, 40), (40, 40)]


def test_memory_left_out_is_said(tiermoe_: Command, tiny: Path) -> None:
    outcome = tiermoe_("run", tiny, "hi", "--max-tokens", "1", "--lanes", "1")
    assert re.search(r"^memory: .*iB, 80% of the .*iB .*; --memory sets another bound$", outcome.err, re.MULTILINE)


def test_more_than_the_machine_has_is_said(tiermoe_: Command, tiny: Path) -> None:
    memory = r"^note: --memory 1000 TiB is more than the \S+ \w+ that this process can have"
    asked, threads = ("--memory", "1000TiB"), processors() + 1
    try:
        outcome = tiermoe_("run", tiny, "hi", *asked, "--threads", threads, "--max-tokens", "1", "--lanes", "1")
    finally:
        torch.set_num_threads(1)
    assert outcome.code == 0
    assert re.search(memory, outcome.err, re.MULTILINE)
    said = rf"^note: --threads {threads} is more than the {threads - 1} processors"
    assert re.search(said, outcome.err, re.MULTILINE)
    assert re.search(memory, tiermoe_("plan", tiny, *asked).err, re.MULTILINE)
    assert "more than" not in tiermoe_("plan", tiny, *asked, "--machine", "macbook-air-m2").err


def test_run_an_encoder_and_decoder(tiermoe_: Command, tmp_path: Path) -> None:
    directory = write(tmp_path / "switch", "switch_transformers", torch.float32)
    model = oracle(directory, "switch_transformers", torch.float32)
    outcome = tiermoe_("run", directory, "translate this", *FAST, "--bits", "16", "--max-tokens", "6", "--json")
    assert outcome.code == 0
    _, tokenizer = tiermoe.load(directory, memory="4GiB", bits=16, lanes=1)
    ids = tokenizer("translate this", return_tensors="pt").input_ids
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[0, 1:]
    assert json.loads(outcome.out)["token_ids"] == wanted.tolist()
    refused = tiermoe_("chat", directory, *FAST)
    assert "Switch Transformers models do not chat; use 'tiermoe run'" in refused.cause


def test_chat_templates(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    """The model's own, one from a file, and none of them where the prompt is raw."""
    directory, file, store = tmp_path / "templated", tmp_path / "own.jinja", ("--store", tmp_path / "store")
    directory.mkdir()
    for each in tiny.iterdir():
        (directory / each.name).symlink_to(each)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    file.write_text("{% for m in messages %}uu:{{ m.content }};{% endfor %}")
    named = ("--chat-template-file", file)
    for model, more, prompt in (
        (directory, (), "u:hi;a:"),
        (directory, ("--raw",), "hi"),
        (tiny, (*store, *named), "uu:hi;"),
        (tiny, store, "hi"),  # the store keeps the model's own
    ):
        outcome = tiermoe_("run", model, "hi", *FAST, *more, "--max-tokens", "2", "--json")
        assert json.loads(outcome.out)["prompt_tokens"] == len(prompt)
    assert "does nothing with --raw" in tiermoe_("run", tiny, "hi", *FAST, *named, "--raw").cause


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"{{ messages }}\n{% for m in %}", "line 2: "),
        (b"A text\nof two lines.", "none of its 2 lines names the variable messages"),
        (b"{{ messages }}\xff", "is no chat template"),
        (b"{{ messages }}" + b" " * (1 << 20), "larger than 1 MiB"),
        (b"{{ messages }}" + b"{% if x %}" * 3000, "nested too deeply"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_chat_template(
    tiermoe_: Command, tiny: Path, tmp_path: Path, content: bytes | None, cause: str
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    for words in (("run", tiny, "hi"), ("serve", tiny)):
        assert cause in tiermoe_(*words, "--chat-template-file", file).cause


# --- plan, show, pack ---


def test_plan(tiermoe_: Command, tiny: Path) -> None:
    outcome = tiermoe_("plan", tiny, "--memory", "2GiB", "--cache", "25%")
    assert outcome.code == 0
    rows = (
        "interpreter and libraries",
        "dense weights",
        "key/value cache",
        "activations",
        "staging",
        "expert cache",
        "in all",
    )
    assert all(row in outcome.out for row in rows)
    assert "experts at 4 bits, other layers at 4 (lm_head 6)" in " ".join(outcome.out.split())
    assert "note: the cache holds 6 experts, one token uses 9" in outcome.err
    data = json.loads(tiermoe_("plan", tiny, "--memory", "2GiB", "--cache", "25%", "--json").out)
    parts = ("interpreter", "dense", "kv_cache", "activations", "staging", "experts")
    assert data["total"] == sum(data[part] for part in parts) <= data["budget"] == 2 << 30
    assert (data["slots"], data["all_slots"], data["experts"]) == (6, 24, 6 * data["slot_bytes"])
    assert len(data["warnings"]) == 1


def test_pack_makes_what_a_run_needs(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    """Dense layers follow each of the precisions, in a recipe of its own; a run then packs nothing."""
    root = tmp_path / "store"
    assert tiermoe_("pack", tiny, "--bits", "4,8,16", "--out", root).code == 0
    store = open_store(root)
    assert set(store.dense) == {"4-lm_head6", "8"}
    assert all((root / f"dense-{key}.bin").exists() for key in store.dense)
    layers = store.dense["4-lm_head6"]["layers"]
    assert {name for name, entry in layers.items() if entry["error"] < 0.03} == {"lm_head"}
    assert layers["lm_head"]["encoding"].startswith("int6/")
    for bits in (4, 8, 16):
        ran = tiermoe_("run", tiny, "hi", *FAST, "--max-tokens", "2", "--bits", bits, "--store", root)
        assert "packing" not in ran.err


def test_plan_packs_nothing(tiermoe_: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERMOE_CACHE", str(tmp_path))
    assert tiermoe_("plan", tiny, "--memory", "2GiB").code == 0
    assert tiermoe_("show", tiny).code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]  # how fast this machine is


def test_pack_and_show(tiermoe_: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    outcome = tiermoe_("pack", tiny, "--bits", "4,16", "--dense-bits", "8", "--out", root)
    assert (outcome.code, outcome.out) == (0, f"{root}\n")
    assert re.search(r"^4 bits: .* KiB\npacked: experts at 4 bits, other layers at 8 bits;", outcome.err, re.MULTILINE)
    assert re.search(r"^16 bits: .* \(served from the checkpoint, no copy\)$", outcome.err, re.MULTILINE)

    monkeypatch.setenv("COLUMNS", "200")
    table = tiermoe_("show", root)
    assert table.code == 0
    assert all(
        word in table.out
        for word in ("Qwen3-MoE", "4-hqq", "(in the checkpoint)", "int4/", "dense layers at 8", "perplexity is")
    )

    facts = json.loads(tiermoe_("show", root, "--json").out)
    assert (facts["moe_layers"], facts["experts_a_layer"], facts["experts_a_token"]) == (3, 8, 3)
    by_key = {entry["precision"]: entry for entry in facts["precisions"]}
    assert set(by_key) == {"4-hqq", "16", "dense layers at 8"}
    assert by_key["16"]["in_place"]
    assert by_key["16"]["bytes"] == 24 * 3 * 64 * 32 * 4
    assert 0.02 < by_key["4-hqq"]["mean_error"] <= by_key["4-hqq"]["max_error"] < 0.2

    model = json.loads(tiermoe_("show", tiny, "--store", root, "--json").out)
    assert model["fingerprint"] == facts["fingerprint"]
    assert model["precisions"] == facts["precisions"]
    assert model["checkpoint"] == str(tiny)
    assert json.loads(tiermoe_("show", tiny, "--store", tmp_path / "none", "--json").out)["store"] == ""

    verified = tiermoe_("show", root, "--verify", "--json")
    result = json.loads(verified.out)
    assert result["damaged"] == []
    assert result["checked"] > 48
    assert f"all {result['checked']} checksums match" in verified.err


def test_pack_again_does_nothing_and_force_packs_anew(tiermoe_: Command, tiny: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    words = ("pack", tiny, "--bits", "4,8", "--out", root)
    first = tiermoe_(*words)
    file, other = (next(root.glob(f"experts-{key}-layer000*")) for key in ("4-hqq", "8"))
    content, packed_at = file.read_bytes(), file.stat().st_ino
    assert tiermoe_(*words).code == 0
    assert file.stat().st_ino == packed_at
    kept = other.stat().st_ino
    file.write_bytes(bytes(len(content)))
    forced = tiermoe_("pack", tiny, "--bits", "4", "--out", root, "--force")
    assert forced.out == first.out
    assert "packing experts (once): 24 to do" in forced.err
    assert file.read_bytes() == content
    assert other.stat().st_ino == kept  # the precisions that were not asked for stay
    assert tiermoe_("show", root, "--verify").code == 0


# --- the command itself ---


def test_every_command_has_the_defaults_of_the_settings() -> None:
    """Options of the engine are declared once: no command has a default of its own."""
    known = {field.name: field.default for field in dataclasses.fields(Settings)} | {"set": None}
    seen: dict[str, set[str]] = {}
    group: Any = typer.main.get_command(app)
    for name in COMMANDS:
        _, command, _ = group.resolve_command(None, [name])
        for option in command.params:
            setting = option.name.removesuffix("_")
            if setting in known and (name, setting) not in OF_THEIR_OWN:
                assert option.default == known[setting], (name, setting)
                assert option.help
                seen.setdefault(name, set()).add(setting)
    engine = {"run", "chat", "serve", "plan", "eval", "bench", "compare", "trace", "calibrate", "pack", "doctor"}
    assert {name for name, settings in seen.items() if "dense_bits" in settings} == engine
    assert seen["run"] == seen["chat"] == seen["serve"] == seen["plan"] | {"threads"} == seen["eval"] | {"context"}
    assert seen["run"] == known.keys() - {"batch", "warm"}


OF_THEIR_OWN = {
    ("bench", "memory"), ("bench", "batch"),  # several, for its cases
    ("pack", "bits"), ("simulate", "bits"), ("simulate", "cache"), ("simulate", "lanes"), ("simulate", "preset"),
}  # fmt: skip


def test_version_and_help(tiermoe_: Command) -> None:
    nothing_asked = tiermoe_()
    assert (nothing_asked.code, nothing_asked.err) == (2, "")
    assert "Usage" in nothing_asked.out
    kernels = ", ".join(native.instruction_sets()) or "none, torch computes, slowly"
    assert tiermoe_("--version").out == f"tiermoe {tiermoe.__version__} (kernels: {kernels})\n"
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        outcome = tiermoe_(*words)
        assert (outcome.code, "Usage" in outcome.out) == (0, True)


STARTS = """
import sys
from tiermoe.cli.main import main
heavy = {"torch", "transformers", "numpy", "tiermoe.lab.simulate"}
for words, more in (
    ("--version", ["pydantic"]), ("--help", ["pydantic"]), ("run --help", ["pydantic"]), ("presets", []),
    ("list --json", []),
):
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as ended:
        print(ended.code, *sys.modules.keys() & {*heavy, *more}, file=sys.stderr)
"""


def test_what_needs_no_model_starts_without_the_libraries() -> None:
    """Importing them takes seconds."""
    ended = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.stderr.splitlines() == ["0"] * 5


def test_the_shell_completes_commands_and_options(tiermoe_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TIERMOE_COMPLETE", "complete_bash")
    for typed, known in (("tiermoe pr", {"presets"}), ("tiermoe run --max", {"--max-tokens"})):
        words = typed.split()
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        assert set(tiermoe_().out.split()) == known


def test_a_reader_that_leaves_early(tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiermoe plan … | head -0`: quiet, no traceback."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return 1

    pointed: list[int] = []
    monkeypatch.setattr(os, "dup2", lambda _, target: pointed.append(target))
    monkeypatch.setattr(sys, "stdout", Gone())
    outcome = tiermoe_("plan", tiny, "--memory", "4GiB", "--json")
    assert (outcome.code, outcome.err, pointed) == (1, "", [1])  # what is left goes nowhere


def test_an_interrupted_command(tiermoe_: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiermoe.engine.generate.generate", interrupted)
    outcome = tiermoe_("run", tiny, "hi", *FAST)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


SWALLOWED = """
import signal, sys

class Swallows:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed", file=sys.stderr)

sys.meta_path.insert(0, Swallows)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs tests in the background
sys.argv = ["tiermoe", *sys.argv[1:]]
from tiermoe.cli.main import main
main()
"""


@pytest.mark.parametrize("words", [("run", "stories-7m", "hi"), ("pack", "nowhere"), ("bench", "nowhere")])
def test_an_interruption_while_libraries_are_imported(words: tuple[str, ...]) -> None:
    """What torch and numpy import of each other swallows it: the command went on, or ended in half a library."""
    ended = subprocess.run(
        [sys.executable, "-c", SWALLOWED, *words], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stderr) == (130, "")
