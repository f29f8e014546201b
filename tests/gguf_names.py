"""Names in a GGUF file of parameters of transformers' models that the gguf package does not have."""

from __future__ import annotations

from collections.abc import Mapping

from gguf import TensorNameMap

CONNECTIONS = {
    "attn_hc.fn": "hc_attn_fn.weight",
    "attn_hc.base": "hc_attn_base.weight",
    "attn_hc.scale": "hc_attn_scale.weight",
    "ffn_hc.fn": "hc_ffn_fn.weight",
    "ffn_hc.base": "hc_ffn_base.weight",
    "ffn_hc.scale": "hc_ffn_scale.weight",
}
"""End of a parameter's path → its name, of hyper-connections."""


def name_in_file(path: str, own: Mapping[str, str], others: TensorNameMap) -> str:
    """The name of the parameter at `path`. own: end of a path → what is behind the layer in the file. others: of a
    model that has the other tensors, too."""
    found = next((f"blk.{path.split('.')[2]}.{name}" for end, name in own.items() if path.endswith(end)), None)
    found = found or others.get_name(path, (".weight", ".bias"))
    assert found is not None, path
    return str(found)
