"""One token's attention on GPUs against a softmax in float64; test_triton.py runs this file in processes of its own, as
it does triton_cases.py."""

import pytest
import torch

from tiermoe.batch import Batch, decode, prompt
from tiermoe.kernels.triton_attention import SPLIT, attend_row, write_row
from tiermoe.model.decoder import decoder_for
from tiermoe.model.hf.configs import Configs
from tiermoe.model.moe import NoExperts
from tiermoe.model.weights import ModuleWeights
from tiny import auto_class, config_of, make_random
from triton_device import DEVICE, DTYPES, TOLERANCE, bfloat16_dot, dot_row_by_row

__all__ = ["bfloat16_dot", "dot_row_by_row"]

SHAPES = [
    (2, 1, 64, 64), (1, 3, 80, 80), (2, 4, 24, 40), (1, 8, 128, 128), (1, 16, 192, 128), (1, 128, 96, 16),
    (1, 20, 576, 512),
]  # fmt: skip
"""Kv heads, heads of each, columns and columns of values."""

PLACES = [
    *((last, None, 1100, False) for last in (0, 1, SPLIT - 1, SPLIT, SPLIT + 1, 1099)),
    *((last, 300, 1100, False) for last in (0, 298, 299, 300, 3 * SPLIT - 1, 1099)),
    *((last, 300, 300, False) for last in (299, 300, 1023, 4 * SPLIT)),  # a ring
    (1000, 1, 3, False), (1000, 600, 617, False), (5000, 5 * SPLIT, 1300, False), (4200, None, 4300, False),
    *((last, 300, 1100, True) for last in (0, 299, 300, 650, 899)),
    (650, 300, 320, True), (1023, 512, 512, True), (1024, 512, 512, True),
]  # fmt: skip
"""Position, window, room, and whether the window is a chunk."""


@pytest.fixture(autouse=True)
def scratch_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of it before it is written makes the result NaN."""
    monkeypatch.setattr(torch, "empty", lambda size, **how: torch.full(size, float("inf"), **how))


def sequence(shape, first: int, last: int, dtype: torch.dtype, latents: bool = False):
    """A query (heads, columns), and keys and values (kv heads, n, columns) of positions first to last."""
    kv_heads, group, columns, value_columns = shape
    made = torch.Generator().manual_seed(last)
    query = torch.randn(kv_heads * group, columns, generator=made).to(dtype)
    keys = torch.randn(kv_heads, last + 1 - first, columns, generator=made).to(dtype)
    values = torch.randn(kv_heads, last + 1 - first, value_columns, generator=made).to(dtype)
    return query, keys, keys[..., :value_columns] if latents else values


def kept(rows: torch.Tensor, first: int, room: int, slab: int = 1, slabs: int = 2) -> torch.Tensor:
    """Rows (kv heads, n, columns) of positions from `first` on in a slab; all else is NaN."""
    heads, count, columns = rows.shape
    result = rows.new_full((slabs, heads, room, columns), float("nan"))
    result[slab, :, torch.arange(first, first + count) % room] = rows
    return result.to(DEVICE)


def place_of(last: int, slab: int = 1) -> torch.Tensor:
    return torch.tensor([last, slab], device=DEVICE)


def first_of(last: int, window: int | None, chunked: bool) -> int:
    return 0 if window is None else last // window * window if chunked else max(0, last - window + 1)


def check(found, query, keys, values, scale: float, sinks=None) -> None:
    """found against the softmax of all keys in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = len(query) // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("hc,hnc->hn", query, keys) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), 1)
    weights = scores.softmax(-1)[:, : keys.shape[1]]
    expected, most = (torch.einsum("hn,hnc->hc", weights, each) for each in (values, values.abs()))
    assert found.shape == expected.shape
    # probabilities and the result are rounded once each; a score's error in float32 is one of its exponential
    slack = 2**-126 + most * (2 * TOLERANCE[found.dtype] + 2**-20 * float(scores.abs().max()))
    assert bool(((found.double().cpu() - expected).abs() <= slack).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    last, columns = SPLIT + 40, shape[2]
    query, keys, values = sequence(shape, 0, last, dtype)
    found = attend_row(query.to(DEVICE), kept(keys, 0, 400), kept(values, 0, 400), place_of(last), columns**-0.5)
    assert found.dtype == dtype
    check(found, query, keys, values, columns**-0.5)


@pytest.mark.filterwarnings("ignore:overflow")  # of a sink far above all scores
@pytest.mark.parametrize("sinks", [False, True], ids=("no sinks", "sinks"))
@pytest.mark.parametrize(("last", "window", "room", "chunked"), PLACES, ids=str)
def test_positions(last, window, room, chunked, sinks):
    shape, first = (2, 3, 16, 16), first_of(last, window, chunked)
    query, keys, values = sequence(shape, first, last, torch.float32)
    own = torch.tensor([-9, -1, 0, 2, 9, 300.0]) if sinks else None
    found = attend_row(
        query.to(DEVICE), kept(keys, first, room), kept(values, first, room), place_of(last), 0.25, window, chunked,
        None if own is None else own.to(DEVICE),
    )  # fmt: skip
    check(found, query, keys, values, 0.25, own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_columns_of_latents(dtype):
    query, keys, values = sequence((1, 20, 72, 64), 0, 270, dtype, latents=True)
    latents = kept(keys, 0, 300)
    found = attend_row(query.to(DEVICE), latents, latents[..., :64], place_of(270), 0.2)
    check(found, query, keys, values, 0.2)


@pytest.mark.usefixtures("dot_row_by_row")
@pytest.mark.parametrize(("last", "window"), [(0, None), (700, None), (700, 300), (8 * SPLIT - 1, 300)])
def test_bits_depend_on_the_sequence_alone(last, window):
    """On its positions, not on the room of a slab, on which slab, or on how many there are."""
    first = first_of(last, window, False)
    query, keys, values = sequence((1, 3, 72, 40), first, last, torch.bfloat16)
    found = [
        attend_row(
            query.to(DEVICE), kept(keys, first, room, slab, slabs), kept(values, first, room, slab, slabs),
            place_of(last, slab), 0.1, window,
        )
        for room, slab, slabs in ((last + 1, 0, 1), (4999, 2, 3), *(((301, 1, 2), (640, 0, 2)) if window else ()))
    ]  # fmt: skip
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 6, 7, 39])
def test_a_row_is_written_to_its_place(position, dtype):
    """And nothing else."""
    made = torch.Generator().manual_seed(position)
    for columns in ((80, 48), (16, 64), (576,)):
        slabs = [torch.randn(3, 2, 7, each, generator=made).to(dtype).to(DEVICE) for each in columns]
        new = [torch.randn(2, each, generator=made).to(dtype).to(DEVICE) for each in columns]
        expected = [each.clone() for each in slabs]
        for each, row in zip(expected, new, strict=True):
            each[2, :, position % 7] = row
        write_row(slabs, new, place_of(position, 2))
        assert all(torch.equal(*pair) for pair in zip(slabs, expected, strict=True))


class Doubling(NoExperts):
    """Experts that double a token."""

    def __call__(self, hidden, index, weights):
        return 2 * hidden


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3_moe", {}), ("gpt_oss", {"sliding_window": 12}), ("llama4_text", {}), ("deepseek_v2", {})],
)
def test_decoders_tokens_by_place(family, sizes, monkeypatch):
    """Are those of torch's operators: heads that share keys, windows and sinks, chunks, latents."""
    monkeypatch.undo()
    torch.manual_seed(0)
    config = config_of(family, **sizes)
    model = auto_class(family).from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    make_random(model)
    decoder = decoder_for(Configs(config, config, False).plain(), ModuleWeights(model.to(DEVICE)), torch.float32)
    decoder.attach([Doubling() for layer in decoder.layers if layer.moe is not None])
    found = []
    for by_place in (True, False):
        cache = decoder.new_cache(2, 48, 16)
        cache.by_place = by_place
        slab = [cache.open() for _ in range(2)][1]
        for first in (0, 16):
            decoder.step(Batch((prompt(slab, list(range(3 + first, 19 + first)), first),)), cache)
        found.append(torch.cat([decoder.step(Batch((decode(slab, 32 + at, 7 + at),)), cache) for at in range(4)]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


if DEVICE == "cuda":

    def test_one_graph_serves_every_position():
        """With the bits of the same launches without it."""
        query, keys, values = sequence((2, 4, 128, 128), 0, 700, torch.bfloat16)
        on_device, slabs, place = query.to(DEVICE), [kept(each, 0, 800) for each in (keys, values)], place_of(0)
        new = [each[:, 0].to(DEVICE) for each in (keys, values)]

        def run() -> torch.Tensor:
            write_row(slabs, new, place)
            return attend_row(on_device, *slabs, place, 0.1)

        run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for position in (0, 1, SPLIT - 1, SPLIT, 700):
            for own, slab, rows in zip(new, slabs, (keys, values), strict=True):
                own.copy_(rows[:, position])
                slab[1, :, position] = float("nan")
            place.copy_(place_of(position))
            graph.replay()
            check(found, query, keys[:, : position + 1], values[:, : position + 1], 0.1)
            assert torch.equal(found, run())
