"""`tiermoe run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, summary
from tiermoe.cli.session import make_sampling, open_session


def run(
    model: opt.Model,
    prompt: Annotated[
        str, typer.Argument(help="What to answer; '-' reads it from standard input.", show_default=False)
    ],
    memory: opt.Memory = None,
    device: opt.Device = "auto",
    gpu_memory: opt.GpuMemory = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    seed: opt.Seed = None,
    bits: opt.Bits = 4,
    dense_bits: opt.DenseBits = 16,
    quantizer: opt.Quantizer = "hqq",
    cache: opt.Cache = None,
    chunk: opt.Chunk = 512,
    context: opt.Context = None,
    preset: opt.Preset = "default",
    set_: opt.Set = None,
    lanes: opt.Lanes = None,
    threads: opt.Threads = None,
    store: opt.StoreDir = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not put the prompt into the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Answer one prompt. The first run of a model packs its experts; later runs start from the store."""
    if prompt == "-":
        prompt = sys.stdin.read()
    engine_options = opt.given(
        memory=memory, bits=bits, dense_bits=dense_bits, quantizer=quantizer, cache=cache, chunk=chunk, context=context,
        preset=preset, set=opt.changes(set_), lanes=lanes, threads=threads, store=store, device=device,
        gpu_memory=gpu_memory,
    )  # fmt: skip
    encoded: dict[str, Any] = {}

    def context_for(tokenizer: Any, blueprint: Any) -> int:
        from tiermoe.runtime.generate import check_length, encode_prompt

        encoded["ids"] = ids = encode_prompt(tokenizer, prompt, raw)
        return int(ids.shape[1]) + check_length(ids.shape[1], max_tokens, blueprint.max_context(), context)

    sampling = make_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    session = open_session(model, engine_options, context_for)
    from tiermoe.runtime.generate import generate

    show = (lambda _: None) if as_json else (lambda text: print(text, end="", flush=True))
    report = generate(session.model, session.tokenizer, encoded["ids"], sampling, show, session.load_s)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        print(flush=True)
        note(summary(report))
    session.model.tiermoe.close()
