"""What memory the parts of an engine need, by phase: while the store is packed, while the model is loaded and while it
runs. Each part's bytes come from its owner; the sums are checked against measured peaks (docs/results.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tiermoe import native
from tiermoe.config import MIB, Settings
from tiermoe.engine.memory_plan import total
from tiermoe.errors import ConfigError
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.store import Store
from tiermoe.kernels.gpu import takes_graphs
from tiermoe.kernels.linear import decoded_bytes, prepared_at_most, prepared_bytes
from tiermoe.model.attention.linear import LinearSizes
from tiermoe.model.cache import kv as kv_cache
from tiermoe.model.decoder import MOST_BY_GRAPHS
from tiermoe.model.families import decoder_family
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.layer import DecoderLayer
from tiermoe.model.packing import dense_bytes
from tiermoe.model.prepare_store import packing_needs
from tiermoe.model.rotary import table_bytes
from tiermoe.model.stored_weights import loading_needs, table_keys
from tiermoe.model.streams import streams_of
from tiermoe.offload.disk import few_lanes, most_lanes, staging_bytes
from tiermoe.offload.neuron_link import neuron_staging_bytes
from tiermoe.offload.presets import Resolved
from tiermoe.types import FEW_TOKENS, Need, Phase, Use, Workload

if TYPE_CHECKING:
    from tiermoe.model.hf.generic import LayerCache

_ALLOCATOR = 1.15  # what the allocator holds beyond the tensors that live, measured
_PACKED_OPERATOR_TOKENS = 12  # from more tokens on, kernels may decode a matrix first (kernels/cpu.py)
_PROBED = 256  # tokens after which every layer keeps something, a compressed cache too
_LOGIT_BYTES = 16  # of a token's logits: in the model's dtype, as float32, and what a draw makes of them
_OF_A_CHUNK, _OF_SCORED = "of one prefill chunk", "logits of tokens that are scored"
_SMALL_CHUNK = 64  # tokens of a prompt's part in a step that takes no slot's memory
_SCORED_COPIES = 2  # of the logits of tokens that are scored, in the model's dtype: some decoders scale them
_GROUPED_STATES = 5  # hidden states of a token of several chunks that live at once, besides its experts' outputs
_CHOICE_BYTES = 96  # of one of a token's experts: index, weight and place, as tensors and in lists
_LENT_SHARE = 0.25  # of the slots, whose memory further chunks of a prompt may take
_GRAPHS_OF_A_LAYER = 1536 << 10  # bytes on a GPU: some 45 launches at 32 KiB, not measured yet
_FIRST_USE = 46 * MIB  # library code and heap that the first forward pass brings in: 43 MiB measured


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What the needs of an engine follow from."""

    blueprint: Blueprint
    resolved: Resolved
    formats: Mapping[int, Sequence[ExpertFormat]]  # precision → the format of each layer's experts
    context: int  # tokens to reserve key/value memory for
    device: str
    process: int  # bytes that the process holds already
    store: Store | None  # the checkpoint's, as it was found
    use: Use  # of the engine

    @property
    def settings(self) -> Settings:
        """Of the resolved preset."""
        return self.resolved.settings


def formats_of(blueprint: Blueprint, resolved: Resolved) -> dict[int, list[ExpertFormat]]:
    """Precision → the format of each layer's experts."""
    unit, quantizer = resolved.composition.unit, resolved.settings.quantizer_used
    return {bits: blueprint.expert_formats(bits, unit, quantizer) for bits in resolved.precisions}


def while_running(model: PlanInputs) -> list[Need]:
    """Needs while the model runs, besides the slots of experts."""
    blueprint, settings = model.blueprint, model.settings
    formats = [form for forms in model.formats.values() for form in forms]
    load = _workload(model)
    in_memory = 0
    if model.resolved.composition.store == "memory":
        in_memory = sum(form.stored.nbytes * form.layer.experts for form in formats)
    dense = dense_bytes(blueprint, settings.dense_bits_used, model.device)
    lanes = most_lanes(settings, formats) if model.device == "cpu" else few_lanes(settings)
    return [
        Need("interpreter", model.process, Phase.RUNNING, "measured in this process"),
        Need("interpreter", _FIRST_USE, Phase.RUNNING, "what the first step brings in"),
        Need("dense", dense, Phase.RUNNING, "weights"),
        *expanding_needs(blueprint, settings, model.device),
        *decoder_needs(blueprint, formats, settings, load, model.device),
        *_between_turns(model),
        Need("staging", staging_bytes(formats, lanes), Phase.RUNNING, "reading lanes"),
        Need("staging", in_memory, Phase.RUNNING, "the store in memory"),
        *_staged_neurons(model, formats, lanes),
        *([Need("requests", model.use.requests, Phase.RUNNING, "those in flight")] if model.use.requests else []),
    ]


def _staged_neurons(model: PlanInputs, formats: Sequence[ExpertFormat], lanes: int) -> list[Need]:
    """Needs of the staging buffers through which neurons come to a GPU: pinned ones, and as many bytes there."""
    composition = model.resolved.composition
    if model.device == "cpu" or composition.unit != "neuron":
        return []
    together = max(layer.top_k for layer in model.blueprint.layers)
    nbytes = (lanes + together) * neuron_staging_bytes(formats, composition.upper_limit)
    return [Need(part, nbytes, Phase.RUNNING, "neurons on their way") for part in ("staging", "activations")]


def prompt_chunks(model: PlanInputs, slots: int, slot_bytes: int, spare: int) -> tuple[int, int]:
    """How many chunks of a prompt go through a layer together, and the bytes that each of them but the first takes: of
    hidden states before and after attention, normed and as sums, and of the experts' outputs. spare: bytes of the
    budget that nobody needs; beyond them chunks take the memory of slots (`MemoryPlan.lent`).

    1 if all experts have slots, or transformers' code, a GPU or neurons run, or rules look at all that runs at once.
    Prompts take a quarter of the slots at most, and none that a layer needs for a token. If other sequences
    run too, a layer of all chunks takes no longer than a chunk in all layers."""
    layers = model.blueprint.layers
    most = _most_chunks(model)
    if most == 1 or slots >= sum(layer.experts for layer in layers):
        return 1, 0
    top_k = max(layer.top_k for layer in layers)
    outputs = top_k + _GROUPED_STATES * streams_of(model.blueprint.config)
    states, choices = _states_of_chunk(model, outputs), model.settings.chunk * top_k * _CHOICE_BYTES
    every_layer = len(layers) * top_k
    lent = min(slots - (every_layer if slots >= every_layer else top_k), int(slots * _LENT_SHARE))
    return min(most, 1 + (spare + lent * slot_bytes) // (states + choices)), states + choices


def of_large_steps(model: PlanInputs) -> tuple[int, int]:
    """Tokens of a step from which on it takes more than others, and the bytes: of a chunk's tensors, and of logits that
    are scored. They are slots' until such a step comes (`MemoryPlan.lent`). (0, 0) where slots cannot be lent.

    What stays for other steps has room for the logits of tokens that are verified."""
    blueprint, settings = model.blueprint, model.settings
    if not _lends(model):
        return 0, 0
    formats = [form for forms in model.formats.values() for form in forms]
    load = _workload(model)
    small = replace(load, chunk=_SMALL_CHUNK)

    def taken(load: Workload) -> int:
        needs = decoder_needs(blueprint, formats, settings, load, model.device)
        return sum(need.nbytes for need in needs if need.what in (_OF_A_CHUNK, _OF_SCORED))

    verified = FEW_TOKENS * int(blueprint.config.vocab_size) * load.itemsize * _SCORED_COPIES
    beyond = taken(load) - taken(replace(small, use=replace(load.use, scored=0))) - verified
    return (small.tokens + 1, beyond) if beyond > 0 else (0, 0)


def _lends(model: PlanInputs) -> bool:
    """Whether steps may take the memory of slots: not in transformers' code, on a GPU, by neurons, or under rules that
    look at all that runs at once."""
    composition = model.resolved.composition
    exact = not composition.lossy and composition.unit == "expert" and composition.store == "disk"
    return exact and model.device == "cpu" and runs_own(model.blueprint, model.settings, model.device)


def _workload(model: PlanInputs) -> Workload:
    settings = model.settings
    return Workload(
        model.context, settings.chunk, settings.batch, model.blueprint.dtype.itemsize,
        settings.threads or torch.get_num_threads(), settings.kv_bits, model.use, model.device == "cpu",
    )  # fmt: skip


def _most_chunks(model: PlanInputs) -> int:
    """How many chunks of a prompt may go through a layer together, whatever they take."""
    settings, layers = model.settings, layers_of(model.blueprint, model.settings, model.device)
    if layers is None or not _lends(model):
        return 1
    chunks = -(-model.context // settings.chunk)
    return chunks if settings.batch == 1 else min(chunks, len(layers))


def _states_of_chunk(model: PlanInputs, count: int) -> int:
    """Bytes of so many hidden states of each token of a chunk."""
    state = int(model.blueprint.config.hidden_size) * model.blueprint.dtype.itemsize
    return int(min(model.settings.chunk, model.context) * state * count * _ALLOCATOR)


def _between_turns(model: PlanInputs) -> list[Need]:
    """Needs of a prompt whose chunks are amid the layers while other sequences run."""
    further = _most_chunks(model) - 1 if model.settings.batch > 1 else 0
    states = further * _states_of_chunk(model, streams_of(model.blueprint.config)) if further else 0
    return [Need("activations", states, Phase.RUNNING, "a prompt between its turns")] if states else []


def while_loading(model: PlanInputs, on_disk: int) -> list[Need]:
    """Needs while the dense weights are loaded, without the `on_disk` bytes that stay there; for a GPU too, whose
    weights come through main memory."""
    dense = dense_bytes(model.blueprint, model.settings.dense_bits_used, model.device) - on_disk
    process = Need("interpreter", model.process, Phase.LOADING)
    return [process, *loading_needs(model.blueprint, dense, on_disk > 0)]


def while_packing(model: PlanInputs, budget: int) -> tuple[int, list[Need]]:
    """Number of workers that pack the store, and their needs; no needs if the store lacks nothing. One worker more
    than torch has threads, since one of them reads, or as many as the budget allows."""
    process = Need("interpreter", model.process + _FIRST_USE, Phase.PACKING)
    for workers in range((model.settings.threads or torch.get_num_threads()) + 1, 0, -1):
        needs = packing_needs(model.store, model.blueprint, model.resolved, workers)
        if not needs:
            return workers, []
        needs = [process, *needs]
        if total(needs, Phase.PACKING) <= budget:
            break
    return workers, needs


def decoder_needs(
    blueprint: Blueprint, formats: Sequence[ExpertFormat], settings: Settings, load: Workload, device: str
) -> list[Need]:
    """Key/value cache and activations of the decoder that a model gets on a device, for a workload."""
    layers = layers_of(blueprint, settings, device)
    if blueprint.family.encodes:
        load = replace(load, chunk=load.context)  # an encoder reads its prompt at once
    if layers is None:
        from tiermoe.model.hf import generic  # late: it imports transformers

        text = blueprint.configs.text
        eager = getattr(blueprint.skeleton.config, "_attn_implementation", None) == "eager"
        latent = blueprint.family.latent_kv or generic.expands_latents(text)
        grown = _grown(blueprint)
        needs = generic.needs(text, load, latent, eager, grown)
        heads, _, head_dim = generic.attention_shape(text)
        columns = heads * head_dim
    else:
        needs = kv_cache.needs([each.sizes.shape for each in layers], load)
        needs = needs + _attention_needs(blueprint, layers, load)
        if takes_graphs(device):
            nbytes = len(layers) * _GRAPHS_OF_A_LAYER * min(load.sequences, MOST_BY_GRAPHS)
            needs = [*needs, Need("activations", nbytes, Phase.RUNNING, "graphs")]
        columns = max(each.sizes.token_columns for each in layers)
    return needs + _layer_needs(blueprint, formats, settings, load, columns)


def _grown(blueprint: Blueprint) -> Sequence[LayerCache] | None:
    """Layers of a model's own cache, [] for an encoder alone; None: they follow from the config."""
    if blueprint.family.encodes:
        return [] if blueprint.family.encoder_class else None
    from tiermoe.model.hf import generic

    return generic.measured_cache(blueprint.skeleton, _PROBED)


def runs_own(blueprint: Blueprint, settings: Settings, device: str) -> bool:
    """Whether a decoder of our own computes on a device; else transformers' code does."""
    return settings.decoder != "generic" and decoder_family(blueprint.config, device) is not None


def layers_of(blueprint: Blueprint, settings: Settings, device: str) -> Sequence[DecoderLayer] | None:
    """Layers of our own decoder, of weights without values; None if transformers' code runs."""
    return blueprint.planned_layers if runs_own(blueprint, settings, device) else None


def layers_for(
    option: str, flag: str, lacking: str, blueprint: Blueprint, settings: Settings, device: str, on_gpu: bool = False
) -> Sequence[DecoderLayer]:
    """`layers_of`; ConfigError if transformers' code runs, or a GPU that `option` does not apply to either. lacking:
    why, of the cache there. flag: the command's option to leave out. on_gpu: it applies to our decoders on a GPU."""
    layers = layers_of(blueprint, settings, device)
    if layers is None or (device != "cpu" and not on_gpu):
        where, here = "" if on_gpu else " on a CPU", "by transformers' code" if layers is None else f"on {device}"
        raise ConfigError(
            f"{option} is for tiermoe's own decoders{where}, and {blueprint.family.name} runs here {here}, whose cache "
            f"{lacking}; leave {flag} out"
        )
    return layers


def longest_request(blueprint: Blueprint, settings: Settings, context: int, device: str) -> int | None:
    """Bytes of keys and values of one sequence of the whole context; None if sequences share no memory: if
    transformers' code runs, or on a GPU."""
    layers = layers_of(blueprint, settings, device)
    if layers is None or device != "cpu":
        return None
    shapes, item = [each.sizes.shape for each in layers], blueprint.dtype.itemsize
    return kv_cache.sequence_bytes(shapes, context, context, min(settings.chunk, context), item, settings.kv_bits)


def expanding_needs(blueprint: Blueprint, settings: Settings, device: str) -> list[Need]:
    """Needs of dense weights that a decoder derives from others and keeps: taps of convolutions, latent attention's
    matrices (native kernels, GPUs), and for the native kernels parts of routers and of matrices of streams in
    float32."""
    layers = layers_of(blueprint, settings, device) or []
    by_kernels = blueprint.dtype == torch.bfloat16 and native.computes_on(torch.device(device))
    by_place = takes_graphs(device)
    expanded = (each.sizes.expanding_bytes for each in layers if by_place or (by_kernels and each.by_kernel))
    latents = sum(expanded) * blueprint.dtype.itemsize // 2
    in_float32 = [tuple(each.shape) for each in blueprint.outline.tensors.values() if each.dtype == torch.float32]
    routers = [tuple(each.moe.router.weight.shape) for each in layers if each.moe is not None]
    hidden = blueprint.config.hidden_size
    wide = streams_of(blueprint.config) * hidden
    of_streams = [shape for shape in in_float32 if len(shape) == 2 and shape[1] == wide > hidden]
    matrices = [*(shape for shape in routers if shape in in_float32), *of_streams]
    parts = sum(3 * 2 * math.prod(shape) for shape in matrices if by_kernels)
    taps = sum(each.sizes.taps_bytes for each in layers if by_kernels or not isinstance(each.sizes, LinearSizes))
    derived = (
        ("matrices that expand latents", latents),
        ("convolutions' taps", taps),
        ("parts of float32 matrices", parts),
    )
    return [Need("dense", nbytes, Phase.RUNNING, what) for what, nbytes in derived if nbytes]


def _attention_needs(blueprint: Blueprint, layers: Sequence[DecoderLayer], load: Workload) -> list[Need]:
    """Needs of one layer's attention, of one sequence after the other, or of a step by the native kernel. Each kind of
    layer keeps a workspace of its own."""
    hidden = int(blueprint.config.hidden_size)
    widest = max(hidden, int(getattr(blueprint.config, "q_lora_rank", None) or 0))
    sizes = [layer.sizes for layer in layers]
    kinds = [[each for each in sizes if type(each) is kind] for kind in {type(each) for each in sizes}]
    many = sum(max(each.prompt_bytes(load, blueprint.dtype) for each in alike) for alike in kinds)
    fused = max(each.sizes.fused_bytes(load, widest) if each.by_kernel and load.on_cpu else 0 for each in layers)
    rotary_columns: dict[int, int] = {}  # by kind of rotary embedding, each of which has a table
    for each in sizes:
        rotary_columns[each.rotary] = max(rotary_columns.get(each.rotary, 0), each.rotated_columns)
    tables = sum(table_bytes(load.context, columns, load.itemsize) for columns in rotary_columns.values())
    return [
        Need("activations", tables, Phase.RUNNING, "angles of positions"),
        Need("activations", many, Phase.RUNNING, "attention"),
        Need("activations", fused, Phase.RUNNING, "attention in one call"),
    ]


def _layer_needs(
    blueprint: Blueprint, formats: Sequence[ExpertFormat], settings: Settings, load: Workload, columns: int
) -> list[Need]:
    """Needs of one layer's tensors that live at the same time (of a norm with float32 copies, of projections or of the
    feed-forward part), of one decoded matrix where many tokens meet packed weights, and of the logits. columns: of a
    token's queries."""
    config, item, tokens = blueprint.config, load.itemsize, load.tokens
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    matrices = [part.out_in for form in formats for part in form.layer.parts if part.is_matrix]
    top_k = max(layer.top_k for layer in blueprint.layers)
    streams = hidden * streams_of(config)
    norm = streams * (item + 3 * 4)
    attention = columns * (8 * item + 3 * 4)
    experts = (hidden * (top_k + 3) + 3 * max(map(max, matrices))) * item
    dense = 3 * _widest_dense(blueprint) * item
    decoded = decoded_bytes(formats, settings.dense_bits_used, blueprint.dtype)
    known = tokens * prepared_at_most(_widest_dense(blueprint)) if native.available() else 0
    prepared = max(prepared_bytes(formats, top_k, tokens, blueprint.dtype), known) if load.on_cpu else 0
    found = {
        _OF_A_CHUNK: int(tokens * (2 * streams * item + max(norm, attention, experts, dense)) * _ALLOCATOR),
        "a decoded matrix": decoded if tokens > _PACKED_OPERATOR_TOKENS else 0,
        "what products know of their tokens": prepared,
        "logits": load.sequences * int(config.vocab_size) * _LOGIT_BYTES,
        _OF_SCORED: load.use.scored * int(config.vocab_size) * item * _SCORED_COPIES,
    }
    return [Need("activations", nbytes, Phase.RUNNING, what) for what, nbytes in found.items()]


def _widest_dense(blueprint: Blueprint) -> int:
    """Columns of the widest dense matrix; embeddings and the output layer aside, which give a row a token."""
    vocabulary, stored = int(blueprint.config.vocab_size), blueprint.checkpoint.tensors
    tables = table_keys(blueprint)
    shapes = [stored[key].shape for key in blueprint.dense_keys if key not in tables]
    return max((max(shape) for shape in shapes if len(shape) == 2 and vocabulary not in shape), default=0)
