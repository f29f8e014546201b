"""Write a Qwen3-MoE checkpoint of a chosen shape with random weights.

    python -m benchmarks.random_moe WORK --experts 64 --layers 4

It stands for speed and memory alone. Its routers are random too: they spread tokens over the experts all but evenly and
know no locality, so a cache hits about as often as it is large.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.widen import TOKENIZER_FILES
from tiermoe.bench.llama.checkpoint import INDEX

TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "stories-7m"
_MULTIPLE = 64  # what our own kernels take


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. `inner`: units of an expert; `top_k`: experts of a token in each layer; `context`:
    positions."""

    experts: int = 32
    layers: int = 4
    top_k: int = 4
    hidden: int = 1024
    inner: int = 512
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    context: int = 4096

    @property
    def name(self) -> str:
        """A folder's name that tells the shape."""
        return (
            f"moe-e{self.experts}-l{self.layers}-k{self.top_k}-h{self.hidden}-i{self.inner}"
            f"-a{self.heads}x{self.kv_heads}x{self.head_dim}-c{self.context}"
        )

    def check(self) -> None:
        """ValueError for sizes that make no model, or none that all kernels take."""
        small = [name for name, value in asdict(self).items() if value < 1]
        if small:
            raise ValueError(f"{', '.join(small)} must be at least 1")
        if self.hidden % _MULTIPLE or self.inner % _MULTIPLE or self.heads * self.head_dim % _MULTIPLE:
            raise ValueError(f"hidden, inner and heads x head_dim must be multiples of {_MULTIPLE}")
        if self.head_dim % 2 or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads of {self.head_dim} do not share {self.kv_heads} key/value heads")
        if self.top_k > self.experts:
            raise ValueError(f"a token cannot use {self.top_k} of {self.experts} experts")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """An option for each size of `Shape`."""
    for field in fields(Shape):
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=int, default=field.default, help=f"default {field.default}")


def shape_of(args: argparse.Namespace) -> Shape:
    """What the options of `add_shape` say. ValueError where it cannot be."""
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    shape.check()
    return shape


def config(shape: Shape, source: dict[str, Any]) -> dict[str, Any]:
    """config.json; vocabulary and special tokens are those of the config `source`."""
    kept = ("vocab_size", "bos_token_id", "eos_token_id")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{name: source[name] for name in kept},
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.inner,
        "moe_intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "router_aux_loss_coef": 0.0,
        "torch_dtype": "bfloat16",
    }


def ensure(shape: Shape, work: Path, seed: int = 0) -> Path:
    """The folder of a checkpoint of this shape below `work`, written where it is not there yet: one shard a layer and
    one for the rest, whole or not at all. Memory: one layer."""
    shape.check()
    out = work / shape.name
    if out.exists():
        return out
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=work) as folder:
        half = Path(folder) / "checkpoint"
        half.mkdir()
        _write(shape, half, seed)
        half.rename(out)
    return out


def _write(shape: Shape, out: Path, seed: int) -> None:
    made = config(shape, json.loads((TOKENIZER / "config.json").read_text()))
    index: dict[str, str] = {}
    total = 0
    for number in range(-1, shape.layers):
        generator = torch.Generator().manual_seed(seed * 100_003 + number + 1)
        shard = f"model-layer-{number:03d}.safetensors" if number >= 0 else "model-dense.safetensors"
        tensors = layer(shape, number, generator) if number >= 0 else outside(shape, made["vocab_size"], generator)
        save_file(tensors, out / shard, {"format": "pt"})
        index.update(dict.fromkeys(tensors, shard))
        total += sum(tensor.nbytes for tensor in tensors.values())
    for name in TOKENIZER_FILES:
        if (TOKENIZER / name).exists():
            shutil.copyfile(TOKENIZER / name, out / name)
    (out / "config.json").write_text(json.dumps(made, indent=1) + "\n")
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}) + "\n")


def outside(shape: Shape, vocabulary: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Embedding, last norm and output matrix."""
    return {
        "model.embed_tokens.weight": torch.randn(vocabulary, shape.hidden, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": _matrix(vocabulary, shape.hidden, generator),
    }


def layer(shape: Shape, number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """All tensors of one layer."""
    prefix, hidden, inner = f"model.layers.{number}.", shape.hidden, shape.inner
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate": (shape.experts, hidden),
    }
    for expert in range(shape.experts):
        for name, size in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            matrices[f"mlp.experts.{expert}.{name}_proj"] = size
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": shape.head_dim,
        "self_attn.k_norm": shape.head_dim,
    }
    return {
        **{f"{prefix}{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()},
        **{f"{prefix}{name}.weight": _matrix(*size, generator) for name, size in matrices.items()},
    }


def _matrix(out: int, in_: int, generator: torch.Generator) -> torch.Tensor:
    """Outputs vary about as much as inputs."""
    return (torch.randn(out, in_, generator=generator) * in_**-0.5).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_moe", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("work", type=Path, help="folder in which the checkpoint gets a folder of its own")
    parser.add_argument("--seed", type=int, default=0)
    add_shape(parser)
    args = parser.parse_args()
    try:
        shape = shape_of(args)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps({"directory": str(ensure(shape, args.work, args.seed)), **asdict(shape)}))


if __name__ == "__main__":
    main()
