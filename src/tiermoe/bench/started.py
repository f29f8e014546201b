"""When a process was started, told to it by who started it: the time to the first token counts from there."""

import os
import time

BEGAN = "TIERMOE_BENCH_BEGAN"
"""Variable with the monotonic clock's seconds at the start."""


def since_start() -> float:
    """Seconds since this process was started; since the call where nobody noted that."""
    began = os.environ.get(BEGAN)
    return time.monotonic() - float(began) if began else 0.0


def peak_resident_bytes() -> int:
    """Largest resident set that this process has had, in bytes (VmHWM; 0 on other systems than Linux)."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
