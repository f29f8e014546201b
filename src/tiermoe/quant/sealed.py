"""An encoding with a checksum of its own, so that one part of an expert can be verified without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from tiermoe.quant.encoding import Encoding, Field
from tiermoe.quant.quantized import Quantizer

CHECK_BYTES = 8


@dataclass(frozen=True)
class Sealed:
    """Another encoding with the checksum of its stored fields, so that a part can be verified without the rest of the
    expert: field `check` uint8 (8,), XXH3-64 of their bytes one after the other."""

    inner: Encoding

    @property
    def name(self) -> str:
        return f"sealed/{self.inner.name}"

    @property
    def bits(self) -> int:
        return self.inner.bits

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (*self.inner.stored_fields(out, in_, dtype), Field("check", torch.uint8, (CHECK_BYTES,)))

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (*self.inner.slot_fields(out, in_, dtype), Field("check", torch.uint8, (CHECK_BYTES,)))

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        fields = self.inner.encode(weight, quantizer, dtype)
        rows, columns = weight.shape
        order = [field.name for field in self.inner.stored_fields(rows, columns, dtype)]
        content = {name: fields[name].contiguous() for name in order}
        return {**fields, "check": torch.frombuffer(bytearray(_seal(content)), dtype=torch.uint8)}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return None

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        self.inner.widen(stored, slot)
        slot["check"].copy_(stored["check"])

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(slot, out, in_, dtype)

    @staticmethod
    def holds(stored: Mapping[str, Tensor]) -> bool:
        """Whether the stored fields, in their order, match their checksum."""
        content = {name: value for name, value in stored.items() if name != "check"}
        return _seal(content) == bytes(stored["check"].numpy())


def _seal(fields: Mapping[str, Tensor]) -> bytes:
    digest = xxhash.xxh3_64()
    for value in fields.values():
        digest.update(value.view(torch.uint8).numpy().data)
    result: bytes = digest.digest()
    return result
