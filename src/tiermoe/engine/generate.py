"""Generation: one prompt in, its text piece by piece, and a report of what it took. Conversations, with the prefix
cache of their earlier turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from tiermoe.engine.detokenize import Detokenizer
from tiermoe.engine.engine import Engine, engine_of, transformers_model
from tiermoe.engine.expectation import OtherBudget
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.engine.speculation import Speculation
from tiermoe.errors import ModelError, PromptError, reason
from tiermoe.metrics import Metrics, PhaseMetrics, named
from tiermoe.model.chat.reader import AnswerReader
from tiermoe.model.chat.template import ChatTemplate, chat_template
from tiermoe.model.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Report(Metrics):
    """One answer and its metrics: `prefill` until the first token, `decode` after it."""

    text: str
    token_ids: list[int]
    load_s: float  # seconds of loading the model
    memory_budget_bytes: int
    preset: str
    bits: int
    dense_bits: int
    other_budgets: list[OtherBudget]
    """What other memory budgets would bring; empty if too little was decoded, nothing was missed, or the preset is
    lossy."""
    guessed_tokens: int = 0  # verified guesses at next tokens
    right_guesses: int = 0

    prompt_tokens = property(attrgetter("prefill.tokens"))
    ttft_s = property(attrgetter("prefill.seconds"))  # seconds to the first token

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        figures = named(
            self, "text", "token_ids", "prompt_tokens", "completion_tokens", "load_s", "ttft_s", "prefill_tok_s",
            "decode_tok_s", "hit_rate", "expert_hits", "expert_misses", "bytes_read", "bytes_read_also", "also_warning",
            "wait_s", "peak_memory_bytes", "memory_budget_bytes", "preset", "bits", "dense_bits", "kernels",
            "bound_tok_s", "prefetching", "displaced_share", "moved_weight_share", "guessed_tokens", "right_guesses",
        )  # fmt: skip
        return {**figures, "other_budgets": [asdict(each) for each in self.other_budgets]}

    @property
    def bound_fraction(self) -> float:
        """The share of the bound that was reached."""
        return self.decode_tok_s / self.bound_tok_s if self.bound_tok_s else 0.0


def encode_prompt(tokenizer: Tokenizer, prompt: str, chat: ChatTemplate | None = None) -> torch.Tensor:
    """Token ids (1, n) of a prompt: as a user's message in a chat template, if there is one. PromptError if the prompt
    is empty."""
    if not prompt.strip():
        raise PromptError("the prompt is empty; say something to answer")
    if chat is not None and chat.text:
        return encode_chat(tokenizer, chat, [{"role": "user", "content": prompt}])[0]
    return _encoded(prompt, "tokenizer", "choose another model", lambda: tokenizer.encode(prompt))


def encode_chat(tokenizer: Tokenizer, chat: ChatTemplate, messages: list[dict[str, str]]) -> tuple[torch.Tensor, str]:
    """Token ids (1, n) and text of a conversation in the model's chat template, ready for the assistant's turn.
    PromptError where the template refuses it."""
    if chat.form.refused:
        raise PromptError(
            f"the model's chat template is not used: {chat.form.refused}; 'tiermoe run --raw' does without"
        )
    text = ""

    def encode() -> list[int]:
        nonlocal text
        prompt = chat.prompt(messages)
        text = prompt.text
        return [token for piece in prompt.pieces for token in tokenizer.encode(piece, add_special_tokens=False)]

    said = "".join(message["content"] for message in messages)
    ids = _encoded(said, "chat template", "'tiermoe run --raw' does without", encode)
    return ids, text


def _encoded(text: str, what: str, instead: str, encode: Callable[[], list[int]]) -> torch.Tensor:
    """Token ids (1, n) that `encode` makes of a text. PromptError if it refuses the text, or makes none."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8 are halves of surrogate pairs in Python
        raise PromptError("the prompt is not valid UTF-8; convert it first") from None
    try:
        ids = encode()
    except Exception as error:  # templates and tokenizers raise errors of their own
        raise PromptError(f"the model's {what} does not take this prompt ({reason(error)}); {instead}") from error
    if not ids:
        raise PromptError("the prompt has no tokens; say something to answer")
    return torch.tensor([ids])


def check_length(prompt_tokens: int, max_tokens: int, longest: int | None, reserved: int | None = None) -> int:
    """How many tokens may be generated. PromptError if the prompt alone fills the model's context of `longest`
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
    tokenizer: Tokenizer,
    input_ids: torch.Tensor,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda _: None,
    load_s: float = 0.0,
    loop: RequestLoop | None = None,
    on_read: Callable[[int, int], None] = lambda done, total: None,
    speculation: Speculation | None = None,
    chat: ChatTemplate | None = None,
) -> Report:
    """Answers one prompt.

    model: a loaded transformers model, or an engine. input_ids: (1, n). on_text: called with each piece of text as it
    is ready. loop: an idle loop over the engine, whose prefix cache may hold a prefix of input_ids (a conversation's
    earlier turns); None: a new one, with this speculation. on_read: called after each chunk of the prompt, with its
    tokens that have run and all of them. PromptError, ModelError if the prompt cannot be answered; LoadError where
    an expert is damaged."""
    engine, guessed, right = engine_of(model), 0, 0
    unknown = int(input_ids.max())
    if unknown >= engine.config.vocab_size:
        raise ModelError(
            f"the tokenizer gives the token {unknown:,}, the model has {engine.config.vocab_size:,}: they do not "
            f"belong together; download both again"
        )
    prompt = input_ids.shape[1]
    sampling = replace(
        sampling, max_tokens=check_length(prompt, sampling.max_tokens, engine.longest_context, engine.plan.context)
    )
    answer = _Answer(engine, tokenizer, on_text)
    before = engine.snapshot()
    if model.config.is_encoder_decoder:
        _generate_by_transformers(transformers_model(model), input_ids, sampling, answer)
    else:
        loop = loop or request_loop(engine, tokenizer, speculation, chat)
        earlier = replace(loop.counts)
        shown = frozenset() if chat is None else chat.shown
        loop.add(Request(input_ids[0].tolist(), sampling, progress=True, special=shown))
        finish = None
        while finish is None:
            for piece in loop.step():
                if piece.error is not None:
                    raise piece.error
                if piece.read is not None:
                    on_read(piece.read, prompt)
                    continue
                answer.add(piece.tokens, piece.text)
                finish = piece.finish
        guessed = loop.counts.guessed_tokens - earlier.guessed_tokens
        right = loop.counts.right_guesses - earlier.right_guesses
    after = engine.snapshot()
    first = answer.first or after
    prefill, decode = first.since(before), after.since(first)
    prefill.tokens, decode.tokens = prompt, max(len(answer.token_ids) - 1, 0)
    report = Report(
        prefill=prefill,
        decode=decode,
        text="".join(answer.pieces),
        token_ids=answer.token_ids,
        load_s=load_s,
        memory_budget_bytes=engine.plan.budget,
        preset=engine.composition.name,
        bits=engine.settings.bits_used,
        dense_bits=engine.settings.dense_bits_used,
        other_budgets=engine.other_budgets(decode),
        guessed_tokens=guessed,
        right_guesses=right,
    )
    return engine.complete(report)


def request_loop(
    engine: Engine, tokenizer: Tokenizer, speculation: Speculation | None, chat: ChatTemplate | None
) -> RequestLoop:
    """A loop whose stop tokens are those of the model's configurations and of its chat template."""
    ends = engine.ends | (frozenset() if chat is None else chat.ends)
    return RequestLoop(engine, tokenizer, ends=ends, speculation=speculation)


class _Answer:
    """The answer so far. It is a streamer for transformers' `generate()`, too."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, on_text: Callable[[str], None]) -> None:
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.first: PhaseMetrics | None = None  # costs until the first token
        self._engine = engine
        self._on_text = on_text
        self._text = Detokenizer(tokenizer)
        self._begun = False

    def add(self, tokens: Sequence[int], text: str) -> None:
        if self.first is None:
            self.first = self._engine.snapshot()
        self.token_ids += tokens
        if text:
            self.pieces.append(text)
            self._on_text(text)

    def put(self, value: torch.Tensor) -> None:
        """Takes tokens from `generate()`, which begins with those that the decoder was given."""
        if self._begun:
            tokens = value.reshape(-1).tolist()
            self.add(tokens, "".join(map(self._text.add, tokens)))
        self._begun = True

    def end(self) -> None:
        self.add((), self._text.end())


def _generate_by_transformers(model: Any, input_ids: torch.Tensor, sampling: Sampling, answer: _Answer) -> None:
    """Answers with an encoder–decoder model, whose encoder takes the prompt."""
    options: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        names = ("temperature", "top_p", "top_k")
        options = {"do_sample": True, **{name: getattr(sampling, name) for name in names}}
    if sampling.seed is not None:
        from transformers import set_seed

        set_seed(sampling.seed)
    ids = input_ids.to(model.device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_tokens, streamer=answer, **options
    )


class Conversation:
    """Messages of a chat with `model` (or an engine), and the keys and values of their tokens.

    A reply runs only the tokens after the longest prefix that the prefix cache holds. Where a reply is interrupted or
    fails, its turn is dropped and the cache with it.

    system: the system prompt, "" for none; it may change between replies. Without a chat template the text begins with
    it. speculation: as in `RequestLoop`. chat: the tokenizer's chat template; None: its format is learned now."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        system: str = "",
        speculation: Speculation | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        self.system = system
        self._speculation = speculation
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat or chat_template(tokenizer)
        self._messages: list[dict[str, str]] = []
        self._loop: RequestLoop | None = None  # whose prefix cache holds the last turn

    def clear(self) -> None:
        """Forgets everything said, but not the system prompt."""
        self._messages.clear()
        self._loop = None

    def undo(self) -> None:
        """Takes the last message and its answer back."""
        del self._messages[-2:]

    def reply(
        self,
        text: str,
        sampling: Sampling,
        on_text: Callable[[str], None],
        on_read: Callable[[int, int], None] = lambda done, total: None,
        on_thought: Callable[[str], None] = lambda _: None,
    ) -> Report:
        """Answers `text` after everything said before. on_text, on_read: as in `generate`; on_thought: as on_text, of
        what the model thinks before. PromptError if the conversation outgrows the context."""
        messages = [*self._messages, {"role": "user", "content": text}]
        inside = False
        if self._chat.text:
            system = [{"role": "system", "content": self.system}] if self.system else []
            ids, prompt = encode_chat(self._tokenizer, self._chat, system + messages)
            inside = self._chat.form.opened(prompt)
        else:
            ids = encode_prompt(self._tokenizer, self.system + "".join(message["content"] for message in messages))
        loop = self._loop or request_loop(engine_of(self._model), self._tokenizer, self._speculation, self._chat)
        if ids.shape[1] >= loop.context:
            raise PromptError(
                f"the conversation has {ids.shape[1]:,} tokens, there is room for {loop.context:,} with the answer; "
                f"/clear it, or start with a larger --context"
            )
        self._loop = None  # until the reply is whole
        reader, said, thought = AnswerReader(self._chat.form, inside=inside), list[str](), list[str]()

        def read(more: str, last: bool = False) -> None:
            chunk = reader.add(more, last)
            for part, parts, tell in ((chunk.thought, thought, on_thought), (chunk.text, said, on_text)):
                if part:
                    parts.append(part)
                    tell(part)

        report = generate(
            self._model, self._tokenizer, ids, sampling, read, loop=loop, on_read=on_read, chat=self._chat
        )
        read("", last=True)
        self._loop = loop
        answer = {"role": "assistant", "content": "".join(said)}
        self._messages = [*messages, answer | ({"reasoning_content": "".join(thought)} if thought else {})]
        return report
