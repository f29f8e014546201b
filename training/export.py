"""The trained model as a Hugging Face checkpoint."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from training.tokenizer import END


def export(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors (a tensor per expert and matrix) and the tokenizer to ``out``."""
    copied = copy.deepcopy(model).to(device="cpu", dtype=dtype)
    copied.config.dtype = dtype
    copied.config.eos_token_id = tokenizer.eos_token_id
    ends = tokenizer.convert_tokens_to_ids(list(dict.fromkeys((str(tokenizer.eos_token), END))))
    copied.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    copied.save_pretrained(out)
    tokenizer.save_pretrained(out)
