"""Threads of torch's own operations."""

import os
import subprocess
import sys
from typing import Any

import pytest

_COUNTED = """
import os, torch
from tiermoe.engine.sampling import Sampler, Sampling, log_probabilities
from tiermoe.engine.steps import is_finite
torch.set_num_threads(1)
logits, unknown = torch.arange(200_000.0), torch.full((1, 200_000), torch.nan)
torch.set_num_threads(2)

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
assert is_finite(logits[None])
assert not is_finite(unknown)
assert Sampler(Sampling(temperature=0)).choose(logits) == 199_999
Sampler(Sampling(temperature=.8, top_p=.9, min_p=.1)).choose(logits)
log_probabilities(logits, 3, 4)
print(threads() - before, torch.get_num_threads(), end=" ")
logits.max()
print(threads() - before)
"""


def _printed(code: str, **environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, check=True)
    return done.stdout.decode().split()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_nothing_between_two_steps_wakes_a_thread_of_torch() -> None:
    assert _printed(_COUNTED) == ["0", "2", "1"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["10000", "None"]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", "None"]),
        ({"OMP_WAIT_POLICY": "active"}, ["None", "active"]),
    ],
)
def test_idle_threads_of_openmp_sleep_soon_unless_the_user_says_otherwise(
    environment: dict[str, Any], expected: list[str]
) -> None:
    asked = "import os, tiermoe; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    assert _printed(asked, **environment) == expected
