"""Write a checkpoint with the shape of a model that people run, and random weights.

    python -m benchmarks.random_model qwen3-30b-a3b OUT [--layers 6 | --gb 20]

It stands for speed and memory alone: what the sizes, the kinds of layers and the stored types cost. Its routers are
random, so they spread tokens all but evenly over the experts. It has no end-of-text token: an answer is as long as
asked for. The tokenizer is that of the shipped small model, whose tokens are a beginning of the vocabulary.

`write` can leave the experts out (`benchmarks.random_store` has them), and take a recorded trace's routing.
"""

import argparse
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX

from benchmarks.recorded_routing import Routing, routed
from benchmarks.rounds import at_least_one, parser_of
from benchmarks.widen import TOKENIZER_FILES
from tiermoe.config import format_size
from tiermoe.errors import PackError, TiermoeError

Config = dict[str, Any]
TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "stories-7m"
SHARD = 1 << 30  # bytes of a file, and so of memory
_POOL = 1 << 24  # different random values; every tensor begins at another of them
_STEP = 7919 * 257


@dataclass(frozen=True)
class Spec:
    """A tensor to draw, in bfloat16, or in bytes of MXFP4."""

    shape: tuple[int, ...]
    kind: str = "matrix"
    """'matrix' (outputs vary about as much as inputs), 'embedding', 'vector' (a bias), 'ones' (a norm), or MXFP4's
    bytes: 'codes' and 'exponents'."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (1 if self.kind in ("codes", "exponents") else 2)


class Drawing:
    """Random tensors, each a stretch of a pool of values: several GB are written as fast as the drive takes them."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._values = torch.randn(_POOL, generator=generator).bfloat16()
        self._bytes = torch.randint(0, 256, (_POOL,), generator=generator, dtype=torch.uint8)
        self._at = 0

    def draw(self, spec: Spec) -> torch.Tensor:
        if spec.kind == "ones":
            return torch.ones(spec.shape, dtype=torch.bfloat16)
        if spec.kind == "codes":
            return self._stretch(self._bytes, spec.shape)
        if spec.kind == "exponents":  # weights of about 0.02: MXFP4's magnitudes have a mean of 2
            return self._stretch(self._bytes, spec.shape) % 3 + 119
        scale = {"embedding": 1.0, "vector": 0.1}.get(spec.kind, spec.shape[-1] ** -0.5)
        return self._stretch(self._values, spec.shape) * scale

    def _stretch(self, pool: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        self._at = (self._at + _STEP) % _POOL
        end = self._at + math.prod(shape)
        pieces = [pool[max(self._at - start, 0) : end - start] for start in range(0, end, _POOL)]
        return torch.cat(pieces).reshape(shape)


Layer = Callable[[Config, int], dict[str, Spec]]


@dataclass(frozen=True)
class Kind:
    """A model that people run."""

    config: Config  # config.json
    layer: Layer  # the tensors of one of its layers, named without the layer's prefix


def _linear(**sizes: tuple[int, int]) -> dict[str, Spec]:
    return {f"{name}_proj.weight": Spec(size) for name, size in sizes.items()}


def _under(prefix: str, specs: Mapping[str, Spec]) -> dict[str, Spec]:
    return {f"{prefix}.{name}": spec for name, spec in specs.items()}


def _norms(hidden: int) -> dict[str, Spec]:
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{name}.weight": Spec((hidden,), "ones") for name in names}


def _attention(config: Config) -> dict[str, Spec]:
    """Grouped-query attention."""
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found = _linear(q=(queries, hidden), k=(keys, hidden), v=(keys, hidden), o=(hidden, queries))
    if config["attention_bias"]:
        outputs = {"q": queries, "k": keys, "v": keys}
        outputs |= {"o": hidden} if config["model_type"] == "gpt_oss" else {}
        found |= {f"{name}_proj.bias": Spec((size,), "vector") for name, size in outputs.items()}
    return found


def _mlp(hidden: int, inner: int) -> dict[str, Spec]:
    return _linear(gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner))


def _experts(count: int, hidden: int, inner: int) -> dict[str, Spec]:
    each = _mlp(hidden, inner)
    return {f"experts.{expert}.{name}": spec for expert in range(count) for name, spec in each.items()}


def _block(hidden: int, attention: Mapping[str, Spec], mlp: Mapping[str, Spec]) -> dict[str, Spec]:
    return {**_norms(hidden), **_under("self_attn", attention), **_under("mlp", mlp)}


def _qwen3(config: Config, number: int) -> dict[str, Spec]:
    heads = {f"{name}_norm.weight": Spec((config["head_dim"],), "ones") for name in "qk"}
    hidden, experts = config["hidden_size"], config["num_experts"]
    mlp = {"gate.weight": Spec((experts, hidden)), **_experts(experts, hidden, config["moe_intermediate_size"])}
    return _block(hidden, {**_attention(config), **heads}, mlp)


def _gpt_oss(config: Config, number: int) -> dict[str, Spec]:
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    sinks = {"sinks": Spec((config["num_attention_heads"],), "vector")}
    mlp = {"router.weight": Spec((experts, hidden)), "router.bias": Spec((experts,), "vector")}
    for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        mlp[f"experts.{name}_proj_blocks"] = Spec((experts, rows, columns // 32, 16), "codes")
        mlp[f"experts.{name}_proj_scales"] = Spec((experts, rows, columns // 32), "exponents")
        mlp[f"experts.{name}_proj_bias"] = Spec((experts, rows), "vector")
    return _block(hidden, {**_attention(config), **sinks}, mlp)


def _shared_and_routed(config: Config, number: int) -> dict[str, Spec]:
    """The MLP of a layer whose first ones are dense and whose others have shared experts."""
    hidden = config["hidden_size"]
    if number < config["first_k_dense_replace"]:
        return _mlp(hidden, config["intermediate_size"])
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    return {
        "gate.weight": Spec((experts, hidden)),
        **_under("shared_experts", _mlp(hidden, config["n_shared_experts"] * inner)),
        **_experts(experts, hidden, inner),
    }


def _deepseek_v2(config: Config, number: int) -> dict[str, Spec]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    attention = {
        **_linear(q=(heads * (plain + rotary), hidden), o=(hidden, heads * values)),
        "kv_a_proj_with_mqa.weight": Spec((latent + rotary, hidden)),
        "kv_a_layernorm.weight": Spec((latent,), "ones"),
        "kv_b_proj.weight": Spec((heads * (plain + values), latent)),
    }
    return _block(hidden, attention, _shared_and_routed(config, number))


def _separate_experts(config: Config, number: int) -> dict[str, Spec]:
    """The MLP of Mixtral and Phi-MoE, whose matrices have numbers."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    each = {"w1.weight": Spec((inner, hidden)), "w3.weight": Spec((inner, hidden)), "w2.weight": Spec((hidden, inner))}
    found = {"gate.weight": Spec((experts, hidden))}
    for expert in range(experts):
        found |= _under(f"experts.{expert}", each)
    return _under("block_sparse_moe", found)


def _mixtral(config: Config, number: int) -> dict[str, Spec]:
    return {
        **_norms(config["hidden_size"]),
        **_under("self_attn", _attention(config)),
        **_separate_experts(config, number),
    }


def _phi(config: Config, number: int) -> dict[str, Spec]:
    hidden = config["hidden_size"]
    biases = {name.replace("weight", "bias"): Spec((hidden,), "vector") for name in _norms(hidden)}
    biases["self_attn.o_proj.bias"] = Spec((hidden,), "vector")
    return {**_mixtral(config, number), **biases}


def _qwen2(config: Config, number: int) -> dict[str, Spec]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    mlp = {
        "gate.weight": Spec((experts, hidden)),
        "shared_expert_gate.weight": Spec((1, hidden)),
        **_under("shared_expert", _mlp(hidden, config["shared_expert_intermediate_size"])),
        **_experts(experts, hidden, config["moe_intermediate_size"]),
    }
    return _block(hidden, _attention(config), mlp)


def _olmoe(config: Config, number: int) -> dict[str, Spec]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    mlp = _experts(experts, hidden, config["intermediate_size"])
    mlp["gate.weight"] = Spec((experts, hidden))
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    norms = {f"{name}_norm.weight": Spec((count * config["head_dim"],), "ones") for name, count in heads.items()}
    return _block(hidden, {**_attention(config), **norms}, mlp)


def _glm4(config: Config, number: int) -> dict[str, Spec]:
    mlp = _shared_and_routed(config, number)
    if "gate.weight" in mlp:
        mlp["gate.e_score_correction_bias"] = Spec((config["n_routed_experts"],), "vector")
    return _block(config["hidden_size"], _attention(config), mlp)


KINDS = {
    "qwen3-30b-a3b": Kind(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48,
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
        },
        _qwen3,
    ),
    "gpt-oss-20b": Kind(
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 24,
            "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
            "vocab_size": 201088, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "swiglu_limit": 7.0, "attention_bias": True,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
                ],
            },
        },
        _gpt_oss,
    ),
    "deepseek-v2-lite": Kind(
        {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 27,
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102400,
            "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy",
            "routed_scaling_factor": 1.0, "norm_topk_prob": False, "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
            },
        },
        _deepseek_v2,
    ),
    "glm-4.5-air": Kind(
        {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 46,
            "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "vocab_size": 151552,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "use_qk_norm": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "attention_bias": True, "num_nextn_predict_layers": 0,
        },
        _glm4,
    ),
}  # fmt: skip
"""Name → shape, from the published config.json."""
KINDS["gpt-oss-120b"] = Kind(
    KINDS["gpt-oss-20b"].config | {"num_hidden_layers": 36, "num_local_experts": 128}, _gpt_oss
)
CHECKPOINTS = {
    "mixtral-8x7b": Kind(
        {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 32,
            "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
            "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
            "attention_bias": False,
        },
        _mixtral,
    ),
    "phi-3.5-moe": Kind(
        {
            "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "num_hidden_layers": 32,
            "hidden_size": 4096, "intermediate_size": 6400, "num_local_experts": 16, "num_experts_per_tok": 2,
            "vocab_size": 32064, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000, "sliding_window": None,
            "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01,
        },  # its positions are scaled by a table, which costs nothing
        _phi,
    ),
    "qwen1.5-moe-a2.7b": Kind(
        {
            "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_hidden_layers": 24,
            "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
            "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "vocab_size": 151936,
            "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": False, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "attention_bias": True, "use_sliding_window": False,
        },
        _qwen2,
    ),
    "olmoe-1b-7b": Kind(
        {
            "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_hidden_layers": 16,
            "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "vocab_size": 50304, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000, "norm_topk_prob": False,
            "attention_bias": False,
        },
        _olmoe,
    ),
}  # fmt: skip
"""Shapes that are written as safetensors alone."""
ALL = {**KINDS, **CHECKPOINTS}
_FEW = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {**_FEW, **_HEADS, "num_experts": 8, "moe_intermediate_size": 32},
    "gpt-oss-20b": {**_FEW, **_HEADS, "num_local_experts": 8, "intermediate_size": 64},
    "deepseek-v2-lite": {
        **_FEW, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "kv_lora_rank": 16,
        "moe_intermediate_size": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "glm-4.5-air": {**_FEW, **_HEADS, "n_routed_experts": 8, "moe_intermediate_size": 32},
}  # fmt: skip
_MANY = {**_FEW, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
SMALL |= {
    "mixtral-8x7b": {**_FEW, **_HEADS, "num_local_experts": 8},
    "phi-3.5-moe": {**_FEW, **_HEADS, "num_local_experts": 8},
    "qwen1.5-moe-a2.7b": {
        **_MANY, "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    },
    "olmoe-1b-7b": {**_MANY, "num_experts": 8, "intermediate_size": 32},
}  # fmt: skip
SMALL["gpt-oss-120b"] = SMALL["gpt-oss-20b"]
"""Kind → sizes of a small model of the family, with the shipped one's vocabulary."""
_COMMON = {
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "torch_dtype": "bfloat16",
}  # fmt: skip


def config_of(kind: str, layers: int | None = None, **changes: Any) -> Config:
    """config.json of `kind` with so many layers (None: as the model has), and sizes replaced by `changes`."""
    own = {} if layers is None else {"num_hidden_layers": layers}
    return {**_COMMON, **ALL[kind].config, **changes, **own}


def specs(kind: str, config: Config) -> Iterator[tuple[str, Spec]]:
    """Every tensor, from the embedding to the output layer."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", Spec((vocabulary, hidden), "embedding")
    for number in range(config["num_hidden_layers"]):
        yield from _under(f"model.layers.{number}", ALL[kind].layer(config, number)).items()
    yield "model.norm.weight", Spec((hidden,), "ones")
    yield "lm_head.weight", Spec((vocabulary, hidden))
    if config["model_type"] == "phimoe":
        yield "model.norm.bias", Spec((hidden,), "vector")
        yield "lm_head.bias", Spec((vocabulary,), "vector")


def layers_within(kind: str, nbytes: float) -> int:
    """As many layers as a checkpoint of so many bytes has, no more than the model's own, and at least one."""
    config = config_of(kind, 0)
    left, layers = nbytes - sum(spec.nbytes for _, spec in specs(kind, config)), 0
    while layers < ALL[kind].config["num_hidden_layers"] and left >= 0:
        left -= sum(spec.nbytes for spec in ALL[kind].layer(config, layers).values())
        layers += left >= 0
    return max(layers, 1)


def require_room(folder: Path, nbytes: int) -> None:
    """PackError if the drive of a folder has less free."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise PackError(
            f"{format_size(nbytes)} are to be written into {folder}, {format_size(free)} are free; free some, or name "
            f"another folder"
        )


def write(
    kind: str, out: Path, config: Config, seed: int = 0, routing: Routing | None = None, experts: bool = True
) -> int:
    """Writes the checkpoint into a folder that is not there yet, whole or not at all; the bytes of its tensors. Memory:
    one file of about a GiB and its largest tensor. routing: what its routers choose; None: random ones. experts: False
    leaves holes in a file in the place of the experts, which take no room on the drive. PackError if there is too
    little."""
    out.parent.mkdir(parents=True, exist_ok=True)
    require_room(out.parent, sum(spec.nbytes for name, spec in specs(kind, config) if experts or not _of_expert(name)))
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=out.parent) as folder:
        half = Path(folder) / "checkpoint"
        half.mkdir()
        total = _write(kind, half, config, Drawing(seed), routing, experts)
        half.rename(out)
    return total


def _of_expert(name: str) -> bool:
    return ".experts." in name


def _write(kind: str, out: Path, config: Config, drawing: Drawing, routing: Routing | None, experts: bool) -> int:
    index: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    left_out: dict[str, Spec] = {}
    total = size = 0

    def flush() -> None:
        shard = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(held, out / shard, {"format": "pt"})
        index.update(dict.fromkeys(held, shard))
        held.clear()

    for name, spec in specs(kind, config):
        total += spec.nbytes
        if _of_expert(name) and not experts:
            left_out[name] = spec
            continue
        if held and size + spec.nbytes > SHARD:
            flush()
            size = 0
        value = drawing.draw(spec)
        held[name] = value if routing is None else routed(value, name, config, routing)
        size += spec.nbytes
    flush()
    if left_out:
        index.update(dict.fromkeys(left_out, "experts.safetensors"))
        _write_holes(out / "experts.safetensors", left_out)
    for name in TOKENIZER_FILES:
        if (TOKENIZER / name).exists() and name != "generation_config.json":
            shutil.copyfile(TOKENIZER / name, out / name)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}) + "\n")
    return total


def _write_holes(path: Path, tensors: Mapping[str, Spec]) -> None:
    """A safetensors file of zeros that nothing was written for."""
    table, end = dict[str, Any](), 0
    for name, spec in tensors.items():
        dtype = "U8" if spec.kind in ("codes", "exponents") else "BF16"
        table[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    header = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def model_parser(text: str | None, out: str, kinds: Mapping[str, Kind] = KINDS) -> argparse.ArgumentParser:
    """The options of a model of random weights. out: what is written, a folder or a file."""
    parser = parser_of(text, measures=False)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("out", type=Path, help=f"{out} to write, which must not be there yet")
    parser.add_argument("--layers", type=at_least_one, help="default: as many as the model has")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    parser = model_parser(__doc__, "folder", ALL)
    parser.add_argument("--gb", type=float, help="as many layers as this many GB have")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already; name another folder")
    config = config_of(args.kind, layers_within(args.kind, args.gb * 1e9) if args.gb else args.layers)
    try:
        nbytes = write(args.kind, args.out, config, args.seed)
    except TiermoeError as error:
        parser.error(str(error))
    print(json.dumps({"directory": str(args.out), "bytes": nbytes}))


if __name__ == "__main__":
    main()
