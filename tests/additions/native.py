"""Changes of the tree for what the native kernels take: by file, each piece of text and what stands there then."""

from __future__ import annotations

from pathlib import Path

Changes = dict[str, list[tuple[str, str]]]

INSTRUCTION_SET: Changes = {
    "src/tiermoe/native/isa/simd.h": [
        (
            '#else\n#include "generic/simd.h"\n',
            '#elif defined(SIMD_VECTORS)\n#include "vectors/simd.h"\n#define SIMD vectors\n#else\n'
            '#include "generic/simd.h"\n',
        ),
    ],
    "src/tiermoe/native/kernels.c": [
        ("extern const Kernels kernels_generic;\n", "extern const Kernels kernels_generic, kernels_vectors;\n"),
        ("    &kernels_generic,\n", "    &kernels_vectors,\n    &kernels_generic,\n"),
    ],
}
"""Beside `vectors.c` and `vectors/simd.h` in `native/isa/`."""

ROUTER_FIELD: Changes = {
    "src/tiermoe/native/route.h": [
        (
            "    float epsilon, scale;    /* the weights are multiplied by scale */\n",
            "    float epsilon, scale;    /* the weights are multiplied by scale */\n"
            "    const bf16 *expert_scale; /* (experts), of the weights; NULL: none */\n",
        ),
    ],
    "src/tiermoe/native/structs.py": [
        (
            "normalise=c_int, epsilon=c_float, scale=c_float,\n",
            "normalise=c_int, epsilon=c_float, scale=c_float, expert_scale=c_void_p,\n",
        ),
    ],
    "src/tiermoe/native/route.c": [
        (
            "        if (router->round_weights) weights[i] = from_bf16(to_bf16(weights[i]));\n",
            "        if (router->round_weights) weights[i] = from_bf16(to_bf16(weights[i]));\n"
            "        if (router->expert_scale) weights[i] *= from_bf16(router->expert_scale[chosen[i]]);\n"
            "        if (router->round_weights) weights[i] = from_bf16(to_bf16(weights[i]));\n",
        ),
    ],
    "src/tiermoe/kernels/router.py": [
        (
            "    dtype: torch.dtype = torch.float32  # what weights are rounded to\n",
            "    dtype: torch.dtype = torch.float32  # what weights are rounded to\n"
            "    expert_scale: Tensor | None = None  # of each expert's weights, bfloat16 (E)\n",
        ),
        ("scale=self.scale,\n", "scale=self.scale, expert_scale=address(self.expert_scale),\n"),
        (
            "((self.bias, torch.bfloat16), ",
            "((self.bias, torch.bfloat16), (self.expert_scale, torch.bfloat16), ",
        ),
    ],
    "src/tiermoe/model/routers.py": [
        (
            "        self.native = self._form if prepared is None and expert_scale is None else None\n",
            "        self.native = self._form if prepared is None else None\n",
        ),
        (
            "            return self._scaled(weights, experts), experts\n        weights, experts",
            "            return weights, experts\n        weights, experts",
        ),
        (
            "            scale=rule.scale,\n",
            "            scale=rule.scale,\n            expert_scale=self._expert_scale,\n",
        ),
    ],
}
"""A router that scales the weights of each expert by a factor of its own (Gemma 4), in the native call too."""


GATE: Changes = {
    "src/tiermoe/native/expert.h": [("X(LIMITED_SILU)\n", "X(LIMITED_SILU) X(RELU)\n")],
    "src/tiermoe/native/isa/activations.h": [
        (
            "    if (expert->gate == SILU) return silu_gate(gate, up);\n",
            "    if (expert->gate == SILU) return silu_gate(gate, up);\n"
            "    if (expert->gate == RELU) return times(larger_of(zeros(), gate), up);\n",
        ),
    ],
}
"""What `additions.gate.RELU` is computed by once its entry says native="RELU"."""


def change(root: Path, changes: Changes) -> None:
    """Applies them to the tree at `root`. AssertionError for a piece that is not there once: the code has moved on."""
    for name, pieces in changes.items():
        text = (root / name).read_text()
        for before, after in pieces:
            assert text.count(before) == 1, f"{name}: {before}"
            text = text.replace(before, after)
        (root / name).write_text(text)
