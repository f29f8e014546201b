"""`tiermoe.load` gives a transformers model: what people do with one works, and equals the plain model."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiermoe
from patience import PATIENCE_S, until
from tiny import oracle


@pytest.fixture(scope="module")
def ours(shipped: Path) -> Iterator[Any]:
    model, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=16, cache="25%")
    yield model, tokenizer
    model.tiermoe.close()


@pytest.fixture(scope="module")
def plain(shipped: Path) -> Any:
    return oracle(shipped, "qwen3_moe", torch.bfloat16)


@pytest.fixture(scope="module")
def in_float32(shipped: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The shipped model and the plain one in float32, where no other order of a sum lets a token win."""
    directory = tmp_path_factory.mktemp("float32")
    shutil.copytree(shipped, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    save_file({name: value.float() for name, value in weights.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    model, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="25%")
    yield model, oracle(directory, "qwen3_moe", torch.float32)
    model.tiermoe.close()


def test_right_padding_is_refused_by_name(ours: tuple[Any, Any]) -> None:
    model, tokenizer = ours
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids.repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with pytest.raises(tiermoe.ConfigError, match=r"padding elsewhere than on the left.*padding_side = 'left'"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static", "disable_compile": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ways_to_generate_equal_the_plain_model(
    in_float32: tuple[Any, Any], ours: tuple[Any, Any], options: dict[str, Any]
) -> None:
    inputs = ours[1]("The old man took his hat and", return_tensors="pt")
    results = []
    for each in in_float32:
        torch.manual_seed(5)
        results.append(each.generate(**inputs, max_new_tokens=16, **{"do_sample": False, **options}))
    assert torch.equal(*results)


def test_generate_goes_on_with_the_cache_that_it_gave_back(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = ours
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), **options)
    whole = model.generate(first.sequences, **options)
    lengths, step = [], model.tiermoe.step

    def counted(batch: Any, *rest: Any, **named: Any) -> Any:
        lengths.append(len(batch.rows[0].tokens))
        return step(batch, *rest, **named)

    monkeypatch.setattr(model.tiermoe, "step", counted)
    again = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert torch.equal(again.sequences, whole.sequences)
    assert lengths == [1, 1, 1, 1]  # the last token was given back uncomputed


def test_pipeline(ours: Any) -> None:
    from transformers import pipeline

    model, tokenizer = ours
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answer = generator("Once upon a time", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert answer.startswith("Once upon a time")
    assert len(answer) > len("Once upon a time")


def test_iterator_streamer(ours: Any) -> None:
    from transformers import TextIteratorStreamer

    model, tokenizer = ours
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=PATIENCE_S)
    options = {**inputs, "max_new_tokens": 10, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs={**options, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    whole = model.generate(**options)[0, inputs.input_ids.shape[1] :]
    assert text == tokenizer.decode(whole)


def test_loss_of_a_text_equals_the_plain_model(ours: Any, plain: Any) -> None:
    model, tokenizer = ours
    ids = tokenizer("There was once a king who had three sons.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids, labels=ids).loss == plain(ids, labels=ids).loss


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: model.cuda(),
        lambda model: model.type(torch.float64),
    ],
)
def test_a_model_cannot_be_moved_or_converted(ours: Any, move: Any) -> None:
    with pytest.raises(tiermoe.ConfigError, match=r"stays in bfloat16 on cpu.*device="):
        move(ours[0])


def test_a_model_is_moved_to_where_it_is(ours: Any) -> None:
    model, tokenizer = ours
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    before = model(**inputs).logits
    moved = model.to("cpu").to(torch.bfloat16).bfloat16().cpu().to(device="cpu", dtype=torch.bfloat16).eval()
    assert moved is model
    assert torch.equal(moved(**inputs).logits, before)


@pytest.mark.parametrize(
    ("damaged", "decoder", "named"),
    [
        ("model.layers.3.input_layernorm.weight", "auto", "layer 3"),
        ("model.layers.3.input_layernorm.weight", "generic", r"model\.layers\.3"),
        ("model.norm.weight", "auto", "weights are damaged"),
    ],
)
def test_weights_that_give_no_numbers_are_an_error(
    shipped: Path, tmp_path: Path, damaged: str, decoder: str, named: str
) -> None:
    shutil.copytree(shipped, tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    weights[damaged] = weights[damaged] * float("nan")
    save_file(weights, tmp_path / "damaged" / "model.safetensors")
    options = {"memory": "4GiB", "device": "cpu", "bits": 16, "cache": "50%", "decoder": decoder}
    with tiermoe.load(tmp_path / "damaged", **options) as (model, tokenizer):
        ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
        for _ in range(2):
            with pytest.raises(tiermoe.ModelError, match=f"logits are not finite numbers.*{named}"):
                tiermoe.generate(model, tokenizer, ids, tiermoe.Sampling(max_tokens=4))
        with pytest.raises(tiermoe.ModelError, match="logits are not finite numbers"):
            model.generate(ids, max_new_tokens=4)


def test_stats_add_up(shipped: Path) -> None:
    model, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache="10%", warm=False)
    model.generate(**tokenizer("A", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    stats = model.tiermoe.stats()
    assert stats["expert_hits"] + stats["expert_misses"] == 6 * 8 * 4
    loads = stats["expert_misses"] + stats["speculative_loads"]
    assert stats["expert_misses"] * stats["slot_bytes"] <= stats["bytes_read"] <= loads * stats["slot_bytes"]
    assert stats["bytes_read"] % stats["slot_bytes"] == 0
    assert stats["hit_rate"] == stats["expert_hits"] / (6 * 8 * 4)
    assert 0 < stats["peak_memory_bytes"] <= 4 << 30
    model.tiermoe.close()


def test_a_context_closes_the_model_and_one_without_experts_is_not_saved(shipped: Path, tmp_path: Path) -> None:
    with tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4) as (model, tokenizer):
        inputs = tokenizer("A b c", return_tensors="pt")
        model(**inputs)
        with pytest.raises(tiermoe.ConfigError, match="cannot be saved"):
            model.save_pretrained(tmp_path)
    model.tiermoe.close()
    with pytest.raises(tiermoe.TiermoeError, match="was closed"):
        model(**inputs)


@pytest.mark.parametrize("decoder", ["auto", "generic"])
def test_threads_that_share_a_model_get_what_each_gets_alone(shipped: Path, decoder: str) -> None:
    with tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache="25%", decoder=decoder) as (model, tokenizer):
        prompts = ["Once upon a time", "The old man took his hat and", "Two boys", "A"]

        def answer(prompt: str) -> list[int]:
            inputs = tokenizer(prompt, return_tensors="pt")
            tokens: list[int] = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0].tolist()
            return tokens

        alone = list(map(answer, prompts))
        found: dict[str, list[int]] = {}
        threads = [
            threading.Thread(target=lambda each=prompt: found.update({each: answer(each)}), daemon=True)
            for prompt in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [found.get(prompt) for prompt in prompts] == alone


def io_threads() -> set[str]:
    """The process's threads that read experts, native ones and Python's."""
    tasks = [path for path in Path("/proc/self/task").iterdir() if read_name(path).startswith("tiermoe-io")]
    return {path.name for path in tasks}


def read_name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended
        return ""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux counts descriptors there")
@pytest.mark.parametrize("options", [{"cache": "25%"}, {"cache": "25%", "decoder": "generic"}, {"bits": 4}], ids=str)
def test_a_model_that_is_dropped_gives_everything_back(shipped: Path, options: dict[str, Any]) -> None:
    gc.collect()
    before, opened = io_threads(), descriptors()
    model, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", **options)
    model.generate(**tokenizer("A", return_tensors="pt"), max_new_tokens=2)
    service = weakref.ref(model.tiermoe.service)
    assert io_threads() - before
    del model
    gc.collect()

    def given_back() -> bool:
        gc.collect()
        return not io_threads() - before and descriptors() <= opened and service() is None

    until(given_back)


def test_a_process_whose_last_model_is_dropped_ends_well(shipped: Path) -> None:
    program = f"""
import tiermoe
def answer():
    model, tokenizer = tiermoe.load({str(shipped)!r}, memory="4GiB", device="cpu")
    model.generate(**tokenizer("A", return_tensors="pt"), max_new_tokens=2)
answer()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_two_models_side_by_side(shipped: Path) -> None:
    first, tokenizer = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache="5%")
    second, _ = tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4)
    inputs = tokenizer("Two boys", return_tensors="pt")
    a, b = (model.generate(**inputs, max_new_tokens=8, do_sample=False) for model in (first, second))
    assert torch.equal(a, b)
    first.tiermoe.close()
    assert torch.equal(second.generate(**inputs, max_new_tokens=8, do_sample=False), b)
    second.tiermoe.close()
