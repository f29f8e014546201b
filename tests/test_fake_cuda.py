"""The pretended CUDA device raises and waits as CUDA does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fake_cuda import DEVICE, PACKAGE, CudaTensor, FakeCuda, on_device, values_of
from tiermoe.kernels import gpu
from tiermoe.kernels.experts import weighted_sum
from tiermoe.kernels.gpu import read_back

ONE, TWO = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])
PLACES, MASK = torch.tensor([2, 0]), torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "operator",
    [
        lambda a, b: a + b,
        lambda a, b: torch.cat((a, b)),
        lambda a, b: torch.zeros(3).index_add_(0, a.long() - 1, b),
        lambda a, b: torch.where(a > 2, a, b),
        lambda a, b: torch.searchsorted(a, b[0]),
        lambda a, b: b[a.long() - 1],
        lambda a, b: torch.rand(3, generator=torch.Generator(), device=a.device),
        lambda a, b: a.numpy(),
    ],
)
def test_what_mixes_devices_raises(fake_cuda: FakeCuda, operator: Callable[..., object]) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"same device|'cuda' device type|can't convert cuda"):
        operator(on_device(ONE), TWO)


@pytest.mark.parametrize(
    "operator",
    [
        lambda a, b: a * b + torch.tensor(2.0),
        lambda a, b: a[PLACES],
        lambda a, b: torch.arange(3, device=a.device) + a.sum(),
        lambda a, b: torch.nn.functional.linear(a[None], torch.stack((a, b))),
    ],
)
def test_values_are_those_of_the_cpu(fake_cuda: FakeCuda, operator: Callable[..., torch.Tensor]) -> None:
    found = operator(on_device(ONE), on_device(TWO))
    assert found.device == DEVICE
    assert torch.equal(values_of(found), operator(ONE, TWO))


def test_threads_share_the_device(fake_cuda: FakeCuda) -> None:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(2, device=DEVICE) + 1))
    thread.start()
    thread.join()
    assert isinstance(made[0], CudaTensor)
    assert made[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("operator", "waits"),
    [
        (lambda a: a.sum().item(), 1),
        (lambda a: bool(a[0] > 1), 1),
        (lambda a: a.tolist(), 1),
        (lambda a: a[a > 1], 1),
        (lambda a: a[[0, 1]], 1),
        (lambda a: a[a[0]], 1),
        (lambda a: a[a[:1]], 0),
        (lambda a: a.bincount(), 1),
        (lambda a: a.nonzero(), 1),
        (lambda a: torch.equal(a, a), 1),
        (lambda a: a.copy_(torch.ones(3)), 1),
        (lambda a: torch.ones(3).copy_(a), 1),
        (lambda a: torch.ones(3).copy_(a, non_blocking=True), 1),
        (lambda a: torch.empty(3, pin_memory=True).copy_(a, non_blocking=True), 0),
        (lambda a: torch.ones(3).to(DEVICE), 1),
        (lambda a: torch.ones(3).to(DEVICE, non_blocking=True), 0),
        (lambda a: a.repeat_interleave(a), 1),
        (lambda a: a.repeat_interleave(a, output_size=6), 0),
        (lambda a: a.topk(2).values.to(torch.bfloat16).softmax(-1) if a.is_floating_point() else a + 1, 0),
    ],
)
def test_waits_are_counted(fake_cuda: FakeCuda, operator: Callable[..., object], waits: int) -> None:
    """As many as code of tiermoe's asks for: here the test stands for it."""
    code = compile("operator(tensor)", f"{PACKAGE}engine/moe.py", "exec")
    exec(code, {"operator": operator, "tensor": on_device(ONE.long())})
    assert sum(fake_cuda.waits.values()) == waits


def test_a_graph_runs_at_its_replay(fake_cuda: FakeCuda) -> None:
    """And not before: what it makes holds nothing until then, and nothing else is written. Pinned memory is read then,
    too."""
    kept, pinned, number = on_device(ONE), torch.empty(3, pin_memory=True).copy_(TWO), torch.tensor(2)
    with capture() as graph:
        rows = kept.repeat(2, 1)
        kept[1:] += 1
        rows[:, 0] = 7
        chosen = kept[on_device(PLACES)]
        back = torch.ones(3, device=DEVICE).copy_(pinned, non_blocking=True)
        back += torch.arange(3, device=DEVICE).add_(number)
        late = torch.empty(3, pin_memory=True).copy_(kept, non_blocking=True)
    assert torch.equal(values_of(kept), ONE)
    assert all(values_of(each).isnan().all() for each in (rows, chosen, back))
    pinned.copy_(ONE)
    number.zero_()
    for more in (1, 2):
        graph.replay()
        torch.cuda.current_stream(DEVICE).record_event().synchronize()
        now = ONE + more * torch.tensor([0, 1, 1])
        assert torch.equal(values_of(kept), now)
        assert torch.equal(values_of(rows)[1, 1:], now[1:] - 1)
        assert values_of(rows)[:, 0].tolist() == [7, 7]
        assert torch.equal(values_of(chosen), now[PLACES])
        assert torch.equal(values_of(back), ONE + torch.arange(3) + 2)
        assert torch.equal(late, now)


@pytest.mark.parametrize(
    "operator",
    [
        lambda a: a.sum().item(),
        lambda a: a[a > 1],
        lambda a: a[a.long()[0]],
        lambda a: torch.cuda.current_stream(DEVICE).record_event().synchronize(),
        lambda a: torch.ones(3).copy_(a),
        lambda a: torch.tensor([1, 2], device=DEVICE),
        lambda a: a.copy_(torch.ones(3), non_blocking=True),
    ],
)
def test_a_capture_does_not_permit_what_waits_or_reads_memory_that_is_not_pinned(
    fake_cuda: FakeCuda, operator: Callable[..., object]
) -> None:
    ended, refused = "previous error during capture", "not permitted when stream is capturing"
    tensor = on_device(ONE)
    with pytest.raises(RuntimeError, match=ended), capture(), pytest.raises(RuntimeError, match=refused):
        operator(tensor)


def test_an_earlier_graph_overwrites_what_a_later_one_has_made(fake_cuda: FakeCuda) -> None:
    """Of the same pool: it may have had the memory."""
    pool = torch.cuda.graph_pool_handle()
    with capture(pool) as one:
        first = torch.zeros(3, device=DEVICE) + 1
    with capture(pool) as other:
        second = torch.zeros(3, device=DEVICE) + 2
    other.replay()
    one.replay()
    assert values_of(first).tolist() == [1, 1, 1]
    assert values_of(second).isnan().all()


@contextlib.contextmanager
def capture(pool: Any = None) -> Iterator[Any]:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        graph.capture_begin(torch.cuda.graph_pool_handle() if pool is None else pool, "thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    torch.cuda.current_stream(DEVICE).wait_stream(side)


def test_a_copy_that_nobody_waits_for_has_not_come(fake_cuda: FakeCuda) -> None:
    target = torch.empty(3, pin_memory=True).copy_(on_device(ONE), non_blocking=True)
    assert target.isnan().all()
    torch.cuda.current_stream(DEVICE).record_event().synchronize()
    assert torch.equal(target, ONE)


def test_all_tensors_come_back_in_one_copy(fake_cuda: FakeCuda) -> None:
    given = [torch.tensor([[3, 1 << 23]]), torch.tensor([[0.3, 0.7]]).bfloat16(), torch.tensor([1e-30, 7.5])]
    found = read_back([on_device(each) for each in given])
    for mine, theirs in zip(found, given, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert list(fake_cuda.waits.values()) == [1]
    assert all(mine is theirs for mine, theirs in zip(read_back(given), given, strict=True))


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weighted_sum_of_a_gpu_rounds_as_torchs_separate_operations(
    fake_cuda: FakeCuda, dtype: torch.dtype, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "has_triton", lambda: triton)
    outputs, weights, places = torch.randn(4, 8).to(torch.bfloat16), torch.rand(6).to(dtype), [5, 0, 3, 2]
    found = weighted_sum([on_device(each) for each in outputs], weights, places)
    total = torch.zeros(8, dtype=torch.bfloat16)
    for output, place in zip(outputs, places, strict=True):
        total = total + (output * weights[place : place + 1]).to(torch.bfloat16)
    assert torch.equal(values_of(found)[0], total)
    assert not fake_cuda.waits
