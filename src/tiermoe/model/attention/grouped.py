"""Grouped-query attention: heads of queries in groups that share keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.batch import Row
from tiermoe.errors import ModelError
from tiermoe.kernels import attention as native
from tiermoe.kernels import gpu
from tiermoe.kernels.attention import (
    Attended,
    FusedAttention,
    fused_attention,
    prompt_attention,
    prompt_workspace,
    takes_prompts,
)
from tiermoe.model.attention.base import (
    SINK_SCORE_BYTES,
    Attention,
    AttentionSizes,
    attend,
    scores_at_once,
    tempered,
)
from tiermoe.model.attention.indexers import BlockIndexer, BlockIndexerSizes, GroupIndexer, GroupIndexerSizes
from tiermoe.model.cache.kv import KVCache, LayerShape
from tiermoe.model.parts import Linear, Norm
from tiermoe.model.rotary import ApplyRope, rope_complex, rope_halves, rotary_at
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_FLOAT_BYTES = 4


def head_columns(config: Any) -> int:
    """Columns of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, slots=True)
class GroupedSizes(AttentionSizes):
    """The description of a `GroupedAttention`."""

    heads: int  # of queries
    kv_heads: int  # of keys and values, each for heads / kv_heads heads of queries
    columns: int  # of a head's query and key
    value_columns: int  # of its value
    window: int | None = None  # the last positions that a token attends to; None: all
    chunked: bool = False  # a token attends from a multiple of the window on (Llama 4)
    sinks: bool = False  # logits that join each softmax and have no value (gpt-oss)
    gated: bool = False  # each head has a gate after its query, by whose sigmoid its output is multiplied (Qwen3-Next)
    gate_apart: bool = False  # the gates are a projection of their own (AFMoE)
    rotary: int = 0
    indexer: BlockIndexerSizes | GroupIndexerSizes | None = None  # of sparse attention

    @property
    def shape(self) -> LayerShape:
        index = 0 if self.indexer is None else self.indexer.columns
        return LayerShape(self.kv_heads, self.columns, self.value_columns, self.window, index_columns=index)

    @property
    def token_columns(self) -> int:
        """Columns of a token's queries, and of their gates."""
        return self.heads * self.columns * (2 if self.gated or self.gate_apart else 1)

    @property
    def rotated_columns(self) -> int:
        return self.columns

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """The kernel's workspace. Without the kernel masks, scores if there are sinks, and copies: of a window in
        order, of keys and values of codes, on a GPU of those that heads share. Of sequences that are longer than an
        indexer chooses, what choosing and attending sparsely takes too."""
        if self.indexer is not None and load.context > self.indexer.most:
            kept = self.kv_heads * self.columns * (2 * load.itemsize + _FLOAT_BYTES * (load.kv_bits == 8))
            chosen = self.indexer.most * (2 * kept + self.heads * 3 * _FLOAT_BYTES)
            return self.indexer.nbytes(load) + chosen + replace(self, indexer=None).prompt_bytes(load, dtype)
        if load.on_cpu and takes_prompts(dtype, self.columns, self.value_columns):
            return prompt_workspace(load.threads, self.columns, self.value_columns)
        tokens = min(load.chunk, load.context)
        masks = tokens * load.context * (3 + load.itemsize)
        scores = scores_at_once(self.heads, tokens, load.context) * SINK_SCORE_BYTES if self.sinks else 0
        room = self.shape.room(load.context, tokens)
        unrolled = 2 * room * self.shape.row_bytes(load.itemsize) if room < load.context else 0
        floats = {8: 1, 4: 3}.get(load.kv_bits)  # 4 bits: with the halves of a Hadamard transform
        decoded = room * self.shape.row_bytes(load.itemsize + floats * _FLOAT_BYTES) if floats else 0
        repeated = 0 if load.on_cpu else room * self.heads * (self.columns + self.value_columns) * load.itemsize
        return masks + scores + unrolled + decoded + repeated

    def fused_bytes(self, load: Workload, hidden: int) -> int:
        queries, values = self.heads * self.columns, self.heads * self.value_columns
        gates = values if self.gated else 0
        projected = queries + gates + self.kv_heads * (self.columns + self.value_columns) + values
        widest = max(hidden, queries, values)
        attention = Attended(self.heads, self.kv_heads, self.columns, self.value_columns, projected, widest)
        return attention.workspace(load.tokens, self.window or load.context, load.threads, load.sequences)


def grouped(
    w: Scope,
    config: Any,
    index: int,
    *,
    kv_heads: int | None = None,
    value_columns: int | None = None,
    window: int | None = None,
    chunked: bool = False,
    rotary: int | None = None,
    rope: ApplyRope = rope_halves,
    scale: float | None = None,
    norms: tuple[str, str] | None = None,
    plain_norms: bool = False,
    norm_all_heads: bool = False,
    norms_rotated: bool = False,
    norm_values: bool = False,
    keys_are_values: bool = False,
    sinks: bool = False,
    gated: bool = False,
    gate: str | None = None,
    output: str = "o_proj",
    clip: float | None = None,
    value_scale: float = 1.0,
    indexer: BlockIndexer | GroupIndexer | None = None,
) -> GroupedAttention:
    """The grouped attention of layer `index` with the weights of `w` ('self_attn'). Heads and their columns are the
    config's, of the layer if layers differ.

    kv_heads, value_columns: where they are not the config's. window, chunked, sinks, gated: of `GroupedSizes`. rotary:
    which of the decoder's rotary embeddings, None: that of the layer's kind. rope: how it rotates. scale: of the
    scores, None: by the root of a head's columns. norms: names of the norms of queries and keys, which not every layer
    has; plain_norms: norms without weights. norm_all_heads, norms_rotated, clip, value_scale: of `GroupedAttention`.
    norm_values: values have a norm without a weight. keys_are_values: no matrix makes values. gate: name of the matrix
    of the heads' gates. output: of the output projection. indexer: chooses the positions. ModelError for a window below
    0."""
    if window is not None and window < 0:
        raise ModelError(f"the config says that attention sees {window} tokens; download the model again")
    own = config.of_layer(index)
    heads, columns = own.num_attention_heads, head_columns(own)
    kv_heads = own.num_key_value_heads if kv_heads is None else kv_heads
    sizes = GroupedSizes(
        heads,
        kv_heads,
        columns,
        columns if value_columns is None else value_columns,
        window=window or None,
        chunked=chunked,
        sinks=sinks,
        gated=gated,
        gate_apart=gate is not None,
        rotary=rotary_at(config, index) if rotary is None else rotary,
        indexer=None if indexer is None else indexer.sizes,
    )
    normed = (heads * columns, kv_heads * columns) if norm_all_heads else (columns, columns)
    query_norm, key_norm = (
        [w.norm(name, size) for name, size in zip(norms, normed, strict=True)]
        if norms is not None and w.has(norms[0])
        else [w.norm_without_weight(columns) if plain_norms else None] * 2
    )
    return GroupedAttention(
        sizes=sizes,
        query=w.linear("q_proj", heads * columns * (2 if gated else 1), w.hidden),
        key=w.linear("k_proj", kv_heads * columns, w.hidden),
        value=None if keys_are_values else w.linear("v_proj", kv_heads * sizes.value_columns, w.hidden),
        output=w.linear(output, w.hidden, heads * sizes.value_columns),
        scale=columns**-0.5 if scale is None else scale,
        apply_rope=rope,
        query_norm=query_norm,
        key_norm=key_norm,
        norm_all_heads=norm_all_heads,
        norms_rotated=norms_rotated,
        value_norm=w.norm_without_weight(columns) if norm_values else None,
        sinks=w.tensor("sinks", heads).float() if sinks else None,
        clip=clip,
        gate=None if gate is None else w.linear(gate, heads * columns, w.hidden),
        value_scale=value_scale,
    )


def window_at(config: Any, index: int) -> int | None:
    """The window of layer `index` if config.layer_types says that it has one."""
    return getattr(config, "sliding_window", None) if config.layer_types[index] == "sliding_attention" else None


@dataclass(frozen=True, slots=True)
class GroupedAttention(Attention):
    """Projections, norms of queries and keys, rotary embedding, attention over a window or over all positions before,
    output projection."""

    sizes: GroupedSizes
    query: Linear  # hidden → heads * columns, each head's gate after its query
    key: Linear  # hidden → kv_heads * columns
    value: Linear | None  # None: values are the outputs of `key` before norm and rotary embedding (Gemma 4)
    output: Linear  # heads * value columns → hidden
    scale: float  # of the scores
    apply_rope: ApplyRope
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norm_all_heads: bool = False  # norms are over all heads together, not over each head
    norms_rotated: bool = False  # norms come after the rotary embedding, not before it (Hunyuan)
    value_norm: Norm | None = None  # over each head (Gemma 4)
    sinks: Tensor | None = None  # float32 (heads)
    clip: float | None = None  # bound of the projections' outputs (OLMoE)
    gate: Linear | None = None  # hidden → heads * columns, where the gates are apart
    value_scale: float = 1.0  # of what is attended to: the cache has values as they are

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        sizes = self.sizes
        query, gates = self._gates(x)
        query = self._heads(query, sizes.heads, self.query_norm, step)
        keys = self.key(x)
        value = self._clipped(keys if self.value is None else self.value(x))
        value = value.view(-1, sizes.kv_heads, sizes.value_columns)
        value = value if self.value_norm is None else self.value_norm(value)
        key = self._heads(keys, sizes.kv_heads, self.key_norm, step)
        query = tempered(query, step.temperatures[sizes.rotary])
        if step.place is not None and self.by_place:
            attended = self._by_place(query[0], key[0], value[0], layer, step.cache, step.place)[None]
        else:
            attended = self._by_rows(query, key, value, layer, step)
        attended = attended.flatten(1) if self.value_scale == 1 else attended.flatten(1) * self.value_scale
        return self.output(attended if gates is None else attended * torch.sigmoid(gates))

    def _by_rows(self, query: Tensor, key: Tensor, value: Tensor, layer: int, step: Step) -> Tensor:
        """Each row's tokens over its sequence, (T, heads, value columns)."""
        sizes, parts = self.sizes, list[Tensor]()
        for span in step.spans if self._by_kernel(layer, step.cache) else step.apart:
            tokens = slice(span.begin, span.end)
            step.cache.write(layer, span.row, key[tokens], value[tokens])
            row, whole = span.row, span.end
            if step.chosen is not None and sizes.indexer is not None:  # the first tokens attend to all
                whole = min(max(span.begin + sizes.indexer.most - row.first, span.begin), span.end)
                row = replace(row, tokens=row.tokens[: whole - span.begin])
            if whole > span.begin:
                parts.append(self._attended(query[span.begin : whole], layer, row, step.cache))
            if step.chosen is not None and whole < span.end:
                some = slice(whole, span.end)
                parts.append(self._sparsely(query[some], layer, row.slab, step.cache, step.chosen[some]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _by_place(self, query: Tensor, key: Tensor, value: Tensor, layer: int, cache: KVCache, place: Tensor) -> Tensor:
        """One token's query (heads, columns), key and value (kv heads, columns) → (heads, value columns)."""
        keys, values, kernels = cache.keys[layer], cache.values[layer], gpu.triton("triton_attention")
        kernels.write_row((keys, values), (key, value), place)
        sizes = self.sizes
        attended: Tensor = kernels.attend_row(
            query, keys, values, place, self.scale, sizes.window, sizes.chunked, self.sinks
        )
        return attended

    @property
    def by_place(self) -> bool:
        return self.sizes.indexer is None

    @property
    def batch_invariant(self) -> bool:
        matrices = (self.query, self.key, self.value, self.output, self.gate)
        return all(each is None or each.batch_invariant for each in matrices)

    @property
    def chunk_invariant(self) -> bool:
        return takes_prompts(torch.bfloat16, self.sizes.columns, self.sizes.value_columns)

    def fused(
        self, before: Norm | None, after: Norm | None, rotary_columns: int, multiplier: float
    ) -> FusedAttention | None:
        if self.clip is not None or self.value is None or self.value_norm is not None or self.gate is not None:
            return None
        return fused_attention(
            native.GroupedAttention(
                query=self.query.packed,
                key=self.key.packed,
                value=self.value.packed,
                output=self.output.packed,
                norm_before=None if before is None else before.native,
                norm_after=None if after is None else after.native,
                head_columns=self.sizes.columns,
                value_columns=self.sizes.value_columns,
                rotary_columns=rotary_columns,
                scale=self.scale,
                norm_query=None if self.query_norm is None else self.query_norm.native,
                norm_key=None if self.key_norm is None else self.key_norm.native,
                interleaved=self.apply_rope is not rope_halves,
                rotated_at_once=self.apply_rope is rope_complex,
                window=self.sizes.window or 0,
                chunked=self.sizes.chunked,
                sinks=self.sinks,
                gated=self.sizes.gated,
                residual_multiplier=multiplier * self.value_scale,
                norms_rotated=self.norms_rotated,
            )
        )

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The queries of x before norm and rotary embedding, and the gates, (T, heads * columns) each."""
        projected = self.query(x)
        if not self.sizes.gated:
            return projected, None if self.gate is None else self.gate(x)
        query, gates = projected.view(-1, self.sizes.heads, 2 * self.sizes.columns).chunk(2, dim=-1)
        return query.flatten(1), gates.flatten(1)

    def _by_kernel(self, layer: int, cache: KVCache) -> bool:
        """Whether the native kernel attends over a layer of this cache."""
        return layer in cache.native and takes_prompts(cache.dtype, self.sizes.columns, self.sizes.value_columns)

    def _attended(self, query: Tensor, layer: int, row: Row, cache: KVCache) -> Tensor:
        """A row's queries over its sequence's cache, by the native kernel if there is one."""
        sizes = self.sizes
        if self._by_kernel(layer, cache):
            return prompt_attention(
                query, cache.native[layer], row.slab, row.first, self.scale, sizes.window, self.sinks,
                chunked=sizes.chunked,
            )  # fmt: skip
        if sizes.chunked and sizes.window:
            return self._in_chunks(query, layer, row, sizes.window, cache)
        keys, values = cache.read(layer, row, sizes.window)
        return attend(query, keys, values, self.scale, sizes.window, self.sinks)

    def _sparsely(self, query: Tensor, layer: int, slab: int, cache: KVCache, chosen: Tensor) -> Tensor:
        """A sequence's queries (T, heads, columns) over the positions that are chosen (T, most), or (T, groups, most),
        for each token, -1: none. One by one, so that no token depends on another."""
        result = torch.empty_like(query)
        groups = chosen if chosen.dim() == 3 else chosen[:, None]
        for token in range(len(query)):
            some = slice(token, token + 1)
            keys, values = cache.read_chosen(layer, slab, groups[some].clamp_min(0))
            mask = (groups[some] >= 0)[:, :, None]
            attended = F.scaled_dot_product_attention(
                query[some, :, None],
                keys,
                values,
                attn_mask=mask if mask.shape[1] == 1 else mask.repeat_interleave(query.shape[1] // mask.shape[1], 1),
                scale=self.scale,
                enable_gqa=self.sizes.heads != self.sizes.kv_heads,
            )
            result[some] = attended[:, :, 0]
        return result

    def _in_chunks(self, query: Tensor, layer: int, row: Row, window: int, cache: KVCache) -> Tensor:
        """`_attended` a chunk of positions after the other."""
        attended = torch.empty_like(query)
        begin = row.first
        while begin < row.end:
            end = min(begin - begin % window + window, row.end)
            part = slice(begin - row.first, end - row.first)
            own = replace(row, first=begin, tokens=row.tokens[part])
            keys, values = cache.read(layer, own, begin % window + 1)
            attended[part] = attend(query[part], keys, values, self.scale, None, self.sinks)
            begin = end
        return attended

    def _heads(self, projected: Tensor, heads: int, norm: Norm | None, step: Step) -> Tensor:
        """Queries or keys (T, heads, columns), clipped, normed and rotated."""
        by_head = norm if not self.norm_all_heads else None
        if norm is not None and self.norm_all_heads:
            projected = norm(projected)
        projected = self._clipped(projected).view(-1, heads, self.sizes.columns)
        if by_head is not None and not self.norms_rotated:
            projected = by_head(projected)
        rotated = self.apply_rope(projected, *step.angles[self.sizes.rotary])
        return by_head(rotated) if by_head is not None and self.norms_rotated else rotated

    def _clipped(self, projected: Tensor) -> Tensor:
        return projected if self.clip is None else projected.clamp(-self.clip, self.clip)
