"""Write a GGUF file with the shape of a model that people run, and random weights: full size in about a minute.

    python -m benchmarks.random_gguf qwen3-30b-a3b OUT.gguf [--layers 48] [--trace FILE] [--experts iq2_xxs,iq3_xxs]

Needs neither llama.cpp nor a checkpoint. Tensors, their types and the entries of the header are those of llama.cpp's
converter and of its quantiser's Q4_K_M; gpt-oss has MXFP4 experts and 8 bits for the rest, as the files that people
download. Weights are blocks of random codes whose scale gives them the deviation of `benchmarks.random_model`; every
tensor begins at another block of a pool. The tokenizer is that of the shipped small model, without its end of a text.
With `--experts` the gate and up of experts have the first type and down has the second, as in the mixtures of 1 to 3
bits that people download.
With `--trace` the token ids 0, 1, 2, … are routed as the tokens of a recorded trace (`benchmarks.recorded_routing`).
`--text` writes words whose tokens are routed as the trace's, in its order, for the commands that read a text.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from tokenizers import Tokenizer

from benchmarks import recorded_routing
from benchmarks.random_model import TOKENIZER, Config, Drawing, Spec, config_of, model_parser, require_room, specs
from benchmarks.recorded_routing import AMPLITUDE, RECALL, Routing, dense_layers, experts_of
from tiermoe.errors import ConfigError, TiermoeError

Bytes = npt.NDArray[np.uint8]

_POOL = 200_003  # different blocks of a type and a scale
_STEP = 7919
_BLOCKS = {
    Type.Q4_K: [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)],
    Type.Q6_K: [("codes", "u1", 192), ("scales", "i1", 16), ("d", "<f2")],
    Type.Q2_K: [("scales", "u1", 16), ("codes", "u1", 64), ("d", "<f2"), ("dmin", "<f2")],
    Type.Q3_K: [("codes", "u1", 108), ("d", "<f2")],
    Type.Q5_0: [("d", "<f2"), ("codes", "u1", 20)],
    Type.IQ1_S: [("d", "<f2"), ("codes", "u1", 48)],
    Type.IQ2_XXS: [("d", "<f2"), ("codes", "u1", 64)],
    Type.IQ2_XS: [("d", "<f2"), ("codes", "u1", 72)],
    Type.IQ2_S: [("d", "<f2"), ("codes", "u1", 80)],
    Type.IQ3_XXS: [("d", "<f2"), ("codes", "u1", 96)],
    Type.IQ3_S: [("d", "<f2"), ("codes", "u1", 108)],
    Type.IQ4_XS: [("d", "<f2"), ("codes", "u1", 134)],
    Type.Q8_0: [("d", "<f2"), ("codes", "i1", 32)],
    Type.MXFP4: [("exponent", "u1"), ("codes", "u1", 16)],
}
_MEAN_CODE = {Type.Q4_K: 7.5, Type.Q2_K: 1.5}
"""Of the types with minima."""
_PARTLY = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
"""What llama.cpp's quantiser takes where a row is no whole number of blocks of 256."""
_SPACE = "\u0120"  # before a word, in a byte-level BPE
_WIDE = ("ffn_gate_inp", "sinks")  # matrices in 32 bits
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")

_ARCHITECTURES = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
}


class Pool:
    """Random blocks of a type whose weights have a standard deviation."""

    def __init__(self, kind: Type, deviation: float, random: np.random.Generator) -> None:
        self._kind, self._at = kind, 0
        layout = np.dtype(_BLOCKS[kind])
        self._blocks = random.integers(0, 256, (_POOL, layout.itemsize), dtype=np.uint8)
        fields = self._blocks.view(layout)[:, 0]
        if kind is Type.MXFP4:
            fields["exponent"] = 127
            fields["exponent"] = 127 + round(math.log2(deviation / self._deviation()))
            return
        fields["d"] = 1
        if kind is Type.Q4_K:  # minima are the scales times the mean code
            fields["scales"][:, 4:8] = fields["scales"][:, :4]
            fields["scales"][:, 8:] = (fields["scales"][:, 8:] & 15) * 17
        elif kind is Type.Q2_K:
            fields["scales"] = (fields["scales"] & 15) * 17
        if kind in _MEAN_CODE:
            fields["dmin"] = _MEAN_CODE[kind]
        fields["d"] = deviation / self._deviation()
        if kind in _MEAN_CODE:
            fields["dmin"] = _MEAN_CODE[kind] * fields["d"]

    def _deviation(self) -> float:
        return float(dequantize(self._blocks[:4096], self._kind).std())

    def draw(self, shape: tuple[int, ...]) -> Bytes:
        """The blocks of a tensor, (*shape[:-1], bytes of a row)."""
        columns, nbytes = gguf.GGML_QUANT_SIZES[self._kind]
        self._at = (self._at + _STEP) % _POOL
        drawn = np.resize(np.roll(self._blocks, -self._at, axis=0), (math.prod(shape) // columns, nbytes))
        return drawn.reshape(*shape[:-1], shape[-1] // columns * nbytes)


def tensors(kind: str, config: Config) -> Iterator[tuple[str, Spec]]:
    """Every tensor by llama.cpp's name, in the converter's order of layers; experts of a layer are one tensor."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    for path, spec in _stacked(kind, config):
        path = path if path.endswith((".weight", ".bias")) else f"{path}.weight"
        name = names.get_name(path, (".weight", ".bias"))
        assert name is not None, path
        yield name, spec


def _stacked(kind: str, config: Config) -> Iterator[tuple[str, Spec]]:
    """`specs`, with the experts of a layer in one, and what the converter splits in its halves."""
    count = experts_of(config)
    for path, spec in specs(kind, config):
        if found := _EXPERT.fullmatch(path):
            if found[2] == "0":
                yield f"{found[1]}.{found[3]}", Spec((count, *spec.shape), spec.kind)
        elif spec.kind == "exponents":
            continue  # part of the blocks
        elif ".experts." in path:
            yield from _fused(path, spec)
        elif path.endswith("kv_b_proj.weight"):
            heads, keys, values = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
            latent = spec.shape[-1]
            yield path.replace("kv_b_proj", "k_b_proj"), Spec((heads, latent, keys))
            yield path.replace("kv_b_proj", "v_b_proj"), Spec((heads, values, latent))
        else:
            yield path.replace("score_correction_bias", "score_correction.bias"), spec


def _fused(path: str, spec: Spec) -> Iterator[tuple[str, Spec]]:
    """gpt-oss's experts: gate and up apart, blocks as matrices."""
    stem, _, last = path.rpartition("_proj_")
    prefix, _, matrix = stem.rpartition(".")
    halves = ("gate", "up") if matrix == "gate_up" else (matrix,)
    experts, rows, *blocks = spec.shape
    shape = (experts, rows // len(halves), *([math.prod(blocks) * 2] if blocks else []))
    for half in halves:
        yield f"{prefix}.{half}_proj.{'bias' if last == 'bias' else 'weight'}", Spec(shape, spec.kind)


def type_of(name: str, spec: Spec, config: Config, experts: tuple[Type, Type] | None = None) -> Type:
    """The type that llama.cpp's quantiser gives a tensor (`llama_tensor_get_type` for Q4_K_M): norms, biases and
    routers in 32 bits, the output layer in Q6_K, and every second to third layer's values and down projections.
    experts: types of their gate and up, and of down, instead."""
    if len(spec.shape) == 1 or not name.endswith(".weight") or any(word in name for word in _WIDE):
        return Type.F32
    if experts is not None and "_exps" in name:
        return experts["ffn_down" in name]
    if config["model_type"] == "gpt_oss":
        return Type.MXFP4 if spec.kind == "codes" else Type.Q8_0
    layers, found = config["num_hidden_layers"], re.match(r"blk\.(\d+)\.(attn_v\.|ffn_down)", name)
    more = name == "output.weight" or (found is not None and _use_more_bits(int(found[1]), layers))
    kind = Type.Q6_K if more else Type.Q4_K
    return kind if spec.shape[-1] % 256 == 0 else _PARTLY[kind]


def _use_more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def write(
    kind: str,
    out: Path,
    config: Config,
    seed: int = 0,
    routing: Routing | None = None,
    experts: tuple[Type, Type] | None = None,
) -> int:
    """Writes the file, whole or not at all; its bytes. Memory: its largest tensor twice, and the pools of blocks.
    routing: what its routers choose; None: random ones. experts: see `type_of`. PackError if there is too little room
    on the drive."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=out.parent) as folder:
        half = Path(folder) / out.name
        writer = gguf.GGUFWriter(half, gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config["model_type"]]])
        _add_entries(writer, config)
        _add_vocabulary(writer, config["vocab_size"])
        found, total = list(tensors(kind, config)), 0
        for name, spec in found:
            type_ = type_of(name, spec, config, experts)
            columns, nbytes = gguf.GGML_QUANT_SIZES[type_]
            size = math.prod(spec.shape) // columns * nbytes
            writer.add_tensor_info(name, spec.shape, np.dtype("<f4"), size, raw_dtype=type_)
            total += size
        require_room(out.parent, total)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        drawing, pools, random = Drawing(seed), dict[tuple[Type, float], Pool](), np.random.default_rng(seed)
        for name, spec in found:
            type_ = type_of(name, spec, config, experts)
            if type_ is Type.F32:
                data: npt.NDArray[Any] = drawing.draw(spec).float().numpy()
            else:
                key = type_, 1.0 if spec.kind == "embedding" else spec.shape[-1] ** -0.5
                if key not in pools:
                    pools[key] = Pool(*key, random)
                data = pools[key].draw(spec.shape)
            writer.write_tensor_data(data if routing is None else _routed(data, name, type_, config, routing))
        writer.close()
        half.rename(out)
    return out.stat().st_size


def _routed(data: npt.NDArray[Any], name: str, kind: Type, config: Config, routing: Routing) -> npt.NDArray[Any]:
    """A tensor of a file with a recorded routing."""
    hidden = config["hidden_size"]
    if name == "token_embd.weight":
        data[:, : routing.columns // 256 * 144] = one_hot_blocks(routing.codes(config["vocab_size"]), routing.columns)
    elif re.search(r"attn_output|ffn_down", name):
        data[..., : routing.columns, :] = 0  # the weights of zero bytes are 0 in every type
    elif "exp_probs_b" in name:
        data[:] = 0
    elif found := re.fullmatch(r"blk\.(\d+)\.(ffn_norm|post_attention_norm|ffn_gate_inp)\.weight", name):
        layer = int(found[1]) - dense_layers(config)
        if layer >= 0:
            return routing.router(layer, hidden) if found[2] == "ffn_gate_inp" else routing.norm(layer, hidden)
    return data


def routing_for(path: Path, config: Config, recall: float = RECALL, seed: int = 0) -> Routing:
    """`recorded_routing.routing_for`. ConfigError too if the model's embedding has no blocks of 256 columns."""
    if config["hidden_size"] % 256:
        raise ConfigError(f"--trace takes models whose hidden size is a multiple of 256, not {config['hidden_size']}")
    return recorded_routing.routing_for(path, config, recall, seed)


def one_hot_blocks(columns: npt.NDArray[np.int64], width: int) -> Bytes:
    """Q4_K rows (R, bytes) of `width` weights: AMPLITUDE in the columns (R, N) of each row, 0 elsewhere."""
    rows = len(columns)
    blocks = np.zeros((rows, width // 256), _BLOCKS[Type.Q4_K])
    blocks["d"] = AMPLITUDE / 15
    blocks["scales"][..., :4] = blocks["scales"][..., 8:] = 1  # all eight scales are 1, all minima 0
    codes = blocks["codes"]  # of each 64 weights: 32 bytes, whose lower halves are the first 32
    for column in columns.T:
        block, within = column // 256, column % 256
        byte, half = within // 64 * 32 + within % 32, np.where(within % 64 < 32, 15, 240)
        codes[np.arange(rows), block, byte] |= half.astype(np.uint8)
    return blocks.view(np.uint8).reshape(rows, -1)


def _add_entries(writer: gguf.GGUFWriter, config: Config) -> None:
    """The model's facts (`set_gguf_parameters` of the converter's classes)."""
    family = config["model_type"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(experts_of(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if family == "deepseek_v2":
        latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_kv_lora_rank(latent)
        writer.add_key_length(latent + rotary)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rotary)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "partial_rotary_factor" in config:
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "n_shared_experts" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
    if family == "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if (scaling := config.get("rope_scaling")) is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """The shipped byte-level BPE, filled up to `size` tokens that no text has. Its token that ends a text is one of
    these: an answer is as long as asked for."""
    document = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    special = {added["id"] for added in document["added_tokens"]}
    tokens = {index: token for token, index in document["model"]["vocab"].items() if index not in special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL if i in tokens else gguf.TokenType.UNUSED for i in range(size)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]])
    writer.add_add_bos_token(False)


def text_of(routing: Routing) -> str:
    """A word for each token of the trace: its token of the file's tokenizer has the class of that token, in order.
    ConfigError if a class has no word."""
    tokenizer, classes = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")), routing.classes
    words = dict[int, str]()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda each: each[1]):
        if token[:1] == _SPACE and token[1:].isalpha() and token[1:].isascii():
            words.setdefault(index % classes, f" {token[1:]}")
    text = "".join(words.get(each, "") for each in range(classes))
    if [index % classes for index in tokenizer.encode(text).ids] != list(range(classes)):
        raise ConfigError(f"the tokenizer has no word for each of the trace's {classes} tokens; leave --text out")
    return text


def expert_types(text: str) -> tuple[Type, Type]:
    """Of gate and up, and of down: `iq2_xxs,iq3_xxs`. ArgumentTypeError where it is no two types that are drawn."""
    known = {kind.name.lower(): kind for kind in _BLOCKS}
    up, _, down = text.partition(",")
    if up not in known or down not in known:
        raise argparse.ArgumentTypeError(
            f"{text} is no pair of types, as iq2_xxs,iq3_xxs; there are {', '.join(known)}"
        )
    return known[up], known[down]


def main() -> None:
    parser = model_parser(__doc__, "file")
    parser.add_argument("--experts", type=expert_types, help="types of experts' gate and up, and of down")
    parser.add_argument("--trace", type=Path, help="routers choose what this trace of as many experts recorded")
    parser.add_argument("--text", type=Path, help="file to write the words to that --trace routes")
    parser.add_argument(
        "--recall",
        type=float,
        default=RECALL,
        help="share of the experts that a later layer's router forecasts right (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already; name another file")
    config = config_of(args.kind, args.layers)
    if args.text is not None and args.trace is None:
        parser.error("--text has the words that a trace routes; give --trace")
    if args.experts is not None and config.get("moe_intermediate_size", 0) % 256:
        parser.error(f"--experts takes models whose experts have rows of whole blocks of 256, not {args.kind}")
    try:
        routing = None if args.trace is None else routing_for(args.trace, config, args.recall, args.seed)
        text = None if args.text is None or routing is None else text_of(routing)
        nbytes = write(args.kind, args.out, config, args.seed, routing, args.experts)
    except TiermoeError as error:
        parser.error(str(error))
    if text is not None:
        args.text.write_text(text, encoding="utf-8")
    print(json.dumps({"file": str(args.out), "bytes": nbytes}))


if __name__ == "__main__":
    main()
