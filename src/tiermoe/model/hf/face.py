"""transformers' protocol in front of a decoder of our own: `forward`, and a `Cache` whose keys and values lie in slabs.

A call that the decoder answers never runs transformers' modelling code. A call that asks for more (attention weights,
hidden states, another cache, embeddings as input, a mask with holes) is left to that code: `Face.parse` returns
None."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tiermoe.batch import Batch, Kind, Row
from tiermoe.errors import ConfigError
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.hf.configs import CACHE_NAMES, cache_name, cache_of

_READ = {"input_ids", "attention_mask", "position_ids"}  # what rows are made of
_ANSWERED = {*_READ, *CACHE_NAMES, "use_cache", "logits_to_keep"}
_OUTPUT_CACHE = cache_name(MoeCausalLMOutputWithPast.__dataclass_fields__)
_COLLECTED = ("output_attentions", "output_hidden_states", "output_router_logits")


class SlabCache(Cache):  # type: ignore[misc]
    """A batch's sequences in a KV cache, as transformers sees them: all of one length, some of it padding on the left.

    new_cache: (sequences) → a KV cache for that many; called when the first tokens come. `padding`: tokens on the left
    that are none, of each sequence."""

    def __init__(self, new_cache: Callable[[int], KVCache]) -> None:
        super().__init__(layers=[])
        self._new_cache = new_cache
        self._kv: KVCache | None = None
        self.slabs: list[int] = []
        self.padding: list[int] = []
        self._length = 0

    @property
    def kv(self) -> KVCache:
        assert self._kv is not None
        return self._kv

    def begin(self, padding: list[int]) -> None:
        """Sequences that begin with so much padding each."""
        self._kv = self._new_cache(len(padding))
        self.slabs = [self._kv.open() for _ in padding]
        self.padding = padding

    def grew(self, tokens: int) -> None:
        """So many more tokens of each sequence have run."""
        self._length += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that have run, padding included."""
        return self._length

    @property
    def is_linear(self) -> list[bool]:
        """Of the layers: `generate()` asks whether the sequences have a length."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets so many tokens at the end, named by a negative number, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the number of tokens to forget as a negative number")
        length = max(self._length + tokens_to_remove, 0)
        for slab, padding in zip(self.slabs, self.padding, strict=True):
            self.kv.crop(slab, max(length - padding, 0))
        self._length = length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] is (beam search)."""
        chosen = beam_idx.tolist()
        self.kv.select(chosen)
        self.padding = [self.padding[i] for i in chosen]

    def reset(self) -> None:
        """Forgets all tokens."""
        self._kv, self.slabs, self.padding, self._length = None, [], [], 0


@dataclass(frozen=True, slots=True)
class ForwardArgs:
    """Arguments of a `forward` that the decoder answers."""

    batch: Batch
    cache: SlabCache
    columns: int  # tokens of each sequence, padding included
    keep: int  # logits are asked of so many last tokens; 0: of all
    returned: bool  # the cache is part of the answer


class Face:
    """Turns calls of a transformers model into steps. parameters: the names of its forward's parameters, in order."""

    def __init__(self, parameters: list[str], use_cache: bool, new_cache: Callable[[int], KVCache]) -> None:
        self._parameters = parameters
        self._cache_name = cache_name(parameters)
        self._use_cache = use_cache
        self._new_cache = new_cache

    def new_cache(self) -> SlabCache:
        """An empty cache for a batch of any size."""
        return SlabCache(self._new_cache)

    def parse(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> ForwardArgs | None:
        """The arguments of a call of `forward`; None if it asks for more than the decoder answers. ConfigError where
        it does so with a cache that only the decoder can read."""
        given = {**dict(zip(self._parameters, arguments, strict=False)), **named}
        given = {name: value for name, value in given.items() if value is not None}
        for name in given.keys() & _READ:
            if isinstance(given[name], Tensor):
                given[name] = given[name].cpu()
        parsed = self._plain(given)
        cache = cache_of(given)
        if parsed is None and isinstance(cache, SlabCache):
            ids, mask = given.get("input_ids"), given.get("attention_mask")
            if isinstance(ids, Tensor) and isinstance(mask, Tensor) and _padding(mask, ids, cache) is None:
                raise ConfigError(
                    "this attention_mask has padding elsewhere than on the left of the sequences, which tiermoe's own "
                    "decoder does not compute; pad with tokenizer.padding_side = 'left'"
                )
            raise ConfigError(
                "this call asks for what tiermoe's own decoder does not compute, with the decoder's key/value cache; "
                f"begin the sequence with {self._cache_name}=DynamicCache(config=model.config)"
            )
        return parsed

    def answer(self, forward: ForwardArgs, logits: Tensor) -> Any:
        """transformers' output object for the logits of a step, of each sequence's last token or of all."""
        forward.cache.grew(forward.columns)
        cache = forward.cache if forward.returned else None
        return MoeCausalLMOutputWithPast(logits=_laid_out(forward, logits), **{_OUTPUT_CACHE: cache})

    def _plain(self, given: dict[str, Any]) -> ForwardArgs | None:
        more = {name for name, value in given.items() if value is not False and not _is_empty(value)} - _ANSWERED
        ids, keep, cache = given.get("input_ids"), given.get("logits_to_keep", 0), cache_of(given)
        if more - {"return_dict"} or given.get("return_dict") is False or not isinstance(keep, int):
            return None
        if ids is None or ids.ndim != 2 or not ids.numel():
            return None
        if cache is not None and not isinstance(cache, SlabCache):
            return None
        cache = self.new_cache() if cache is None else cache
        padding = _padding(given.get("attention_mask"), ids, cache)
        if padding is None or not _usual(given.get("position_ids"), padding, ids, cache):
            return None
        if not cache.get_seq_length():
            cache.begin(padding)
        elif len(cache.slabs) != ids.shape[0]:
            return None
        returned = bool(given.get("use_cache", self._use_cache))
        return ForwardArgs(_batch_of(ids, cache), cache, ids.shape[1], keep, returned)


def _is_empty(value: Any) -> bool:
    """Whether it holds nothing, as what was made of pictures does where there are none."""
    return isinstance(value, dict) and not value


def takes_own_cache(generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether `generate()` may begin with a cache of ours: the default one, and nothing that the decoder lacks."""
    default = generation_config.cache_implementation in (None, "dynamic") and generation_config.use_cache is not False
    more = any(getattr(generation_config, name, False) or model_kwargs.get(name) for name in _COLLECTED)
    given = cache_of(model_kwargs) is not None or model_kwargs.get("inputs_embeds") is not None
    return default and not more and not given


class Front(Protocol):
    """What answers the calls of a transformers model."""

    def forward(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """transformers' output object."""

    def cache_for_generate(self, generation_config: Any, model_kwargs: dict[str, Any]) -> SlabCache | None:
        """The cache that `generate()` begins with; None: one of transformers'."""


def face_class(cls: type[Any]) -> type[Any]:
    """A subclass of a transformers model class whose calls are answered by a `Front`. Its method `serve` takes the
    front and the engine, which is the model's attribute `tiermoe` from then on."""

    signature = inspect.signature(cls.forward)

    def serve(self: Any, engine: Any, front: Front) -> None:
        self.tiermoe, self.front = engine, front

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        self.tiermoe.check_open()
        return self.front.forward(self, arguments, named)

    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any) -> None:
        cache = self.front.cache_for_generate(generation_config, model_kwargs)
        if cache is None:
            cls._prepare_cache_for_generation(self, generation_config, model_kwargs, *rest)
        else:
            model_kwargs[cache_name(signature.parameters)] = cache

    def save_pretrained(self: Any, *_: Any, **__: Any) -> None:
        raise ConfigError(
            "this model holds no experts, so it cannot be saved; its checkpoint and its expert store lie on disk"
        )

    def apply_to_tensors(self: Any, change: Callable[[Tensor], Tensor], *rest: Any) -> Any:
        engine = getattr(self, "tiermoe", None)
        if engine is None:  # it is being loaded
            return cls._apply(self, change, *rest)
        if not _keeps(change, engine.dtype, engine.device):
            dtype = str(engine.dtype).removeprefix("torch.")
            raise ConfigError(
                f"this model stays in {dtype} on {engine.device}, where its experts are; for another device load it "
                f"with tiermoe.load(..., device=...), for fewer bytes with bits=... and dense_bits=..."
            )
        return self

    forward.__signature__ = signature  # type: ignore[attr-defined]
    members = {
        "serve": serve,
        "forward": forward,
        "_prepare_cache_for_generation": prepare,
        "save_pretrained": save_pretrained,
        "_apply": apply_to_tensors,  # what to(), half(), cuda() and the like come to
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), members)


def _keeps(change: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a change of a module's tensors leaves them in their dtype on their device."""
    try:
        changed = change(torch.empty(0, dtype=dtype, device=device))
    except Exception:  # a device that this machine lacks
        return False
    return changed.dtype == dtype and changed.device.type == device.type


def face_base(cls: type[Any]) -> Any:
    """The transformers class that `face_class` made a subclass of."""
    return cls.__mro__[1]


def _padding(mask: Any, ids: Tensor, cache: SlabCache) -> list[int] | None:
    """Padding on the left of each sequence; None if the mask says anything else."""
    past = cache.get_seq_length()
    if mask is None:
        return cache.padding if past else [0] * ids.shape[0]
    if not isinstance(mask, Tensor) or mask.shape != (ids.shape[0], past + ids.shape[1]):
        return None
    first: list[int] = (mask.shape[1] - (mask != 0).sum(1)).tolist()
    if past:
        return cache.padding if first == cache.padding else None
    places = torch.arange(mask.shape[1])
    left = not any(first) or torch.equal(mask != 0, places >= torch.tensor(first)[:, None])
    return first if left and max(first) < mask.shape[1] else None


def _usual(positions: Any, padding: list[int], ids: Tensor, cache: SlabCache) -> bool:
    """Whether position ids, where they are given, are those that the tokens have anyway."""
    if positions is None:
        return True
    past = cache.get_seq_length()
    if positions.shape not in (ids.shape, (1, ids.shape[1])):
        return False
    expected = torch.arange(past, past + ids.shape[1]) - torch.tensor(padding)[:, None]
    return bool(((positions == expected) | (expected < 0)).all())


def _batch_of(ids: Tensor, cache: SlabCache) -> Batch:
    """One generated token of each sequence, or tokens that are given."""
    past = cache.get_seq_length()
    kind = Kind.DECODE if ids.shape[1] == 1 and past else Kind.PROMPT
    rows = []
    for slab, padding, tokens in zip(cache.slabs, cache.padding, ids.tolist(), strict=True):
        skipped = max(padding - past, 0)
        rows.append(Row(slab, max(past - padding, 0), tuple(tokens[skipped:]), kind))
    return Batch(tuple(rows))


def _laid_out(forward: ForwardArgs, logits: Tensor) -> Tensor:
    """(sequences, kept columns, vocabulary) of a step's logits; zeros where there is padding."""
    if forward.keep == 1:
        return logits[:, None]
    whole = logits.new_zeros((len(forward.batch.rows), forward.columns, logits.shape[-1]))
    begin = 0
    for index, row in enumerate(forward.batch.rows):
        whole[index, forward.columns - len(row.tokens) :] = logits[begin : begin + len(row.tokens)]
        begin += len(row.tokens)
    return whole[:, -forward.keep :] if forward.keep else whole
