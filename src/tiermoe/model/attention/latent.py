"""Multi-head latent attention (DeepSeek-V2, section 2.1): the cache has one compressed vector a token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tiermoe.formats.plain import Plain
from tiermoe.kernels import attention as native
from tiermoe.kernels import gpu
from tiermoe.kernels.attention import Attended, FusedAttention, PackedMatrix, fused_attention, takes_latents
from tiermoe.model.attention.base import (
    SINK_SCORE_BYTES,
    Attention,
    AttentionSizes,
    attend,
    scores_at_once,
    tempered,
)
from tiermoe.model.attention.compressed import PoolIndexerSizes
from tiermoe.model.attention.indexers import IndexerSizes
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.parts import Linear, Norm
from tiermoe.model.rotary import ApplyRope, is_rotated, rope_complex, rope_halves, rope_pairs, yarn_scale
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_SCORE_BYTES = 14  # without sinks, of a score of torch's own operations: as float32 three times, and masks; measured


@dataclass(frozen=True, slots=True)
class LatentSizes(AttentionSizes):
    """The description of a `LatentAttention`."""

    heads: int
    plain_columns: int  # of a head's query and key that are not rotated
    rotary_columns: int  # of a head's query, and of the key that all heads share
    value_columns: int  # of a head
    latent_columns: int
    indexer: IndexerSizes | PoolIndexerSizes | None = None  # of sparse attention
    keeps_index: bool = False  # the layer has an indexer of its own, whose keys the cache holds
    sinks: bool = False  # logits that join each softmax and have no value (Hunyuan 4)
    gate_columns: int = 0  # of a projection by whose sigmoid heads are multiplied

    @property
    def shape(self) -> LayerShape:
        shape = LayerShape(1, self.latent_columns + self.rotary_columns, 0)
        return self.indexer.kept(shape) if self.indexer is not None and self.keeps_index else shape

    @property
    def token_columns(self) -> int:
        return self.heads * (self.plain_columns + self.rotary_columns)

    @property
    def rotated_columns(self) -> int:
        return self.rotary_columns

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """What an indexer takes; without the kernel keys and values of all heads, masks, and a few heads' scores."""
        long = self.indexer is not None and load.context > self.indexer.most
        chosen = self.indexer.nbytes(load) if long and self.indexer is not None else 0
        columns = self.plain_columns, self.value_columns, self.latent_columns, self.rotary_columns
        if load.on_cpu and takes_latents(dtype, *columns):
            return chosen
        tokens, positions = min(load.chunk, load.context), load.context
        keys = self.plain_columns + self.rotary_columns
        heads = self.heads * (2 * self.plain_columns + self.rotary_columns + 2 * self.value_columns)
        expanded = positions * (heads + 2 * self.latent_columns) * load.itemsize
        masks = tokens * positions * (3 + 4 + 2 * long)
        scores = scores_at_once(self.heads, tokens, positions)
        share = min(1.0, scores / (self.heads * tokens * positions))
        widened = 4 * positions * self.heads * (keys + self.value_columns)
        score_bytes = SINK_SCORE_BYTES if self.sinks else _SCORE_BYTES
        return chosen + expanded + masks + scores * score_bytes + int(widened * share)

    def fused_bytes(self, load: Workload, hidden: int) -> int:
        latent, rotary = self.latent_columns, self.rotary_columns
        projected = hidden + self.token_columns + latent + rotary + self.gate_columns + self.heads * self.value_columns
        widest = max(hidden, self.heads * self.value_columns)
        attended = load.context if self.indexer is None else min(load.context, self.indexer.most)
        attention = Attended(self.heads, 1, latent + rotary, latent, projected, widest, latent)
        return attention.workspace(load.tokens, attended, load.threads, load.sequences)

    @property
    def expanding_bytes(self) -> int:
        return 2 * self.heads * self.latent_columns * (self.plain_columns + self.value_columns)


def latent(
    w: Scope,
    config: Any,
    *,
    rope: ApplyRope = rope_pairs,
    narrow_epsilon: float | None = 1e-6,
    gate: str | None = None,
    gate_columns: int = 0,
    sinks: bool = False,
    indexer: IndexerSizes | PoolIndexerSizes | None = None,
    keeps_index: bool = False,
) -> LatentAttention:
    """The latent attention with the weights of `w` ('self_attn'). Sizes are the config's.

    rope: how it rotates. narrow_epsilon: of the norms of narrow queries and of latents; None: the config's. gate: name
    of the matrix of the gates of what is attended to, of so many columns. sinks, indexer, keeps_index: of
    `LatentSizes`."""
    sizes = LatentSizes(
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        indexer,
        keeps_index,
        sinks,
        gate_columns,
    )
    narrow, latents = getattr(config, "q_lora_rank", None), sizes.latent_columns
    parameters = config.rope_parameters if is_rotated(config) else {}
    return LatentAttention(
        sizes=sizes,
        query=w.linear("q_b_proj" if narrow else "q_proj", sizes.token_columns, narrow or w.hidden),
        narrow_query=w.linear("q_a_proj", narrow, w.hidden) if narrow else None,
        query_norm=w.norm("q_a_layernorm", narrow, narrow_epsilon) if narrow else None,
        compress=w.linear("kv_a_proj_with_mqa", latents + sizes.rotary_columns, w.hidden),
        latent_norm=w.norm("kv_a_layernorm", latents, narrow_epsilon),
        expand=w.linear("kv_b_proj", sizes.heads * (sizes.plain_columns + sizes.value_columns), latents),
        output=w.linear("o_proj", w.hidden, sizes.heads * sizes.value_columns),
        scale=yarn_scale(parameters, (sizes.plain_columns + sizes.rotary_columns) ** -0.5),
        apply_rope=rope,
        gate=None if gate is None else w.linear(gate, gate_columns, w.hidden),
        sinks=w.tensor("sinks", sizes.heads).float() if sinks else None,
    )


def has_indexer(config: Any, index: int) -> bool:
    """Whether layer `index` has an indexer of its own; a layer that config.indexer_types calls shared takes the choice
    of the layer before it."""
    kinds = getattr(config, "indexer_types", None)
    return kinds is None or bool(kinds[index] == "full")


@dataclass(frozen=True, slots=True)
class LatentAttention(Attention):
    """Attention whose cache keeps a latent and a rotary key side by side, as keys.

    The native call attends to latents as they are: it expands a token's queries, and what the token attended to; so
    does a GPU for a token that it computes by its place. Else keys and values of all heads are expanded while the layer
    runs."""

    sizes: LatentSizes
    query: Linear  # hidden, or the narrow query → heads * (plain + rotary columns)
    compress: Linear  # hidden → latent columns, and one rotary key that all heads share
    latent_norm: Norm
    expand: Linear  # latent → heads * (plain columns of a key, value columns)
    output: Linear  # heads * value columns → hidden
    scale: float  # of the scores
    apply_rope: ApplyRope
    narrow_query: Linear | None = None  # hidden → narrow query, with its norm
    query_norm: Norm | None = None
    gate: Linear | None = None
    """hidden → heads (Ling 3.0), or their value columns (Hunyuan 4), by whose sigmoid what they attended to is
    multiplied."""
    sinks: Tensor | None = None  # float32 (heads)
    expanding: list[Tensor] = field(default_factory=list)
    """What a GPU expands by, from the first token on: of keys (heads, plain, latent), of values (heads, latent,
    value)."""

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        sizes = self.sizes
        narrow = x if self.narrow_query is None or self.query_norm is None else self.query_norm(self.narrow_query(x))
        query = self.query(narrow).view(x.shape[0], sizes.heads, -1)
        plain, rotary_query = query[..., : sizes.plain_columns], query[..., sizes.plain_columns :]
        compressed = self.compress(x)
        latent = self.latent_norm(compressed[:, : sizes.latent_columns].contiguous())[:, None]
        rotary_key = self.apply_rope(compressed[:, sizes.latent_columns :][:, None], step.cos, step.sin)
        query = torch.cat((plain, self.apply_rope(rotary_query, step.cos, step.sin)), dim=-1)
        query = tempered(query, step.temperatures[0])
        kept, new = step.cache.keys[layer], torch.cat((latent, rotary_key), dim=-1)
        if step.place is not None and self.by_place:
            attended = self._by_place(query[0], new[0], kept, step.place)[None]
        else:
            attended = self._by_rows(query, new, kept, step)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x).float()).to(x.dtype).view(len(x), sizes.heads, -1)
        return self.output(attended.flatten(1))

    @property
    def batch_invariant(self) -> bool:
        matrices = (self.query, self.compress, self.output, self.narrow_query, self.gate)
        return all(matrix is None or matrix.batch_invariant for matrix in matrices)

    def fused(
        self, before: Norm | None, after: Norm | None, rotary_columns: int, multiplier: float
    ) -> FusedAttention | None:
        if self.expand.packed.bias is not None:
            return None
        key_up, value_up = map(_plain, self._expanding(torch.bfloat16))
        return fused_attention(
            native.LatentAttention(
                query=self.query.packed,
                latent=self.compress.packed,
                key_up=key_up,
                value_up=value_up,
                output=self.output.packed,
                norm_before=None if before is None else before.native,
                norm_after=None if after is None else after.native,
                norm_latent=self.latent_norm.native,
                head_columns=self.sizes.plain_columns,
                value_columns=self.sizes.value_columns,
                latent_columns=self.sizes.latent_columns,
                rotary_columns=self.sizes.rotary_columns,
                scale=self.scale,
                query_first=None if self.narrow_query is None else self.narrow_query.packed,
                norm_query=None if self.query_norm is None else self.query_norm.native,
                interleaved=self.apply_rope is not rope_halves,
                rotated_at_once=self.apply_rope is rope_complex,
                residual_multiplier=multiplier,
                sinks=self.sinks,
                gate=None if self.gate is None else self.gate.packed,
            )
        )

    def _expanding(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The two matrices that make keys and values of latents: of keys each head's transpose (heads * latent, plain),
        of values (heads * value, latent)."""
        packed, heads, latent = self.expand.packed, self.sizes.heads, self.sizes.latent_columns
        both = packed.encoding.decode(packed.fields, packed.out, packed.in_, dtype).view(heads, -1, latent)
        keys = both[:, : self.sizes.plain_columns].transpose(1, 2).reshape(heads * latent, -1).contiguous()
        values = both[:, self.sizes.plain_columns :].reshape(-1, latent).contiguous()
        return keys, values

    @property
    def by_place(self) -> bool:
        return self.sizes.indexer is None and self.expand.packed.bias is None

    def _by_place(self, query: Tensor, new: Tensor, kept: Tensor, place: Tensor) -> Tensor:
        """One token's query (heads, columns) and latent with its rotary key (1, columns) → (heads, value columns)."""
        plain, kernels = self.sizes.plain_columns, gpu.triton("triton_attention")
        kernels.write_row((kept,), (new,), place)
        if not self.expanding:
            keys, values = self._expanding(query.dtype)
            latents = self.sizes.latent_columns
            self.expanding.append(keys.view(self.sizes.heads, latents, -1).transpose(1, 2))
            self.expanding.append(values.view(self.sizes.heads, -1, latents).transpose(1, 2))
        keys, values = self.expanding
        query = torch.cat((torch.bmm(query[:, None, :plain], keys)[:, 0], query[:, plain:]), -1)
        attended = kernels.attend_row(query, kept, kept[..., : keys.shape[2]], place, self.scale, sinks=self.sinks)
        return torch.bmm(attended[:, None], values)[:, 0]

    def _by_rows(self, query: Tensor, new: Tensor, kept: Tensor, step: Step) -> Tensor:
        """Each row's tokens over its sequence, (T, heads, value columns)."""
        parts = list[Tensor]()
        for span in step.apart:
            tokens = slice(span.begin, span.end)
            write_rows(kept, span.row, new[tokens])
            rows = read_rows(kept, span.row, None)[0]
            chosen = None if step.chosen is None else step.chosen[tokens]
            parts.append(self._attended(query[tokens], rows, chosen))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attended(self, query: Tensor, kept: Tensor, chosen: Tensor | None) -> Tensor:
        """Attention of queries (T, heads, columns) over the sequence's latents (n, latent + rotary columns); the last T
        latents belong to the queries. chosen: the positions (T, most) of sparse attention, padded with -1."""
        keys = query.new_empty((self.sizes.heads, kept.shape[0], query.shape[2]))
        values = query.new_empty((self.sizes.heads, kept.shape[0], self.sizes.value_columns))
        self._expand(kept, keys, values)
        mask = None
        if chosen is not None and len(kept) > chosen.shape[1]:
            mask = query.new_zeros((len(query), len(kept) + 1), dtype=torch.bool)  # a column for those that are none
            mask = mask.scatter_(1, chosen.long() % mask.shape[1], True)[:, :-1]
        return attend(query, keys, values, self.scale, None, self.sinks, mask)

    def _expand(self, kept: Tensor, keys: Tensor, values: Tensor) -> None:
        """Expands kept (n, latent + rotary columns) into keys (heads, n, plain + rotary columns) and values (heads, n,
        value columns)."""
        latents, rotaries = kept[:, : self.sizes.latent_columns].contiguous(), kept[:, self.sizes.latent_columns :]
        both = self.expand(latents).view(latents.shape[0], self.sizes.heads, -1).transpose(0, 1)
        keys[..., : self.sizes.plain_columns] = both[..., : self.sizes.plain_columns]
        keys[..., self.sizes.plain_columns :] = rotaries
        values[:] = both[..., self.sizes.plain_columns :]


def _plain(weight: Tensor) -> PackedMatrix:
    return PackedMatrix(Plain(), {"weight": weight}, *weight.shape)
