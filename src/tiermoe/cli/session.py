"""A loaded model for a command: tokenizer and prompt first, so that the plan knows the context, then the engine, and
what guesses at next tokens (`--draft`)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.cli.output import note, progress_bar, starting
from tiermoe.config import Settings, format_size, settings
from tiermoe.platform import file_io
from tiermoe.platform.machine import most_memory, processors

if TYPE_CHECKING:
    from tiermoe.engine.engine import Engine
    from tiermoe.engine.sampling import Sampling
    from tiermoe.engine.speculation import Speculation
    from tiermoe.formats.gguf_file import GgufFile
    from tiermoe.model.chat.template import ChatTemplate
    from tiermoe.model.hf.blueprint import Blueprint


@dataclass(slots=True)
class Session:
    """A loaded model."""

    engine: Engine
    tokenizer: Any
    load_s: float  # seconds from the command's start of loading
    speculation: Speculation | None  # of request loops; None: no guesses
    chat: ChatTemplate


def read_ahead(model: str, options: dict[str, Any]) -> GgufFile | None:
    """The headers of a GGUF file, whose dense weights the drive begins to read into the page cache: it has nothing else
    to do while torch is imported. None for another model, and where options ask for weights that are packed. ModelError
    as `check_local` and `open_gguf`: before torch is imported."""
    from tiermoe.formats.gguf_file import is_gguf, open_gguf, read_whole
    from tiermoe.model.hf.local_models import check_local

    path = check_local(model)
    if path is None or not is_gguf(path):
        return None
    file = open_gguf(path)
    if {"bits", "dense_bits"} & options.keys():
        return None

    def read() -> None:
        for tensor in read_whole(file):
            with contextlib.suppress(OSError), open(tensor.file, "rb") as handle:
                file_io.read_ahead(handle.fileno(), tensor.offset, tensor.nbytes)

    threading.Thread(target=read, name="tiermoe-read-ahead", daemon=True).start()
    return file


def open_session(
    model: str,
    options: dict[str, Any],
    context_for: Callable[[Any, Blueprint, ChatTemplate], int | None],
    *,
    headers: GgufFile | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    served: bool = False,
    kv_memory: int | None = None,
    draft: str = "none",
    template: str | None = None,
) -> Session:
    """Loads `model` and prints the plan's warnings on standard error.

    context_for: called with tokenizer, blueprint and chat template before anything heavy happens; gives the tokens to
    reserve memory for if --context is not named, and may refuse the prompt. headers: of a GGUF file, if they are read
    already (`read_ahead`). on_progress: called with the progress of packing (task, done, total). served: memory is
    reserved for a server's steps; without a named batch 16 requests run at once. kv_memory: bytes of the KV cache that
    a server's requests share; None: as there is room for. draft: where guesses come from (`options.Draft`); the memory
    of a draft model, or of an MTP head, is a part of --memory. template: a chat template in place of the model's."""
    started = time.perf_counter()
    with starting():
        from tiermoe.cli.describe import loss_of, missing_kernels
        from tiermoe.engine.load import start
        from tiermoe.model.chat.template import chat_template
        from tiermoe.model.gguf.checkpoint import open_checkpoint
        from tiermoe.model.hf.blueprint import inspect_model
        from tiermoe.model.hf.hub import resolve_model
        from tiermoe.model.prepare_store import store_root
        from tiermoe.model.tokenizer import keep_tokenizer, load_tokenizer, read_tokenizer, tokenizer_origin
        from tiermoe.types import USUAL

        asked = settings(**options)
        directory = resolve_model(model)
        blueprint = inspect_model(directory, model, asked.store, None if headers is None else open_checkpoint(headers))
        if draft == MTP:
            from tiermoe.model.hf.mtp_blueprint import with_mtp

            blueprint = with_mtp(blueprint, asked.store)
        root = store_root(blueprint, asked.store)
        # a server's grammars need transformers'
        kept = None if served else read_tokenizer(root, tokenizer_origin(blueprint))
        tokenizer = kept or load_tokenizer(directory)
        if template is not None:
            tokenizer.chat_template = template
        kept_in = root if template is None else None
        chat = chat_template(tokenizer, kept_in)
        context = context_for(tokenizer, blueprint, chat)
        if context is not None and options.get("context") is None:
            options = {**options, "context": context}
    packed_before = _packed_bytes(root)
    times: list[float] = []
    with progress_bar() as progress:

        def packing(what: str, done: int, total: int) -> None:
            times[1:] = [time.perf_counter()]
            progress(what, done, total)
            if on_progress is not None:
                on_progress(what, done, total)

        asked, use = settings(**options), USUAL
        if served:
            from tiermoe.serve.batch_limits import as_served

            asked, use = as_served(blueprint, asked, "batch" in options, kv_memory, note)
        drafting = None
        if draft not in (LOOKUP, MTP, NONE):  # a model of their own
            drafting, asked = planned_draft(draft, tokenizer, blueprint, asked)
        engine = start(blueprint, asked, packing, use)
        speculation = speculation_of(draft, drafting, engine, packing)
    if kept is None and template is None:
        keep_tokenizer(root, tokenizer_origin(blueprint), tokenizer)
    chat = chat_template(tokenizer, kept_in)  # which is kept now that there is a store
    if times and (packed := _packed_bytes(root) - packed_before) > 0:
        took = f"packed {format_size(packed)} in {times[-1] - times[0]:.0f} s, once; later runs read it from {root}"
        note("\n".join(filter(None, (took, loss_of(engine, blueprint)))))
    plan = engine.plan
    if options.get("memory") is None:
        note(f"memory: {format_size(plan.budget)}, {plan.budget_source}; --memory sets another bound")
    slow = missing_kernels(blueprint.dtype) if engine.device.type == "cpu" else ""
    for warning in filter(None, (slow, *beyond_this_machine(asked), *plan.warnings, *engine.service.second.notes)):
        note(f"note: {warning}")
    return Session(engine, tokenizer, time.perf_counter() - started, speculation, chat)


def _packed_bytes(root: Path) -> int:
    """Bytes of the packed experts and dense layers in the folder of a store, which may not be there yet."""
    return sum(file.stat().st_size for kind in ("experts-*", "dense-*") for file in root.glob(kind))


def beyond_this_machine(asked: Settings) -> Iterator[str]:
    """Lines about memory or threads that the settings name and this machine does not have."""
    memory, cores = most_memory(), processors()
    if asked.memory is not None and asked.memory > memory:
        yield (
            f"--memory {format_size(asked.memory)} is more than the {format_size(memory)} that this process can have; "
            "what it takes beyond that is swapped, or the system ends it"
        )
    if asked.threads is not None and asked.threads > cores:
        yield (
            f"--threads {asked.threads} is more than the {cores} processors that this process may run on; threads then "
            "wait for each other"
        )


def make_sampling(**values: Any) -> Sampling:
    """A `Sampling` of these values. ConfigError where one is out of range."""
    with starting():
        from tiermoe.engine.sampling import Sampling

    return Sampling(**values)


def choose_sampling(blueprint: Blueprint, named: dict[str, Any], otherwise: Sampling) -> Sampling:
    """A `Sampling` for a model: values that are `named`, else those of the model's generation_config.json, else
    `otherwise`. Prints a line on standard error where the file makes the answer random."""
    from tiermoe.engine.sampling import sampling_for

    config = blueprint.generation_config()
    sampling = sampling_for(config, named, otherwise)
    if sampling != sampling_for(None, named, otherwise) and sampling.temperature and "temperature" not in named:
        note(
            f"sampling as the model's generation_config.json says: temperature {sampling.temperature:g}, top-p "
            f"{sampling.top_p:g}, top-k {sampling.top_k or 'all'}; --temperature 0 takes the likeliest tokens"
        )
    return sampling


LOOKUP, MTP, NONE = "lookup", "mtp", "none"


def planned_draft(
    draft: str, tokenizer: Any, blueprint: Blueprint, asked: Settings
) -> tuple[tuple[Blueprint, Settings], Settings]:
    """((blueprint, settings) of a draft model, settings of the model with the memory that it leaves). ModelError where
    its tokenizer is another, BudgetError if it does not fit whole."""
    from tiermoe.engine.budget import context_of
    from tiermoe.engine.drafts import check_vocabulary, plan_draft
    from tiermoe.model.hf.blueprint import inspect_model
    from tiermoe.model.hf.hub import resolve_model
    from tiermoe.model.tokenizer import load_tokenizer

    directory = resolve_model(draft)
    check_vocabulary(tokenizer.get_vocab(), load_tokenizer(directory).get_vocab(), draft)
    small = inspect_model(directory, draft, asked.store)
    longest = min(filter(None, (context_of(blueprint, asked), small.max_context())))
    own = Settings(
        memory=asked.memory, context=longest, batch=asked.batch, threads=asked.threads, store=asked.store,
        device=asked.device,
    )  # fmt: skip
    plan = plan_draft(small, own, draft)
    return (small, own), replace(asked, memory=plan.budget - (plan.total - plan.interpreter))


def speculation_of(
    draft: str,
    drafting: tuple[Blueprint, Settings] | None,
    engine: Engine,
    progress: Callable[[str, int, int], None],
) -> Speculation | None:
    """The `Speculation` of request loops over an engine; None: no guesses."""
    if draft == NONE:
        return None
    from tiermoe.engine.drafts import Lookup
    from tiermoe.engine.speculation import Speculation

    if draft == MTP:
        from tiermoe.engine.drafts import MtpDrafts, require_verification

        require_verification(engine)
        drafts = MtpDrafts(engine, Lookup())
        return Speculation(drafts, drafts.draft_batch)
    if drafting is None:
        return Speculation(Lookup())
    from tiermoe.engine.drafts import DraftModel
    from tiermoe.engine.load import start

    blueprint, settings = drafting
    assert settings.context is not None  # `planned_draft`
    small = start(blueprint, settings, progress)
    engine.before_closing(small.close)
    vocabulary = min(small.config.vocab_size, engine.config.vocab_size)
    return Speculation(DraftModel(small, vocabulary, settings.batch, settings.context))
