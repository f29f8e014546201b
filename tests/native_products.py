"""What native products of every coding are asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.formats.encoding import Encoding
from tiermoe.kernels.linear import linear
from tiermoe.kernels.matrix import MatrixForm, matrix_form


def random(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def form_of(encoding: Encoding, out: int, in_: int) -> MatrixForm:
    """The form of a matrix that the kernels take."""
    form = matrix_form(encoding, out, in_, torch.bfloat16)
    assert form is not None
    return form


def assert_alone_as_among_others(
    form: MatrixForm, fields: dict[str, Tensor], tokens: int, counts: Sequence[int], threads: Sequence[int] = (1, 3)
) -> None:
    """A token's product depends on no other token and no thread."""
    x, before = random(tokens, form.in_, 1), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(token[None], form, fields) for token in x])
        for number in threads:
            torch.set_num_threads(number)
            for count in counts:
                assert torch.equal(linear(x[:count], form, fields), alone[:count])
    finally:
        torch.set_num_threads(before)


def columns_of(form: MatrixForm, fields: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The weights (in_, out) as tokens that take a column each find them, together and alone."""
    x = torch.eye(form.in_).bfloat16()
    return linear(x, form, fields), torch.cat([linear(one[None], form, fields) for one in x])
