"""One answer: prompt in, text out piece by piece, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import TextStreamer

from tiermoe.decide.phase_costs import PhaseCosts
from tiermoe.engine.engine import engine_of, transformers_model
from tiermoe.errors import ModelError, PromptError, reason
from tiermoe.generation.sampling import Sampler, Sampling
from tiermoe.generation.sequence import OnRead, Sequence, end_tokens
from tiermoe.memory.other_budgets import OtherBudget


@dataclass(slots=True)
class Report:
    """One answer and its costs; the object that `--json` prints. Times in seconds, rates in tokens per second.

    `hit_rate`: of the experts the router asked for, the share already there. `bound_tok_s`: what decoding could have
    reached, tokens / max(compute time, bytes read / measured bandwidth of the drive): docs/architecture.md, "Bounds"; 0
    where it read nothing.
    `prefetching`: whether measuring has turned it on or off, and its figures; empty where nothing has been decided.
    `displaced_choices`: of the experts of decoded tokens, the share that stood in for one that was not here, and
    `moved_weight` the share of the gate weight that moved with them (routing=cached). `other_budgets`: what other
    memory budgets would bring; empty where too little was decoded to say, nothing was missed, or the preset is lossy.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    load_s: float
    ttft_s: float
    prefill_tok_s: float
    decode_tok_s: float
    hit_rate: float
    expert_hits: int
    expert_misses: int
    bytes_read: int
    wait_s: float
    peak_memory_bytes: int
    memory_budget_bytes: int
    preset: str
    bits: int
    dense_bits: int
    bound_tok_s: float
    prefetching: str
    displaced_choices: float
    moved_weight: float
    other_budgets: list[OtherBudget]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def bound_fraction(self) -> float:
        """The share of the bound that was reached."""
        return self.decode_tok_s / self.bound_tok_s if self.bound_tok_s else 0.0


def encode_prompt(tokenizer: Any, prompt: str, raw: bool = False) -> torch.Tensor:
    """Token ids (1, n) of a prompt: as a user's message in the model's chat template where it has one, unless `raw`.
    PromptError where the prompt is empty."""
    if not prompt.strip():
        raise PromptError("the prompt is empty; say something to answer")
    _require_unicode(prompt)
    if not raw and getattr(tokenizer, "chat_template", None):
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    try:
        ids: torch.Tensor = tokenizer(prompt, return_tensors="pt").input_ids
    except Exception as error:
        raise _not_encoded("tokenizer", error) from error
    return _require_tokens(ids)


def _require_tokens(ids: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] == 0:
        raise PromptError("the prompt has no tokens; say something to answer")
    return ids


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    """Token ids (1, n) of a conversation in the model's chat template, ready for the assistant's turn. PromptError
    where the template does not take it."""
    _require_unicode("".join(message["content"] for message in messages))
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # a template refuses what it does not know with errors of its own
        raise _not_encoded("chat template", error) from error
    ids: torch.Tensor = encoded["input_ids"]
    return _require_tokens(ids)


def _require_unicode(text: str) -> None:
    """PromptError where a text was made of bytes that are no UTF-8: Python keeps such bytes as halves of pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError("the prompt is not valid UTF-8; convert it first") from None


def _not_encoded(what: str, error: Exception) -> PromptError:
    instead = "'tiermoe run --raw' does without" if what == "chat template" else "choose another model"
    return PromptError(f"the model's {what} does not take this prompt ({reason(error)}); {instead}")


def check_length(prompt_tokens: int, max_tokens: int, longest: int | None, reserved: int | None = None) -> int:
    """How many tokens may be generated. PromptError where the prompt alone fills the model's context of `longest`
    tokens (None: unbounded), or the `reserved` tokens that memory was set aside for."""
    if longest is not None and prompt_tokens >= longest:
        raise PromptError(
            f"the prompt has {prompt_tokens:,} tokens, the model's context holds {longest:,} with the answer; "
            f"shorten it"
        )
    if reserved is not None and prompt_tokens >= reserved:
        raise PromptError(
            f"the prompt has {prompt_tokens:,} tokens, memory is reserved for {reserved:,} with the answer; "
            f"shorten it or reserve more with --context"
        )
    return min([max_tokens, *(bound - prompt_tokens for bound in (longest, reserved) if bound is not None)])


def generate(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda _: None,
    load_s: float = 0.0,
    sequence: Sequence | None = None,
    on_read: OnRead = lambda done, total: None,
) -> Report:
    """Answers one prompt.

    model: a loaded transformers model, or an engine. input_ids: (1, n). on_text: called with each piece of text as it
    is ready. sequence: holds a beginning of input_ids already (a conversation's earlier turns). on_read: called as the
    prompt is read (`Sequence.read`). Raises LoadError where an expert is damaged.
    """
    engine = engine_of(model)
    unknown = int(input_ids.max())
    if unknown >= engine.config.vocab_size:
        raise ModelError(
            f"the tokenizer gives the token {unknown:,}, the model has {engine.config.vocab_size:,}: they do not "
            f"belong together; download both again"
        )
    max_tokens = check_length(input_ids.shape[1], sampling.max_tokens, engine.longest_context, engine.plan.context)
    streamer = _Streamer(tokenizer, on_text, engine)
    before = engine.snapshot()
    if model.config.is_encoder_decoder:
        _answer_by_transformers(transformers_model(model), input_ids, sampling, max_tokens, streamer)
    else:
        _answer(model, input_ids[0].tolist(), sampling, max_tokens, streamer, sequence, on_read)
    return _report(engine, streamer, before, engine.snapshot(), input_ids.shape[1], load_s)


def _answer(
    model: Any,
    ids: list[int],
    sampling: Sampling,
    max_tokens: int,
    streamer: _Streamer,
    sequence: Sequence | None,
    on_read: OnRead,
) -> None:
    """Our own loop: a step, a token, until an end token or enough of them."""
    engine, config = engine_of(model), model.generation_config
    alone = sequence is None
    sequence = Sequence(engine, engine.new_cache()) if sequence is None else sequence
    sampler, ends = Sampler(sampling, getattr(config, "repetition_penalty", None)), end_tokens(config)
    try:
        logits = sequence.read(ids, on_read)
        for count in range(1, max_tokens + 1):
            token = sampler.choose(logits, sequence.tokens, count - 1)
            streamer.put(torch.tensor([token]))
            if token in ends or count == max_tokens:
                break
            logits = sequence.add(token)
        streamer.end()
    finally:
        if alone:
            sequence.close()


def _answer_by_transformers(
    model: Any, input_ids: torch.Tensor, sampling: Sampling, max_tokens: int, streamer: _Streamer
) -> None:
    """An encoder–decoder model, whose prompt is another model's input."""
    if sampling.seed is not None:
        transformers.set_seed(sampling.seed)
    options: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    ids = input_ids.to(model.device)
    streamer.skip_start = True
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=streamer, **options)


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Passes text on, and notes the tokens and what had been when the `first` one came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], engine: Any) -> None:
        super().__init__(tokenizer, skip_prompt=False, skip_special_tokens=True)
        self.skip_start = False
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.first: PhaseCosts | None = None
        self._on_text = on_text
        self._engine = engine

    def put(self, value: torch.Tensor) -> None:
        if self.skip_start:  # generate() begins with what the decoder was given
            self.skip_start = False
            return
        if self.first is None:
            self.first = self._engine.snapshot()
        self.token_ids.extend(value.reshape(-1).tolist())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.pieces.append(text)
            self._on_text(text)


def _report(
    engine: Any, streamer: _Streamer, before: PhaseCosts, after: PhaseCosts, prompt: int, load_s: float
) -> Report:
    first = streamer.first or after
    whole, until_first, decode = after.since(before), first.since(before), after.since(first)
    decode.tokens = max(len(streamer.token_ids) - 1, 0)
    stats = engine.stats()
    return Report(
        text="".join(streamer.pieces),
        token_ids=streamer.token_ids,
        prompt_tokens=prompt,
        completion_tokens=len(streamer.token_ids),
        load_s=load_s,
        ttft_s=until_first.seconds,
        prefill_tok_s=prompt / until_first.seconds,
        decode_tok_s=decode.tok_s,
        hit_rate=whole.hit_rate,
        expert_hits=whole.counts.hits,
        expert_misses=whole.counts.misses,
        bytes_read=whole.bytes_read,
        wait_s=whole.wait_s,
        peak_memory_bytes=stats["peak_memory_bytes"],
        memory_budget_bytes=engine.plan.budget,
        preset=engine.composition.name,
        bits=engine.settings.bits_used,
        dense_bits=engine.settings.dense_bits_used,
        bound_tok_s=decode.bound_tok_s(engine.bandwidth) if decode.bytes_read else 0.0,
        prefetching=stats["prefetching"],
        displaced_choices=decode.displaced_share,
        moved_weight=decode.moved_share(len(engine.layers)),
        other_budgets=engine.other_budgets(decode),
    )
