"""The engine of one loaded model: its experts' service, its decoder, and its counters. It is `model.tiermoe`."""

from __future__ import annotations

import _thread
import atexit
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import xxhash

from tiermoe import native
from tiermoe.batch import Batch
from tiermoe.engine.backend import kernels_of
from tiermoe.engine.budget import shape_of
from tiermoe.engine.expectation import OtherBudget, other_budgets
from tiermoe.engine.forecasts import Forecaster
from tiermoe.engine.forward_context import ForwardContext
from tiermoe.engine.moe import MoELayer, closed_error, forget
from tiermoe.engine.observer import Observer, Undo, time_kernels
from tiermoe.engine.rerouting import ConfidentDecoding, routes
from tiermoe.engine.sampling import end_tokens
from tiermoe.engine.service import ExpertService
from tiermoe.engine.steps import AnyDecoder, SequenceCache, gathered, is_finite, not_finite, passes_of
from tiermoe.errors import ConfigError, ModelError
from tiermoe.formats.store import precision_key
from tiermoe.metrics import Metrics, PhaseMetrics
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.decoder import Decoder, NotFiniteError
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.moe import ExpertGate
from tiermoe.model.mtp_head import Drafted, DraftToken, MtpHead
from tiermoe.offload.cuda import GpuErrors
from tiermoe.offload.policies.routing import require_adaptive, require_little
from tiermoe.platform.machine import installed_version, processor_identity
from tiermoe.platform.process_memory import peak_resident_bytes, resident_bytes

Figures = TypeVar("Figures", bound=Metrics)


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine is given of its model. `decoder` computes batches. Of each MoE layer in order: `gates`, what its
    experts compute, and `routers`, None where it names no experts by index."""

    blueprint: Blueprint
    decoder: AnyDecoder
    gates: Sequence[ExpertGate]
    routers: Sequence[Any]
    generation_config: Any


class Engine:
    """Runs batches of a model whose experts a service brings. Made by `tiermoe.load` and the commands. One that is
    collected as garbage is closed."""

    def __init__(self, service: ExpertService, model: Model) -> None:
        resolved = service.resolved
        self.service = service
        self.store, self.plan, self.link = service.store, service.plan, service.link
        self.scheduler, self.loader = service.scheduler, service.scheduler.loader
        self.settings, self.composition, self.precisions = resolved.settings, resolved.composition, resolved.precisions
        self._blueprint = model.blueprint
        self.config: Any = model.blueprint.config  # transformers' config of the model
        self.dtype, self.device = model.blueprint.dtype, torch.device(service.device)
        self._errors = GpuErrors(service.device, "computing")
        self.generation_config = model.generation_config
        self.longest_context = model.blueprint.max_context()  # tokens the model was made for; None: unbounded
        self.decoder = model.decoder
        self.mtp: MtpHead | None = getattr(model.decoder, "mtp", None)
        self.gates = list(model.gates)
        experts = [gate.experts for gate in self.gates]
        self.forecaster = Forecaster(model.routers, experts, False, self._stacked_layers())
        encoder_layers = shape_of(self.store.layers).encoder_layers
        self.context = ForwardContext(self.scheduler, self.forecaster, encoder_layers, service.before_step)
        renormalise = self._blueprint.family.renormalises(self.config)
        chooses = routes(self.context, model.decoder, len(self.gates))
        self.layers = [
            MoELayer(index, gate.experts, service.experts(index, gate), self.context, renormalise, chooses[index])
            for index, gate in enumerate(self.gates)
        ]
        self._keep_addresses()
        if isinstance(model.decoder, Decoder):
            model.decoder.attach(self.layers)
        self.confident = self._decode_little_first()
        self.context.adaptive = self.composition.adaptive_gating
        if self.context.adaptive is not None:
            require_adaptive(self.context.adaptive, [layer.top_k for layer in self.store.layers])
        self._undo: list[Callable[[], None]] = []
        self._unwatch: list[Undo] = []
        self._closed = False
        self._collected = weakref.finalize(self, _end_beside, service, self._blueprint)
        self._collected.atexit = False
        self._decoded = PhaseMetrics()
        self.observe(None)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer, as the model's configurations name them."""
        return frozenset(end_tokens(self.generation_config) | end_tokens(self.config))

    @property
    def lossy(self) -> list[str]:
        """What can change tokens: parts of the composition, keys and values in fewer bits; empty: exact."""
        return self.composition.lossy + ([f"kv_bits={self.settings.kv_bits}"] if self.settings.kv_bits != 16 else [])

    @functools.cached_property
    def kernels(self) -> str:
        """What computes the experts: 'native avx2' (the instruction set), 'torch' or 'triton'."""
        return kernels_of(self._blueprint, self.service.resolved, self.device.type)

    def snapshot(self) -> PhaseMetrics:
        """The clock and the counters now; two of them tell what happened between. Tokens are the caller's to count."""
        seconds, wait_s, link = time.perf_counter(), self.service.wait_s, self.link.counters()
        counts, discarded = self.loader.counts.copy(), self.scheduler.discarded.copy()
        return PhaseMetrics(
            seconds, seconds - wait_s, wait_s, link.bytes_read, 0, counts, discarded, link.busy_s,
            self.service.second.bytes_read, link.bytes_copied, link.copy_s,
        )  # fmt: skip

    def other_budgets(self, decode: PhaseMetrics) -> list[OtherBudget]:
        """What other memory budgets would bring, by all decoding that this was told of (`decode`: the latest), and the
        record that later plans read; empty if it says nothing."""
        self.scheduler.record_hits()
        self._decoded.add(decode, decode.tokens)
        curve = self.scheduler.size_curve(self.plan.slots, self._decoded)
        if curve is not None and self.service.history is not None:
            self.service.history.record(curve)
        return other_budgets(self.plan, curve)

    def complete(self, run: Figures) -> Figures:
        """`run`, whose phases are measured, with what is known at its end."""
        run.bandwidth, run.layers = self.service.bandwidth, len(self.layers)
        run.peak_memory_bytes = peak_resident_bytes()
        run.fallback_ratio = self.confident.fallback_ratio if self.confident else 0.0
        run.prefetching = self.scheduler.prefetching
        run.also_warning = self.service.second.warning
        run.kernels = self.kernels
        return run

    def stats(self) -> dict[str, float | int | str]:
        """Counters since loading: hits and misses of experts, bytes read, seconds waited for the link, memory."""
        now, run = self.snapshot(), self.complete(Metrics())
        return {
            "preset": self.composition.name,
            "lossy": ", ".join(self.lossy),
            "bits": self.settings.bits_used,
            "dense_bits": self.settings.dense_bits_used,
            "kv_bits": self.settings.kv_bits,
            "kernels": run.kernels,
            **now.expert_counts,
            "expert_evictions": self.loader.cache.evictions,
            "cached_experts": len(self.loader.cache),
            "prefetching": run.prefetching,
            "fallback_ratio": run.fallback_ratio,
            "hit_rate": now.hit_rate,
            "bytes_read": now.bytes_read,
            "bytes_read_also": now.bytes_read_also,
            "also_warning": run.also_warning,
            "wait_s": now.wait_s,
            "cache_slots": self.plan.slots,
            "slot_bytes": self.plan.slot_bytes,
            "all_experts": self.plan.all_slots,
            "link_bandwidth": run.bandwidth,
            "lanes": self.link.lanes,
            "direct_io": not self.service.keep,
            "mapped": self.service.mapped,
            "memory_bytes": resident_bytes(),
            "peak_memory_bytes": run.peak_memory_bytes,
            "memory_budget_bytes": self.plan.budget,
            **self.service.tier_stats(),
            **self.service.unit.stats(),
        }

    def before_closing(self, undo: Callable[[], None]) -> None:
        """Calls `undo` when the engine is closed; the last one that was told comes first."""
        self._undo.append(undo)

    def close(self) -> None:
        """Ends the reading lanes and gives the slots back, when the step that runs has ended. The model cannot run
        afterwards."""
        with self.context.lock:
            if self._closed:
                return
            self._closed = True
            for layer in self.layers:
                layer.close()
            while self._undo:
                self._undo.pop()()
            self.forecaster.close()
            _end(self.service, self._blueprint)
            self._collected.detach()

    @torch.no_grad()
    def step(self, batch: Batch, cache: SequenceCache, every: bool = False) -> torch.Tensor:
        """Runs a batch and returns the logits (rows, vocabulary) of each row's last token, or of every token of all
        rows (T, vocabulary). Prompts run in chunks. Threads wait for each other. ModelError if logits are not
        finite, which names the layer that they come from; BudgetError and DeviceError of a GPU; TiermoeError after
        `close`. After an error the next step begins anew."""
        self.check_open()
        context, run = self.context, self.decoder.step
        with self._errors, context.lock:
            context.start()
            passes = passes_of(batch, self.decoder, self.settings.chunk, self.plan.prompt_chunks)
            found = []
            for each in passes:
                chunks = max(len(each.rows) - len(batch.rows), 0) + 1
                scored = every and each.phase == "prefill"
                lends = chunks > 1 or self.plan.step_slots > 0
                lent = lends and self.service.lend(chunks, len(each.tokens), scored)
                context.begin(each)
                if self.confident is None or every or each.phase != "decode":
                    found.append(run(each, cache, every))
                else:
                    once_or_twice = functools.partial(run, each, cache)
                    found.append(self.confident.decode(once_or_twice, lambda logits: logits))
                if lent:
                    self.loader.cache.take_back()
            logits = found[0] if len(found) == 1 else gathered(passes, found, batch, every)
            if not is_finite(logits):
                raise self._not_finite(passes, cache)
            context.finish()
        return logits

    @torch.no_grad()
    def step_by_layers(self, batch: Batch, cache: KVCache, layers: int) -> Iterator[torch.Tensor | None]:
        """`step` over chunks of a prompt by our own decoder, in turns of so many layers: gives None after each turn but
        the last, and then the logits. Other sequences' steps may run between two turns. Errors as `step`."""
        context, decoder, passing, logits = self.context, self.decoder, None, None
        assert isinstance(decoder, Decoder)
        depth = len(decoder.layers)
        while logits is None:
            self.check_open()
            with self._errors, context.lock:
                context.start()
                self.service.lend(len(batch.rows), len(batch.tokens), False)
                if passing is None:
                    context.begin(batch)
                    passing = decoder.begin(batch, cache)
                else:
                    context.resume(batch, decoder.moe_before(passing.layer))
                decoder.advance(passing, min(passing.layer + layers, depth))
                logits = decoder.finish(passing) if passing.layer == depth else None
                self.loader.cache.take_back()
                if logits is not None and not is_finite(logits):
                    raise self._not_finite([batch], cache)
                context.finish()
            yield logits

    @torch.no_grad()
    def draft(self, cache: KVCache, wanted: Sequence[DraftToken]) -> list[Drafted]:
        """Drafts by the MTP head of what follows tokens of several sequences. LoadError and TiermoeError as `step`."""
        self.check_open()
        context, head = self.context, self.mtp
        assert head is not None
        with self._errors, context.lock:
            context.start()
            context.begin_draft([each.token for each in wanted], len(self.layers) - self.store.drafting)
            drafted = head.draft(cache, wanted)
            context.finish()
        return drafted

    def new_cache(self, sequences: int = 1, context: int | None = None) -> SequenceCache:
        """Keys and values for `sequences` of up to `context` tokens; None: as many as memory is set aside for."""
        return self.decoder.new_cache(sequences, context or self.plan.context, self.settings.chunk)

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer`, and nobody else, of what runs from now on; None ends it."""
        for undo in self._unwatch:
            undo()
        self._unwatch = []
        if observer is not None and observer.kernels:
            self._unwatch = time_kernels(self.decoder, [layer.watch for layer in self.layers], observer)
        self.context.observer = observer if observer is not None and observer.layers else None
        rule, predictor = self.scheduler.precision, self.composition.policy("prefetch")
        self.context.needs_weights = self.composition.reads_weights or (observer is not None and observer.weights)
        whole = observer is not None and observer.whole_rankings
        self.forecaster.whole = whole or rule.ranks_all or predictor.ranks_all

    def check_open(self) -> None:
        """TiermoeError if the engine was closed."""
        if self._closed:
            raise closed_error()

    def _keep_addresses(self) -> None:
        """The layers' native kernels get the addresses of experts that have come, and lose those of experts that leave.
        Without a reference to the engine: the service ends it."""
        layers = self.layers
        if self.scheduler.settles:
            self.loader.listen(lambda key, slot: layers[key.layer].place(key.expert, key.bits, slot))
        else:
            self.loader.cache.on_leave = forget(layers)

    def _not_finite(self, passes: Sequence[Batch], cache: SequenceCache) -> ModelError:
        """The error for logits that are not: a second run says which layer they come from."""
        undo = self.decoder.require_finite()
        try:
            for each in passes:
                self.context.begin(each)
                self.decoder.step(each, cache)
        except NotFiniteError as error:
            return not_finite(str(error))
        except ValueError:  # the sequence cannot be wound back for another run
            pass
        finally:
            undo()
        return not_finite()

    def _stacked_layers(self) -> int:
        """Layers whose routers are evaluated in one product."""
        alike = len({layer.experts for layer in self.store.layers}) == 1
        stacked = self.composition.policy("prefetch").in_one_product and self._blueprint.family.plain_router and alike
        return int(self.composition["ahead"]) if stacked else 1

    def _decode_little_first(self) -> ConfidentDecoding | None:
        if self.composition.routing not in ("half", "confident"):
            return None
        little = self.composition.little
        require_little(self.composition.routing, little, [layer.top_k for layer in self.store.layers])
        self.context.little = little
        gamma = self.composition.gamma if self.composition.routing == "confident" else None
        if gamma is not None and not self.decoder.can_rollback:
            raise ConfigError(
                f"routing=confident runs a token again where it is unsure, and {self._blueprint.family.name} keeps a "
                f"recurrent state that cannot be wound back; use --set routing=half or routing=all"
            )
        return ConfidentDecoding(self.context, gamma)


def _end(service: ExpertService, blueprint: Blueprint) -> None:
    service.close()
    blueprint.checkpoint.close()


_ending: set[_thread.LockType] | None = set()
"""One lock for each engine that ends beside the program, held until it has ended. None once the program ends."""


def _end_beside(service: ExpertService, blueprint: Blueprint) -> None:
    """`_end` in a thread of its own: an I/O thread itself may be what collects."""
    if _ending is None:
        return
    running = _thread.allocate_lock()
    running.acquire()
    _ending.add(running)
    parts: list[Any] = [service, blueprint]

    def end() -> None:
        try:
            _end(*parts)
        finally:
            parts.clear()  # tensors are freed within C++: here, and not after the lock is released
            if _ending is not None:
                _ending.discard(running)
            running.release()

    _thread.start_new_thread(end, ())


@atexit.register
def _wait_until_ended() -> None:
    """A thread that is at work when the interpreter goes would be stopped within C++, which ends the process."""
    global _ending
    ending, _ending = _ending or set(), None
    for running in list(ending):
        running.acquire()


def engine_of(loaded: Any) -> Engine:
    """The engine of a loaded transformers model, or the engine itself."""
    engine: Engine = loaded if isinstance(loaded, Engine) else loaded.tiermoe
    return engine


def transformers_model(loaded: Any) -> Any:
    """The transformers model of a family that has no decoder of ours: `loaded` itself, or that of an engine."""
    decoder: Any = loaded.decoder if isinstance(loaded, Engine) else None
    return loaded if decoder is None else decoder.model


def numerics(engine: Engine) -> dict[str, Any]:
    """What the bits of keys and values follow from, besides the tokens, as values that JSON can hold, by name: the
    checkpoint, every precision, what computes, and the parts that can change tokens. Who keeps keys and values longer
    than a process lives compares it. The memory budget, and what is cached, change no bit; nor do chunks and threads
    where the decoder's are of the token's sequence alone."""
    settings, composition, library = engine.settings, engine.composition, native.library()
    return {
        "version": installed_version("tiermoe") or "",
        "torch": torch.__version__,
        "checkpoint": engine.store.source.fingerprint,
        "dtype": str(engine.dtype),
        "experts": [precision_key(bits, settings.quantizer_used, composition.unit) for bits in engine.precisions],
        "dense": engine.plan.dense_bits,
        "kv_bits": settings.kv_bits,
        **({"mtp": True} if engine.mtp is not None else {}),  # whose keys and values a slab has too
        **({} if engine.decoder.chunk_invariant else {"chunk": settings.chunk, "threads": torch.get_num_threads()}),
        "decoder": type(engine.decoder).__name__,
        "kernels": native.instruction_set(),
        "build": xxhash.xxh3_64(library.read_bytes()).hexdigest() if library else "",  # of the native kernels
        "processor": [torch.backends.cpu.get_cpu_capability(), processor_identity()],
        "lossy": {name: str(value) for name, value in composition.settings().items()} if engine.lossy else {},
    }
