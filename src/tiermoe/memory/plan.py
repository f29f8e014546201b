"""What would go where in the memory budget, computed before anything is loaded: the owners' needs summed, the rest
divided into slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiermoe.config import KIB, CacheSize, Settings, format_size
from tiermoe.decide.compose import ModelShape, cache_bytes
from tiermoe.decide.composition import require_device
from tiermoe.decide.prediction import PREDICTIONS
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.kernels import machine_layout
from tiermoe.memory.activations import longest_request, sizes_for
from tiermoe.memory.gpu_plan import divided_with_gpu, gpu_budget
from tiermoe.memory.memory_plan import MemoryPlan, least_room, slot_pools, total
from tiermoe.memory.needs import Inputs, formats_of, while_loading, while_packing, while_running
from tiermoe.memory.refusals import check_phases, refuse
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.dense import recipe
from tiermoe.model.embedding import embedding_bytes
from tiermoe.model.latent import LatentSizes
from tiermoe.model.own_linears import own_linears, types_of
from tiermoe.process.footprint import ACTIVATIONS_HEAP, resident_bytes
from tiermoe.process.machine import available_memory
from tiermoe.store.store import Store
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import resolve_device
from tiermoe.types import USUAL, MoeLayer, Need, Phase, Use

DEFAULT_CONTEXT = 4096
_SHARE_OF_FREE = 0.8


def plan_memory(blueprint: Blueprint, resolved: Resolved, store: Store | None, use: Use = USUAL) -> MemoryPlan:
    """Divides the budget. store: the checkpoint's, as it is (`found_store`). use: of the engine. BudgetError, with the
    numbers and the nearest setting that would do, where what must be there and one layer's experts do not fit."""
    settings, composition = resolved.settings, resolved.composition
    device = resolve_device(settings.device)
    require_device(composition, device.partition(":")[0])
    _check_options(blueprint, resolved)
    _check_kv_bits(blueprint, settings, device)
    _check_kv_memory(blueprint, settings, use, device)
    gpu = gpu_budget(settings, device)  # first: it starts CUDA, which the interpreter's size includes
    budget, source = _budget(settings)
    model = Inputs(
        blueprint, resolved, formats_of(blueprint, resolved, machine_layout(device)), context_of(blueprint, settings),
        device, resident_bytes(), store, use,
    )  # fmt: skip
    sizes = {bits: max(form.slot.nbytes for form in forms) for bits, forms in model.formats.items()}
    wanted = cache_bytes(composition, settings.cache or CacheSize(fraction=1.0), shape_of(blueprint.layers), sizes)
    needs = while_running(model)
    tight = budget - total(needs, Phase.RUNNING) < wanted
    on_disk = embedding_bytes(blueprint) if gpu is None and (tight or blueprint.comes_quantized) else 0
    if on_disk:
        needs.append(Need("dense", -on_disk, Phase.RUNNING, "the embedding on disk"))
    idle = ACTIVATIONS_HEAP if gpu is None and budget - total(needs, Phase.RUNNING) - wanted >= ACTIVATIONS_HEAP else 0
    needs.append(Need("activations", idle, Phase.RUNNING, "what may lie idle between them"))
    packers, packing = while_packing(model, budget)
    needs += packing + while_loading(model, on_disk)
    base = MemoryPlan(
        budget,
        source,
        tuple(needs),
        slot_bytes=sizes[resolved.precisions[0]],
        slots=0,
        all_slots=sum(layer.experts for layer in blueprint.layers),
        layer_slots=max(layer.top_k for layer in blueprint.layers),
        token_slots=sum(layer.top_k for layer in blueprint.layers),
        context=model.context,
        dense_bits=_dense_bits(blueprint, settings.dense_bits_used, machine_layout(device)),
        embedding_on_disk=on_disk > 0,
        looked_up=0 if on_disk else embedding_bytes(blueprint),
        kv_bits=settings.kv_bits,
        kv_memory=use.kv_memory,
        packers=packers,
        idle_activations=idle,
        types=blueprint.own_types(),
    )
    if gpu is None:
        plan = _divided(base, wanted, model, sizes)
        if holds_everything(plan, resolved) and composition.unit == "expert":
            plan = replace(plan, unless_mapped=plan.looked_up)
        plan.warnings.extend(_warnings(plan) + _left_out(blueprint))
        return plan
    on_gpu = divided_with_gpu(base, wanted, resolved, sizes, device, gpu)
    on_gpu.warnings.extend(_left_out(blueprint))
    return on_gpu


def holds_everything(plan: MemoryPlan, resolved: Resolved) -> bool:
    """Whether each expert is read from the drive once: all have slots, in one precision."""
    everything = plan.slots >= plan.all_slots and len(resolved.precisions) == 1
    return everything and resolved.composition.store == "disk"


def _check_options(blueprint: Blueprint, resolved: Resolved) -> None:
    """ConfigError for an option that would do nothing for this family."""
    prefetch = resolved.composition.prefetch
    if not blueprint.family.forecasts and PREDICTIONS[prefetch].asks_routers:
        raise ConfigError(
            f"prefetch={prefetch} does not apply to {blueprint.family.name}: its routers cannot be asked about another "
            f"layer's input; use --set prefetch=path or none"
        )
    if not blueprint.family.encodes:
        return
    if resolved.settings.chunk != Settings().chunk:
        raise ConfigError(f"chunk does not apply to {blueprint.family.name}: an encoder reads its prompt at once")


def _check_kv_bits(blueprint: Blueprint, settings: Settings, device: str) -> None:
    """ConfigError where keys and values have 16 bits alone."""
    if settings.kv_bits == 16:
        return
    option = f"kv_bits={settings.kv_bits}"
    sizes = sizes_for(option, "--kv-bits", "has 16 bits", blueprint, settings, device)
    if any(isinstance(each, LatentSizes) for each in sizes):
        raise ConfigError(
            f"{option} does not apply to {blueprint.family.name}: its cache holds latents, which are compressed "
            f"already; leave --kv-bits out"
        )


def _check_kv_memory(blueprint: Blueprint, settings: Settings, use: Use, device: str) -> None:
    """ConfigError where the memory that sequences share for keys and values holds no sequence of the whole context, or
    where none is shared."""
    if use.kv_memory is None:
        return
    option = f"--kv-memory {format_size(use.kv_memory)}"
    sizes_for(option, "--kv-memory", "takes its memory by itself", blueprint, settings, device)
    context = context_of(blueprint, settings)
    longest = longest_request(blueprint, settings, context, device)
    assert longest is not None
    if longest > use.kv_memory:
        raise ConfigError(
            f"{option} holds no request of {context:,} tokens, which takes {format_size(longest)}; raise it to "
            f"{-(-longest // KIB)}KiB, or lower --context"
        )


def context_of(blueprint: Blueprint, settings: Settings) -> int:
    """Tokens to reserve key/value memory for. ConfigError where more are asked for than the model was made for."""
    longest = blueprint.max_context()
    if settings.context is not None:
        if longest is not None and settings.context > longest:
            raise ConfigError(
                f"a context of {settings.context:,} tokens is more than the {longest:,} that the model was made for; "
                f"lower --context"
            )
        return settings.context
    return min(DEFAULT_CONTEXT, longest) if longest else DEFAULT_CONTEXT


def shape_of(layers: Sequence[MoeLayer]) -> ModelShape:
    """A model's MoE layers as compositions see them; those of an encoder run first."""
    return ModelShape(
        experts=tuple(layer.experts for layer in layers),
        top_k=tuple(layer.top_k for layer in layers),
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in layers),
    )


def _divided(base: MemoryPlan, wanted: int, model: Inputs, sizes: Mapping[int, int]) -> MemoryPlan:
    """The plan with the slots that the rest of the budget gives, of `wanted` bytes at the most."""
    room = min(base.budget - base.fixed, wanted)
    least = least_room(base, model.resolved, sizes)
    if room < least:
        refuse(base, model, wanted, least)
    check_phases(base)
    pools = slot_pools(room, model.resolved, sizes, base.all_slots)
    slots = sum(pool.slots for pool in pools)
    if model.resolved.composition.cache == "all" and slots < base.all_slots:
        raise BudgetError(
            f"the preset keeps all {base.all_slots} experts in memory, {slots} fit; "
            f"raise --memory by {wanted - room:,} bytes or use another preset"
        )
    return replace(base, slots=slots, pools=pools)


def _budget(settings: Settings) -> tuple[int, str]:
    if settings.memory is not None:
        return settings.memory, "--memory"
    free, source = available_memory()
    return int(free * _SHARE_OF_FREE) + resident_bytes(), f"{_SHARE_OF_FREE:.0%} of the {format_size(free)} {source}"


def _dense_bits(blueprint: Blueprint, bits: int, layout: str) -> str:
    if bits == 16 and (own := own_linears(blueprint, "cpu" if layout == machine_layout("cpu") else layout)):
        return f"16, or as the file has them ({types_of(blueprint, own.values())})"
    more = ", ".join(f"{kind} {own}" for kind, own in sorted(recipe(blueprint, bits, layout).items()))
    return f"{bits} ({more})" if more else str(bits)


def _warnings(plan: MemoryPlan) -> list[str]:
    if plan.slots < plan.all_slots and plan.slots < plan.token_slots:
        return [
            f"the cache holds {plan.slots} experts, one token uses {plan.token_slots}: an LRU cache of that size "
            f"hits almost never; from {format_size(plan.fixed + plan.token_slots * plan.slot_bytes)} on it does"
        ]
    return []


def _left_out(blueprint: Blueprint) -> list[str]:
    """What a checkpoint has that does not run."""
    found = []
    if blueprint.unread:
        found.append(f"only the text part of this model runs: it does not read {blueprint.unread}")
    if blueprint.own_code:
        found.append(
            f"{blueprint.own_code} of this model names code of the model's own, which does not run: transformers' code "
            f"for its family does"
        )
    return found
