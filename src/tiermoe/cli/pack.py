"""`tiermoe pack`: checkpoint → expert store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar, waiting
from tiermoe.config import BITS, format_size
from tiermoe.errors import ConfigError


def pack(
    model: opt.Model,
    bits: Annotated[str, typer.Option(help="Precisions to pack, like 4 or 4,2.")] = "4",
    quantizer: opt.Quantizer = "hqq",
    dense_bits: opt.DenseBits = 16,
    device: Annotated[str, typer.Option(help="Pack for cpu, for cuda (here or not), or auto.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the store. Default: the user's cache folder.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Pack anew what the store holds already.")] = False,
) -> None:
    """Pack a checkpoint's experts into a store. Interrupted, it picks up where it stopped when run again."""
    precisions = _parse_bits(bits)
    with waiting("reading the checkpoint's headers"):
        from tiermoe.runtime import footprint

        footprint.import_libraries()
        from tiermoe.config import settings
        from tiermoe.kernels import machine_layout
        from tiermoe.runtime.blueprint import inspect_model
        from tiermoe.runtime.prepare_store import ensure_packed, open_or_create, store_root
        from tiermoe.runtime.resolve import resolve_model
        from tiermoe.store.pack import forget
        from tiermoe.store.store import dense_key, precision_key
        from tiermoe.tiers.cuda import resolve_device

        settings(quantizer=quantizer, dense_bits=dense_bits, device=device)
        kernels = resolve_device(device) if device == "auto" else device
        blueprint = inspect_model(resolve_model(model), model)
        store = open_or_create(blueprint, store_root(blueprint, out), force)
        if force:
            for precision in precisions:
                forget(
                    store,
                    precision_key(precision, quantizer, machine_layout(kernels)),
                    dense_key(dense_bits, machine_layout(kernels)) if dense_bits < 16 else None,
                )
    with progress_bar() as progress:
        for precision in precisions:
            ensure_packed(store, blueprint, precision, quantizer, dense_bits, progress, kernels)
    for precision in precisions:
        packed = store.precisions[precision_key(precision, quantizer, machine_layout(kernels))]
        layers = packed.layers
        nbytes = sum(extent.nbytes for layer in layers for extent in layer.extents)
        error = max(error for layer in layers for error in layer.errors)
        place = " (served from the checkpoint, no copy)" if packed.in_place else ""
        note(f"{precision} bits: {format_size(nbytes)}{place}, relative error of an expert at most {error:.1%}")
    print(store.root)


def _parse_bits(text: str) -> list[int]:
    try:
        values = [int(value) for value in text.split(",")]
    except ValueError:
        raise ConfigError(f"bits '{text}' are not numbers; write them like 4 or 4,2") from None
    for value in values:
        if value not in BITS:
            raise ConfigError(f"bits must be of {', '.join(map(str, BITS))}, got {value}")
    return values
