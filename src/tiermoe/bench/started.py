"""When a process was started, told to it by who started it: the time to the first token counts from there. And what a
peer's run says of itself, in an interpreter that need not have torch."""

import os
import time

BEGAN = "TIERMOE_BENCH_BEGAN"
"""Variable with the monotonic clock's seconds at the start."""


def since_start() -> float:
    """Seconds since this process was started; since the call where nobody noted that."""
    began = os.environ.get(BEGAN)
    return time.monotonic() - float(began) if began else 0.0


def figures(
    rows: int, prompt: int, length: int, prefill_s: float, decode_s: float, first_token_s: float, load_s: float
) -> dict[str, float | int | None]:
    """What every peer's run says of `rows` sequences of `length` tokens, `prompt` of them the prompt. Seconds."""
    return {
        "prefill_tok_s": rows * prompt / prefill_s,
        "decode_tok_s": rows * (length - prompt) / decode_s if length > prompt else None,
        "first_token_s": first_token_s,
        "load_s": load_s,
        "peak_memory_bytes": peak_resident_bytes(),
    }


def peak_resident_bytes() -> int:
    """Largest resident set that this process has had, in bytes (VmHWM; 0 on other systems than Linux)."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
