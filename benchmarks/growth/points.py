"""What is measured along each axis: one point is a model's shape, a cache, a prompt and an output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.random_moe import Shape

AXES = ("experts", "layers", "prompt", "budget")
VALUES: dict[str, tuple[int, ...]] = {
    "experts": (8, 16, 32, 64, 128),
    "layers": (2, 4, 8, 16),
    "prompt": (16, 32, 64, 128, 256, 512, 1024, 2048),
}
"""Where nothing else is asked; a budget's values follow from the model (`budgets`)."""

ALL = "all experts cached"


@dataclass(frozen=True)
class Model:
    """What runs: a random checkpoint of a `shape`, or the one that was named (None). `experts` of each layer, `top_k`
    of a token."""

    layers: int
    experts: int
    top_k: int
    shape: Shape | None = None

    @property
    def every(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    @property
    def token(self) -> int:
        """Experts that one token uses in all layers."""
        return self.layers * self.top_k


def random_model(shape: Shape) -> Model:
    """A random checkpoint."""
    return Model(shape.layers, shape.experts, shape.top_k, shape)


@dataclass(frozen=True)
class Run:
    """What a process of its own does. `slots`: experts that the cache holds. An `output` of 0 tokens measures the
    prompt alone."""

    model: Model
    preset: str
    slots: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Point:
    """One place of one line: `x` along the axis `over`."""

    over: str
    series: str
    x: int
    run: Run


@dataclass(frozen=True)
class Common:
    """What the points of a measurement share. `share`: of the experts, for the line of equal shares; `slots`: of the
    line of equal caches, None as many as the smallest model has experts; `tokens`: (prompt, output) in decode."""

    presets: Sequence[str]
    share: float
    slots: int | None
    tokens: tuple[int, int]


def plan(over: str, values: Sequence[int], model: Model, common: Common) -> list[Point]:
    """The points along one axis, line after line."""
    found = []
    for preset in common.presets:
        points = _models(over, values, model, common, preset) if over in ("experts", "layers") else []
        points += _prompts(values, model, common, preset) if over == "prompt" else []
        points += _budgets(values, model, common, preset) if over == "budget" else []
        named = f", {preset}" if len(common.presets) > 1 else ""
        found += [replace(point, series=f"{point.series}{named}") for point in points]
    return found


def _models(over: str, values: Sequence[int], model: Model, common: Common, preset: str) -> list[Point]:
    assert model.shape is not None
    shape = model.shape
    models = {value: random_model(replace(shape, **{over: value})) for value in sorted(values)}
    least = next(iter(models.values()))
    held = common.slots or least.every
    lines = {
        ALL: {x: each.every for x, each in models.items()},
        f"{common.share:.0%} of the experts cached": {x: _share(each, common.share) for x, each in models.items()},
        f"{held} experts cached": {x: min(held, each.every) for x, each in models.items()},
    }
    return [
        Point(over, name, x, Run(models[x], preset, slots, *common.tokens))
        for name, line in lines.items()
        for x, slots in line.items()
    ]


def _prompts(values: Sequence[int], model: Model, common: Common, preset: str) -> list[Point]:
    lines = {ALL: model.every, f"{common.share:.0%} of the experts cached": _share(model, common.share)}
    return [
        Point("prompt", name, x, Run(model, preset, slots, x, 0))
        for name, slots in lines.items()
        for x in sorted(values)
    ]


def _budgets(values: Sequence[int], model: Model, common: Common, preset: str) -> list[Point]:
    return [Point("budget", "cached", x, Run(model, preset, x, *common.tokens)) for x in sorted(values)]


def budgets(model: Model) -> list[int]:
    """Caches in experts: all of them, halves of that and what lies between, what one token uses, and the least that
    runs: one layer's K."""
    found = {model.every, model.token, model.top_k}
    size = model.every
    while size > model.top_k:
        found |= {size, max(size * 3 // 4, model.top_k)}
        size //= 2
    return sorted(found)


def _share(model: Model, share: float) -> int:
    return max(int(share * model.every), model.top_k)
