"""One case under transformers, in a process of its own: resident, or with accelerate's disk offload.

    python -m tiermoe.bench.child_transformers '{"model": …, "ids": …, "prompt": …, "warm": …, "threads": …}'

With `cpu_bytes` and `offload` accelerate puts what goes beyond so many bytes into that folder. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tiermoe.bench.started import figures, since_start


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """The model in the checkpoint's own dtype, with transformers' default implementation of experts."""
    import numpy as np
    import torch
    import transformers

    from tiermoe.bench.feeding import Feeding

    torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {}
    if job.get("offload"):
        options = {"device_map": "auto", "max_memory": {"cpu": job["cpu_bytes"]}, "offload_folder": job["offload"]}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype="auto", trust_remote_code=False, **options
    )
    model.eval()
    load_s, first_token_s = since_start(), 0.0
    ids, prompt = torch.from_numpy(np.load(job["ids"])), job["prompt"]
    rows, length = ids.shape
    with torch.inference_mode():
        if job["warm"]:
            feeding = Feeding(model, ids, prompt)
            feeding.prompt()
            first_token_s = since_start()
            feeding.decode(job["warm"])
        feeding = Feeding(model, ids, prompt)
        began = time.perf_counter()
        feeding.prompt()
        prefilled = time.perf_counter()
        first_token_s = first_token_s or since_start()
        feeding.decode(length)
        decode_s = time.perf_counter() - prefilled
    return {
        **figures(rows, prompt, length, prefilled - began, decode_s, first_token_s, load_s),
        "version": f"transformers {transformers.__version__}, {str(model.dtype).removeprefix('torch.')}",
    }


def main() -> None:
    print(json.dumps(measure(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
