"""Perplexity of the same GGUF files under tiermoe and llama.cpp, a type of weights after the other.

    python -m benchmarks.gguf_perplexity --work WORK --converter FOLDER --peer-python PYTHON

llama.cpp's converter (`benchmarks.llamacpp`) and quantiser write each file, with every matrix in the type where
llama.cpp has it so. Both engines get the same tokens in the same windows. Both round what a matrix is multiplied with
to 8 bits, each in its way, so perplexities differ a little either way. The difference has a standard error: that of the
windows' means. A table goes to standard error, one JSON object to standard output.

Blocks of 256 do not divide the shipped model's rows: for those types it is widened first (`benchmarks.widen`), which
leaves its function as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import tiermoe
from benchmarks.llamacpp import ROOT, Peer, convert
from benchmarks.rounds import parser_of
from benchmarks.surprisals import Ids, Logits, surprisals
from benchmarks.widen import widen
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.formats.gguf_file import open_gguf
from tiermoe.lab.bench.cases import DEFAULT_TEXT, token_ids
from tiermoe.model.tokenizer import load_tokenizer

FTYPES = {
    "f32": "ALL_F32", "bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0",
    "q4_1": "MOSTLY_Q4_1", "q5_0": "MOSTLY_Q5_0", "q5_1": "MOSTLY_Q5_1", "iq4_nl": "MOSTLY_IQ4_NL",
    "mxfp4": "MOSTLY_MXFP4_MOE", "q2_k": "MOSTLY_Q2_K", "q3_k": "MOSTLY_Q3_K_S", "q4_k": "MOSTLY_Q4_K_S",
    "q5_k": "MOSTLY_Q5_K_S", "q6_k": "MOSTLY_Q6_K", "iq4_xs": "MOSTLY_IQ4_XS", "iq1_s": "MOSTLY_IQ1_S",
    "iq1_m": "MOSTLY_IQ1_M", "iq2_xxs": "MOSTLY_IQ2_XXS", "iq2_xs": "MOSTLY_IQ2_XS", "iq2_s": "MOSTLY_IQ2_M",
    "iq3_xxs": "MOSTLY_IQ3_XXS", "iq3_s": "MOSTLY_IQ3_S", "tq1_0": "MOSTLY_TQ1_0", "tq2_0": "MOSTLY_TQ2_0",
}  # fmt: skip
"""Types of weights → llama.cpp's names of files of them."""

_SUPER = 256  # columns of a block of the types that have blocks of blocks


def wide(model: Path, work: Path) -> Path:
    """The checkpoint, or one with its function whose rows are whole blocks of 256. ValueError where that cannot be."""
    config = json.loads((model / "config.json").read_text())
    columns = math.gcd(config["hidden_size"], config["num_attention_heads"] * config["head_dim"])
    m, mi = (_SUPER // math.gcd(each, _SUPER) for each in (columns, config["moe_intermediate_size"]))
    if m == mi == 1:
        return model
    out = work / f"wide-{m}-{mi}"
    if not (out / "config.json").exists():
        widen(model, out, m, mi)
    return out


def written(args: argparse.Namespace, kind: str, peer: Peer) -> Path:
    """The file of a type, written where it is not there yet."""
    blocks_of_256 = kind.endswith("_k") or (kind.startswith(("iq", "tq")) and kind != "iq4_nl")
    model = wide(args.model, args.work) if blocks_of_256 else args.model
    whole, out = args.work / f"{model.name}.bf16.gguf", args.work / f"{model.name}.{kind}.gguf"
    if not whole.exists():
        if args.converter is None:
            raise ConfigError(f"{whole} is not there yet; name the folder of llama.cpp's converter with --converter")
        convert(model, args.converter, "bf16", whole, peer)
    if not out.exists():
        peer.quantise(whole, FTYPES[kind], out, pure=True)
    return out


def logits_of(model: Any) -> Logits:
    """The logits of what `tiermoe.load` returns."""

    @torch.inference_mode()
    def logits(ids: Ids) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()
        return found

    return logits


def ours(args: argparse.Namespace, file: Path, ids: Ids) -> npt.NDArray[np.float64]:
    """The mean surprisal of each window under tiermoe, in nats."""
    model, _ = tiermoe.load(file, store=args.work / f"store-{file.stem}", threads=args.threads)
    found = [window.mean() for window in surprisals(logits_of(model), ids, args.context)]
    model.tiermoe.close()
    return np.array(found)


def compared(args: argparse.Namespace, kind: str, ids: Ids, peer: Peer) -> dict[str, Any]:
    """Both perplexities of a type, their difference as a share of llama.cpp's, and its standard error."""
    file = written(args, kind, peer)
    sums, counts = peer.surprisals(file, ids, args.context, args.attention)
    mine, its = ours(args, file, ids), sums / counts
    difference = mine - its
    return {
        "type": kind,
        "in_the_file": sorted({tensor.kind.name for tensor in open_gguf(file).tensors.values()}),
        "bytes": file.stat().st_size,
        "windows": len(mine),
        "tiermoe": float(np.exp(mine.mean())),
        "llama_cpp": float(np.exp(its.mean())),
        "difference": float(np.expm1(difference.mean())),
        "standard_error": float(difference.std(ddof=1) / math.sqrt(len(difference))),
    }


def row(found: dict[str, Any]) -> str:
    return (
        f"{found['type']:7} {found['tiermoe']:9.4f} {found['llama_cpp']:9.4f} {100 * found['difference']:+8.3f} % "
        f"{100 * found['standard_error']:7.3f} %  {', '.join(found['in_the_file'])}"
    )


def parser() -> argparse.ArgumentParser:
    top = parser_of(__doc__)
    top.add_argument("model", type=Path, nargs="?", default=ROOT / "models" / "stories-7m")
    top.add_argument("--work", type=Path, required=True, help="a folder for the files; what is there is used again")
    top.add_argument("--converter", type=Path, help="folder of llama.cpp's convert_hf_to_gguf.py, for the first file")
    top.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    top.add_argument("--types", default=",".join(FTYPES), help=f"of {', '.join(FTYPES)}; default: all")
    top.add_argument("--text", type=Path, default=DEFAULT_TEXT)
    top.add_argument("--tokens", type=int, default=32768, help="of the text's beginning")
    top.add_argument("--context", type=int, default=256, help="tokens of a window; windows do not overlap")
    top.add_argument("--attention", choices=["default", "exact"], default="default", help="of llama.cpp")
    top.add_argument("--threads", type=int, default=2)
    return top


def main() -> None:
    args = parser().parse_args()
    kinds = args.types.split(",")
    if unknown := [kind for kind in kinds if kind not in FTYPES]:
        sys.exit(f"gguf_perplexity: no type {unknown[0]}; there are {', '.join(FTYPES)}")
    args.work.mkdir(parents=True, exist_ok=True)
    whole = token_ids(load_tokenizer(args.model), args.text.read_text(encoding="utf-8"))
    ids, peer = np.asarray(whole[: args.tokens], dtype=np.int64), Peer(args.peer_python, args.threads)
    print("type      tiermoe llama.cpp  difference  standard error  types in the file", file=sys.stderr)
    results = []
    try:
        for kind in kinds:
            results.append(compared(args, kind, ids, peer))
            print(row(results[-1]), file=sys.stderr, flush=True)
    except (TiermoeError, ValueError) as error:
        sys.exit(f"gguf_perplexity: {error}")
    print(json.dumps({"model": args.model.name, "context": args.context, "types": results}))


if __name__ == "__main__":
    main()
