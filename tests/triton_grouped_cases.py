"""Groups of experts in few launches a matrix, against one launch per expert and against decoded weights, and their
weighted sums; test_triton.py runs this file in processes of its own, as it does triton_cases.py."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime import interpreter

from fake_cuda import CudaTensor, plain
from gpu_models import FAMILY
from parity import logits
from parity import tokens as tokens_of_text
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.kernels import gpu, triton_kernels
from tiermoe.kernels.experts import Grouped, SlotViews, UnfusedExperts, expert_kernel, unfused
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.gpu import grouped_experts
from tiermoe.types import MoeLayer, Part
from triton_device import DEVICE, DTYPES, KINDS, TOLERANCE, bfloat16_dot, tokens

__all__ = ["bfloat16_dot"]  # for every case

SLOTS = 9
INT4, NL3 = KINDS[1], KINDS[6]


def expert_format(kinds: tuple[str | None, str | None], dtype: torch.dtype, *parts: Part) -> ExpertFormat:
    """Experts of `parts`, two matrices first, in the encodings of these names; None: 16 bits."""
    encodings = {part.name: encoding_named(kind) for part, kind in zip(parts, kinds, strict=False) if kind}
    return ExpertFormat(MoeLayer("experts", SLOTS, 2, parts), 4, dtype, encodings)


def few_rows(kinds: tuple[str, str], dtype: torch.dtype, columns: tuple[int, int] | None = None) -> ExpertFormat:
    """Of few rows, for the interpreter takes its time: at 8 bits more than the 4 of a program and no multiple of them,
    at 4 and 2 bits with a last block of fewer rows than 64. columns: of the matrices."""
    uneven = {"int8": (6, 5), "int4": (80, 48), "u2": (80, 48)}
    up, down = (uneven.get(kind.partition("/")[0], (64, 64))[at] for at, kind in enumerate(kinds))
    first, second = columns or (256, 256)
    return expert_format(kinds, dtype, Part("up", (up, first)), Part("down", (down, second)))


def gated(kind: str | None, dtype: torch.dtype, *more: Part, last: str | None = None) -> ExpertFormat:
    return expert_format((kind, last or kind), dtype, Part("gate_up", (64, 64)), Part("down", (64, 32)), *more)


def spread(form: ExpertFormat):
    """An activation from the rows of the first matrix to the columns of the second; no two features are equal."""
    rows, columns = form.layer.parts[0].shape[0], form.layer.parts[1].shape[1]
    factors = torch.linspace(-1, 1, columns).to(form.dtype).to(DEVICE)
    return lambda features: features[:, torch.arange(columns, device=DEVICE) % rows] * factors


def slots_with_experts(form: ExpertFormat, count: int) -> list[SlotViews]:
    """`count` random experts in slots of one buffer that stand in no order, with bytes of no expert around them."""
    generator = torch.Generator().manual_seed(count)
    buffer = torch.randint(0, 256, (SLOTS, form.slot.nbytes), dtype=torch.uint8, generator=generator)
    places = torch.randperm(SLOTS, generator=generator)[:count].tolist()
    stored = torch.empty(form.stored.nbytes, dtype=torch.uint8)
    for place in places:
        tensors = {
            part.name: torch.randn(part.shape, generator=generator) * 0.05 + 0.02 * place for part in form.layer.parts
        }
        form.encode(tensors, QUANTIZERS["linear"], stored)
        buffer[place] = stored
    buffer = buffer.to(DEVICE)
    return [SlotViews(form.slot.views(buffer[place])) for place in places]


def check_against_single_launches(form: ExpertFormat, experts: int) -> None:
    views, activation = slots_with_experts(form, experts), spread(form)
    grouped, separate = expert_kernel(form, activation, "cuda"), UnfusedExperts(form, activation, "cuda")
    assert isinstance(grouped, Grouped)
    x = tokens(1, form.layer.parts[0].shape[1], form.dtype)
    together = grouped.forward_one(x, views)
    assert together.dtype == form.dtype
    assert torch.equal(together, torch.cat([separate(x, each) for each in views]))
    some = list(range(experts))[::-2]
    assert torch.equal(grouped.forward_one(x, [views[at] for at in some]), together[some])


@pytest.mark.parametrize(("kind", "experts"), [*((kind, 2) for kind in KINDS), (INT4, 1), ("int8", 4)])
def test_bits_of_the_single_launches(kind, experts):
    check_against_single_launches(few_rows((kind, kind), torch.bfloat16), experts)


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        *((kinds, torch.bfloat16) for kinds in ((INT4, "int8"), (INT4, NL3), (NL3, "int8"))),
        *((("int8", INT4), dtype) for dtype in DTYPES),
    ],
    ids=str,
)
def test_matrices_of_two_encodings(kinds, dtype):
    check_against_single_launches(few_rows(kinds, dtype, (64, 128)), 2)


@pytest.mark.parametrize("kind", [INT4, "int8"])
def test_more_columns_than_one_block(kind):
    check_against_single_launches(few_rows((kind, kind), torch.bfloat16, (576, 576)), 1)


@pytest.mark.parametrize("columns", [(33, 7), (50, 30)])
def test_rows_that_end_at_no_boundary(columns):
    check_against_single_launches(few_rows(("int8", "int8"), torch.bfloat16, columns), 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [INT4, NL3, "int8"])
def test_agrees_with_decoded_weights(kind, dtype):
    columns = 192
    form = few_rows((kind, kind), dtype, (columns, columns))
    views, grouped = slots_with_experts(form, 2), grouped_experts(form)
    slots = [next(iter(each["up"].values())).data_ptr() for each in views]
    tiles = triton_kernels.tiles_of(slots, [1, 1], torch.device(DEVICE))
    for part, matrix, shared in zip(form.layer.parts, (grouped._first, grouped._second), (True, False), strict=True):
        x = tokens(1 if shared else 2, columns, dtype)
        y = triton_kernels.grouped_linear(x, tiles, matrix, shared)
        assert y.dtype == dtype
        assert y.shape == (2, part.shape[0])
        for row, expert in enumerate(views):
            w = form.encodings[part.name].decode(expert[part.name], *part.shape, torch.float32).double()
            own = x[0 if shared else row].double()
            assert float(((y[row].double() - w @ own).abs() / (w.abs() @ own.abs())).max()) <= TOLERANCE[dtype]


RAGGED = [
    *((kind, [3, 1, 17], torch.bfloat16) for kind in KINDS),
    *((kind, [1, 2, 70, 1, 16], dtype) for kind in (INT4, "int8") for dtype in DTYPES),
]


@pytest.mark.parametrize(("kind", "counts", "dtype"), RAGGED, ids=str)
def test_bits_of_single_launches_whatever_the_company(kind, counts, dtype):
    form = few_rows((kind, kind), dtype, None if kind.endswith("g256") else (64, 64))
    views, activation = slots_with_experts(form, len(counts)), spread(form)
    grouped, separate = expert_kernel(form, activation, "cuda"), UnfusedExperts(form, activation, "cuda")
    x = tokens(sum(counts), form.layer.parts[0].shape[1], dtype)
    own = [separate(rows, each) for rows, each in zip(x.split(counts), views, strict=True)]
    assert torch.equal(grouped.forward_ragged(x, counts, views), torch.cat(own))
    last = grouped.forward_ragged(x[-counts[-1] :], counts[-1:], views[-1:])
    assert torch.equal(last, own[-1])


def test_two_launches_for_any_number_of_experts(monkeypatch):
    form = expert_format(("int8", "int8"), torch.bfloat16, Part("gate_up", (12, 64)), Part("down", (10, 6)))
    kernel, views, launched = expert_kernel(form, gate_named("silu"), "cuda"), slots_with_experts(form, 4), []
    launch = triton_kernels.grouped_kernel

    class Counted:
        def __getitem__(self, grid):
            launched.append(grid)
            return launch[grid]

    monkeypatch.setattr(triton_kernels, "grouped_kernel", Counted())
    x = tokens(1, 64, torch.bfloat16)
    for experts in (1, 4):
        launched.clear()
        together = kernel.forward_one(x, views[:experts])
        assert launched == [(3, experts), (3, experts)]  # 12 and 10 rows, 4 to a program
        assert torch.equal(together, torch.cat([kernel(x, each) for each in views[:experts]]))
    launched.clear()
    kernel.forward_ragged(tokens(91, 64, torch.bfloat16), [70, 1, 17, 3], views)
    # 12 and 10 rows, 64, 4 and 32 to a program; tiles of 64, 1 and 16 tokens
    assert launched == [(1, 3), (3, 1), (1, 1)] * 2


def test_steps_of_several_experts_can_be_taken_apart():
    form = gated(KINDS[0], torch.float32)
    kernel, (views,) = expert_kernel(form, gate_named("silu"), "cuda"), slots_with_experts(form, 1)
    x = tokens(3, 64, torch.float32)
    assert torch.equal(kernel(x, views), UnfusedExperts(form, gate_named("silu"), "cuda")(x, views))
    assert isinstance(unfused(kernel), UnfusedExperts)


@pytest.fixture
def rounding_to_nearest(monkeypatch):
    """The interpreter cuts float32 off to bfloat16."""
    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast(self, source, into):
        if (source.dtype.scalar, into.scalar) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return plain_cast(self, source, into)
        values = torch.from_numpy(source.data).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(values.numpy(), into.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize("columns", [96, 1030])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_sums_round_as_torchs_separate_operations(dtype, columns):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(3, 4, columns, generator=generator).to(dtype).to(DEVICE)
    weights = torch.rand(3, 4, generator=generator)
    addresses = torch.tensor([[output.data_ptr() for output in row] for row in outputs])
    addresses[1, 2] = addresses[2, 0] = 0
    found, gates = gpu.weighted_sums(addresses, weights, outputs[0]), weights.to(DEVICE)
    for token in range(3):
        total = torch.zeros(columns, dtype=dtype, device=DEVICE)
        for place in range(4):
            if addresses[token, place]:
                total += (outputs[token, place] * gates[token, place, None]).to(dtype)
        assert torch.equal(found[token], total)


@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize("biased", [("down",), ("up", "down")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [INT4, "int8"])
def test_biases_are_added_as_torch_adds_them(kind, dtype, biased):
    matrices = Part("up", (80, 64)), Part("down", (48, 64))
    biases = [Part(f"{part.name}_bias", part.shape[:1]) for part in matrices if part.name in biased]
    form = expert_format((kind, kind), dtype, *matrices, *biases)
    views, activation = slots_with_experts(form, 3), spread(form)
    grouped, separate = expert_kernel(form, activation, "cuda"), UnfusedExperts(form, activation, "cuda")
    assert isinstance(grouped, Grouped)
    for counts in ([1, 1, 1], [3, 1, 17]):
        x = tokens(sum(counts), 64, dtype)
        own = [separate(rows, each) for rows, each in zip(x.split(counts), views, strict=True)]
        assert torch.equal(grouped.forward_ragged(x, counts, views), torch.cat(own))


@pytest.mark.parametrize(
    "form",
    [
        gated(None, torch.bfloat16),
        gated(None, torch.bfloat16, last="int8"),
        gated("int8", torch.bfloat16, Part("scale", (64,))),
    ],
    ids=["16 bits", "a matrix of 16 bits", "a vector of another kind"],
)
def test_other_experts_are_computed_one_by_one(form):
    kernel, views = expert_kernel(form, gate_named("silu"), "cuda"), slots_with_experts(form, 2)
    assert isinstance(kernel, UnfusedExperts)
    x = tokens(1, 64, torch.bfloat16)
    assert torch.equal(kernel.forward_one(x, views), torch.cat([kernel(x, each) for each in views]))


def test_a_shape_without_groups_gets_eight_bits_and_is_taken():
    kinds = tuple(encoding_for(4, *shape, torch.float32).name for shape in ((80, 64), (5, 48)))
    assert kinds == (INT4, "int8")
    check_against_single_launches(few_rows(kinds, torch.float32, (64, 48)), 2)


if DEVICE == "cpu":  # the interpreter computes with the values of the pretended GPU's tensors

    @pytest.mark.long
    def test_a_model_gives_the_same_bits_for_every_cache(gpu_model, on_fake_gpu, monkeypatch):
        sizes, forward_one = [], Grouped.forward_one

        def watched(kernel, x, views):
            sizes.append(len(views))
            return forward_one(kernel, x, views)

        def on_values(name):
            kernel = getattr(triton_kernels, name)
            return lambda *given, **named: CudaTensor(kernel(*map(plain, given), **named))

        monkeypatch.setattr(Grouped, "forward_one", watched)
        kernels = {name: on_values(name) for name in ("linear", "grouped_linear", "weighted_sums")}
        monkeypatch.setattr(gpu, "triton", lambda *_: SimpleNamespace(**vars(triton_kernels) | kernels))
        found, groups = [], []
        for cache, host_slots in (("100%", 24), ("15%", 2)):
            loaded, _ = on_fake_gpu(gpu_model, host_slots, bits=8, cache=cache, preset="lru")
            ids = tokens_of_text(1, 1, seed=3).to(loaded.device)
            found.append([logits(loaded, FAMILY, ids).cpu() for _ in range(2)])
            groups.append(sizes.copy())
            sizes.clear()
        assert groups[0] != groups[1]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
