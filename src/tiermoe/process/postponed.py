"""What transformers imports of torch that inference never uses, and who asks for it, as told by the frames."""

from __future__ import annotations

from types import FrameType

# module -> names that transformers 5.23 imports from it and uses as the stand-ins allow.
# An empty set: a package on the way to one of the others, or one that is used through its decorators.
POSTPONED: dict[str, frozenset[str]] = {
    "torch._dynamo": frozenset(),
    "torch._dynamo._trace_wrapped_higher_order_op": frozenset({"TransformGetItemToIndex"}),
    "torch.distributed.tensor": frozenset({"DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"}),
    "torch.distributed.tensor._utils": frozenset({"compute_local_shape_and_global_offset"}),
    "torch.distributed.tensor.placement_types": frozenset({"Shard", "_StridedShard"}),
    "torch.distributed._functional_collectives": frozenset({"wait_tensor", "all_to_all_single_autograd"}),
    "torch.distributed._composable": frozenset(),
    "torch.distributed._composable.fsdp": frozenset({"fully_shard"}),
    "torch.distributed.fsdp": frozenset({"CPUOffloadPolicy", "FullyShardedDataParallel", "MixedPrecisionPolicy"}),
    "torch.distributed.checkpoint": frozenset(),
    "torch.distributed.checkpoint.hf_storage": frozenset({"HuggingFaceStorageReader", "HuggingFaceStorageWriter"}),
}
# Where transformers asks: at module level, and in two functions that test an instance's class
# whenever a model loads or runs.
TRANSFORMERS_CODE = frozenset({"<module>", "is_dtensor", "is_fsdp_managed_module"})
# torch imports torch._dynamo here, for `disable` alone, when a function that it wraps is first called.
_TORCH_ASKER = ("torch._compile", "inner")
# Frames between a postponed module and the one that asks.
_IMPORT_SYSTEM = frozenset({"importlib", "importlib._bootstrap", "importlib._bootstrap_external"})
_BETWEEN = frozenset(
    {
        ("torch", "__getattr__"),
        ("torch.compiler", "allow_in_graph"),
        ("torch.compiler", "assume_constant_result"),
        ("torch.compiler", "disable"),
    }
)


def asking_frame(postponed: str, frame: FrameType | None) -> FrameType | None:
    """The frame that asks for `postponed` or a name in it, or None where the real thing is to be had."""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if module.startswith("transformers."):
            return frame
        if (module, code) == _TORCH_ASKER:
            return frame if postponed == "torch._dynamo" else None
        if module not in _IMPORT_SYSTEM and (module, code) not in _BETWEEN:
            return None
        frame = frame.f_back
    return None


def at_module_level(frame: FrameType | None) -> bool:
    """True while a module of transformers runs its own code, of itself or through its own functions."""
    space = frame.f_globals if frame is not None else {}
    if not str(space.get("__name__")).startswith("transformers."):
        return False
    while frame is not None and frame.f_globals is space:
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False
