"""What determines the trained weights: the defaults are those of models/stories-7m, `RECIPES` has every model's."""

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, text: str) -> Any:
    """A setting with its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Shape, amount of text and optimisation: the same settings and text give the same run."""

    layers: int = option(8, "transformer layers, each with experts")
    hidden: int = option(128, "width of the residual stream")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key and value heads")
    head_dim: int = option(32, "width of a head")
    experts: int = option(32, "experts in a layer")
    top_k: int = option(4, "experts that run for a token")
    expert_hidden: int = option(64, "intermediate width of an expert")
    vocab: int = option(4096, "tokens of the tokenizer")
    tied: bool = option(True, "one matrix for the embedding and the output layer")
    chats: bool = option(False, "tokenizer with the tokens and the template of chats, a token for each digit")
    embedding_std: float = option(
        0.02, "standard deviation of the embedding at the start (large: a layer's input resembles its output)"
    )
    max_length: int = option(2048, "context that the configuration names (positions beyond --sequence are not trained)")
    sequence: int = option(256, "tokens in a training sequence")
    batch: int = option(16, "sequences in a batch")
    tokens: int = option(20_000_000, "tokens to train on, counting repetitions")
    learning_rate: float = option(2e-3, "peak learning rate of AdamW")
    warmup_steps: int = option(100, "steps of linear warm-up")
    final_rate: float = option(0.05, "learning rate at the end, as a fraction of the peak (linear decay)")
    weight_decay: float = option(0.1, "weight decay of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    balance: float = option(0.01, "weight of the load-balancing loss")
    capacity_factor: float = option(2.0, "room of an expert in a training batch, in multiples of the mean load")
    seed: int = option(0, "seed of initialisation and of the order of the text")

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
