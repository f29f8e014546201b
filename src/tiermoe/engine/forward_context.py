"""The forward context: the pass that runs, its phase, which experts its tokens may use, and who observes its
routers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tiermoe.batch import Batch
from tiermoe.engine.forecasts import Forecaster
from tiermoe.engine.observer import Observer
from tiermoe.errors import ConfigError
from tiermoe.kernels.gpu import read_back
from tiermoe.model.hf.configs import cache_of
from tiermoe.offload.policies.routing import AdaptiveGating, little
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import Ready, Routed

INSTEAD = {"routing=cached": "routing=all", "on_mispredict=predicted": "on_mispredict=reload"}
"""A setting by which other experts run than a router chose → one by which the router's own do."""


class ForwardContext:
    """The forward pass that runs, which MoE layers look into: its phase, its tokens, which experts they may use.

    encoder_layers: MoE layers of an encoder, which run first (0: a decoder alone). `needs_weights`, `proceed`: what the
    composition asks of the layers. `unsure`: in a fallback pass, the rows of the batch that run with all K; None runs
    every row with all K, an empty list none (the little pass). `little`: experts that run in a little pass, None for
    K/2. `adaptive`: says how many run in decode, None: all K. `observer`: is notified of the layers. before_step:
    called before each step with whether the last one was interrupted. `helped`: a token's hidden states (1, H) on a GPU
    that the next `read_back` brings to main memory as `on_host`, for experts that the CPU computes. `lock`: owned by
    the step that runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        forecasts: Forecaster,
        encoder_layers: int,
        before_step: Callable[[bool], None],
    ) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.forecasts = forecasts
        self.phase = "prefill"
        self.needs_weights = False
        self.proceed = scheduler.proceed
        self.unsure: list[int] | None = None
        self.little: int | None = None
        self.adaptive: AdaptiveGating | None = None
        self.observer: Observer | None = None
        self.helped: torch.Tensor | None = None
        self.on_host: torch.Tensor | None = None
        self._batch: Batch | None = None  # of the last pass that began
        self._encoder_layers = encoder_layers
        self._encoded = False
        self._before_step = before_step
        self._interrupted = False

    def start(self) -> None:
        """A step begins, within `lock`. One that did not `finish`, whatever interrupted it wherever, is rolled back
        first: an interruption may hit whoever would clean up after it too."""
        self._before_step(self._interrupted)
        if self._interrupted:
            self.unsure = self._batch = self.helped = self.on_host = None
            self.forecasts.little.clear()
        self._interrupted = True

    def finish(self) -> None:
        """The step has ended."""
        self._interrupted = False

    def begin(self, batch: Batch) -> None:
        """A pass over a batch begins."""
        for row in batch.rows:
            if row.first == 0:
                self.scheduler.new_sequence()
                break
        tokens = batch.tokens
        self._begin(batch.phase, tokens, len(tokens), 0)
        self._batch = batch

    def resume(self, batch: Batch, first: int) -> None:
        """The pass over a batch goes on with MoE layer `first`, perhaps after other passes."""
        if self._batch is not batch:
            tokens = batch.tokens
            self._begin(batch.phase, tokens, len(tokens), first, resumed=True)
            self._batch = batch

    def begin_draft(self, tokens: list[int], first: int) -> None:
        """A pass over MoE layer `first`, an MTP head's, begins. Its tokens run in the model's own passes too."""
        self._begin("decode", tokens, len(tokens), first, resumed=True)

    def begin_call(self, ids: torch.Tensor | None, rows: int, length: int, past: int, prompt: bool) -> None:
        """A pass of transformers' own code begins, over `rows` sequences of `length` tokens after `past` ones. ids: the
        tokens, if there are any. prompt: they belong to a prompt; else a single token is a generated one."""
        if past == 0:
            self.scheduler.new_sequence()
        phase = "decode" if length == 1 and past > 0 and not prompt else "prefill"
        if phase == "decode" and (moves := self.scheduler.moves_choices):
            raise ConfigError(
                f"{moves} decodes with tiermoe's own decoder, and this call asks for what transformers' code computes "
                f"(hidden states, another cache); ask for less, or use --set {INSTEAD[moves]}"
            )
        self._begin(phase, _listed(ids), rows * length, 0)

    def follow_encoder(self, model: Any, decoder: bool) -> list[Callable[[], None]]:
        """Makes calls of an encoder and of the `decoder` after it, if there is one, which `generate()` calls apart,
        steps; returns what ends that."""
        undo = [self._follow(model.get_encoder(), self.before_encoder)]
        return [*undo, self._follow(model.get_decoder(), self.before_decoder)] if decoder else undo

    def _follow(self, part: Any, begin: Callable[..., None]) -> Callable[[], None]:
        forward = part.forward

        @functools.wraps(forward)
        def followed(*arguments: Any, **named: Any) -> Any:
            with self.lock:
                self.start()
                begin(arguments, named)
                output = forward(*arguments, **named)
                self.finish()
                return output

        part.forward = followed
        return functools.partial(delattr, part, "forward")

    def before_encoder(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Another request begins, and its prompt is read at once."""
        ids, rows, length = given_tokens(arguments, named)
        self.scheduler.new_sequence()
        self._encoded = True
        self._begin("prefill", _listed(ids), rows * length, 0)

    def before_decoder(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The first token of a decoder after an encoder is a generated one too."""
        ids, rows, length = given_tokens(arguments, named)
        if past_tokens(named) == 0 and not self._encoded:
            self.scheduler.new_sequence()  # what was encoded before is decoded again
        self._encoded = False
        self._begin("decode" if length == 1 else "prefill", _listed(ids), rows * length, self._encoder_layers)

    @contextlib.contextmanager
    def halved(self, unsure: list[int]) -> Iterator[None]:
        """Decode passes within it run with `little` experts, but for the rows `unsure`."""
        self.unsure = unsure
        try:
            yield
        finally:
            self.unsure = None

    def route(
        self, layer: int, index: torch.Tensor, weights: torch.Tensor, none: int, renormalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts that run: all K of a token, or few where the pass is a little one for it or it needs no more.
        none: an index that names no expert."""
        if self.phase != "decode":
            return index, weights
        if self.adaptive is not None:
            places = [self.adaptive.kept(layer, gates) for gates in weights.tolist()]
            return keep(index, weights, places, none, renormalise)
        if self.unsure is None:
            return index, weights
        if not self.unsure:
            self._record_little(layer, index, weights)
        return keep_little(index, weights, self.unsure, none, renormalise, self.little)

    def read_back(self, layer: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A layer's tensors in main memory, by one device-to-host copy that has its prefetch's forecasts too: the host
        synchronises once a layer."""
        said = self.forecasts.launch() if self.scheduler.predicting else []
        helped = [] if self.helped is None else [self.helped]
        found = read_back([*tensors, *helped, *said], ("read back", layer))
        if said:
            self.forecasts.take(found[-len(said) :])
        if helped:
            self.helped, self.on_host = None, found[len(tensors)]
        return found[: len(tensors)]

    def run_layer(self, routed: Routed, hidden: torch.Tensor) -> Iterator[list[Ready]]:
        """`Scheduler.run_layer` for a layer whose input is `hidden` (T, H), which `forecasts` know of."""
        if self.observer is None:
            return self.scheduler.run_layer(routed, self.forecasts)
        self.observer.on_route(routed, hidden)  # before any load begins
        return self._observed(self.observer, routed.layer, self.scheduler.run_layer(routed, self.forecasts))

    def _observed(self, observer: Observer, layer: int, groups: Iterator[list[Ready]]) -> Iterator[list[Ready]]:
        for group in groups:
            for ready in group:
                observer.on_ready(layer, ready)
            yield group

    def _begin(self, phase: str, tokens: list[int], count: int, first: int, resumed: bool = False) -> None:
        """A pass over `count` tokens begins, or goes on, whose first MoE layer is `first`."""
        self.phase, self._batch = phase, None
        self.forecasts.tokens = tokens
        self.forecasts.at(None)
        self.scheduler.begin_pass(count, self.forecasts, phase, first, resumed)

    def _record_little(self, layer: int, index: torch.Tensor, weights: torch.Tensor) -> None:
        """What the router said in the little pass, of all K: summed over the rows of a batch."""
        totals: dict[int, float] = {}
        for chosen, gates in zip(index.tolist(), weights.tolist(), strict=True):
            for expert, gate in zip(chosen, gates, strict=True):
                totals[expert] = totals.get(expert, 0.0) + gate
        self.forecasts.little[layer] = sorted(totals.items(), key=lambda pair: -pair[1])


def given_tokens(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[torch.Tensor | None, int, int]:
    """(token ids if there are any, rows, tokens of each) of a forward call."""
    ids = arguments[0] if arguments else named.get("input_ids")
    given = ids if ids is not None else named["inputs_embeds"]
    return ids, given.shape[0], given.shape[1]


def _listed(ids: torch.Tensor | None) -> list[int]:
    return ids.reshape(-1).tolist() if ids is not None else []


def past_tokens(named: dict[str, Any]) -> int:
    """Tokens that the key/value cache of a forward call holds already."""
    cache = cache_of(named)
    return int(cache.get_seq_length()) if cache is not None else 0


def keep_little(
    index: torch.Tensor,
    weights: torch.Tensor,
    whole_rows: list[int],
    none: int,
    renormalise: bool,
    count: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """index, weights (T, K) with those of each row's experts that are not in the little pass replaced by `none`, except
    in `whole_rows`. count: experts of the little pass, None for K/2. The rest as `keep`."""
    places = [
        list(range(len(gates))) if row in whole_rows else little(gates, count)
        for row, gates in enumerate(weights.tolist())
    ]
    return keep(index, weights, places, none, renormalise)


def keep(
    index: torch.Tensor, weights: torch.Tensor, places: Sequence[Sequence[int]], none: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """index, weights (T, K) with `none` in the place of the experts of each row that are not at its `places`. What is
    left is scaled to the row's sum where the model normalises over the chosen ones."""
    k = index.shape[1]
    dropped = torch.tensor([[place not in kept for place in range(k)] for kept in places], device=index.device)
    left = weights.masked_fill(dropped, 0)
    if renormalise:
        scale = weights.sum(1, keepdim=True) / left.sum(1, keepdim=True)
        scale[~dropped.any(1)] = 1
        left = left * scale
    return index.masked_fill(dropped, none), left
