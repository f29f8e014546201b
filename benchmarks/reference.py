"""Logits and perplexity of a checkpoint under transformers' eager experts: the reference for every engine."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.perplexity import Logits, perplexity
from tiermoe.bench import stretches


def token_ids(model: Path, text: Path) -> npt.NDArray[np.int64]:
    """The tokens (N,) of a whole text file, without added special tokens."""
    ids = stretches.token_ids(
        AutoTokenizer.from_pretrained(model, trust_remote_code=False), text.read_text(encoding="utf-8")
    )
    return np.asarray(ids, dtype=np.int64)


def load_eager(model: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint with transformers' eager experts, in evaluation mode."""
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, experts_implementation="eager", trust_remote_code=False
    )
    loaded.eval()
    return loaded


def logits_of(model: PreTrainedModel) -> Logits:
    """A ``logits_fn`` for `perplexity`: token ids (T,) to float32 logits (T, vocabulary)."""

    @torch.inference_mode()
    def logits(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        out = model(torch.from_numpy(ids)[None].to(model.device), use_cache=False).logits[0]
        array: npt.NDArray[np.float32] = out.float().cpu().numpy()
        return array

    return logits


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=Path("data/heldout.txt"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_eager(args.model, getattr(torch, args.dtype))
    result = perplexity(logits_of(model), token_ids(args.model, args.text), args.context, args.stride)
    print(json.dumps({"engine": "transformers eager", "dtype": args.dtype, **asdict(result)}))


if __name__ == "__main__":
    main()
