"""Names in a GGUF file of parameters of transformers' models that the gguf package does not have."""

from __future__ import annotations

from collections.abc import Mapping

from gguf import TensorNameMap


def name_in_file(path: str, own: Mapping[str, str], others: TensorNameMap) -> str:
    """The name of the parameter at `path`. own: end of a path → what is behind the layer in the file. others: of a
    model that has the other tensors, too."""
    found = next((f"blk.{path.split('.')[2]}.{name}" for end, name in own.items() if path.endswith(end)), None)
    found = found or others.get_name(path, (".weight", ".bias"))
    assert found is not None, path
    return str(found)
