"""CUDA graphs compute what plain calls compute, and what cannot be a graph is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fake_cuda import DEVICE, KERNELS, FakeCuda, on_device, plain, values_of
from fake_graph import capturing
from gpu_models import needs_gpu
from tiermoe.kernels import graphs as module
from tiermoe.kernels.graphs import Graphs, launch, using

X = [torch.tensor([[1.0, 2, 3]]) + 7 * at for at in range(6)]
WEIGHT = torch.eye(3) * 2 + 1


@pytest.fixture
def graphs(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    monkeypatch.setattr(module, "_warned", set())
    made = Graphs(DEVICE)
    with using(made):
        yield made


def layer(weight: Tensor) -> Callable[[Tensor], Any]:
    """Of whose results some are views, of the input too, integers, NaN and None."""

    def compute(x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        y = F.linear(x, weight)
        first, second = (y.softmax(-1) * 5).split([1, 2], -1)
        chosen = torch.topk(y, 2, dim=-1).indices + torch.arange(2, device=x.device)
        return first, [second, None, chosen, y.gather(-1, chosen.clamp(max=2)), (y - y) / 0, x[:, 1:], y.sum()]

    return compute


def same(found: object, expected: object) -> bool:
    """Whether tensors have the same bits and lie in the same tuples and lists."""
    (mine, form), (theirs, expected_form) = tree_flatten(plain(found)), tree_flatten(expected)
    return form == expected_form and all(
        one is other is None or (one.dtype == other.dtype and one.nan_to_num(nan=7e7).equal(other.nan_to_num(nan=7e7)))
        for one, other in zip(mine, theirs, strict=True)
    )


def launched(device: FakeCuda, call: Callable[[], object]) -> list[str]:
    """The operators of a call."""
    device.clear()
    call()
    return [each.operator for each in device.events]


def test_the_third_call_launches_one_graph(graphs: Graphs, fake_cuda: FakeCuda) -> None:
    compute, expected, given = layer(on_device(WEIGHT)), layer(WEIGHT), [on_device(x) for x in X]
    for at in range(2):
        assert same(launch("layer", compute, given[at]), expected(X[at]))
    assert sum(fake_cuda.waits.values()) == 1
    for at in range(2, 6):
        assert launched(fake_cuda, lambda: launch("layer", compute, given[at])) == ["copy_", "graph"]  # noqa: B023
        assert same(launch("layer", compute, given[at]), expected(X[at]))
    assert same(given, X)


def test_without_graphs_functions_are_called(fake_cuda: FakeCuda) -> None:
    """Outside of `using`, and in another thread."""
    graphs, x = Graphs(DEVICE), on_device(X[0])
    calls: list[Tensor] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    for _ in range(4):
        launch("key", compute, x)
        with using(graphs), ThreadPoolExecutor(1) as pool:
            pool.submit(launch, "key", compute, x).result()
            with using(None):
                launch("key", compute, x)
    assert len(calls) == 12


def test_a_graph_reads_the_results_of_another_in_place(graphs: Graphs, fake_cuda: FakeCuda) -> None:
    """And views of them. Each layer's second call is its capture, so that the chain stands after two."""

    def chain(x: Tensor) -> Tensor:
        y, both = launch("one", lambda x: (x + 1, torch.cat((x, -x))), x)
        z = launch("two", lambda y, row: y * row, y, both[1:])
        return launch("three", lambda y, z: (y - z).abs(), y, z)

    for at in range(2):
        assert same(chain(on_device(X[at])), chain_on_cpu(X[at]))
    x = on_device(X[2])
    for at in range(3):
        assert launched(fake_cuda, lambda: chain(x)) == ["copy_", "graph", "graph", "graph"]
        assert same(chain(on_device(X[at])), chain_on_cpu(X[at]))


def chain_on_cpu(x: Tensor) -> Tensor:
    return (x + 1 - (x + 1) * -x).abs()


def test_other_inputs_are_another_graph(graphs: Graphs, fake_cuda: FakeCuda) -> None:
    """Other addresses of fixed tensors, shapes, types, and strides."""
    square = graphs.fixed("square", torch.randn(3, 3))[0]
    given = [*graphs.fixed(0, X[0]), *graphs.fixed(1, X[1]), on_device(X[2]), on_device(X[3].repeat(2, 1))]
    given += [on_device(X[4].long()), square, square.T, square[:1]]
    for x in given * 3:
        assert same(launch("double", lambda x: 2 * x, x), 2 * values_of(x))
    for x in given:
        asked = launched(fake_cuda, lambda: launch("double", lambda x: 2 * x, x))  # noqa: B023
        assert asked[-1] == "graph"
    assert len(graphs._graphs["double"]) == len(given)


def test_a_key_copies_its_own_results_before_it_overwrites_them(graphs: Graphs) -> None:
    y = on_device(X[0])
    for at in range(1, 5):
        y, before = launch("again", lambda y: (y + y, y[:, :1]), y)
        assert same(y, X[0] * 2**at)
        assert same(before, X[0][:, :1] * 2 ** (at - 1))
    assert len(graphs._graphs["again"]) == 1
    old = on_device(X[0])
    for at in range(1, 5):
        old, change = launch("change", lambda x, old: (x, x - old), on_device(X[at]), old)
        assert same((old, change), (X[at], X[at] - X[at - 1]))
    given = on_device(X[0].long())
    result = [launch("mixed", lambda x: (x + 0.5, x[:, :1]), given)[0] for _ in range(2)][1]
    for _ in range(2):
        twice = launch("mixed", lambda x: (x + 0.5, x[:, :1]), result)
    assert same(twice, (X[0] + 1, X[0][:, :1] + 0.5))


def test_two_keys_that_take_each_others_results_are_few_graphs(graphs: Graphs) -> None:
    y = on_device(X[0])
    for at in range(1, 9):
        y = launch("two", lambda y: y - 1, launch("one", lambda y: 2 * y, y))
        assert same(y, (X[0] - 1) * 2**at + 1)
    assert [len(graphs._graphs[key]) for key in ("one", "two")] == [2, 1]


def test_a_result_holds_until_the_keys_next_call(graphs: Graphs) -> None:
    """Whatever graphs run after it: they share the memory of what is temporary in them."""
    x = on_device(X[0])
    for _ in range(2):
        launch("early", lambda x: (x + 1).exp().sum(), x)
    for _ in range(3):
        late = launch("late", lambda x: (x + 1) * 3, x)
    launch("early", lambda x: (x + 1).exp().sum(), x)
    assert same(late, (X[0] + 1) * 3)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda x, call: x * call, "other bits than the call"),
        (lambda x, call: x.repeat(call, 1), "other shapes than the call"),
        (lambda x, call: (x,) if call % 2 else [x], "other shapes than the call"),
        (lambda x, call: x * x.sum().item(), "operation not permitted when stream is capturing"),
        (lambda x, call: x + torch.tensor([1.0, 2, 3], device=x.device), "operation not permitted"),
        (lambda x, call: x + torch.ones(3).to(x.device, non_blocking=True), "operation not permitted"),
        (lambda x, call: x * (1 // (call not in (4, 6))), "by zero"),
    ],
)
def test_what_cannot_be_a_graph_is_called(
    function: Callable[[Tensor, int], Any], cause: str, graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so, and other graphs go on."""
    calls: list[bool] = []  # whether each was for a capture

    def compute(x: Tensor) -> Any:
        calls.append(capturing())
        return function(x, len(calls))

    for at in range(5):
        for key in ("one", "two"):
            before = len(calls)
            found = launch(key, compute, on_device(X[at]))
            made = [call for call in range(before, len(calls)) if not calls[call]]
            assert any(same(found, function(X[at], call + 1)) for call in made)
        assert same(launch("good", layer(on_device(WEIGHT)), on_device(X[at])), layer(WEIGHT)(X[at]))
    (warning,) = caplog.messages
    assert warning.startswith("no CUDA graph for one: ")
    assert cause in warning


def test_a_key_that_is_refused_loses_its_graphs(graphs: Graphs) -> None:
    calls: list[int] = []

    def compute(x: Tensor) -> Tensor:
        calls.append(1)
        return x * (1 if len(x) == 1 else len(calls))

    for rows in (1, 1, 1, 2, 2, 1):
        before = len(calls)
        launch("key", compute, on_device(X[0].repeat(rows, 1)))
    assert len(calls) == before + 1


def test_a_result_takes_no_more_memory_than_it_needs(graphs: Graphs) -> None:
    for _ in range(3):
        found = launch("key", lambda x: (x.repeat(100, 1) + 1)[-1:], on_device(X[0]))
    assert found.untyped_storage().nbytes() == X[0].nbytes


def test_a_number_of_the_host_stays_what_it_was(graphs: Graphs) -> None:
    """As on CUDA: the check at the capture cannot see what changes later."""
    for number in (1, 1, 2):
        found = launch("key", lambda x, number=number: x * number, on_device(X[0]))
    assert same(found, X[0])


def test_a_cache_is_written_at_an_index_of_the_device(graphs: Graphs) -> None:
    cache, rows = on_device(torch.zeros(6, 3)), torch.zeros(6, 3)

    def write(x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        cache[position] = x
        cache.index_copy_(0, position + 1, -x)
        return cache[:2], cache.sum(0)

    for at, position in enumerate([0, 2, 4, 1]):
        index = graphs.fixed("position", torch.tensor([position]))
        found = launch("write", write, on_device(X[at]), *index)
        rows[position], rows[position + 1] = X[at], -X[at]
        assert same([cache, *found], [rows, rows[:2], rows.sum(0)])
        assert found[0].data_ptr() == cache.data_ptr()


def test_what_stands_for_tritons_kernels_is_captured(graphs: Graphs) -> None:
    """Products, weighted sums of rows at addresses that stay, and records that are put in their places."""
    codes, scales = on_device((WEIGHT * 2).to(torch.int8)), on_device(torch.full((3,), 0.5))
    row, target = on_device(torch.zeros(1, 3)), on_device(torch.zeros(4))
    gate = torch.tensor(0.5, dtype=torch.float64).view(torch.int64).item()
    choices = on_device(torch.tensor([[[row.data_ptr()]], [[gate]]]))

    def compute(x: Tensor, staged: Tensor) -> Tensor:
        row.copy_(KERNELS.linear(x, "INT8", 0, codes, scales, 3))
        KERNELS.scatter(staged, 1)
        return KERNELS.weighted_sums(choices, row)

    for at in range(4):
        record = torch.full((4,), float(at))
        table = torch.tensor([target.data_ptr(), 32, 16, 0]).view(torch.uint8)
        staged = on_device(torch.cat((table, record.view(torch.uint8))))
        assert same(launch("key", compute, on_device(X[at]), staged), X[at] @ WEIGHT.T / 2)
        assert same(target, record)


def test_fixed_tensors_keep_their_addresses(graphs: Graphs, fake_cuda: FakeCuda) -> None:
    one, two = graphs.fixed("key", X[0], torch.tensor([1]))
    for at in range(3):
        again = graphs.fixed("key", X[at], torch.tensor([at]))
        assert again[0] is one
        assert again[1] is two
        assert same(again, (X[at], torch.tensor([at])))
    wide, _ = graphs.fixed("key", X[0].repeat(2, 1), torch.tensor([1]))
    assert wide.shape == (2, 3)
    assert same(one, X[2])
    assert not fake_cuda.waits


def test_cleared_graphs_are_captured_again(graphs: Graphs, fake_cuda: FakeCuda) -> None:
    """With the memory that their function knows by then."""
    caches = [on_device(x) for x in X[:2]]
    for cache in caches:
        for at in range(3):
            found = launch("key", lambda x, cache=cache: x + cache, on_device(X[at]))
            assert same(found, X[at] + values_of(cache))
        graphs.clear()
    assert sum(fake_cuda.waits.values()) == 2


def test_graphs_within_a_graph_are_parts_of_it(graphs: Graphs, fake_cuda: FakeCuda) -> None:
    x = on_device(X[0])
    for _ in range(3):
        asked = launched(fake_cuda, lambda: launch("outer", lambda x: launch("inner", torch.exp, x) + 1, x))
    assert asked == ["copy_", "graph"]


@needs_gpu
def test_graphs_of_a_real_gpu_have_the_bits_of_calls() -> None:
    device = torch.device("cuda")
    made, weight = Graphs(device), torch.randn(64, 64, device=device)
    cache = torch.zeros(16, 64, device=device)

    def write(x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        cache.index_copy_(0, position, x @ weight)
        return x, cache.softmax(-1).sum(0, keepdim=True)

    for at in range(6):
        x, position = made.fixed("x", torch.full((1, 64), 0.1 * at), torch.tensor([at]))
        expected = [each.clone() for each in write(x, position)]
        with using(made):
            first, found = launch("write", write, x, position)
            last = launch("last", layer(weight), found)
        assert all(map(torch.equal, (first, found), expected))
        torch.testing.assert_close(last, layer(weight)(found), rtol=0, atol=0, equal_nan=True)
    assert made._graphs.keys() == {"write", "last"}
