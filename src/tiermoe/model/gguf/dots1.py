"""dots.llm1 in GGUF files (`Dots1Model` of the converter): its config."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, glm4moe
from tiermoe.model.gguf.shapes import AGAIN


def dots1(file: GgufFile) -> Config:
    """GLM-4.5's fields: the layers are the same. None has a window (models/dots1.cpp). ModelError where routers are not
    dots.llm1's; older files say nothing of them."""
    if file.count("expert_gating_func", SIGMOID) != SIGMOID:
        raise ModelError(f"{file.path} has no sigmoid router, which every dots.llm1 has; {AGAIN}")
    return {**glm4moe(file), "model_type": "dots1", "sliding_window": None}
