"""Forecasts: choices of later layers' routers on the running layer's input, and the tables of hash layers, which route
by the token alone (DeepSeek-V4's first ones)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiermoe.kernels import graphs
from tiermoe.kernels import router as native_router
from tiermoe.kernels.gpu import read_back
from tiermoe.model.decoder import Decoder
from tiermoe.model.families.family import Family
from tiermoe.model.routers import Router
from tiermoe.offload.policies.prediction import Ranked

Remembered = tuple[tuple[Any, ...], dict[str, Any]]


class Forecaster:
    """Calls a model's routers on other layers' inputs: the `policies.prediction.Forecasts` of the pass that runs.

    routers: one per MoE layer; a None names no experts by index (Switch) or is a hash of the token (whose prediction is
    another), and nothing is forecast for it. experts: how many each layer has; a router may name more, which compute
    nothing. whole: rank all experts of a layer, not only the chosen ones (percentiles, popularity, traces).

    A router of transformers' is called with what its block gives it besides the input (MiniMax-M2's correction bias),
    as seen in the model's own last call; before the first one nothing is forecast. It is asked about what the running
    layer's own router was given, which is not always what its experts are (Gemma 4, Nemotron-H). stacked: so many
    layers ahead are one product (HOBBIT, section 3.3), for routers that are a matrix and nothing else; 1 calls each
    router.

    tokens: ids of the pass. `little`: layer → what its router said in the discarded little pass.
    """

    def __init__(self, routers: Sequence[Any], experts: Sequence[int], whole: bool, stacked: int = 1) -> None:
        self._routers = list(routers)
        self._experts = list(experts)
        self.whole = whole
        self.tokens: list[int] = []
        self.little: dict[int, Ranked] = {}
        self._asked: Sequence[torch.Tensor] = ()
        self._layer = -1  # the running one, if it is told
        self._hidden: torch.Tensor | None = None  # the running layer's input (T, H), before the first layer None
        self._ranked: dict[int, Ranked] = {}  # by target, of the running layer
        self._counted: dict[int, Ranked] = {}
        self._usual: dict[int, dict[int, None]] = {}  # layer → targets that were asked for while it ran
        self._launched: list[tuple[range, int]] = []  # layers that were asked at once, and how many tensors they gave
        self._stack = _stacked([router for router in routers if router is not None]) if stacked > 1 else None
        self._ahead = stacked
        own = {layer for layer, router in enumerate(self._routers) if isinstance(router, Router)}
        self._beside_input: dict[int, Remembered] = {layer: ((), {}) for layer in own}
        self._flat = dict.fromkeys(own, True)  # of each layer seen: whether its router takes (T, H), or (1, T, H)
        self._hooks = [
            router.register_forward_pre_hook(self._remember(layer), with_kwargs=True)
            for layer, router in enumerate(self._routers)
            if router is not None and layer not in own
        ]

    def at(self, hidden: torch.Tensor | None, layer: int = -1) -> None:
        """Another layer runs, on `hidden` (T, H), which its router was given if nobody has said otherwise
        (`router_input`); None: a pass begins. layer: its index, where `launch` follows."""
        asked, self._asked = self._asked, ()
        if hidden is not None and asked:
            rows = [each if each.ndim == 2 else each.reshape(-1, each.shape[-1]) for each in asked]
            hidden = rows[0] if len(rows) == 1 else torch.cat(rows)
        self._layer, self._hidden = layer, hidden
        self._ranked.clear()
        self._counted.clear()

    def launch(self) -> list[torch.Tensor]:
        """Asks the routers that were asked in earlier passes while this layer ran. What they say goes to `take` once it
        is in main memory: a GPU's host then waits once for a layer's choices and its forecasts."""
        self._launched, said, hidden = [], [], self._hidden
        if hidden is None:
            return []
        for target in self._usual.get(self._layer, ()):
            if target not in self._ranked and not any(target in layers for layers, _ in self._launched):
                layers, found = self._ask(target, hidden)
                self._launched.append((layers, len(found)))
                said += found
        return said

    def take(self, said: Sequence[torch.Tensor]) -> None:
        """What `launch` gave, in main memory."""
        tokens = 0 if self._hidden is None else len(self._hidden)
        for layers, count in self._launched:
            self._ranked.update(self._rankings(layers, said[:count], tokens))
            said = said[count:]

    def ranked(self, target: int) -> Ranked:
        """`rank` of layer `target` on the running layer's input. For stacked routers, one matrix product ranks the
        following layers of the lookahead too."""
        known, hidden = self._ranked, self._hidden
        if hidden is None:
            return ()
        if target not in known:
            self._usual.setdefault(self._layer, {})[target] = None
            layers, said = self._ask(target, hidden)
            known.update(self._rankings(layers, read_back(said), len(hidden)))
        return known[target]

    def counted(self, target: int) -> Ranked:
        """`count` of layer `target` on the running layer's input."""
        if self._hidden is None:
            return ()
        if target not in self._counted:
            self._counted[target] = self.count(target, self._hidden)
        return self._counted[target]

    def token_ids(self) -> Sequence[int]:
        return self.tokens

    def recalled(self, target: int) -> Ranked:
        return self.little.get(target, ())

    def rank(self, target: int, hidden: torch.Tensor) -> Ranked:
        """The router of layer `target` on `hidden` (T, H): experts with weights, likeliest first; weights are summed
        over the tokens. The chosen ones come first for a single token."""
        return self._ranking(target, read_back(self._said(target, hidden)), len(hidden))

    def count(self, target: int, hidden: torch.Tensor) -> Ranked:
        """`policies.prediction.Forecasts.counted`, of layer `target` on `hidden` (T, H)."""
        if not self._knows(target):
            return ()
        experts = self._experts[target]
        _, index = self._routed(target, hidden)
        (chosen,) = read_back([index])
        counts = torch.bincount(chosen.reshape(-1), minlength=experts)[:experts]
        return [entry for entry in _descending(counts) if entry[1]]

    def router_input(self, parts: Sequence[torch.Tensor]) -> None:
        """A router of our own is given each of the parts of a step, (T, H)."""
        self._asked = parts

    def close(self) -> None:
        """Takes its hooks off the model's routers."""
        for hook in self._hooks:
            hook.remove()

    def _ask(self, target: int, hidden: torch.Tensor) -> tuple[range, list[torch.Tensor]]:
        """The layers that are asked at once where `target` is, and what they say, on hidden's device: of one layer
        `_said`, of several in one product weights (layers, k) and experts (layers, k)."""
        if self._stack is None or self.whole or hidden.shape[0] > 1 or target >= len(self._stack):
            said = functools.partial(self._said, target)
            return range(target, target + 1), graphs.launch((id(self), "said", target), said, hidden)
        layers = range(target, min(target + self._ahead, len(self._stack)))
        k = max(self._routers[layer].top_k for layer in layers)
        largest = functools.partial(_largest, self._stack[layers.start : layers.stop], k=k)
        return layers, [*graphs.launch((id(self), "largest", target), largest, hidden)]

    def _rankings(self, layers: range, said: Sequence[torch.Tensor], tokens: int) -> dict[int, Ranked]:
        """Of what `_ask` gave for so many tokens, in main memory."""
        if not said or said[0].ndim == 1:
            return {layers.start: self._ranking(layers.start, said, tokens)}
        weights, experts = (each.tolist() for each in said)
        return {
            layer: list(zip(chosen, gates, strict=True))
            for layer, chosen, gates in zip(layers, experts, weights, strict=True)
        }

    def _said(self, target: int, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What `_ranking` takes, on hidden's device: the tokens' experts (T K) and their weights (T K), or with `whole`
        the last token's experts (K) and the sum of all tokens' probabilities (E). Empty if nothing is known."""
        if not self._knows(target):
            return []
        if self.whole:
            logits, _, index = self._called(target, hidden)
            return [index[-1], logits.float().softmax(-1)[:, : self._experts[target]].sum(0)]
        weights, index = self._routed(target, hidden)
        return [index.reshape(-1), weights.reshape(-1)]

    def _ranking(self, target: int, said: Sequence[torch.Tensor], tokens: int) -> Ranked:
        if not said:
            return ()
        experts = self._experts[target]
        if tokens > 1 and self.whole:
            return _descending(said[1])
        if tokens > 1:
            summed = torch.zeros(int(said[0].max()) + 1).index_add_(0, said[0], said[1].float())
            return [entry for entry in _descending(summed) if entry[1] > 0 and entry[0] < experts]
        chosen, listed = (each.tolist() for each in said)
        if not self.whole:
            pairs = sorted(zip(chosen, listed, strict=True), key=lambda pair: -pair[1])
            return [pair for pair in pairs if pair[0] < experts]
        first = sorted((each for each in chosen if each < experts), key=lambda expert: -listed[expert])
        rest = sorted(set(range(experts)).difference(first), key=lambda expert: -listed[expert])
        return [(expert, listed[expert]) for expert in [*first, *rest]]

    def _knows(self, target: int) -> bool:
        return target < len(self._routers) and target in self._beside_input

    def _routed(self, target: int, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """The router's weights and experts."""
        router = self._routers[target]
        return router.route(hidden) if isinstance(router, Router) else self._called(target, hidden)[1:]

    def _called(self, target: int, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """The router's logits, weights and experts."""
        arguments, named = self._beside_input[target]
        router = self._routers[target]
        call = router.forward if isinstance(router, torch.nn.Module) else router  # past the hooks
        rows = hidden if self._flat[target] else hidden[None]
        routed: Sequence[torch.Tensor] = call(rows, *arguments, **named)[:3]
        return routed

    def _remember(self, layer: int) -> Callable[..., None]:
        def remember(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._beside_input[layer] = (arguments[1:], named)
            self._flat[layer] = arguments[0].ndim == 2
            self._asked = arguments[:1]

        return remember


def _largest(stack: torch.Tensor, hidden: torch.Tensor, *, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest probabilities of each router in stack (layers, E, H) for hidden (1, H), and their experts: (layers,
    k), the largest first."""
    matrix = stack.flatten(0, 1)
    if native_router.takes(matrix) and hidden.dtype == torch.bfloat16:
        logits = native_router.products_of(matrix, hidden.contiguous()).to(hidden.dtype).view(len(stack), -1)
        return native_router.choose(logits, k, normalise=False)
    logits = torch.nn.functional.linear(hidden, matrix)
    weights, experts = logits.view(len(stack), -1).float().softmax(-1).topk(k, dim=-1)
    return weights, experts


def _stacked(routers: list[Any]) -> torch.Tensor:
    """The routers' matrices in one tensor (layers, E, H), of which each router's own becomes a view: it takes no memory
    of its own. They must be of one shape."""
    stack = torch.stack([router.weight.data for router in routers])
    for router, weight in zip(routers, stack, strict=True):
        router.weight.data = weight
    return stack


def _descending(values: torch.Tensor) -> Ranked:
    order = values.argsort(descending=True, stable=True).tolist()
    listed = values.tolist()
    return [(expert, listed[expert]) for expert in order]


class TokenTable:
    """`policies.prediction.HashTable` of a router's own table (vocabulary, K) of expert indices."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table.cpu()

    def __getitem__(self, token_id: int) -> Sequence[int]:
        experts: list[int] = self._table[token_id].tolist()
        return experts


def decoder_tables(decoder: Decoder) -> dict[int, TokenTable]:
    """MoE layer → its table, of the layers of a decoder of ours that have one."""
    return {layer: TokenTable(table) for layer, table in decoder.tables.items()}


def router_tables(routers: Sequence[Any], family: Family) -> dict[int, TokenTable]:
    """MoE layer → the table of its router of transformers', of the layers that have one."""
    if family.hash_table is None:
        return {}
    tables = {layer: getattr(router, family.hash_table, None) for layer, router in enumerate(routers)}
    return {layer: TokenTable(table) for layer, table in tables.items() if table is not None}
