"""DeepSeekMoE, which transformers does not have: checkpoints as deepseek-ai publishes them, against its published
equations, computed one token and one expert at a time between transformers' Llama attention and norms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

import tiermoe
from commands import Command
from parity import close, tokens

HIDDEN, HEADS, EXPERTS, INNER, VOCABULARY, LAYERS = 64, 4, 8, 32, 128, 4
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig", "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "aux_loss_alpha": 0.001, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 256,
    "model_type": "deepseek", "moe_intermediate_size": INNER, "moe_layer_freq": 1, "n_routed_experts": EXPERTS,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": HEADS, "num_experts_per_tok": 3,
    "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "pretraining_tp": 1, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True, "vocab_size": VOCABULARY,
}  # fmt: skip
"""config.json of deepseek-moe-16b-base, with smaller sizes."""

VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "weights that sum to 1": {"norm_topk_prob": True},
    "every second layer": {"moe_layer_freq": 2, "first_k_dense_replace": 0},
    "no shared experts": {"n_shared_experts": None},
    "grouped queries": {"num_key_value_heads": 2},
    "biases": {"attention_bias": True},
    "stretched positions": {"rope_scaling": {"type": "linear", "factor": 2.0}},
}


def has_experts(config: dict[str, Any], layer: int) -> bool:
    return bool(layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0)


def write(directory: Path, **changes: Any) -> Path:
    """A random checkpoint in float32 by the published names, with code that must not run."""
    directory.mkdir(exist_ok=True)
    config = {**PUBLISHED, **changes}
    torch.manual_seed(0)
    found: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        random = torch.randn(shape)
        found[name] = 1 + 0.1 * random if "norm" in name else 0.15 * random

    def add_block(prefix: str, inner: int) -> None:
        add(f"{prefix}.gate_proj.weight", inner, HIDDEN)
        add(f"{prefix}.up_proj.weight", inner, HIDDEN)
        add(f"{prefix}.down_proj.weight", HIDDEN, inner)

    add("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    add("model.norm.weight", HIDDEN)
    add("lm_head.weight", VOCABULARY, HIDDEN)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        add(f"{path}.input_layernorm.weight", HIDDEN)
        add(f"{path}.post_attention_layernorm.weight", HIDDEN)
        for name in "qkvo":
            rows = HIDDEN if name in "qo" else HIDDEN // HEADS * config["num_key_value_heads"]
            add(f"{path}.self_attn.{name}_proj.weight", rows, HIDDEN)
            if config["attention_bias"]:
                add(f"{path}.self_attn.{name}_proj.bias", rows)
        if not has_experts(config, layer):
            add_block(f"{path}.mlp", config["intermediate_size"])
            continue
        add(f"{path}.mlp.gate.weight", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            add_block(f"{path}.mlp.experts.{expert}", INNER)
        if config["n_shared_experts"]:
            add_block(f"{path}.mlp.shared_experts", config["n_shared_experts"] * INNER)
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (directory / name).write_text(f"open({str(directory / 'ran')!r}, 'w').close()\n")
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer that calls itself Llama's, as the published one does."""
    words = ["<pad>", "<s>", "</s>", "Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 4]]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.add_special_tokens(words[:3])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    facts = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))


class Published:
    """The equations of the published model (arXiv:2401.06066, section 3) over a checkpoint's tensors."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = load_file(directory / "model.safetensors")
        usual = {"attention_bias", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"}
        sizes = {"hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"}
        fields = {name: self.config[name] for name in usual | sizes}
        self.llama = LlamaConfig(**fields, attn_implementation="eager")

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> Tensor:
        """Logits (T, vocabulary)."""
        x = self.weights["model.embed_tokens.weight"][torch.tensor(ids)][None]
        places = torch.arange(len(ids))[None]
        turned = LlamaRotaryEmbedding(self.llama)(x, places)
        mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)[None, None]
        for layer in range(self.config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            attention = self._loaded(LlamaAttention(self.llama, layer), f"{path}.self_attn.")
            x = x + attention(self._norm(f"{path}.input_layernorm", x), turned, mask)[0]
            normed = self._norm(f"{path}.post_attention_layernorm", x)[0]
            moe = has_experts(self.config, layer)
            x = x + torch.stack([self._moe(f"{path}.mlp", u) if moe else self._ffn(f"{path}.mlp", u) for u in normed])
        return linear(self._norm("model.norm", x)[0], self.weights["lm_head.weight"])

    def _loaded(self, module: Any, prefix: str) -> Any:
        inside = {key.removeprefix(prefix): each for key, each in self.weights.items() if key.startswith(prefix)}
        module.load_state_dict(inside)
        return module.eval()

    def _norm(self, path: str, x: Tensor) -> Tensor:
        found: Tensor = self._loaded(LlamaRMSNorm(HIDDEN, self.config["rms_norm_eps"]), f"{path}.")(x)
        return found

    def _ffn(self, path: str, u: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{path}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (silu(gate @ u) * (up @ u))

    def _moe(self, path: str, u: Tensor) -> Tensor:
        """Of one token u (H)."""
        scores = torch.softmax(self.weights[f"{path}.gate.weight"] @ u, dim=-1)
        chosen = scores.argsort(descending=True)[: self.config["num_experts_per_tok"]].tolist()
        total = sum(scores[expert] for expert in chosen) if self.config["norm_topk_prob"] else 1.0
        result = torch.zeros_like(u)
        for expert in sorted(chosen):
            result += scores[expert] / total * self._ffn(f"{path}.experts.{expert}", u)
        return result + self._ffn(f"{path}.shared_experts", u) if self.config["n_shared_experts"] else result


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("deepseek") / "model")


@pytest.mark.parametrize("decoder", ["auto", "generic"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_published_equations(name: str, decoder: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "model", **VARIANTS[name])
    model, _ = tiermoe.load(
        directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1, decoder=decoder, store=tmp_path / "store"
    )
    assert type(model).__name__ == "DeepseekForCausalLM"
    ids = tokens(1, 40)
    with torch.no_grad():
        assert close(model(ids).logits[0], Published(directory)(ids[0].tolist()))
    assert not (directory / "ran").exists()
    model.tiermoe.close()


def test_the_commands(published: Path, tmp_path: Path, tiermoe_: Command) -> None:
    """The plan, packing to 4 bits, and an answer in the same tokens twice: by transformers' tokenizer and, from the
    store, without transformers."""
    said = tiermoe_("show", published)
    assert said.code == 0, said.err
    assert "DeepSeekMoE" in said.out
    store = ("--store", tmp_path / "store")
    assert tiermoe_("plan", published, "--memory", "4GiB", *store).code == 0
    assert tiermoe_("pack", published, "--bits", "4", *store).code == 0
    words = ("run", published, "A dog 42", "--memory", "4GiB", "--cache", "50%", "--bits", "4", "--max-tokens", "8")
    answers = [tiermoe_(*words, *store) for _ in range(2)]
    assert [answer.code for answer in answers] == [0, 0], answers[0].err
    assert answers[0].out == answers[1].out
    assert not (published / "ran").exists()


def test_the_tokenizer_is_the_byte_level_one_of_the_file(published: Path) -> None:
    _, tokenizer = tiermoe.load(published, memory="4GiB", device="cpu", bits=16, lanes=1)
    expected = Tokenizer.from_file(str(published / "tokenizer.json")).encode("A dog 42", add_special_tokens=False).ids
    assert tokenizer.encode("A dog 42", add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == "A dog 42"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"scoring_func": "sigmoid"}, "know 'softmax' alone"),
    "no order of layers": ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
    "fewer experts": ({"n_routed_experts": 9}, "of 8 experts"),
    "another number of shared experts": ({"n_shared_experts": 3}, "has shape"),
    "no experts": ({"n_routed_experts": None}, "has no expert layers"),
    "dense layers": ({"first_k_dense_replace": 3}, "lacks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_does_not_fit_is_refused_in_a_line(name: str, tmp_path: Path, tiermoe_: Command) -> None:
    changes, cause = REFUSED[name]
    directory = write(tmp_path / "model")
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    said = tiermoe_("run", directory, "hi", "--max-tokens", "2", "--memory", "4GiB", "--store", tmp_path / "store")
    assert cause in said.cause
