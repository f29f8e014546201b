"""`tiermoe pack`: checkpoint → expert store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar, starting
from tiermoe.cli.session import MTP
from tiermoe.config import BITS, Settings, format_size, settings
from tiermoe.errors import ConfigError


@opt.engine_options(only=["dense_bits", "quantizer"])
def pack(
    model: opt.Model,
    options: dict[str, Any],
    bits: Annotated[
        str | None,
        typer.Option(
            help="Precisions to pack, like 4 or 4,2. Default: 4; a quantised checkpoint is used as it is.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda (here or not) or auto: a GPU needs layers packed that a CPU takes as a quantised "
            "checkpoint has them."
        ),
    ] = "auto",
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", "--out", help="Folder of the store. Default: the user's cache folder.", show_default=False
        ),
    ] = None,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            help="A text file, UTF-8, to calibrate gptq on: text like the model is going to read. Default: passages of "
            "English books.",
            show_default=False,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="mtp: pack the model's own MTP head too, for `run --draft mtp`.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Pack again what the store has already.")] = False,
) -> None:
    """Pack a checkpoint's experts into a store. After an interruption the next run resumes."""
    if draft not in (None, MTP):
        raise ConfigError(
            f"pack has --draft mtp alone, not --draft {draft}: looking up packs nothing, and a draft model is packed "
            f"as any other"
        )
    precisions = _parse_bits(bits) if bits is not None else None
    content = opt.read_text(calibration_text) if calibration_text is not None else None
    with starting("reading the checkpoint's headers"):
        from tiermoe.cli.describe import packing_loss
        from tiermoe.engine.expert_inputs import PackInputs
        from tiermoe.engine.load import check_mtp, resolve_for
        from tiermoe.formats.in_place import OWN_BITS
        from tiermoe.formats.pack import forget
        from tiermoe.formats.store import precision_key
        from tiermoe.model.hf.blueprint import inspect_model
        from tiermoe.model.hf.hub import resolve_model
        from tiermoe.model.hf.mtp_blueprint import with_mtp
        from tiermoe.model.packing import recipe_key, with_own_dense
        from tiermoe.model.prepare_store import ensure_packed, open_or_create, store_root
        from tiermoe.offload.cuda import resolve_device

        kernels = resolve_device(device) if device == "auto" else device
        blueprint = inspect_model(resolve_model(model), model, store)
        if draft == MTP:
            blueprint = with_mtp(blueprint, store)
        usual = OWN_BITS if blueprint.comes_quantized else Settings().bits_used
        asked = [
            with_own_dense(settings(bits=number, device=device, **options), blueprint, kernels)
            for number in precisions or [usual]
        ]
        experts = {each.bits_used: precision_key(each.bits_used, each.quantizer_used) for each in asked}
        dense = {each.bits_used: recipe_key(blueprint, each.dense_bits_used) for each in asked}
        if blueprint.parts:
            for each in asked:
                check_mtp(blueprint, resolve_for(blueprint, each))
    name = calibration_text.name if calibration_text is not None else None
    for part in blueprint.parts or (blueprint,):
        root = store_root(part, store)
        with progress_bar() as progress:
            packed = open_or_create(part, root, force, waiting=progress)
            calibrated = PackInputs(part, packed, asked, experts, name, content, force)
            if force:  # once it is clear that these precisions can be packed
                for each in asked:
                    forget(packed, experts[each.bits_used], dense[each.bits_used], progress)
            for each in asked:
                ensure_packed(
                    packed,
                    part,
                    each.bits_used,
                    each.quantizer_used,
                    each.dense_bits_used,
                    progress,
                    inputs=calibrated.inputs(each, progress),
                )
        calibrated.forget()
        for precision, key in experts.items():
            if (found := packed.precisions.get(key)) is None:  # a head without experts
                continue
            nbytes = sum(extent.nbytes for layer in found.layers for extent in layer.extents)
            of = "" if part.trunk is None else "the MTP head at "
            note(f"{of}{precision} bits: {format_size(nbytes)}{_IN_PLACE * found.in_place}")
            if part.trunk is None and (loss := packing_loss(packed, [key], dense[precision])):
                note(f"packed: {loss}")
    print(store_root(blueprint, store))


_IN_PLACE = " (served from the checkpoint, no copy)"


def _parse_bits(text: str) -> list[int]:
    try:
        values = [int(value) for value in text.split(",")]
    except ValueError:
        raise ConfigError(f"bits '{text}' are not numbers; write them like 4 or 4,2") from None
    for value in values:
        if value not in BITS:
            raise ConfigError(f"bits must be of {', '.join(map(str, BITS))}, got {value}")
    return values
