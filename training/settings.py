"""What determines the trained weights: the defaults are those of models/stories-7m, `RECIPES` has every model's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Shape, amount of text and optimisation: the same settings and text give the same run."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    expert_hidden: int = 64
    vocab: int = 4096
    tied: bool = True
    chats: bool = False
    embedding_std: float = 0.02
    max_length: int = 2048
    sequence: int = 256
    batch: int = 16
    tokens: int = 20_000_000
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_rate: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.01
    capacity_factor: float = 2.0
    seed: int = 0

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.sequence))


RECIPES = {
    "stories-7m": Settings(),
    "chats-15m": Settings(
        experts=64,
        top_k=8,
        vocab=6144,
        tied=False,
        chats=True,
        embedding_std=0.25,
        sequence=512,
        batch=8,
        tokens=6_000_000,
    ),
}
"""Shipped model → the settings that make one like it."""


HELP = {
    "layers": "transformer layers, each with experts",
    "hidden": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of a head",
    "experts": "experts in a layer",
    "top_k": "experts that run for a token",
    "expert_hidden": "intermediate width of an expert",
    "vocab": "tokens of the tokenizer",
    "tied": "one matrix for the embedding and the output layer",
    "chats": "tokenizer with the tokens and the template of chats, a token for each digit",
    "embedding_std": "standard deviation of the embedding at the start (large: a layer's input resembles its output)",
    "max_length": "context that the configuration names (positions beyond --sequence are not trained)",
    "sequence": "tokens in a training sequence",
    "batch": "sequences in a batch",
    "tokens": "tokens to train on, counting repetitions",
    "learning_rate": "peak learning rate of AdamW",
    "warmup_steps": "steps of linear warm-up",
    "final_rate": "learning rate at the end, as a fraction of the peak (linear decay)",
    "weight_decay": "weight decay of matrices",
    "clip": "largest norm of the gradient",
    "balance": "weight of the load-balancing loss",
    "capacity_factor": "room of an expert in a training batch, in multiples of the mean load",
    "seed": "seed of initialisation and of the order of the text",
}
