"""A transformers model in front of an engine: its experts are the engine's, its calls are steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tiermoe.engine.engine import Engine
from tiermoe.engine.fallback import SavedCache
from tiermoe.engine.forward_context import given_tokens, past_tokens
from tiermoe.engine.steps import is_finite, not_finite
from tiermoe.model.decoder import Decoder
from tiermoe.model.families.family import Family
from tiermoe.model.hf.configs import cache_of
from tiermoe.model.hf.experts import shells_of
from tiermoe.model.hf.face import Face, SlabCache, face_base, takes_own_cache
from tiermoe.model.hf.generic import pieces


def attach(engine: Engine, model: Any, family: Family) -> None:
    """Puts a model whose class `hf.face.face_class` made in front of its engine, until that is closed."""
    for shell, experts in zip(shells_of(model).values(), engine.layers, strict=True):
        shell.run_experts = experts
    if family.encodes:
        for undo in engine.context.follow_encoder(model, family.encoder_decoder):
            engine.before_closing(undo)
    use_cache = bool(getattr(model.config.get_text_config(), "use_cache", True))
    front = Front(engine, face_base(type(model)), use_cache, family)
    model.serve(engine, front)


class Front:
    """What a transformers model with an engine does when it is called: a step where the decoder answers, else the code
    of its own class, whose passes are told apart by their lengths.

    base: the class whose code runs where the engine's decoder is none of ours."""

    def __init__(self, engine: Engine, base: Any, use_cache: bool, family: Family) -> None:
        self._family = family
        self._engine = engine
        self._context = engine.context
        self._base = base
        self._parameters = [name for name in inspect.signature(base.forward).parameters if name != "self"]
        own = isinstance(engine.decoder, Decoder)
        self._face = Face(self._parameters, use_cache, engine.new_cache) if own else None

    def forward(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """transformers' output object."""
        asked = self._face.parse(arguments, named) if self._face is not None else None
        if asked is not None and self._face is not None:
            asked.cache.kv.reserve(max(row.end for row in asked.batch.rows))
            logits = self._engine.step(asked.batch, asked.cache.kv, every=asked.keep != 1)
            return self._face.answer(asked, logits)
        if self._family.encodes:  # its encoder and its decoder are passes
            output = self._base.forward(model, *arguments, **named)
        else:
            with self._context.lock:
                self._context.start()
                output = self._by_transformers(model, arguments, named)
                self._context.finish()
        found: Any = getattr(output, "logits", None)
        if found is not None and not is_finite(found[:, -1]):
            raise not_finite()
        return output

    def cache_for_generate(self, generation_config: Any, model_kwargs: dict[str, Any]) -> SlabCache | None:
        """The cache that `generate()` begins with; None: one of transformers'."""
        if self._face is None or not takes_own_cache(generation_config, model_kwargs):
            return None
        return self._face.new_cache()

    def _by_transformers(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {**dict(zip(self._parameters, arguments, strict=False)), **named}
        ids, rows, length = given_tokens((), given)
        cache = cache_of(given)
        if ids is not None and cache is not None:
            ends = pieces(past_tokens(given), length, self._engine.settings.chunk, self._family.continues)
            if len(ends) > 1:
                return self._in_chunks(model, given, ids, ends)
        self._context.begin_call(ids, rows, length, past_tokens(given), prompt=False)
        confident = self._engine.confident
        if confident is None or self._context.phase != "decode":
            return self._base.forward(model, **given)
        saved = SavedCache(cache)
        return confident.decode(lambda: self._base.forward(model, **given), lambda output: output.logits, saved.restore)

    def _in_chunks(self, model: Any, given: dict[str, Any], ids: Tensor, ends: list[tuple[int, int]]) -> Any:
        """A prompt, some of it at a time. The last output has the logits of all."""
        past = past_tokens(given)
        keep = given.get("logits_to_keep") or 0
        kept: list[Tensor] = []
        for begin, end in ends:
            part = {**given, "input_ids": ids[:, begin:end], "logits_to_keep": min(keep, end - begin)}
            if given.get("attention_mask") is not None and given["attention_mask"].ndim == 2:
                part["attention_mask"] = given["attention_mask"][:, : past + end]
            if given.get("position_ids") is not None:
                part["position_ids"] = given["position_ids"][..., begin:end]
            self._context.begin_call(ids[:, begin:end], ids.shape[0], end - begin, past + begin, prompt=True)
            output = self._base.forward(model, **part)
            kept.append(output.logits)
        if keep != 1:
            output.logits = torch.cat(kept, dim=1)[:, -keep:]
        return output
