"""Every input that cannot work: one line with the cause, the numbers and what to do next, and exit code 2."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OpenAIPrivacyFilterConfig

import tiermoe
from commands import Command
from sharded import edit_json
from tiermoe.model.families import REFUSED
from tiny import write, write_tokenizer

RUN = ("--memory", "4GiB", "--max-tokens", "4", "--lanes", "1")


@pytest.fixture
def model(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


# --- the model ---


def test_a_model_without_experts(tiermoe_: Command, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    said = r"is a 'llama' model without experts: tiermoe runs Mixture-of-Experts .* llama\.cpp run a dense"
    for command, *more in (("run", "hi"), ("plan",), ("pack",), ("show",), ("chat",)):
        assert re.search(said, tiermoe_(command, tmp_path, *more).cause)


def test_a_family_that_is_refused(tiermoe_: Command, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for model_type, why in REFUSED.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_experts": 8}))
        for command, *more in (("run", "hi"), ("plan",), ("show",)):
            cause = tiermoe_(command, tmp_path, *more).cause
            assert f"models of the family '{model_type}' are refused: {why}" in cause


def test_a_model_that_does_not_continue_a_text(tiermoe_: Command, tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe", torch.float32)
    OpenAIPrivacyFilterConfig().save_pretrained(tmp_path)
    cause = tiermoe_("run", tmp_path, "hi").cause
    assert "has no class that continues a text for the model type 'openai_privacy_filter'" in cause


def test_a_config_that_is_missing_or_torn(tiermoe_: Command, model: Path) -> None:
    config = model / "config.json"
    text = config.read_text()
    config.write_text(text[:50])
    assert re.search(r"config\.json cannot be read .*; download it again", tiermoe_("run", model, "hi").cause)
    config.write_text("{}")
    assert "names no model_type" in tiermoe_("run", model, "hi").cause
    config.write_text(json.dumps({**json.loads(text), "num_experts_per_tok": "two"}))
    assert re.search(r"transformers [\d.]+ cannot read .*config\.json", tiermoe_("plan", model).cause)
    config.unlink()
    assert "has no config.json: it is not a Hugging Face model directory" in tiermoe_("plan", model).cause


def test_a_tokenizer_that_is_missing_or_torn(tiermoe_: Command, model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    assert re.search(
        r"the tokenizer in .* cannot be loaded \(.*\); download it again", tiermoe_("run", model, "hi").cause
    )
    for file in model.glob("tokenizer*"):
        file.unlink()
    cause = tiermoe_("run", model, "hi").cause
    assert re.search(r"has no tokenizer \(none of tokenizer\.json, .*\); download it again with its tokenizer", cause)


def test_shards_that_are_missing_or_truncated(tiermoe_: Command, model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    with open(shard, "r+b") as handle:
        handle.truncate(shard.stat().st_size - 100)
    cause = tiermoe_("run", model, "hi").cause
    assert re.search(
        rf"{shard.name} is truncated: \S+ ends at byte [\d,]+, the file has [\d,]+; download it again", cause
    )
    shard.unlink()
    assert re.search(
        rf"1 of \d shards are missing in .*: {shard.name}; download them again", tiermoe_("plan", model).cause
    )
    for file in model.glob("*.safetensors*"):
        file.unlink()
    assert "holds no safetensors weights" in tiermoe_("pack", model).cause


def test_a_checkpoint_that_lacks_an_expert(tiermoe_: Command, model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[-1]
    shard.unlink()
    edit_json(
        model / "model.safetensors.index.json",
        lambda index: [
            index["weight_map"].pop(key) for key, file in [*index["weight_map"].items()] if file == shard.name
        ],
    )
    assert re.search(r"lacks .*weights.*, the first is \S+; download it again", tiermoe_("run", model, "hi").cause)


def test_a_config_of_another_checkpoint(tiermoe_: Command, model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(moe_intermediate_size=64))
    cause = tiermoe_("pack", model, "--out", model.parent / "out").cause
    assert "config.json and weights do not belong together" in cause


def test_a_model_that_is_not_there(tiermoe_: Command, model: Path, tmp_path: Path) -> None:
    assert "config.json is a file; name the directory" in tiermoe_("run", model / "config.json", "hi").cause
    assert re.search(
        r"nowhere does not exist; name a model directory, a GGUF file, or a hub id",
        tiermoe_("run", tmp_path / "nowhere", "hi").cause,
    )
    assert "nomodel does not exist" in tiermoe_("plan", "nomodel").cause
    offline = tiermoe_("run", "nobody/no-such-model", "hi").cause
    assert re.search("'nobody/no-such-model' cannot be downloaded: .*; .*, or name a model directory", offline)
    assert "neither a directory nor a valid hub id" in tiermoe_("show", "no body/b--ad..name").cause


# --- the budget and the options ---


def test_too_little_memory(tiermoe_: Command, sharded: Path) -> None:
    for words in (("run", sharded, "hi"), ("plan", sharded), ("chat", sharded)):
        cause = tiermoe_(*words, "--memory", "100MiB").cause
        assert re.search(
            r"100 MiB are too little: interpreter .*, dense .* need .* MiB\. Use --memory \d+MiB or more",
            cause,
        )
    assert re.search(r"cannot hold the 3 .*; use --cache \d+KiB", tiermoe_("plan", sharded, "--cache", "2%").cause)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--memory", "banana"), r"memory 'banana' is not a size; write it like 6GiB"),
        (("--memory", "0"), r"memory must be at least one byte"),
        (("--cache", "lots"), r"cache 'lots' is not a size|share; write it like"),
        (("--cache", "120%"), r"cache '120%' must be above 0% and at most 100%"),
        (("--memry", "6GiB"), r"no such option: --memry; did you mean --memory"),
        (("--xyzzy",), r"no such option: --xyzzy; see --help"),
        (("--bits", "5"), r"bits must be one of \(16, 8, 4, 3, 2\), got 5"),
        (("--bits", "3", "--quantizer", "linear"), r"linear makes no codes of 3 bits"),
        (("--bits", "four"), r"invalid value for '--bits': .*integer.*; see --help"),
        (("--dense-bits", "2"), r"dense_bits must be one of \(16, 8, 4\), got 2"),
        (("--quantizer", "awq"), r"quantizer must be one of nonlinear, hqq, .*, gptq, gptq-nonlinear, got 'awq'"),
        (("--temperature", "-1"), r"temperature must be 0 \(greedy\) or more, got -1"),
        (("--temperature", "nan"), r"temperature must be .*, got nan"),
        (("--top-p", "2"), r"top-p must be from 0, the likeliest token alone, to 1, got 2"),
        (("--max-tokens", "0"), r"max-tokens must be at least 1, got 0"),
        (("--chunk", "0"), r"chunk must be at least 1 token, got 0"),
        (("--lanes", "0"), r"lanes must be 1 to 64, got 0"),
        (("--threads", "0"), r"threads must be 1 to 1024, got 0"),
        (("--threads", "5000"), r"threads must be 1 to 1024, got 5000"),
        (("--context", "1"), r"context must be at least 2 tokens, got 1"),
        (("--context", "100000"), r"a context of 100,000 tokens is more than the 256 .*lower --context"),
        (("--device", "tpu"), r"device must be auto, cpu or cuda, got 'tpu'"),
        (("one", "too", "many"), r"unexpected extra argument.*; see --help"),
    ],
)
def test_wrong_options(words: tuple[str, ...], cause: str, tiermoe_: Command, sharded: Path) -> None:
    outcome = tiermoe_("run", sharded, "hi", *words)
    assert re.search(cause, outcome.cause)
    assert outcome.out == ""


def test_wrong_commands(tiermoe_: Command, sharded: Path) -> None:
    assert "no such command 'rnu'" in tiermoe_("rnu", sharded).cause
    assert re.search("missing argument '(?i:model)'; see --help", tiermoe_("run").cause)
    assert "bits 'a' are not numbers; write them like 4 or 4,2" in tiermoe_("pack", sharded, "--bits", "a").cause
    assert "bits must be of 16, 8, 4, 3, 2, got 5" in tiermoe_("pack", sharded, "--bits", "4,5").cause
    assert tiermoe_("rum").cause == "tiermoe: no such command 'rum'; did you mean 'run'?"
    assert tiermoe_("xyzzy").cause == "tiermoe: no such command 'xyzzy'; see --help"


def test_wrong_keys_of_the_python_interface(sharded: Path) -> None:
    with pytest.raises(tiermoe.ConfigError, match=r"unknown option 'memry'; did you mean 'memory'"):
        tiermoe.load(sharded, memry="6GiB")
    with pytest.raises(tiermoe.ConfigError, match=r"memory 'banana' is not a size"):
        tiermoe.plan(sharded, memory="banana")


# --- the prompt ---


def test_an_empty_prompt(tiermoe_: Command, sharded: Path) -> None:
    for words, stdin in (("", ""), ("  \n", ""), ("-", ""), ("-", "  \n")):
        assert "the prompt is empty; say something" in tiermoe_("run", sharded, words, *RUN, stdin=stdin).cause


def test_a_prompt_longer_than_the_context(tiermoe_: Command, sharded: Path) -> None:
    cause = tiermoe_("run", sharded, "x" * 300, *RUN).cause
    assert "the prompt has 300 tokens, the model's context holds 256 with the answer; shorten it" in cause
    cause = tiermoe_("run", sharded, "x" * 30, *RUN, "--context", "20").cause
    assert "the prompt has 30 tokens, memory is reserved for 20 with the answer; shorten it or reserve more" in cause


def test_a_conversation_longer_than_the_context(tiermoe_: Command, sharded: Path) -> None:
    words = ("--context", "40", "--temperature", "0", "--store", sharded.parent / "store")
    outcome = tiermoe_("chat", sharded, *RUN, *words, stdin="x" * 50 + "\nab\n")
    assert outcome.code == 0  # it goes on with the next line
    assert "the conversation has 50 tokens, there is room for 40 with the answer; /clear it, or start" in outcome.err
    assert outcome.out == "\n" + tiermoe_("chat", sharded, *RUN, *words, stdin="ab\n").out
