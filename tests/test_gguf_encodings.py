"""The blocks of GGUF files as encodings: their sizes, what they stand for, products without native kernels."""

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import GGMLQuantizationType

import gguf_blocks
from measures import relative_error
from parity import as_integers
from tiermoe.errors import ConfigError, StoreError
from tiermoe.formats import gguf_types
from tiermoe.formats.gguf_types import ENCODINGS, Nvfp4, gguf_encoding
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_named
from tiermoe.kernels.linear import linear_for

NAMES = [each.type for each in ENCODINGS]


@pytest.mark.parametrize("each", ENCODINGS, ids=NAMES)
def test_blocks_have_the_sizes_that_the_gguf_package_knows(each):
    assert GGML_QUANT_SIZES[GGMLQuantizationType[each.type.upper()]] == (each.columns, each.nbytes)
    assert encoding_named(each.name) is each is gguf_encoding(each.type.upper())
    (field,) = each.stored_fields(3, 512, torch.bfloat16)
    assert (field.dtype, field.shape) == (torch.uint8, (3, 512 // each.columns * each.nbytes))
    assert each.slot_fields(3, 512, torch.bfloat16) == (field,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("type", NAMES)
def test_decodes_to_what_the_gguf_package_dequantises(type, dtype, monkeypatch):
    monkeypatch.setattr(gguf_types, "DECODED_WEIGHTS", 1024)  # two rows at a time, the last one alone
    slot = gguf_blocks.random_blocks(type, 5, 512)
    decoded = gguf_encoding(type).decode(slot, 5, 512, dtype)
    assert torch.equal(decoded, gguf_blocks.weights(type, slot).to(dtype))
    assert decoded.isfinite().all()
    assert decoded.float().std() > 0


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("type", NAMES)
def test_products_without_native_kernels(type, dtype):
    slot = gguf_blocks.random_blocks(type, 70, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = linear_for(f"gguf/{type}", "cpu", dtype)(x, slot, 70, 256)
    assert found.dtype == dtype
    expected = x.double() @ gguf_blocks.weights(type, slot).double().t()
    assert relative_error(found.double(), expected) < {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 4e-3)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"Q4_K is read from GGUF files and never packed"):
        gguf_encoding("q4_k").encode(torch.zeros(1, 256), QUANTIZERS["linear"], torch.bfloat16)
    with pytest.raises(StoreError, match=r"row of 320 columns is no whole number of Q6_K blocks of 256"):
        gguf_encoding("q6_k").stored_fields(1, 320, torch.bfloat16)
    for name in ("gguf/q1_0", "gguf/q4_k/2", "gguf/nvfp4/0", "gguf/nvfp4/x"):
        with pytest.raises(StoreError, match=r"choose a file of Q8_0, Q4_0.*, NVFP4"):
            encoding_named(name)


@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_a_slot_of_nvfp4_stands_for_what_the_gguf_package_dequantises(matrices):
    stored, factors = gguf_blocks.random_blocks("nvfp4", 6, 128), torch.tensor([0.5, 3.0])[:matrices]
    wanted = gguf_blocks.weights("nvfp4", stored)
    if matrices:
        stored, wanted = {**stored, "factors": factors}, wanted * factors.repeat_interleave(6 // matrices)[:, None]
    encoding = Nvfp4(matrices)
    assert encoding_named(encoding.name) == encoding
    assert [each.name for each in encoding.stored_fields(6, 128, torch.bfloat16)] == list(stored)
    slot = encoding.slot_of(stored, 6, 128)
    assert [(name, value.shape) for name, value in slot.items()] == [
        (each.name, each.shape) for each in encoding.slot_fields(6, 128, torch.bfloat16)
    ]
    assert torch.equal(encoding.decode(slot, 6, 128, torch.float32), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_nvfp4(dtype):
    encoding = Nvfp4(2)
    stored = {**gguf_blocks.random_blocks("nvfp4", 64, 256), "factors": torch.tensor([0.5, 3.0])}
    slot = encoding.slot_of(stored, 64, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    taken = x.double() if dtype == torch.float32 else as_integers(x)
    wanted = taken @ encoding.decode(slot, 64, 256, torch.float32).double().t()
    found = linear_for(encoding.name, "cpu", dtype)(x, slot, 64, 256)
    assert (found - wanted).abs().max() <= (1e-6 if dtype == torch.float32 else 4e-3) * wanted.abs().max()
