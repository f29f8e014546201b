"""Write a Qwen3-MoE checkpoint as a GGUF file for llama.cpp: one tensor in memory at a time.

llama.cpp names tensors ``blk.N.*`` and stacks a layer's experts into one (experts, rows, columns) tensor per
matrix (`MODEL_ARCH.QWEN3MOE` in the gguf package). Weights keep their values; norms and routers are float32,
as in llama.cpp's own converter.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tiermoe.bench.llama.checkpoint import Checkpoint, expert_count

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
FILE_TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor to write; ``parts`` are the checkpoint's tensors that are stacked into it."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]


def check_supported(config: dict[str, Any]) -> None:
    """Refuse what this writer would write wrongly."""
    if config.get("model_type") != "qwen3_moe":
        raise ValueError(f"only qwen3_moe checkpoints are written, not {config.get('model_type')!r}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("every layer must be a mixture of experts: dense layers are not written")
    if config.get("attention_bias") or not config.get("norm_topk_prob"):
        raise ValueError("llama.cpp's qwen3moe has no attention bias and always normalises the gate's weights")


def tensors(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """Every tensor of the file, in its order."""

    def single(name: str, source: str) -> Tensor:
        return Tensor(f"{name}.weight", (f"{source}.weight",), checkpoint.shape(f"{source}.weight"))

    yield single("token_embd", "model.embed_tokens")
    yield single("output_norm", "model.norm")
    if not checkpoint.config.get("tie_word_embeddings"):
        yield single("output", "lm_head")
    for layer in range(checkpoint.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for source, name in LAYER.items():
            yield single(f"blk.{layer}.{name}", f"{prefix}.{source}")
        for source, name in EXPERT.items():
            experts = range(expert_count(checkpoint.config))
            parts = tuple(f"{prefix}.mlp.experts.{expert}.{source}.weight" for expert in experts)
            yield Tensor(f"blk.{layer}.{name}.weight", parts, (len(parts), *checkpoint.shape(parts[0])))


def bfloat16_bits(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.uint16]:
    """The values as bfloat16 bits: as stored, or rounded to nearest even."""
    if checkpoint.dtype(name) == "BF16":
        return checkpoint.raw(name)
    data = gguf.quantize(checkpoint.float32(name), gguf.GGMLQuantizationType.BF16)
    bits: npt.NDArray[np.uint16] = data.view(np.uint16)
    return bits


def keeps_float32(tensor: Tensor) -> bool:
    return len(tensor.shape) == 1 or tensor.name.endswith("ffn_gate_inp.weight")


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], file_type: gguf.LlamaFileType) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(expert_count(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """The byte-level BPE of tokenizer.json, which llama.cpp calls "gpt2" with pre-tokenizer "gpt-2"."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"] if added["special"]}
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()} | special
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(config["vocab_size"])]
    kinds = [
        gguf.TokenType.CONTROL
        if index in special
        else gguf.TokenType.NORMAL
        if index in by_id
        else gguf.TokenType.UNUSED
        for index in range(config["vocab_size"])
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def write_gguf(directory: Path, out: Path, file_type: str) -> None:
    """Write the checkpoint in ``directory`` to ``out`` as ``file_type`` "f32" or "bf16".

    Memory: one stacked tensor, that is one matrix of all experts of one layer. Raises ValueError where
    llama.cpp's qwen3moe could not compute the same function.
    """
    checkpoint = Checkpoint(directory)
    check_supported(checkpoint.config)
    weight_type, llama_type = FILE_TYPES[file_type]
    writer = gguf.GGUFWriter(out, "qwen3moe")
    add_metadata(writer, checkpoint.config, llama_type)
    add_tokenizer(writer, directory, checkpoint.config)
    planned = list(tensors(checkpoint))
    for tensor in planned:
        width = 4 if keeps_float32(tensor) or file_type == "f32" else 2
        kind = gguf.GGMLQuantizationType.F32 if keeps_float32(tensor) else weight_type
        size = int(np.prod(tensor.shape)) * width
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in planned:
        exact = keeps_float32(tensor) or file_type == "f32"
        read: Callable[[str], npt.NDArray[Any]] = (
            checkpoint.float32 if exact else lambda name: bfloat16_bits(checkpoint, name)
        )
        stacked = np.stack([read(part) for part in tensor.parts]).reshape(tensor.shape)
        writer.write_tensor_data(stacked)
    writer.close()
