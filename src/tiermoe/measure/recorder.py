"""Records what a model's routers choose on a text, and which neurons are active (|act(W1 x)| > theta; CORM, section 3):
`tiermoe trace`, and the calibrations.

Of each of a text's sequences the first tokens are a prompt, read in one pass; the others are fed one at a time,
whatever the model would have said. Recording changes nothing: the little pass before a token and the forecasts leave
the model's own passes as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tiermoe.batch import Batch, decode, prompt
from tiermoe.decide.prediction.protocol import Ranked
from tiermoe.decide.routing import require_little
from tiermoe.engine.engine import engine_of, transformers_model
from tiermoe.engine.observer import Observer
from tiermoe.errors import ConfigError
from tiermoe.families import family_of
from tiermoe.kernels.expert import separate_steps
from tiermoe.tiers.neurons import to_bits
from tiermoe.trace.schema import LayerTrace, Little, Pass
from tiermoe.types import Ready, Routed

DISTANCES = (1, 2, 3)
_DIGITS = 5  # significant ones of a forecast's weight: a trace holds hundreds for each token


class Recorder(Observer):
    """Follows the layers of a loaded model that has run before (`Forecaster`). distances: layers ahead whose routers
    are asked too. little: run the little pass (MoBiLE) before each token, of `little_k` experts (None: K/2). theta:
    note the neurons above it of each token after a prompt (CORM; ModelError where the experts are not gated). `holds`
    and `distances` are what comes of it (an adapter family's routers name no experts; with one expert per token there
    is no half). Close it, or use it as a context.

    Raises ConfigError for a model whose composition is lossy or decodes with fewer experts: its choices would not be
    the model's."""

    weights = whole_rankings = True

    def __init__(
        self,
        model: Any,
        distances: Sequence[int] = DISTANCES,
        little: bool = True,
        theta: float | None = None,
        little_k: int | None = None,
    ) -> None:
        self._model = model
        self._engine = engine = engine_of(model)
        if engine.lossy:
            raise ConfigError(
                f"preset {engine.composition.name} is lossy ({', '.join(engine.lossy)}); record with an exact preset"
            )
        layers = engine.store.layers
        self._experts = [layer.experts for layer in layers]
        self._top_k = [layer.top_k for layer in layers]
        family = family_of(engine.config.model_type)
        self.little = little and not family.encoder_decoder and engine.rewinds and max(self._top_k) > 1
        if little_k is not None:
            require_little("confident", little_k, self._top_k)
        engine.current.little = little_k
        self.distances = () if not family.forecasts else tuple(d for d in distances if d < len(layers))
        self._layers: list[LayerTrace] = []
        self._neurons = None if theta is None else NeuronWatch(model, theta)
        engine.observe(self)

    @property
    def holds(self) -> frozenset[str]:
        """Of `tiermoe.trace.schema.HOLDS`."""
        parts = {
            "forecasts": self.distances, "counts": self.distances, "little": self.little, "neurons": self._neurons,
        }  # fmt: skip
        return frozenset(["weights", "tokens", *(name for name, there in parts.items() if there)])

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the model as it was."""
        self._engine.current.little = None
        self._engine.observe(None)

    @torch.inference_mode()
    def passes(self, ids: torch.Tensor, first: int, sequence: int = 0) -> Iterator[Pass]:
        """The passes over one sequence (n,): its first `first` tokens, then each of the others. An encoder–decoder
        model reads the prompt through its encoder, and its decoder is fed the others after its start token."""
        feed = Feed(self._model, ids, first)
        self._begin()
        feed.prompt()
        yield Pass("prefill", sequence, ids[:first].tolist(), self._layers)
        for position in range(first, len(ids)):
            little = self._little(feed, position) if self.little else None
            self._begin()
            feed.token(position)
            self._note_neurons()
            yield Pass("decode", sequence, [int(ids[position])], self._layers, little)

    def _begin(self) -> None:
        self._layers = [LayerTrace([], []) for _ in self._experts]
        if self._neurons is not None:
            self._neurons.begin()

    def _note_neurons(self) -> None:
        if self._neurons is not None:
            for layer, active, named in zip(self._layers, self._neurons.active, self._neurons.named, strict=True):
                layer.neurons, layer.named = active, named

    def _little(self, feed: Feed, position: int) -> Little:
        """The little pass at a position, undone afterwards."""
        current = self._engine.current
        self._begin()
        try:
            with current.halved([]):
                logits = feed.token(position)
        finally:
            feed.take_back(position)
            current.scheduler.discard_pass()
        for layer, ranked in current.forecasts.little.items():
            traced = self._layers[layer]
            traced.experts = [[expert for expert, _ in ranked]]
            traced.weights = [[weight for _, weight in ranked]]
        current.forecasts.little.clear()
        return Little(float(logits.float().softmax(-1).amax()), self._layers)

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        if self._neurons is not None:
            self._neurons.on_route(routed, hidden)
        traced = self._layers[routed.layer]
        traced.experts = [list(chosen) for chosen in routed.experts]
        # as they are: a score that is a threshold, as calibrated ones are, must fall on the same side in a replay
        traced.weights = [list(gates) for gates in routed.weights]
        for distance in self.distances:
            target = routed.layer + distance
            if target < len(self._experts):
                ranked = self._engine.forecaster.ranked(target, hidden)
                kept = self._kept(target) if len(hidden) == 1 else self._experts[target]
                traced.forecasts[distance] = _shortened(ranked[:kept])
                if routed.phase == "prefill":
                    traced.counts[distance] = list(self._engine.forecaster.counted(target, hidden))

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._neurons is not None:
            self._neurons.on_ready(layer, ready)

    def _kept(self, target: int) -> int:
        """Of one token's ranking: twice its K, and what lies above the 75th percentile. Several tokens' choices may
        be anywhere in it."""
        return max(2 * int(self._top_k[target]), -(-int(self._experts[target]) // 4) + 1)


class Feed:
    """Feeds one sequence (n,) to a model: its `first` tokens at once, the others one by one."""

    def __init__(self, model: Any, ids: torch.Tensor, first: int) -> None:
        self._engine = engine_of(model)
        self._ids: list[int] = ids.tolist()
        self._first = first
        self._both = BothFeed(transformers_model(model), ids, first) if model.config.is_encoder_decoder else None
        self._cache: Any = None if self._both else self._engine.new_cache(1, len(self._ids))
        self._slab = self._cache.open() if self._cache is not None else 0

    def prompt(self) -> None:
        """Its first tokens, in one pass; an encoder–decoder model then decodes its start token."""
        if self._both is not None:
            self._both.prompt()
        else:
            self._engine.step(Batch((prompt(self._slab, self._ids[: self._first]),)), self._cache)

    def token(self, position: int) -> torch.Tensor:
        """The logits after the token at `position`."""
        if self._both is not None:
            return self._both.token(position)
        row = decode(self._slab, position, self._ids[position])
        logits: torch.Tensor = self._engine.step(Batch((row,)), self._cache)[0]
        return logits

    def take_back(self, position: int) -> None:
        """Forgets the token at `position`, the last one."""
        self._cache.crop(self._slab, position)


class BothFeed:
    """`Feed` for an encoder–decoder model, whose prompt goes to the encoder."""

    def __init__(self, model: Any, ids: torch.Tensor, prompt: int) -> None:
        self._model = model
        self._ids = ids[None].to(model.device)
        self._prompt = prompt
        self._encoded: Any = None
        self._cache: Any = None

    def prompt(self) -> None:
        ids = self._ids[:, : self._prompt]
        start = torch.full_like(ids[:, :1], self._model.config.decoder_start_token_id)
        self._encoded = self._model.get_encoder()(input_ids=ids)  # apart, as generate() does
        output = self._model(encoder_outputs=self._encoded, decoder_input_ids=start, use_cache=True)
        self._cache = output.past_key_values

    def token(self, position: int) -> torch.Tensor:
        ids = self._ids[:, position : position + 1]
        output = self._model(
            encoder_outputs=self._encoded, decoder_input_ids=ids, past_key_values=self._cache, use_cache=True
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def _shortened(ranked: Ranked) -> list[tuple[int, float]]:
    return [(expert, _rounded(weight)) for expert, weight in ranked]


def _rounded(weight: float) -> float:
    return float(f"{weight:.{_DIGITS}g}")


class NeuronWatch(Observer):
    """Looks at what comes out of the first matrix of a loaded model's experts while each token runs alone. ModelError
    where they are not W2 (act(W1 x) * W3 x)."""

    def __init__(self, model: Any, theta: float) -> None:
        engine: Any = engine_of(model)
        self._engine = engine
        self._theta = theta
        self._gates = [gate.alone() for gate in engine.gates]
        self._hidden: torch.Tensor | None = None
        self._before: torch.Tensor | None = None  # of the layer before
        self._chosen: set[int] = set()
        self.active: list[dict[int, int]] = []
        """Per layer, of the last pass: expert → its active neurons as a bit set (neuron j is bit j)."""
        self.named: list[dict[int, int]] = []
        """Those that would be active if the layer ran on the layer before's input, which is what predicts them."""
        self.begin()

    def begin(self) -> None:
        """Another pass begins."""
        self.active = [{} for _ in self._gates]
        self.named = [{} for _ in self._gates]
        self._hidden = None

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        self._before = self._hidden
        self._hidden = hidden.clone() if len(hidden) == 1 else None
        self._chosen = {expert for token in routed.experts for expert in token}

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._hidden is None or ready.expert not in self._chosen:
            return
        kernel, views = self._engine.held(layer, ready)
        features = separate_steps(kernel).features

        def above(hidden: torch.Tensor) -> int:
            magnitudes = self._gates[layer](features(hidden, views).chunk(2, dim=-1)[0])[0].float().abs()
            return to_bits(~(magnitudes <= self._theta).cpu())  # an undefined one is active, as in kernels.neurons

        self.active[layer][ready.expert] = above(self._hidden)
        if self._before is not None:
            self.named[layer][ready.expert] = above(self._before)
