"""Structs of the native kernels: a class a struct of C, its fields in the order of the header. The header says what a
field means. An address is a `data_ptr`, 0: none.

`_native.pack` checks a struct and turns it into bytes, valid as long as the tensors at its addresses live. Sizes are
compared with C's when `native` is imported, names and places of fields by `test_native_build.py`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_size_t, c_void_p
from typing import Any


class Struct(Structure):
    """A struct of C. AttributeError for a field that it does not have."""

    __slots__ = ()


def in_order(**kinds: type[Any]) -> tuple[tuple[str, type[Any]], ...]:
    """Fields as ctypes takes them."""
    return tuple(kinds.items())


class Matrix(Struct):
    """matrix.h"""

    __slots__ = ()
    _fields_ = in_order(
        coding=c_int, weights=c_void_p, scales=c_void_p, rows=c_size_t, columns=c_size_t, group=c_size_t,
        zeros_or_factors=c_void_p, scale_kind=c_int, scale_rows=c_size_t, scale_columns=c_size_t, factor_rows=c_size_t,
    )  # fmt: skip


class Expert(Struct):
    """expert.h"""

    __slots__ = ()
    _fields_ = in_order(
        first=Matrix, second=Matrix, first_bias=c_void_p, second_bias=c_void_p, gate=c_int, limit=c_float,
        alpha=c_float,
    )  # fmt: skip


class Router(Struct):
    """route.h"""

    __slots__ = ()
    _fields_ = in_order(
        weight=c_void_p, parts=c_size_t, bias=c_void_p, correction=c_void_p, corrects_logits=c_int, experts=c_size_t,
        columns=c_size_t, k=c_size_t, groups=c_size_t, kept=c_size_t, judges=c_size_t, scoring=c_int,
        exact_logits=c_int, round_weights=c_int, normalise=c_int, epsilon=c_float, scale=c_float,
    )  # fmt: skip


class Norm(Struct):
    """norm.h"""

    __slots__ = ()
    _fields_ = in_order(
        weight=c_void_p, bias=c_void_p, width=c_size_t, epsilon=c_float, kind=c_int,
    )  # fmt: skip


class Projection(Struct):
    """attention.h"""

    __slots__ = ()
    _fields_ = in_order(
        matrix=Matrix, bias=c_void_p,
    )  # fmt: skip


class Attention(Struct):
    """attention.h"""

    __slots__ = ()
    _fields_ = in_order(
        query=Projection, key=Projection, value=Projection, output=Projection, query_first=Projection,
        key_up=Projection, gate=Projection, before=Norm, after=Norm, query_norm=Norm, key_norm=Norm, sinks=c_void_p,
        heads=c_size_t, kv_heads=c_size_t, key_columns=c_size_t, value_columns=c_size_t, rotary_columns=c_size_t,
        latent_columns=c_size_t, window=c_size_t, chunked=c_int, gated=c_int, interleaved=c_int, norms_rotated=c_int,
        scale=c_float, residual_multiplier=c_float,
    )  # fmt: skip


class Step(Struct):
    """attention.h; `spread` is filled in by `native.pack`."""

    __slots__ = ()
    _fields_ = in_order(
        tokens=c_size_t, slabs=c_void_p, positions=c_void_p, first=c_void_p, cos=c_void_p, sin=c_void_p,
        temperatures=c_void_p, rotary_columns=c_size_t, spread=c_size_t, chosen=c_void_p, most=c_size_t,
    )  # fmt: skip


class Slabs(Struct):
    """attention.h"""

    __slots__ = ()
    _fields_ = in_order(
        keys=c_void_p, values=c_void_p, key_scales=c_void_p, value_scales=c_void_p, bits=c_size_t, slabs=c_size_t,
        kv_heads=c_size_t, room=c_size_t, key_columns=c_size_t, value_columns=c_size_t, ring=c_int,
    )  # fmt: skip


class Prompt(Struct):
    """prompt_attention.h"""

    __slots__ = ()
    _fields_ = in_order(
        query=c_void_p, out=c_void_p, out_stride=c_size_t, sinks=c_void_p, tokens=c_size_t, heads=c_size_t,
        slab=c_size_t, first=c_size_t, window=c_size_t, chunked=c_int, scale=c_float,
    )  # fmt: skip


class Convolution(Struct):
    """convolution.h"""

    __slots__ = ()
    _fields_ = in_order(
        taps=c_void_p, bias=c_void_p, kept=c_size_t, channels=c_size_t, silu=c_int,
    )  # fmt: skip


class StateRows(Struct):
    """convolution.h"""

    __slots__ = ()
    _fields_ = in_order(
        tokens=c_size_t, rows=c_size_t, ends=c_void_p, before=c_void_p, after=c_void_p, prompts=c_void_p,
    )  # fmt: skip


class ConvolutionStep(Struct):
    """convolution.h"""

    __slots__ = ()
    _fields_ = in_order(
        rows=StateRows, values=c_void_p, stride=c_size_t, inputs=c_void_p,
    )  # fmt: skip


class Delta(Struct):
    """delta.h"""

    __slots__ = ()
    _fields_ = in_order(
        convolution=Convolution, rates=c_void_p, biases=c_void_p, norm=c_void_p, epsilon=c_float, least_decay=c_float,
        gate=c_int, key_heads=c_size_t, heads=c_size_t, key_columns=c_size_t, value_columns=c_size_t,
        decay_columns=c_size_t,
    )  # fmt: skip


class DeltaStep(Struct):
    """delta.h"""

    __slots__ = ()
    _fields_ = in_order(
        mixed=ConvolutionStep, gates=c_void_p, betas=c_void_p, decays=c_void_p, gates_stride=c_size_t,
        betas_stride=c_size_t, decays_stride=c_size_t, states=c_void_p, out=c_void_p,
    )  # fmt: skip


class Scan(Struct):
    """scan.h"""

    __slots__ = ()
    _fields_ = in_order(
        rates=c_void_p, biases=c_void_p, skips=c_void_p, norm=c_void_p, epsilon=c_float, least_step=c_float,
        heads=c_size_t, columns=c_size_t, groups=c_size_t, state=c_size_t,
    )  # fmt: skip


class ScanStep(Struct):
    """scan.h"""

    __slots__ = ()
    _fields_ = in_order(
        rows=StateRows, mixed=c_void_p, times=c_void_p, gates=c_void_p, mixed_stride=c_size_t, times_stride=c_size_t,
        gates_stride=c_size_t, states=c_void_p, out=c_void_p,
    )  # fmt: skip


class ChannelScan(Struct):
    """scan.h"""

    __slots__ = ()
    _fields_ = in_order(
        rates=c_void_p, skips=c_void_p, state=c_size_t, channels=c_size_t,
    )  # fmt: skip


class ChannelScanStep(Struct):
    """scan.h"""

    __slots__ = ()
    _fields_ = in_order(
        rows=StateRows, values=c_void_p, times=c_void_p, gates=c_void_p, keys=c_void_p, queries=c_void_p,
        values_stride=c_size_t, times_stride=c_size_t, gates_stride=c_size_t, keys_stride=c_size_t,
        queries_stride=c_size_t, states=c_void_p, out=c_void_p,
    )  # fmt: skip


class Neurons(Struct):
    """neurons.h"""

    __slots__ = ()
    _fields_ = in_order(
        records=c_void_p, record_bytes=c_size_t, width=c_size_t, group=c_size_t, bits=c_int, two_level=c_int,
        used=c_void_p, count=c_size_t, gates=c_void_p,
    )  # fmt: skip


class Weights(Struct):
    """encode.h"""

    __slots__ = ()
    _fields_ = in_order(
        values=c_void_p, rows=c_size_t, columns=c_size_t, wide=c_int,
    )  # fmt: skip


class Codes(Struct):
    """encode.h"""

    __slots__ = ()
    _fields_ = in_order(
        coding=c_int, weights=Weights, group=c_size_t, exact=c_int, scales=c_void_p, zeros=c_void_p, codes=c_void_p,
        squares=c_void_p,
    )  # fmt: skip


class Hqq(Struct):
    """encode.h"""

    __slots__ = ()
    _fields_ = in_order(
        weights=Weights, group=c_size_t, block=c_size_t, largest=c_float, thresholds=c_void_p, steps=c_size_t,
        codes=c_void_p, scale=c_void_p, offset=c_void_p, shrunk=c_void_p,
    )  # fmt: skip


class Uneven(Struct):
    """encode.h"""

    __slots__ = ()
    _fields_ = in_order(
        coding=c_int, weights=c_void_p, rows=c_size_t, columns=c_size_t, group=c_size_t, candidates=c_void_p,
        count=c_size_t, steps=c_size_t, blocks=c_void_p,
    )  # fmt: skip


class Trellis(Struct):
    """trellis.h"""

    __slots__ = ()
    _fields_ = in_order(
        targets=c_void_p, weights=c_void_p, count=c_size_t, exact=c_int, codes=c_void_p, levels=c_void_p,
    )  # fmt: skip


STRUCTS: tuple[type[Struct], ...] = tuple(Struct.__subclasses__())
